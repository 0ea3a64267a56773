"""Completeness without data: files, tiling, stray files and the tracker file."""

import itertools
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_eopt.checkpoints.contents import read_contents
from megatron_eopt.checkpoints.problems import (
    check_files,
    check_neighbours,
    check_structure,
    check_tiling,
    tiling_fault,
)
from tests.checkpoints.made import save


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
    assert check_structure(read_contents(save(tmp_path / "checkpoint"))) == []


def test_files(tmp_path):
    contents = read_contents(save(tmp_path / "checkpoint"))
    (file,) = contents.folder.glob("*.distcp")
    end = max(chunk.start + chunk.length for t in contents.tensors.values() for chunk in t.chunks)
    end = max([end, *(chunk.start + chunk.length for chunk in contents.blobs.values())])
    os.truncate(file, end)
    assert check_files(contents) == []
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
    (problem,) = check_tiling(contents)
    assert problem.what == "norm [9]: no chunk holds the entry at [8]"


def test_stray_files_and_the_tracker_file(tmp_path):
    folder = save(tmp_path / "iter_0000005")
    contents = read_contents(folder)
    (problem,) = check_neighbours(contents)
    assert (problem.severity, "no latest_checkpointed_iteration.txt" in problem.what) == ("warning", True)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("5")
    assert check_neighbours(contents) == []
    (folder / ".metadata.tmp").touch()
    (folder / "__7_0.distcp").touch()
    assert [problem.what.split()[0] for problem in check_neighbours(contents)] == [".metadata.tmp", "__7_0.distcp"]
    assert {problem.severity for problem in check_neighbours(contents)} == {"warning"}
    tracker.write_text("9")
    error = check_neighbours(contents)[-1]
    assert (error.severity, "iter_0000009 is not there" in error.what) == ("error", True)
