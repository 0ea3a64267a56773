"""Completeness without data: files and tiling. With data: damage, NaN, shapes."""

import io
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.checkpoints.contents import StoredTensor, read_contents
from megatron_eopt.checkpoints.faults import check_files
from megatron_eopt.tools.verify.data import check_data, check_tiling
from tests.checkpoints.made import archive_of, save, sums, tensors

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
    [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64],
)
def test_sound(tmp_path, dtype):
    values = {**tensors(), "more": torch.ones(3, 5).to(dtype), "scalar": torch.tensor(2.0), "empty": torch.ones(0, 4)}
    assert faults(save(tmp_path / "checkpoint", values)) == []


def faults(folder, saved=None):
    return [problem.what for problem in check_data(read_contents(folder), saved or {})]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    values = tensors()
    return values, save(tmp_path_factory.mktemp("saved") / "checkpoint", values)


@given(data=st.data())
def test_a_flipped_bit_shows_or_changes_nothing(saved, data):
    values, folder = saved
    file, start, length = archive_of(folder, KEY)
    sound = file.read_bytes()
    raw = bytearray(sound)
    at = start + data.draw(st.integers(0, length - 1))
    contents = read_contents(folder)
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    file.write_bytes(raw)
    try:
        if not list(check_data(contents, sums(values))):  # padding, and what the archive says of itself twice
            assert torch.equal(torch.load(io.BytesIO(raw[start : start + length])), values[KEY])
    finally:
        file.write_bytes(sound)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, torch.inf),
        (torch.bfloat16, torch.nan),
        (torch.float8_e4m3fn, torch.nan),
        (torch.complex64, torch.inf),
    ],
)
def test_nan_and_infinity(tmp_path, dtype, value):
    (fault,) = faults(save(tmp_path / "checkpoint", {"a": torch.tensor([1.0, value]).to(dtype), "b": torch.ones(2)}))
    assert fault == "a has NaN or infinite entries"


def test_other_shapes_and_types_than_promised(tmp_path):
    contents = read_contents(save(tmp_path / "checkpoint"))
    stored = contents.tensors["norm"]
    contents.tensors["norm"] = StoredTensor("norm", stored.shape, torch.bfloat16, stored.chunks)
    (problem,) = check_data(contents, {})
    assert "holds torch.float32 [8], not torch.bfloat16 [8]" in problem.what


def test_an_object_is_checked_too(tmp_path):
    folder = save(tmp_path / "checkpoint")
    chunk = read_contents(folder).blobs["rng_state/shard_0_1"]
    raw = bytearray((folder / chunk.file).read_bytes())
    at = raw.index(b"seed", chunk.start)
    raw[at] ^= 1
    (folder / chunk.file).write_bytes(raw)
    (fault,) = faults(folder)
    assert "rng_state/shard_0_1" in fault


def test_saved_without_crc(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        folder = save(tmp_path / "checkpoint")
    finally:
        torch.serialization.set_crc32_options(True)
    assert faults(folder) == []
