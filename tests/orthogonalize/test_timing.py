"""Which kernel is chosen for which size, by a clock that fake kernels set forward."""

import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt.orthogonalize import timing
from megatron_eopt.orthogonalize.kernels import KERNELS, Kernel, choose, made, reason_against
from megatron_eopt.orthogonalize.products import Products
from megatron_eopt.orthogonalize.timing import fastest, times

CPU, BF16 = torch.device("cpu"), torch.bfloat16
TILES = [tuple(map(int, name.split("/")[1].split("x"))) for name in timing.CANDIDATES[2:]]


@dataclass(frozen=True)
class Clocked(Products):
    """Right products (but of sizes in ``wrong``) that take as many seconds as ``cost`` says for tiles and a shape."""

    tiles: tuple = ()

    def gram(self, x, out=None):
        CLOCK.now += CLOCK.cost(self.tiles, tuple(x.shape))
        return super().gram(x, out).mul_(1.5 if self.tiles and x.size(-2) in CLOCK.wrong else 1)


CLOCK = SimpleNamespace(now=0.0, cost=lambda tiles, shape: 1.0, wrong=())
FAKES = {
    "triton": Kernel(lambda precision, *tiles: Clocked(tiles)),
    "torch": Kernel(lambda precision: Clocked()),
}


def clocked(cost, wrong=()):
    """Let fake kernels serve on the CPU and set a clock forward."""
    CLOCK.now, CLOCK.cost, CLOCK.wrong = 0.0, cost, wrong
    KERNELS.update(FAKES)
    timing.time = SimpleNamespace(perf_counter=lambda: CLOCK.now)
    timing.is_timed = lambda device: True


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    for name, kernel in KERNELS.items():
        monkeypatch.setitem(KERNELS, name, kernel)
    for name in ("time", "is_timed"):
        monkeypatch.setattr(timing, name, getattr(timing, name))


def by_size(tiles, shape):
    """Small matrices are fastest in torch, larger ones by the first tiles, and the largest by the last."""
    best = [(), TILES[0], TILES[-1]][(shape[-2] >= 32) + (shape[-2] >= 64)]
    return 1.0 if tiles == best else 2.0


def test_each_size_has_its_fastest_kernel():
    clocked(by_size)
    stacks = [(20, 24), (24, 20), (3, 40, 33), (70, 130), (130, 140)]
    choice = fastest(times(stacks, [BF16], CPU))
    assert choice == "torch, triton/64x64x8x4x3 from 32, triton/128x64x8x8x3 from 64"
    found = choose(stacks, BF16, "cpu", kept=choice)
    assert (found.kernel, found.dropped) == (choice, {})
    for rows, tiles in ((1, ()), (31, ()), (32, TILES[0]), (63, TILES[0]), (64, TILES[-1]), (8192, TILES[-1])):
        assert made(choice, rows) == Clocked(tiles)


def test_one_kernel_for_all_is_a_name():
    clocked(lambda tiles, shape: 1.0 if tiles == TILES[1] else 2.0)
    choice = fastest(times([(20, 24), (70, 80)], [BF16, torch.float16], CPU))
    assert choice == "triton/128x32x8x4x4"
    assert made(choice, 4096) == Clocked(TILES[1])
    clocked(lambda tiles, shape: 1.0)  # of equals the one that needs no further compiler
    assert fastest(times([(20, 24), (70, 80)], [BF16], CPU)) == "torch"


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_fp32_has_the_tiles_of_the_table(precision):
    clocked(lambda tiles, shape: 1.0 if tiles else 2.0)
    found = times([(20, 24)], [torch.float32], CPU, precision)
    assert found.count_nonzero() == 2
    assert fastest(found) == "torch"
    found[4, 1] = 1.0
    assert fastest(found) == "triton"


def test_the_times_of_all_stacks_of_a_size_count():
    # alone each would choose another one
    def cost(tiles, shape):
        return {(): 4.0, TILES[0]: 1.0 if len(shape) == 2 else 6.0}.get(tiles, 9.0)

    clocked(cost)
    assert fastest(times([(20, 24)], [BF16], CPU)) == "triton/64x64x8x4x3"
    assert fastest(times([(2, 20, 24)], [BF16], CPU)) == "torch"
    found = times([(20, 24), (2, 20, 24)], [BF16], CPU)
    assert found.sum(0)[[0, 2]].tolist() == [8.0, 7.0]
    assert fastest(found) == "triton/64x64x8x4x3"


def test_what_decides_nothing_is_not_timed():
    """Compilers take most of a first start: they run once for 16 bits, and not for a router beside experts."""
    seen = set()

    def cost(tiles, shape):
        seen.add((tiles, shape))
        return 1.0 if tiles == TILES[0] else 2.0

    clocked(cost)
    stacks = [(8, 100), (16, 80, 80)]
    found = times(stacks, [BF16, torch.float16], CPU)
    assert found[3].count_nonzero() == 0  # of 8 rows
    assert {shape for _, shape in seen} <= {(2, 80, 80), (16, 80, 80)}
    seconds = sum(1.0 if tiles == TILES[0] else 2.0 for tiles in ((), *TILES))
    assert found.sum() == seconds  # for one dtype
    assert made(fastest(found), 8) == Clocked(TILES[0])


def test_a_kernel_that_fails_where_it_was_not_timed_is_dropped():
    clocked(lambda tiles, shape: 1.0 if tiles else 2.0, wrong=(8,))
    stacks = [(8, 100), (16, 80, 80)]
    timed = fastest(times(stacks, [BF16], CPU))
    assert timed == "triton/64x64x8x4x3"
    with pytest.warns(UserWarning, match=r"triton/64x64x8x4x3 is dropped, torch serves: X X\^T of \(8, 100\)"):
        assert choose(stacks, BF16, "cpu", timed=timed).kernel == "torch"


def test_a_line_tells_what_takes_long():
    for seconds, lines in ((1e-3, 0), (1.0, 1)):
        clocked(lambda tiles, shape, seconds=seconds: seconds)
        told = []
        times([(20, 24), (70, 80)], [BF16], CPU, tell=told.append)
        assert len(told) == lines


def test_nothing_to_time():
    clocked(by_size)
    assert fastest(times([], [BF16], CPU)) is None
    # torch alone has products in fp64
    assert fastest(times([(20, 24)], [torch.float64, BF16], CPU)) is None


def no_memory(at, tiles):
    """Costs of kernels of which one has no memory for a shape."""

    def cost(of, shape):
        if of == tiles and shape == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return 1.0 if of else 2.0

    return cost


@pytest.mark.parametrize("tiles", [TILES[0], ()])
def test_an_error_while_a_kernel_is_timed_is_an_answer(tiles, monkeypatch):
    """The other ranks wait for this one's times. Of a stack of three the check takes two, and the clock takes all."""
    freed = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(True))
    clocked(no_memory((3, 40, 50), tiles))
    with pytest.warns(UserWarning, match="is dropped: OutOfMemoryError: CUDA out of memory"):
        found = times([(20, 24), (3, 40, 50)], [BF16], CPU)
    assert (found[5] == torch.inf).tolist() == [each == tiles for each in [(), None, *TILES]]
    assert found[4].isfinite().all()
    assert freed
    found[5] = torch.inf  # where no kernel can be timed, torch serves
    assert fastest(found).endswith(", torch from 32")


def test_what_gives_wrong_numbers_is_dropped_for_its_size():
    clocked(lambda tiles, shape: 1.0 if tiles else 2.0, wrong=(70,))
    dropped = r"triton/64x64x8x4x3 is dropped: X X\^T of \(2, 70, 80\) in .* is off by"
    with pytest.warns(UserWarning, match=dropped) as caught:
        choice = fastest(times([(20, 24), (3, 70, 80)], [BF16], CPU))
    assert choice == "triton/64x64x8x4x3, torch from 64"
    assert len(caught) == 1  # for all tiles
    # and so is a table that says otherwise
    table = "torch, triton/64x64x8x4x3 from 32"
    assert reason_against(table, [(20, 24)], [BF16], CPU, "ieee") is None
    assert "off by" in reason_against(table, [(20, 24), (70, 80)], [BF16], CPU, "ieee")


def test_without_triton_torch_serves():
    clocked(lambda tiles, shape: 1.0 if tiles else 2.0)
    KERNELS["triton"] = Kernel(FAKES["triton"].make, missing=lambda device: "triton is not installed")
    with pytest.warns(UserWarning, match="is dropped: triton is not installed") as caught:
        assert fastest(times([(20, 24), (70, 80)], [BF16], CPU)) == "torch"
    assert len(caught) == 1
    table = "torch, triton/64x64x8x4x3 from 64"
    with pytest.raises(RuntimeError, match=r"cannot serve: triton is not installed.* kernel of the checkpoint"):
        choose([(20, 24)], BF16, "cpu", kept=table)


def test_choices_of_older_checkpoints_are_known():
    clocked(by_size)
    for kept in ("triton", "torch"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert choose([(20, 24)], BF16, "cpu", kept=kept).kernel == kept
        assert made(kept, 4096) == Clocked()


NO_CHOICES = ["", "cublas", "triton/128x64", "torch from", "torch from 2", "torch, torch", "torch, cublas from 64"]


@pytest.mark.parametrize("choice", NO_CHOICES)
def test_what_is_no_choice(choice):
    with pytest.raises(ValueError, match=r"unknown kernel .* expected one of triton, blocked, torch"):
        choose([(20, 24)], BF16, "cpu", kernel=choice)
