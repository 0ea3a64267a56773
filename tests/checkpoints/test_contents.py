"""Reading the metadata of a checkpoint: what it says, and what is refused with its reason."""

import argparse
import json
import os
import pickle

import pytest
import torch

from megatron_eopt.checkpoints.contents import (
    CheckpointError,
    newest,
    read_contents,
)
from tests.checkpoints.made import common, save, tensors


def test_what_it_says(tmp_path):
    values = tensors()
    contents = read_contents(save(tmp_path / "iter_0000005", values))
    assert contents.tensors.keys() == values.keys()
    for key, value in values.items():
        tensor = contents.tensors[key]
        assert (tensor.shape, tensor.dtype) == (tuple(value.shape), value.dtype)
        for chunk in tensor.chunks:
            with (contents.folder / chunk.file).open("rb") as file:
                file.seek(chunk.start)
                assert file.read(2) == b"PK"
    assert contents.blobs.keys() == {"rng_state/shard_0_1", "common_state/shard_0_1"}
    assert contents.iteration == 5
    assert contents.args["params_dtype"] == torch.float32


def test_the_common_state_of_older_releases(tmp_path):
    folder = save(tmp_path / "checkpoint", state={"iteration": 7})
    torch.save({"iteration": 8}, folder / "common.pt")
    contents = read_contents(folder)
    assert (contents.iteration, contents.args) == (8, {})


def test_reading_changes_no_setting(tmp_path):
    """Also where others registered a class as safe, as Megatron-Core does."""
    before = set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals([argparse.Namespace]):
        read_contents(save(tmp_path / "checkpoint", state=common()))
        assert set(torch.serialization.get_safe_globals()) == before | {argparse.Namespace}


def refused(folder, *words):
    with pytest.raises(CheckpointError) as error:
        read_contents(newest(folder))
    for word in words:
        assert word in str(error.value)


def test_what_is_no_checkpoint(tmp_path):
    (tmp_path / "legacy" / "mp_rank_00").mkdir(parents=True)
    for name in ("none", "legacy"):
        refused(tmp_path / name, f"{name}/metadata.json is missing", "it is no torch_dist checkpoint", "or name one")


def test_a_save_that_did_not_finish(tmp_path):
    folder = save(tmp_path / "checkpoint")
    (folder / "metadata.json").unlink()
    refused(folder, "metadata.json is missing", "did not finish", "Take the checkpoint before it")


def test_damaged_metadata(tmp_path):
    folder = save(tmp_path / "checkpoint")
    metadata = (folder / ".metadata").read_bytes()
    for size in (0, len(metadata) // 2):
        (folder / ".metadata").write_bytes(metadata[:size])
        refused(folder, ".metadata cannot be loaded", "take another checkpoint")
    (folder / ".metadata").write_bytes(pickle.dumps([1]))
    refused(folder, ".metadata cannot be loaded")
    (folder / ".metadata").unlink()
    refused(folder, ".metadata cannot be loaded")
    (folder / "metadata.json").write_text('{"sharded_backend": "fsdp_dtensor"}')
    refused(folder, "'fsdp_dtensor'", "only torch_dist")
    (folder / "metadata.json").write_text("{")
    refused(folder, "metadata.json cannot be read")


def test_a_damaged_common_state(tmp_path):
    folder = save(tmp_path / "checkpoint")
    (folder / "common.pt").write_bytes(b"nothing")
    refused(folder, "the common state", "cannot be loaded")
    torch.save(3, folder / "common.pt")
    refused(folder, "the common state", "cannot be loaded")
    (folder / "common.pt").unlink()
    chunk = read_contents(folder).blobs["common_state/shard_0_1"]
    os.truncate(folder / chunk.file, chunk.start + 40)
    refused(folder, "the common state")
    (folder / chunk.file).unlink()
    refused(folder, "the common state", "__0_0.distcp is missing")


def test_the_newest_of_a_run(tmp_path):
    for iteration in (5, 10):
        save(tmp_path / f"iter_{iteration:07d}")
    refused(tmp_path, "it is no torch_dist checkpoint", "or name one")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("10\n")
    assert newest(tmp_path) == tmp_path / "iter_0000010"
    assert newest(tmp_path / "iter_0000005") == tmp_path / "iter_0000005"
    tracker.write_text("15")
    refused(tmp_path, "says '15', and no such checkpoint is there")
    for word in ("ten", "\0\0", "", "release"):
        tracker.write_text(word)
        refused(tmp_path, f"says {word!r}, and no such")
    save(tmp_path / "release")
    assert newest(tmp_path) == tmp_path / "release"
    assert json.loads((newest(tmp_path) / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
