"""What the elementwise half of a step costs with kernels: launches and bytes, on CUDA tensors without numbers."""

from contextlib import ExitStack

import pytest
import torch
from counting import Allocations, bytes_of_kernel, counted_kernels, launches, moved
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt.parallel.schemes import whole
from tests.optimizers.family import build

pytest.importorskip("triton")

SMALL = [(64, 64), (96, 64), (64, 96), (128, 64), (64, 128)]
# of GPT-3's 1.3B: 24 layers of hidden size 2048, and one more shape
LARGE = [(6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192), (4096, 2048)]
MOST_OPERATIONS, MOST_BYTES = 60, 30


class Costs(TorchDispatchMode):
    """Counts operations that reach a device, and the bytes that they and the kernels read and write."""

    def __init__(self):
        super().__init__()
        self.sent = 0  # tables
        self.operations, self.bytes, self.beside, self.allocated = {}, 0, True, Allocations()

    def count(self, name, tensors):
        self.operations[name] = self.operations.get(name, 0) + 1
        self.bytes += sum(x.numel() * x.itemsize for x in tensors)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if launches(func) and self.beside and func.overloadpacket.__name__ != "device":
            read, written = moved(func, args, kwargs, result)
            self.count(func.overloadpacket.__name__, [*read, *written])
        return result


def cost_of_step(shapes, monkeypatch, name="muon", **settings):
    """Operations and bytes beside the iteration in the fourth step, and its entries."""
    costs = Costs()

    def orthogonalized(stack, job, iterate=whole.orthogonalized):
        costs.beside = False
        factors = iterate(stack, job)
        costs.beside = True
        return factors

    def launched(kernel, x, other):
        costs.operations[kernel.__name__] = costs.operations.get(kernel.__name__, 0) + 1
        costs.bytes += bytes_of_kernel(kernel, x, other) + x.table.numel() * 8

    def sent():
        costs.sent += 1

    monkeypatch.setattr(whole, "orthogonalized", orthogonalized)
    with ExitStack() as modes:
        modes.enter_context(counted_kernels(launched, sent))
        modes.enter_context(FakeTensorMode())
        parameters = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes]
        for p in parameters:
            p.grad = torch.empty_like(p)
        optimizer = build(name, parameters, symmetric_products="torch", **settings)
        for step in range(4):
            if step == 3:
                costs.operations, costs.bytes, costs.sent = {}, 0, 0
                modes.enter_context(costs)
                modes.enter_context(costs.allocated)
            optimizer.step()
    assert ("momentum_kernel" in costs.operations) == (settings.get("step_kernels") != "torch")
    return costs, sum(p.numel() for p in parameters)


@pytest.mark.parametrize(
    ("shapes", "of_each"),
    [pytest.param(SMALL, 120, id="64 x 64"), pytest.param(LARGE, 24, id="1.3B", marks=pytest.mark.wide)],
)
def test_a_step_of_muon_costs_few_operations_and_bytes(shapes, of_each, monkeypatch):
    costs, entries = cost_of_step(shapes * of_each, monkeypatch)
    assert sum(costs.operations.values()) <= MOST_OPERATIONS, str(costs.operations)
    assert costs.bytes / entries <= MOST_BYTES, costs.operations
    assert costs.sent == 0  # nothing is copied from the host


@pytest.mark.parametrize(
    ("shape", "count", "chunks"),
    [pytest.param((2048, 7168), 96, 12, marks=pytest.mark.wide), ((768, 2048), 128, 1)],
    ids=str,
)
def test_experts_go_through_one_bucket_a_chunk(shape, count, chunks, monkeypatch):
    """No launch a matrix, and no momentum that is copied."""
    costs, entries = cost_of_step([shape] * count, monkeypatch)
    assert (costs.operations["momentum_kernel"], costs.operations["subtract_kernel"]) == (chunks, chunks)
    assert costs.bytes / entries <= MOST_BYTES, costs.operations
    assert costs.allocated.peak <= 2**31
