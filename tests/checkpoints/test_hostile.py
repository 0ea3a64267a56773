"""Files that are broken or made to do harm: one line that says so, whatever they are, in bounded memory and time."""

import io
import json
import os
import pickle
import shutil

import pytest
import torch

from megatron_eopt.checkpoints.problems import tiling_fault
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


def stored(**changed):
    def change(metadata):
        for each in metadata.storage_data.values():
            for name, value in changed.items():
                setattr(each, name, value)

    return lambda folder: changed_metadata(folder, change)


def huge_object(folder):
    """The common state, behind all that is in the file."""

    def change(metadata):
        (state,) = (each for index, each in metadata.storage_data.items() if index.fqn.startswith("common_state"))
        state.offset, state.length = 2**30, 2**40

    changed_metadata(folder, change)


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


def deep_key(folder):
    """A tuple of two million levels as the key of a dict, which torch's reader would hash."""
    deep = b"\x80\x04}" + b")" + b"\x85" * 2_000_000 + b"K\1s."
    (folder / ".metadata").write_bytes(deep)


def shared(depth, width=10):
    """A list that has ``width ** depth`` entries, of few bytes."""
    value = [1]
    for _ in range(depth):
        value = [value] * width
    return value


def state_with(**arguments):
    return lambda folder: torch.save(common(**arguments), folder / "common.pt")


def endless():
    value = []
    value.append(value)
    return value


# A million times the same megabyte.
AGAIN = b"\x80\2c_codecs\nencode\nq\0X" + (10**6).to_bytes(4, "little") + b"a" * 10**6
AGAIN += b"X\6\0\0\0latin1\x86q\1" + b"h\0h\1R" * 10**6 + b"."
REFUSED = {
    "a huge tracker": (sparse(f"../{TRACKER}", 8 * 2**30), "8,589,934,592 bytes, and at most 64"),
    "a tracker that is a pipe": (pipe(f"../{TRACKER}"), "no regular file"),
    "a long word in the tracker": (written(f"../{TRACKER}", b"a" * 5000), "5,000 bytes, and at most 64"),
    "huge metadata": (sparse(".metadata", 2**40), "bytes, and at most 536,870,912"),
    "metadata that are a pipe": (pipe(".metadata"), "no regular file"),
    "no pickle": (written(".metadata", b"\x80\x04garbage"), ".metadata cannot be read"),
    "a deep tuple": (deep_key, "more than 1,000"),
    "a far place in the memo": (written(".metadata", b"\x80\4Nr\xff\xff\xff\x7f."), "it holds a NoneType"),
    "the same bytes again and again": (written(".metadata", AGAIN), "MemoryError"),
    "a long file name": (stored(relative_path="a" * 5000), "is no name of a file"),
    "a file name with a zero": (stored(relative_path="a\0b"), "is no name of a file"),
    "a number for a file": (stored(relative_path=3), "is no name of a file"),
    "a negative length": (stored(length=-1), "sizes or offsets that no tensor or file can have"),
    "an endless length": (stored(length=10**5000), "sizes or offsets that no tensor or file can have"),
    "objects that share bytes": (stored(offset=0, length=2**40), "share bytes of __0_0.distcp"),
    "a huge object": (huge_object, "at most 268,435,456 are read of an object"),
    "a deep format": (written("metadata.json", b"[" * 100_000), "metadata.json cannot be read"),
    "a huge format": (sparse("metadata.json", 2**40), "metadata.json cannot be read"),
    "a format that is a pipe": (pipe("metadata.json"), "metadata.json cannot be read"),
    "arguments of many entries": (state_with(data=shared(9)), "more than 10,000,000 values"),
    "arguments in arguments": (state_with(data=shared(500, 1)), "more than 100 deep"),
    "arguments without an end": (state_with(data=endless()), "more than 100 deep"),
    "a common state that is a pipe": (pipe("common.pt"), "the common state"),
    "settings that are none": (
        lambda folder: torch.save({"optimizer": {"megatron_eopt": 3}}, folder / "common.pt"),
        "",
    ),
}
WRONG = {
    "data that are a pipe": (pipe("__0_0.distcp"), "__0_0.distcp is missing"),
    "deep integrity": (written("integrity.json", b'{"files":' + b"[" * 100_000), "integrity.json cannot be read"),
    "integrity that is a pipe": (pipe("integrity.json"), "integrity.json cannot be read"),
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


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong(folder, case):
    make, words = WRONG[case]
    if case == "data that are a pipe":
        torch.save(common(), folder / "common.pt")
    make(folder)
    status, said = verify(folder.parent)
    assert status == 1, said[-3000:]
    assert words in said


def test_integrity_of_files_elsewhere(folder):
    (folder.parent / "secret").write_text("")
    (folder / "link").symlink_to(folder.parent / "secret")
    (folder / "round").symlink_to(folder / "round")
    names = ["../secret", str(folder.parent / "secret"), "link", "round", "a\0b", "b" * 5000]
    (folder / "integrity.json").write_text(json.dumps({"files": dict.fromkeys(names, "0")}))
    status, said = verify(folder)
    assert status == 1
    assert said.count("integrity.json names what is no file of the checkpoint") == len(names)


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
    assert "norm in other.distcp at byte 0 is damaged: it holds a dict, not a tensor" in said


def test_chunks_that_cut_each_other_into_many_parts(monkeypatch):
    """Each of one half is cut by all of the other, so the parts are as many as the product."""
    upper = [((index, 0), (1, 1)) for index in range(200)]
    lower = [((0, 1 + index), (200, 1)) for index in range(200)]
    assert tiling_fault((200, 201), [*upper, *lower]) is None
    monkeypatch.setattr("megatron_eopt.checkpoints.problems.PARTS", -30_000)
    assert "too many parts" in tiling_fault((200, 201), [*upper, *lower])


def test_no_escape_reaches_the_terminal(tmp_path):
    red = "\x1b[31m\x9b1m\r\u202e"
    values = tensors(matrices=(f"mlp{red}",))
    state = common(world_size=red)
    state["optimizer"][0] |= {"param_groups": [{"lr": red}], "megatron_eopt": block(red, settings={red: red})}
    folder = save(tmp_path / f"check{red}point", values, state)
    (folder / f"stray{red}").touch()
    (folder / "integrity.json").write_text(json.dumps({"files": {f"other{red}": 0}}))
    for flags in ([], ["--manifest"]):
        status, said = verify(folder, *flags)
        assert status == 1
        assert "stray\\x1b[31m" in said
        assert all(each.isprintable() for each in said.replace("\n", ""))
    for wrong in (tmp_path / f"none{red}", tmp_path / ("a" * 5000)):
        status, said = verify(wrong)
        assert (status, said.count("\n")) == (2, 1)
        assert all(each.isprintable() for each in said.replace("\n", ""))
