"""Reading the metadata of a checkpoint: what it says, and what is refused with its reason."""

import argparse
import json
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp

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
    assert contents.release == "0.19 or later"


def test_the_common_state_of_older_releases(tmp_path):
    folder = save(tmp_path / "checkpoint", state={"iteration": 7})
    torch.save({"iteration": 8}, folder / "common.pt")
    contents = read_contents(folder)
    assert (contents.iteration, contents.args) == (8, {})
    assert contents.release == "0.18 or before"


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
    refused(tmp_path / "none", "no such folder", "--save")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "is empty")
    (empty / "notes.txt").write_text("")
    refused(empty, "is no checkpoint", "notes.txt")
    (tmp_path / "legacy" / "mp_rank_00").mkdir(parents=True)
    refused(tmp_path / "legacy", "legacy torch format", "--ckpt-convert-format torch_dist")


def test_a_save_that_did_not_finish(tmp_path):
    folder = save(tmp_path / "checkpoint")
    (folder / "metadata.json").unlink()
    refused(folder, "no metadata.json", "did not finish", "take the checkpoint before it")
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "other", no_dist=True)
    refused(tmp_path / "other", "another program")


def test_damaged_metadata(tmp_path):
    folder = save(tmp_path / "checkpoint")
    metadata = (folder / ".metadata").read_bytes()
    for size in (0, 1, len(metadata) // 2, len(metadata) - 1):
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
    refused(folder, "common.pt: the common state", "cannot be loaded")
    torch.save(3, folder / "common.pt")
    refused(folder, "it holds a int")
    (folder / "common.pt").unlink()
    chunk = read_contents(folder).blobs["common_state/shard_0_1"]
    os.truncate(folder / chunk.file, chunk.start + 40)
    refused(folder, "the common state")
    (folder / chunk.file).unlink()
    refused(folder, "lacks __0_0.distcp, ", "copy what is missing")


def test_the_newest_of_a_run(tmp_path):
    for iteration in (5, 10):
        save(tmp_path / f"iter_{iteration:07d}")
    refused(tmp_path, "no save has finished", "iter_0000005, iter_0000010")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("10\n")
    assert newest(tmp_path) == tmp_path / "iter_0000010"
    assert newest(tmp_path / "iter_0000005") == tmp_path / "iter_0000005"
    tracker.write_text("15")
    refused(tmp_path, "says '15', which is no iteration that is there", "there are iter_0000005, iter_0000010")
    tracker.write_text("ten")
    refused(tmp_path, "says 'ten', which is no iteration that is there, nor 'release'")
    tracker.write_text("release")
    refused(tmp_path, "says 'release', which is no")
    save(tmp_path / "release")
    assert newest(tmp_path) == tmp_path / "release"
    assert json.loads((newest(tmp_path) / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
