"""Files that are broken or made to do harm: one line that says so, whatever they are, in bounded memory and time."""

import io
import pickle
import shutil

import pytest
import torch

from megatron_eopt.cli import main
from tests.checkpoints import limits
from tests.checkpoints.made import block, common, save, tensors

TRACKER = "latest_checkpointed_iteration.txt"


def verify(folder, *flags):
    """Exit status and output of the command, in a process of its own that has little memory and time."""
    return limits.run(lambda: main(["verify-checkpoint", str(folder), *flags]))


def changed_metadata(folder, change):
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def written(name, data):
    return lambda folder: (folder / name).write_bytes(data)


REFUSED = {
    "a long word in the tracker": (written(f"../{TRACKER}", b"a" * 5000), "characters)"),
    "no pickle": (written(".metadata", b"\x80\x04garbage"), ".metadata cannot be loaded"),
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


def test_a_tensor_that_is_none(folder):
    """Its pickle is looked at before torch reads it."""
    data = io.BytesIO()
    torch.save({"a": bytearray(b"a")}, data)

    def change(metadata):
        (stored,) = (each for key, each in metadata.storage_data.items() if key.fqn == "norm")
        stored.relative_path, stored.offset, stored.length = "other.distcp", 0, len(data.getvalue())

    changed_metadata(folder, change)
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
