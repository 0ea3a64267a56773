"""Muon's program, written out by a reader of its four lines."""

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt import PolarGrad, TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.optimizers.muon import muon
from megatron_eopt.optimizers.step import scaled
from megatron_eopt.orthogonalize import NewtonSchulz

SHAPES = [(24, 16), (16, 40), (33, 12)]


def reader(p, g, m, lr, weight_decay, beta, nesterov):
    """One step of a matrix in place, from the lines of ``muon``; the scale is that of ``spectral``."""
    p *= 1 - lr * weight_decay
    m.lerp_(g, 1 - beta)
    u = g.lerp(m, beta) if nesterov else m
    factor = NewtonSchulz(steps=5, coefficient_type="quintic", fp32_matmul_prec="highest")(u)
    p -= lr * (max(p.shape) ** 0.5 * factor)


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_step_is_what_a_reader_computes(nesterov):
    generator = torch.Generator().manual_seed(0)
    settings = {"lr": 2.0**-4, "weight_decay": 0.125, "momentum": 0.75}
    own = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    read = [(p.detach().clone(), torch.zeros_like(p)) for p in own]
    optimizer = TensorParallelMuon(own, nesterov=nesterov, fp32_matmul_prec="highest", **settings)
    for _ in range(10):
        for p, (q, m) in zip(own, read, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            reader(q, p.grad, m, settings["lr"], settings["weight_decay"], settings["momentum"], nesterov)
        optimizer.step()
    for p, (q, m) in zip(own, read, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(optimizer.state[p]["momentum_buffer"], m)


class Names(TorchDispatchMode):
    """The operations of torch, by their names."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.found.append(str(function))
        return function(*arguments, **(named or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_scale_is_copied_to_a_gpu(dtype):
    """A copy from the host would be waited for, and cannot be captured as a graph."""
    with FakeTensorMode():
        factors = [torch.empty(shape, dtype=dtype, device="cuda") for shape in SHAPES]
        with Names() as names:
            scaled(factors, [0.5, 1.0, 0.5])
    assert names.found == ["aten._foreach_mul_.Scalar"]


def test_the_program_is_four_lines():
    lines = inspect.getsource(muon).splitlines()
    assert len(lines) < 20
    assert [line.split("# ")[1] for line in lines if "# " in line] == [
        "p -= lr * weight_decay * p",
        "m += (1 - beta) (g - m);  u = (1 - beta) g + beta m",
        "of each whole logical matrix: ranks may wait here",
        "p -= lr * s O",
    ]


def test_a_program_that_keeps_momenta_has_less_room_for_a_chunk():
    """It holds them in fp32 until their factors are there."""

    def chunks(cls, **settings):
        matrices = [torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(16)]
        engine = cls(matrices, workspace=2**18, **settings).proposed()
        return len(engine.order(range(16)))

    muon, adamuon = chunks(TensorParallelMuon), chunks(TensorParallelAdaptiveMuon)
    assert chunks(PolarGrad) > muon
    assert chunks(TensorParallelAdaptiveMuon, moment2_method="namo") > muon == adamuon
