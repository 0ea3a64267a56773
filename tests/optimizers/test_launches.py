"""How many operations one step takes: as many as there are kinds of matrices, however many matrices there are."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt.family import ROWS

SHAPES = [(64, 64), (96, 64), (64, 96), (128, 64), (64, 128)]
OF_EACH = 64

# The most operations of the fourth step of OF_EACH matrices of each shape, and the settings with which it is taken.
LIMITS = {
    "adamuon": (400, "adaptive_muon", {"moment2_method": "adamuon"}),
    "adamuon not aligned": (400, "adaptive_muon", {"moment2_method": "adamuon", "align_rms": False}),
    "normuon": (400, "adaptive_muon", {"moment2_method": "normuon"}),
    "namo": (400, "adaptive_muon", {"moment2_method": "namo"}),
    "muon_hyperball": (400, "muon_hyperball", {}),
    "polargrad": (400, "polargrad", {}),
    "mars_muon": (400, "mars_muon", {}),
}
COPIES = 128  # of factors of tall matrices, one by one: to be made of whole stacks (parallel/schemes/whole.py)
TORCH_PRODUCTS = {"symmetric_products": "torch"}  # as many products as there are steps, on every machine

# What launches nothing on a GPU: views, and memory that is not written to.
FREE = frozenset(
    "view _unsafe_view _reshape_alias alias as_strided detach diagonal expand lift_fresh narrow permute select slice "
    "split split_with_sizes squeeze t transpose unbind unsqueeze empty empty_like empty_strided new_empty "
    "new_empty_strided promote_types".split()
)


class Counted(TorchDispatchMode):
    """Counts what reaches a device, a multi-tensor operation as one."""

    def __init__(self):
        super().__init__()
        self.operations = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in FREE:
            self.operations[name] += 1
        return func(*args, **(kwargs or {}))


def built(name, masked=False, of_each=OF_EACH):
    _, row, settings = LIMITS[name]
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator)) for _ in range(of_each) for s in SHAPES]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    products = TORCH_PRODUCTS if ROWS[row].takes("symmetric_products") else {}
    optimizer = ROWS[row].cls(params, **products, **settings)
    if masked:  # as on a GPU, which is not asked which gradients are finite
        of_step = optimizer._batches
        optimizer._batches = lambda accepted: of_step(accepted, masked=True)
    return optimizer


@pytest.mark.parametrize("masked", [False, True], ids=["on a CPU", "masked"])
@pytest.mark.parametrize("name", LIMITS)
def test_a_step_takes_few_operations(name, masked):
    optimizer = built(name, masked)
    for _ in range(3):
        optimizer.step()
    with Counted() as counted:
        optimizer.step()
    assert counted.operations.total() <= LIMITS[name][0] + COPIES, counted.operations.most_common()


def test_the_first_step_reads_back_the_norms_of_all_matrices_at_once():
    optimizer = built("muon_hyperball", of_each=4)
    with Counted() as counted:
        optimizer.step()
    assert counted.operations["_local_scalar_dense"] <= 2  # of gradients that are not finite
