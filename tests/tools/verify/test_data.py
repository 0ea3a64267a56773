"""Completeness without data: files, tiling, stray files and the tracker file. With data: damage, NaN, shapes, zeros."""

import io
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.checkpoints.contents import StoredTensor, read_contents
from megatron_eopt.checkpoints.faults import check_files
from megatron_eopt.tools.verify.data import Window, check_data, check_tiling
from tests.checkpoints.made import archive_of, overwrite, save, tensors

KEY = "optimizer.state.momentum_buffer.mlp.fc1"


def test_a_whole_checkpoint(tmp_path):
    contents = read_contents(save(tmp_path / "checkpoint"))
    assert [*check_files(contents), *check_tiling(contents)] == []


def test_files(tmp_path):
    contents = read_contents(save(tmp_path / "checkpoint"))
    (file,) = contents.folder.glob("*.distcp")
    end = max(chunk.start + chunk.length for t in contents.tensors.values() for chunk in t.chunks)
    end = max([end, *(chunk.start + chunk.length for chunk in contents.blobs.values())])
    os.truncate(file, end)
    assert list(check_files(contents)) == []
    os.truncate(file, end - 1)
    (problem,) = check_files(contents)
    assert problem.severity == "error"
    assert problem.what == f"{file.name} is truncated: {end - 1:,} bytes, and its last chunk ends at {end:,}"
    file.unlink()
    (problem,) = check_files(contents)
    assert f"{file.name} is missing" in problem.what


@pytest.mark.parametrize(
    ("shape", "said"),
    [((9,), "norm has 9 entries, and its chunks 8"), ((7,), "a chunk of norm [7] lies outside of it: [0]")],
)
def test_chunks_that_do_not_tile(tmp_path, shape, said):
    contents = read_contents(save(tmp_path / "checkpoint"))
    object.__setattr__(contents.tensors["norm"], "shape", shape)
    assert next(check_tiling(contents)).what == said


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64],
)
def test_sound(tmp_path, dtype):
    values = {**tensors(), "more": torch.ones(3, 5).to(dtype), "scalar": torch.tensor(2.0), "empty": torch.ones(0, 4)}
    contents = read_contents(save(tmp_path / "checkpoint", values))
    data = check_data(contents, {})
    assert data.problems == []
    assert data.archives == len(values) + 2
    assert data.bytes == sum(
        chunk.length for chunk in [*contents.blobs.values(), *(c for t in contents.tensors.values() for c in t.chunks)]
    )


@pytest.mark.parametrize("block", [16, 1 << 24])
def test_a_flipped_bit(tmp_path, monkeypatch, block):
    monkeypatch.setattr("megatron_eopt.tools.verify.data.BLOCK", block)
    values = tensors()
    folder = save(tmp_path / "checkpoint", values)
    flipped = values[KEY].clone()
    flipped[1, 3, 5] = -flipped[1, 3, 5]
    overwrite(folder, KEY, values[KEY], flipped)
    data = check_data(read_contents(folder), {})
    (problem,) = data.problems
    file, start, _ = archive_of(folder, KEY)
    assert f"{KEY} in {file.name} at byte {start:,} is damaged: Bad CRC-32" in problem.what
    # torch itself loads the damaged number without a word; should it learn to check, this command could do less.
    loaded = {KEY: torch.zeros_like(flipped)}
    dcp.load(loaded, checkpoint_id=folder, no_dist=True)
    assert torch.equal(loaded[KEY], flipped)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    values = tensors()
    return values[KEY], save(tmp_path_factory.mktemp("saved") / "checkpoint", values)


@given(data=st.data())
def test_a_flipped_bit_shows_or_changes_nothing(saved, data):
    value, folder = saved
    file, start, length = archive_of(folder, KEY)
    sound = file.read_bytes()
    raw = bytearray(sound)
    at = start + data.draw(st.integers(0, length - 1))
    contents = read_contents(folder)
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(raw)
    try:
        if not check_data(contents, {}).problems:  # padding, and what the archive says of itself twice
            assert torch.equal(torch.load(io.BytesIO(raw[start : start + length])), value)
    finally:
        file.write_bytes(sound)


@pytest.mark.parametrize("entry", [b"data.pkl", b"data/0"])
def test_an_entry_that_is_marked_as_a_folder(saved, entry):
    """torch reads nothing of it: other numbers, or an error of the pickle."""
    _, folder = saved
    file, start, length = archive_of(folder, KEY)
    sound = file.read_bytes()
    name_at = sound.rindex(entry, start, start + length)  # in the list at the end of the archive
    at = sound.rindex(b"PK\1\2", start, name_at) + 38  # of its attributes
    raw = bytearray(sound)
    raw[at] ^= 0x10
    file.write_bytes(raw)
    try:
        (problem,) = check_data(read_contents(folder), {}).problems
    finally:
        file.write_bytes(sound)
    assert f"{entry.decode()} is marked as a folder" in problem.what


@pytest.mark.parametrize("block", [16, 1 << 24])
def test_nan_and_infinity(tmp_path, monkeypatch, block):
    monkeypatch.setattr("megatron_eopt.tools.verify.data.BLOCK", block)
    values = tensors()
    folder = save(tmp_path / "checkpoint", values)
    bad = values[KEY].clone()
    bad[0, 0, :3] = torch.nan
    bad[1, 5, 7] = -torch.inf
    overwrite(folder, KEY, values[KEY], bad, fix_checksum=True)
    (problem,) = check_data(read_contents(folder), {}).problems
    assert problem.what == f"{KEY} has 3 NaN and 1 infinite entries"


def test_nan_in_float8(tmp_path):
    value = torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)
    (problem,) = check_data(read_contents(save(tmp_path / "checkpoint", {"a": value})), {}).problems
    assert problem.what == "a has 1 NaN and 0 infinite entries"


def test_other_shapes_and_types_than_promised(tmp_path):
    contents = read_contents(save(tmp_path / "checkpoint"))
    stored = contents.tensors["norm"]
    contents.tensors["norm"] = StoredTensor("norm", stored.shape, torch.bfloat16, stored.chunks)
    (problem,) = check_data(contents, {}).problems
    assert "it holds torch.float32 [8], not torch.bfloat16 [8]" in problem.what


def test_an_object_is_checked_too(tmp_path):
    folder = save(tmp_path / "checkpoint")
    contents = read_contents(folder)
    chunk = contents.blobs["rng_state/shard_0_1"]
    raw = bytearray((folder / chunk.file).read_bytes())
    at = raw.index(b"seed", chunk.start)
    raw[at] ^= 1
    (folder / chunk.file).write_bytes(raw)
    (problem,) = check_data(contents, {}).problems
    assert "rng_state/shard_0_1" in problem.what


def test_saved_without_checksums(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        folder = save(tmp_path / "checkpoint")
    finally:
        torch.serialization.set_crc32_options(True)
    data = check_data(read_contents(folder), {})
    (problem,) = data.problems
    assert (problem.severity, "without checksums" in problem.what) == ("warning", True)


@given(
    st.binary(max_size=60),
    st.integers(0, 20),
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(0, 70), st.integers(-1, 30)), max_size=8),
)
def test_a_window_is_the_file_that_its_bytes_would_be(raw, start, length, steps):
    length = min(length, max(0, len(raw) - start))
    window = io.BufferedReader(Window(io.BytesIO(raw), start, length))
    plain = io.BytesIO(raw[start : start + length])
    for position, size in steps:
        assert window.seek(position) == plain.seek(position)
        assert window.read(size) == plain.read(size)
        assert window.tell() == plain.tell()
    assert window.seek(0, 2) == plain.seek(0, 2)
