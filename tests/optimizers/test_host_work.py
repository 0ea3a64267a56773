"""What the host does in a step of many matrices as a GPU makes it: no GPU is needed, since no kernel is launched.

Kernels of Triton are bound for a GPU and noted; torch's operations run on small tensors of the CPU.
"""

import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from megatron_eopt import Execution, TensorParallelMuon
from megatron_eopt.kernels import choice, triton_kernel, triton_norms, triton_step
from megatron_eopt.step.momenta import step_form
from tests.kernels.launched import binding, without_memory
from tests.optimizers.on_gpu import masking

pytestmark = pytest.mark.skipif(
    triton_step.INTERPRETED or torch.cuda.is_available(), reason="Triton would launch, or interpret"
)
LAUNCHERS = (
    triton_kernel._launch,
    triton_norms._launch_squares,
    triton_norms._launch_norms,
    triton_norms._launch_quotients,
    triton_step.launchers[triton_step.momentum_kernel],
    triton_step.launchers[triton_step.subtract_kernel],
)


@pytest.fixture
def gpu(monkeypatch):
    """Notes launches, of launchers that know none."""
    for launcher in LAUNCHERS:
        monkeypatch.setattr(launcher, "_known", {})
    for module in (step_form, choice):
        monkeypatch.setattr(module, "triton_missing", lambda device: None)
    return binding(monkeypatch)


def prepared(count):
    """Muon for so many matrices of two shapes in two groups, after its first steps."""
    parameters = [torch.nn.Parameter(torch.zeros((4, 4) if n % 3 else (4, 16))) for n in range(count)]
    groups = [{"params": parameters[: count // 2]}, {"params": parameters[count // 2 :], "lr": 0.5}]
    # bf16: products of the CPU's fp32 go one by one
    optimizer = TensorParallelMuon(
        groups,
        execution=Execution(symmetric_products="triton", step_kernels="triton"),
        fp32_matmul_prec="medium",
        weight_decay=0.1,
    )
    for p in parameters:
        p.grad = torch.ones_like(p)
    masking(optimizer)
    for _ in range(2):
        optimizer.step()
    return optimizer


def test_a_step_searches_for_no_kernel_that_is_known(gpu, monkeypatch):
    optimizer = prepared(20)
    gpu.started.clear()
    gpu.searched.clear()
    optimizer.step()
    known = without_memory(gpu.started)
    assert len(known) > 20
    assert gpu.searched == []
    for launcher in LAUNCHERS:
        monkeypatch.setattr(launcher, "_known", {})
    gpu.started.clear()
    optimizer.step()
    assert len({*gpu.searched}) == len(LAUNCHERS)
    assert known == without_memory(gpu.started)  # what Triton itself would start


class Dispatched(TorchDispatchMode):
    """Counts torch's operations, views among them."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def work_of_step(optimizer):
    """Operations of torch in a step, calls of Python functions, and calls of others."""
    with Dispatched() as dispatched:
        optimizer.step()
    calls = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update([event]))
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    return dispatched.count, calls["call"], calls["c_call"]


def test_more_matrices_cost_no_operation_and_few_calls(gpu):
    few, many = (work_of_step(prepared(count)) for count in (60, 360))
    operations, functions, others = (b - a for a, b in zip(few, many, strict=True))
    assert operations == 0  # no view of each matrix, no table
    assert functions <= 4 * 300
    assert others <= 12 * 300
