"""What a launch that is known hands to a GPU is what Triton itself would. No GPU is needed: nothing is compiled."""

import pytest
import torch

pytest.importorskip("triton")

from megatron_eopt.kernels import triton_kernel
from megatron_eopt.kernels.triton_kernel import Tiles, symmetric_product
from megatron_eopt.kernels.triton_launch import Launcher
from tests.kernels.launched import Compiled, binding

pytestmark = pytest.mark.skipif(
    triton_kernel.INTERPRETED or torch.cuda.is_available(), reason="Triton would launch, or interpret"
)


def launcher():
    return Launcher(triton_kernel._kernel, triton_kernel._call)


def test_an_equal_launch_is_not_searched_for_again(monkeypatch):
    gpu = binding(monkeypatch)
    monkeypatch.setattr(triton_kernel, "_launch", launcher())
    a = torch.zeros(3, 32, 48, dtype=torch.float16)
    for _ in range(3):
        symmetric_product(a, a, alpha=0.5, out=torch.empty(3, 32, 32, dtype=torch.float16))
    assert len(gpu.started) == 3
    assert len(gpu.searched) == 1


def takes_less(self, grid):
    return lambda: None


def has_no_grids(self, grid):
    raise TypeError("not subscriptable")


@pytest.mark.parametrize("other", [takes_less, has_no_grids])
def test_where_triton_starts_otherwise_all_launches_are_its_own(other, monkeypatch, caplog):
    gpu = binding(monkeypatch)
    monkeypatch.setattr(Compiled, "__getitem__", other)
    monkeypatch.setattr(Launcher, "starts_known", True)
    monkeypatch.setattr(triton_kernel, "_launch", launcher())
    a = torch.zeros(3, 32, 48, dtype=torch.float16)
    out = torch.empty(3, 32, 32, dtype=torch.float16)
    for _ in range(3):
        symmetric_product(a, a, out=out)
    first, *others = map(values, gpu.started)
    assert others == [first] * 2
    assert len(caplog.records) == 1


def products():
    """Arguments that Triton tells apart by what it looks at: dtypes, addresses, sizes, strides, constants."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        for rows, cols in ((32, 48), (33, 48), (1, 16), (16, 1)):
            memory = torch.zeros(2 * rows * cols + 1, dtype=dtype)
            stack = memory[:-1].view(2, rows, cols)
            shifted = memory[1:].view(2, rows, cols)
            for x in (stack, stack[0], shifted, stack.mT, stack[:, ::2], stack[:1], stack[:, :, 1:]):
                yield (x, x), {}
                yield (x, x), {"tiles": Tiles(width=32, depth=16)}
                square = torch.zeros(*x.shape[:-1], x.size(-2), dtype=dtype)
                yield (square, square.mT, square), {"beta": 1.0, "alpha": 0.25}
                yield (square, square, square.float()), {"beta": 0.5}
                yield (square, square, square), {"beta": 0.0, "input_precision": "tf32"}


def values(launched):
    """What was started, tensors by their addresses."""
    *others, arguments = launched
    return others, [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]


def test_known_launches_are_those_of_triton(monkeypatch):
    gpu = binding(monkeypatch)
    shared = launcher()
    cases = 0
    for arguments, settings in products():
        out = torch.empty(*arguments[0].shape[:-1], arguments[0].size(-2), dtype=arguments[0].dtype)
        for launch in (launcher(), shared, shared):
            monkeypatch.setattr(triton_kernel, "_launch", launch)
            symmetric_product(*arguments, out=out, **settings)
        if out.numel():
            by_triton, *ours = map(values, gpu.started[-3:])
            assert ours == [by_triton] * 2
            cases += 1
    assert len(gpu.started) == 3 * cases
    assert len(gpu.searched) < 2.5 * cases  # some of ours were known
