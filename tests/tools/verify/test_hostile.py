"""Files that are broken or made to do harm: one line that says so, whatever they are, in bounded memory and time."""

import io
import os
import shutil

import pytest
import torch

from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.cli import main
from megatron_eopt.megatron.checkpoints.integrity import refuse_pipes
from tests.checkpoints import limits
from tests.checkpoints.made import block, change_layout, common, save, tensors

DATA = "__0_0.distcp"
TRACKER = "latest_checkpointed_iteration.txt"


def verify(folder, *flags):
    """Exit status and output of the command, in a process of its own that has little memory and time."""
    return limits.run(lambda: main(["verify-checkpoint", str(folder), *flags]))


def huge_object(folder):
    """The common state, behind all that is in the file."""

    def change(metadata):
        (state,) = (each for index, each in metadata.storage_data.items() if index.fqn.startswith("common_state"))
        state.offset, state.length = 2**30, 2**40

    change_layout(folder, change)


def sparse(name, size):
    def make(folder):
        with (folder / name).open("wb") as file:
            file.truncate(size)

    return make


def pipe(name):
    def make(folder):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return make


def written(name, data):
    return lambda folder: (folder / name).write_bytes(data)


# A million times the same megabyte.
AGAIN = b"\x80\2c_codecs\nencode\nq\0X" + (10**6).to_bytes(4, "little") + b"a" * 10**6
AGAIN += b"X\6\0\0\0latin1\x86q\1" + b"h\0h\1R" * 10**6 + b"."
REFUSED = {
    "a huge tracker": (sparse(f"../{TRACKER}", 8 * 2**30), f"{TRACKER} says"),
    "huge metadata": (sparse(".metadata", 2**40), "and at most 4,294,967,296 are"),
    "no pickle": (written(".metadata", b"\x80\x04garbage"), ".metadata cannot be loaded"),
    "the same bytes again and again": (written(".metadata", AGAIN), ".metadata names _codecs.encode"),
    "a huge object": (huge_object, "and at most 4,294,967,312 are"),
    "a deep format": (written("metadata.json", b"[" * 100_000), "metadata.json cannot be read"),
    "data that are a pipe": (pipe(DATA), f"{DATA} is missing, or no regular file"),
    "settings that are none": (
        lambda folder: torch.save({"optimizer": {"megatron_eopt": 3}}, folder / "common.pt"),
        "",
    ),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    (folder / TRACKER).write_text("5")
    state = common()
    state["optimizer"][0]["megatron_eopt"] = block()
    save(folder / "iter_0000005", state=state)
    return folder


@pytest.fixture
def folder(sound, tmp_path):
    return shutil.copytree(sound, tmp_path / "run") / "iter_0000005"


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read(folder, case):
    make, words = REFUSED[case]
    make(folder)
    status, said = verify(folder.parent)
    assert (status, said.count("\n")) == (2, 1), said[-3000:]
    assert words in said
    assert len(said) < 3000


def refused_by_a_run(folder):
    with pytest.raises((CheckpointError, FileNotFoundError), match="no regular file"):
        refuse_pipes(folder, None)
    return 0


@pytest.mark.parametrize("name", [f"../{TRACKER}", ".metadata", "common.pt", DATA, "mp_rank_00/model_optim_rng.pt"])
def test_a_run_waits_for_no_pipe(folder, name):
    (folder / name).parent.mkdir(exist_ok=True)
    pipe(name)(folder)
    status, said = limits.run(lambda: refused_by_a_run(folder.parent))
    assert status == 0, said


def test_a_tensor_that_is_none(folder):
    """Its pickle is looked at before torch reads it."""
    data = io.BytesIO()
    torch.save({"a": bytearray(b"a")}, data)

    def change(metadata):
        (stored,) = (each for key, each in metadata.storage_data.items() if key.fqn == "norm")
        stored.relative_path, stored.offset, stored.length = "other.distcp", 0, len(data.getvalue())

    change_layout(folder, change)
    (folder / "other.distcp").write_bytes(data.getvalue())
    status, said = verify(folder)
    assert status == 1
    assert "norm in other.distcp at byte 0" in said


def test_no_escape_reaches_the_terminal(tmp_path):
    red = "\x1b[31m\x9b1m\r\u202e"
    values = tensors(matrices=(f"mlp{red}",))
    state = common(world_size=red)
    state["optimizer"][0] |= {"param_groups": [{"lr": red}], "megatron_eopt": block(red, settings={red: red})}
    folder = save(tmp_path / f"check{red}point", values, state)
    (folder / f"stray{red}.pt").touch()
    for flags in ([], ["--manifest"]):
        _, said = verify(folder, *flags)
        assert "\\x1b[31m" in said
        assert all(each.isprintable() for each in said.replace("\n", ""))
    for wrong in (tmp_path / f"none{red}", tmp_path / ("a" * 5000)):
        status, said = verify(wrong)
        assert (status, said.count("\n")) == (2, 1)
        assert all(each.isprintable() for each in said.replace("\n", ""))
