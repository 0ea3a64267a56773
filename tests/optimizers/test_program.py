"""What Muon's step does on a device and in memory."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt import Execution, PolarGrad, TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.step.elementwise import Update, scaled

SHAPES = [(24, 16), (16, 40), (33, 12)]


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
            scaled(Update([factor], scale) for factor, scale in zip(factors, [0.5, 1.0, 0.5], strict=True))
    assert names.found == ["aten._foreach_mul_.Scalar"]


def test_a_program_that_keeps_momenta_has_less_room_for_a_chunk():
    """It holds them in fp32 until their factors are there."""

    def chunks(cls, **settings):
        matrices = [torch.nn.Parameter(torch.zeros(64, 64)) for _ in range(16)]
        engine = cls(matrices, execution=Execution(workspace=2**18), **settings).proposed()
        return len(engine.order(range(16)))

    muon, adamuon = chunks(TensorParallelMuon), chunks(TensorParallelAdaptiveMuon)
    assert chunks(PolarGrad) > muon
    assert chunks(TensorParallelAdaptiveMuon, moment2_method="namo") > muon == adamuon
