"""How many operations one step takes: as many as there are kinds of matrices, however many matrices there are."""

import pytest
import torch
from counting import HOST_READ, Operations, launches

from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.step import stacked_optimizer
from tests.optimizers.family import build, every, having
from tests.optimizers.on_gpu import masking

SHAPES = [(12, 12), (18, 12), (12, 18), (24, 12), (12, 24)]
EXACT = {"symmetric_products": "torch"}  # as many products as there are steps, on every machine


def many(count, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return params


def operations_of(name, of_each, flagged):
    """Of the fourth step of so many matrices of each shape."""
    params = many(of_each)
    optimizer = build(name, params, **(EXACT if name in having("symmetric_products") else {}))
    optimizer = masking(optimizer) if flagged else optimizer
    for _ in range(3):
        optimizer.step()
    with Operations() as counted:
        optimizer.step()
    return counted.counts


@pytest.mark.parametrize("flagged", [False, True], ids=["on a CPU", "with a flag"])
@every
def test_a_step_of_more_matrices_takes_no_more_operations(name, flagged):
    few, many = (operations_of(name, of_each, flagged) for of_each in (2, 5))
    assert many == few
    assert many[HOST_READ] <= 2  # of gradients that are not finite, which a GPU does not ask


def test_a_step_of_muon_takes_few_operations():
    assert operations_of("muon", 5, False).total() <= 150
    assert operations_of("muon", 5, True).total() <= 220  # a flag costs a few for each shape


def test_the_first_step_reads_back_all_norms_at_once():
    optimizer = build("muon_hyperball", many(4))
    with Operations() as counted:
        optimizer.step()
    assert counted.counts[HOST_READ] <= 2  # of gradients that are not finite


class Sizes(Operations):
    """Has also the bytes of the largest tensor that an operation makes."""

    tensor = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(func, types, args, kwargs)
        if launches(func):
            tensors = made if isinstance(made, list | tuple) else [made]
            self.tensor = max([self.tensor, *(each.nbytes for each in tensors if isinstance(each, torch.Tensor))])
        return made


@pytest.mark.parametrize("settings", [{}, {"max_dim": 80}], ids=str)
def test_stacks_of_soap_are_bounded(monkeypatch, settings):
    shapes = [(64, 64), (96, 64), (64, 96), (128, 64), (64, 128)]
    whole, params = many(12, shapes), many(12, shapes)
    most = 3 * 4 * 128 * 64 * 4  # of four of the largest matrices
    a, b = (SOAP(each, precondition_frequency=2, **settings) for each in (whole, params))
    for _ in range(4):
        a.step()
    monkeypatch.setattr(stacked_optimizer, "MOST_STACK_BYTES", most)
    with Sizes() as watched:
        for _ in range(4):
            b.step()
    assert 128 * 128 * 4 < watched.tensor <= most
    for p, q in zip(params, whole, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
