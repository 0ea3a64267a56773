"""Muon's program, written out by a reader of its four lines."""

import inspect

import pytest
import torch

from megatron_eopt import TensorParallelMuon
from megatron_eopt.optimizers.muon import muon
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


def test_the_program_is_four_lines():
    lines = inspect.getsource(muon).splitlines()
    assert len(lines) < 20
    assert [line.split("# ")[1] for line in lines if "# " in line] == [
        "p -= lr * weight_decay * p",
        "m += (1 - beta) (g - m);  u = (1 - beta) g + beta m",
        "O of each whole logical matrix",
        "p -= lr * s O",
    ]
