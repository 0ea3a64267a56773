"""How many operations one step takes: as many as there are kinds of matrices, however many matrices there are."""

import pytest
import torch
from counting import HOST_READ, Operations

from megatron_eopt.family import OPTIMIZERS
from tests.optimizers.family import FOR_VECTORS, build
from tests.optimizers.field import drawn
from tests.optimizers.on_gpu import masking

SHAPES = [(64, 64), (96, 64), (64, 96), (128, 64), (64, 128)]
OF_EACH = 64

# The most operations of the fourth step of OF_EACH matrices of each shape, and the settings with which it is taken.
LIMITS = {
    "muon": (150, "muon", {}),
    "scion": (150, "scion", {}),
    "adamuon": (400, "adaptive_muon", {"moment2_method": "adamuon"}),
    "adamuon not aligned": (400, "adaptive_muon", {"moment2_method": "adamuon", "align_rms": False}),
    "normuon": (400, "adaptive_muon", {"moment2_method": "normuon"}),
    "namo": (400, "adaptive_muon", {"moment2_method": "namo"}),
    "muon_hyperball": (400, "muon_hyperball", {}),
    "polargrad": (400, "polargrad", {}),
    "mars_muon": (400, "mars_muon", {}),
    "lion": (400, "lion", {}),
    "signum": (400, "signum", {}),
    "schedule_free_adamw": (400, "schedule_free_adamw", {}),
    "ademamix": (400, "ademamix", {}),
    "spectron": (1500, "spectron", {"rank": 16}),
    "dion": (1500, "dion", {}),
    "dion2": (1500, "dion2", {}),
    "muown": (1500, "muown", {}),
    "soap": (1500, "soap", {}),
    "psgd_kron": (1800, "psgd_kron", {}),
    "soap refreshed": (1500, "soap", {"precondition_frequency": 1}),
}
# Masks are put on stacks of equal parameters, and so cost a few operations for each shape.
MASKED = {"muon": 220, "scion": 220}
TORCH_PRODUCTS = {"symmetric_products": "torch"}  # as many products as there are steps, on every machine


def built(name, masked=False, of_each=OF_EACH):
    _, row, settings = LIMITS[name]
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for _ in range(of_each) for s in SHAPES]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    products = TORCH_PRODUCTS if OPTIMIZERS[row].takes("symmetric_products") else {}
    optimizer = OPTIMIZERS[row].cls(params, **products, **settings)
    return masking(optimizer) if masked else optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FOR_VECTORS)
def test_a_masked_step_is_the_step_of_what_is_accepted(name, dtype):
    shapes = [(8, 4), (8, 4), (4,), ()]
    values = [drawn(shape).to(dtype) for shape in shapes]
    both = [[torch.nn.Parameter(x.clone()) for x in values] for _ in range(2)]
    masked, plain = masking(build(name, both[0], weight_decay=0.1)), build(name, both[1], weight_decay=0.1)
    for step, bad in enumerate([None, torch.nan, torch.inf, None]):
        for params, optimizer in zip(both, (masked, plain), strict=True):
            for i, p in enumerate(params):
                p.grad = drawn(p.shape, 10 * step + i).to(dtype)
            if bad is not None:
                params[0].grad[2, 1] = bad
            before = [x.clone() for x in [params[0], *optimizer.state[params[0]].values()]]
            optimizer.step()
            if bad is not None:
                assert all(map(torch.equal, before, [params[0], *optimizer.state[params[0]].values()]))
    for p, q in zip(*both, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        for key, x in masked.state[p].items():
            torch.testing.assert_close(x, plain.state[q][key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "masked", [pytest.param(False, id="on a CPU", marks=pytest.mark.wide), pytest.param(True, id="masked")]
)
@pytest.mark.parametrize("name", LIMITS)
def test_a_step_takes_few_operations(name, masked):
    optimizer = built(name, masked)
    for _ in range(3):
        optimizer.step()
    with Operations() as counted:
        optimizer.step()
    limit = MASKED.get(name, LIMITS[name][0]) if masked else LIMITS[name][0]
    assert counted.counts.total() <= limit, counted.counts.most_common()
    assert counted.counts[HOST_READ] <= 2  # of gradients that are not finite, which a GPU does not ask


def test_the_first_step_reads_back_the_norms_of_all_matrices_at_once():
    optimizer = built("muon_hyperball", of_each=4)
    with Operations() as counted:
        optimizer.step()
    assert counted.counts[HOST_READ] <= 2  # of gradients that are not finite
