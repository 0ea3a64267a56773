"""Completeness without data: files, tiling, stray files and the tracker file. With data: damage, NaN, shapes, zeros."""

import hashlib
import io
import itertools
import json
import os

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.checkpoints.contents import StoredTensor, read_contents
from megatron_eopt.checkpoints.problems import (
    Window,
    check_data,
    check_files,
    check_integrity,
    check_structure,
    tiling_fault,
)
from tests.checkpoints.made import archive_of, overwrite, save, tensors

KEY = "optimizer.state.momentum_buffer.mlp.fc1"


@st.composite
def tilings(draw):
    """A shape, and boxes that tile it: cut again and again, so not always a grid."""
    shape = draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(0, sizes[axis]))
        for start, size in ((0, cut), (cut, sizes[axis] - cut)):
            start_of, extent = list(offsets), list(sizes)
            start_of[axis] += start
            extent[axis] = size
            boxes.append((tuple(start_of), tuple(extent)))
    return shape, draw(st.permutations(boxes))


def covered(shape, boxes):
    count = torch.zeros(shape, dtype=torch.int)
    for offsets, sizes in boxes:
        count[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    return count


@given(tilings())
def test_tilings_have_no_fault(case):
    shape, boxes = case
    assert bool((covered(shape, boxes) == 1).all())
    assert tiling_fault(shape, boxes) is None


@given(st.data())
def test_a_fault_is_found_where_entries_are_not_covered_once(data):
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    intervals = [
        st.integers(0, n - 1).flatmap(lambda o, n=n: st.tuples(st.just(o), st.integers(0, n - o))) for n in shape
    ]
    box = st.tuples(*intervals).map(lambda pairs: tuple(zip(*pairs, strict=True)))
    boxes = data.draw(st.lists(box, max_size=5))
    exact = bool((covered(shape, boxes) == 1).all())
    assert (tiling_fault(shape, boxes) is None) == exact


@given(tilings(), st.data())
def test_a_box_less_or_twice_is_a_fault(case, data):
    shape, boxes = case
    index = data.draw(st.integers(0, len(boxes) - 1))
    if torch.Size(boxes[index][1]).numel():
        assert "no chunk holds" in tiling_fault(shape, boxes[:index] + boxes[index + 1 :])
        assert "2 chunks hold" in tiling_fault(shape, [*boxes, boxes[index]])


def test_boxes_of_another_kind():
    assert "lies outside" in tiling_fault((4,), [((0,), (5,))])
    assert "lies outside" in tiling_fault((4,), [((-1,), (2,)), ((1,), (3,))])
    assert "other dimensions" in tiling_fault((4,), [((0, 0), (4, 1))])
    assert tiling_fault((0, 3), []) is None
    assert "no chunk holds the entry at [2, 0]" in tiling_fault((3, 2), [((0, 0), (2, 2))])


@pytest.mark.parametrize("shape", [(30_000,), (40, 20, 40)])
def test_many_chunks_take_no_time(shape):
    boxes = [(index, (1,) * len(shape)) for index in itertools.product(*map(range, shape))]
    assert tiling_fault(shape, boxes) is None


def test_a_whole_checkpoint(tmp_path):
    assert list(check_structure(read_contents(save(tmp_path / "checkpoint")))) == []


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


def test_chunks_that_do_not_tile(tmp_path):
    contents = read_contents(save(tmp_path / "checkpoint"))
    tensor = contents.tensors["norm"]
    object.__setattr__(tensor, "shape", (9,))
    (problem,) = check_structure(contents)
    assert problem.what == "norm [9]: no chunk holds the entry at [8]"


def test_stray_files_and_the_tracker_file(tmp_path):
    folder = save(tmp_path / "iter_0000005")
    contents = read_contents(folder)
    (problem,) = check_structure(contents)
    assert (problem.severity, "no latest_checkpointed_iteration.txt" in problem.what) == ("warning", True)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("5")
    assert list(check_structure(contents)) == []
    (folder / "tokenizer").mkdir()  # of Megatron 0.20
    assert list(check_structure(contents)) == []
    (folder / ".metadata.tmp").touch()
    (folder / "__7_0.distcp").touch()
    assert [problem.what.split()[0] for problem in check_structure(contents)] == [".metadata.tmp", "__7_0.distcp"]
    assert {problem.severity for problem in check_structure(contents)} == {"warning"}
    tracker.write_text("9")
    error = list(check_structure(contents))[-1]
    assert (error.severity, "iter_0000009 is not there" in error.what) == ("error", True)


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64],
)
def test_sound(tmp_path, dtype):
    values = {**tensors(), "more": torch.ones(3, 5).to(dtype), "scalar": torch.tensor(2.0), "empty": torch.ones(0, 4)}
    contents = read_contents(save(tmp_path / "checkpoint", values))
    data = check_data(contents)
    assert (data.problems, data.zeros, data.unchecked) == ([], set(), 0)
    assert data.archives == len(values) + 2
    assert data.bytes == sum(
        chunk.length for chunk in [*contents.blobs.values(), *(c for t in contents.tensors.values() for c in t.chunks)]
    )


@pytest.mark.parametrize("block", [16, 1 << 24])
def test_a_flipped_bit(tmp_path, monkeypatch, block):
    monkeypatch.setattr("megatron_eopt.checkpoints.problems.BLOCK", block)
    values = tensors()
    folder = save(tmp_path / "checkpoint", values)
    flipped = values[KEY].clone()
    flipped[1, 3, 5] = -flipped[1, 3, 5]
    overwrite(folder, KEY, values[KEY], flipped)
    data = check_data(read_contents(folder))
    (problem,) = data.problems
    assert data.zeros == set()
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
        if not check_data(contents).problems:  # padding, and what the archive says of itself twice
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
        (problem,) = check_data(read_contents(folder)).problems
    finally:
        file.write_bytes(sound)
    assert f"{entry.decode()} is marked as a folder" in problem.what


@pytest.mark.parametrize("block", [16, 1 << 24])
def test_nan_and_infinity(tmp_path, monkeypatch, block):
    monkeypatch.setattr("megatron_eopt.checkpoints.problems.BLOCK", block)
    values = tensors()
    folder = save(tmp_path / "checkpoint", values)
    bad = values[KEY].clone()
    bad[0, 0, :3] = torch.nan
    bad[1, 5, 7] = -torch.inf
    overwrite(folder, KEY, values[KEY], bad, fix_checksum=True)
    (problem,) = check_data(read_contents(folder)).problems
    assert problem.what == f"{KEY} has 3 NaN and 1 infinite entries"


def test_nan_in_float8(tmp_path):
    value = torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)
    (problem,) = check_data(read_contents(save(tmp_path / "checkpoint", {"a": value}))).problems
    assert problem.what == "a has 1 NaN entries"


def test_zeros(tmp_path):
    values = {**tensors(), "zero": torch.zeros(4, 4), "empty": torch.zeros(0)}
    assert check_data(read_contents(save(tmp_path / "checkpoint", values))).zeros == {"zero"}


def test_other_shapes_and_types_than_promised(tmp_path):
    contents = read_contents(save(tmp_path / "checkpoint"))
    stored = contents.tensors["norm"]
    contents.tensors["norm"] = StoredTensor("norm", stored.shape, torch.bfloat16, stored.chunks)
    (problem,) = check_data(contents).problems
    assert "it holds torch.float32 [8], not torch.bfloat16 [8]" in problem.what


def test_an_object_is_checked_too(tmp_path):
    folder = save(tmp_path / "checkpoint")
    contents = read_contents(folder)
    chunk = contents.blobs["rng_state/shard_0_1"]
    raw = bytearray((folder / chunk.file).read_bytes())
    at = raw.index(b"seed", chunk.start)
    raw[at] ^= 1
    (folder / chunk.file).write_bytes(raw)
    (problem,) = check_data(contents).problems
    assert "rng_state/shard_0_1" in problem.what


def test_saved_without_checksums(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        folder = save(tmp_path / "checkpoint")
    finally:
        torch.serialization.set_crc32_options(True)
    data = check_data(read_contents(folder))
    assert data.unchecked == data.archives
    (problem,) = data.problems
    assert (problem.severity, "without checksums" in problem.what) == ("warning", True)


def test_missing_and_truncated_files_are_left_to_others(tmp_path):
    folder = save(tmp_path / "checkpoint")
    contents = read_contents(folder)
    (file,) = folder.glob("*.distcp")
    file.unlink()
    assert check_data(contents).archives == 0


def test_the_checksums_that_megatron_wrote_down(tmp_path):
    folder = save(tmp_path / "checkpoint")
    assert list(check_integrity(folder)) == []
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    manifest = folder / "integrity.json"
    manifest.write_text(json.dumps({"algorithm": "sha256", "files": files}))
    assert list(check_integrity(folder)) == []
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    (folder / ".metadata").unlink()
    said = sorted(problem.what for problem in check_integrity(folder))
    assert said == [
        ".metadata is in integrity.json and missing",
        "metadata.json has another SHA-256 than integrity.json says",
    ]
    manifest.write_text('{"algorithm": "md5", "files": {}}')
    assert "md5" in next(check_integrity(folder)).what
    manifest.write_text("[]")
    assert "cannot be read" in next(check_integrity(folder)).what


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
