"""What comes back to a program that yields a list: matrices of its own, copied bucket by bucket."""

import pytest
import torch
from counting import Launches
from step import RANKS
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_eopt.orthogonalize import NewtonSchulz
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import Layout
from megatron_eopt.parallel.rectangles import cut

SHAPES = [(64, 32), (32, 64)]


def launched(group, mode, of_each):
    shapes = SHAPES * of_each
    layouts = [Layout(each, cut(each, int(each[0] < each[1]), RANKS), group, "tp") for each in shapes]
    specs = [ParamSpec(str(i), torch.float32, each, iteration=NewtonSchulz()) for i, each in enumerate(layouts)]
    with FakeTensorMode():
        engine = Engine(specs, torch.device("cuda"), mode)
        shards = [torch.empty(each.rectangle.shape, device="cuda") for each in layouts]
        with Launches() as counted:
            factors = engine.factors(range(len(shards)), shards)
    assert {(x.dtype, x.is_contiguous()) for x in factors} == {(torch.float32, True)}
    return counted.kernels.total()


@pytest.mark.parametrize("mode", ["duplicated", "owner", "gram", "distributed"])
def test_more_matrices_of_a_bucket_launch_no_more_kernels(mode, fake_group):
    assert launched(fake_group, mode, 24) == launched(fake_group, mode, 16)
