"""Weights that Megatron 0.19 cuts a second time, in what this package does around the optimizers.

No run: Megatron cuts them with Transformer Engine alone. What the optimizers make of them: tests/distributed.
"""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt import TensorParallelMuon
from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.megatron.checkpoints.torch_dist import SavedState
from megatron_eopt.megatron.manifest import _layout
from megatron_eopt.megatron.parameters import trainable
from tests.parallel.test_layout import Group

pytestmark = pytest.mark.wide

COPIES = """
import torch
import megatron_eopt
megatron_eopt.activate()
from megatron.core.tensor_parallel import copy_gtp_attributes, copy_tensor_model_parallel_attributes
p, main = torch.ones(3, 2), torch.ones(3, 2)
p.is_gtp_weight_remat, p.pad_length, p.tensor_model_parallel, p.partition_dim = True, 5, True, 0
copy_tensor_model_parallel_attributes(main, p)
copy_gtp_attributes(main, p)
print(main.is_gtp_weight_remat, main.pad_length, main.partition_dim)
"""


def test_the_fp32_copy_of_a_parameter_knows_its_padding():
    """Which Megatron's own attributes of a copy are not."""
    done = subprocess.run([sys.executable, "-c", COPIES], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-3:] == ["True", "5", "0"]


@pytest.mark.parametrize(
    ("attributes", "shape", "layout"),
    [
        ({}, (12, 8), "whole"),
        ({"tensor_model_parallel": True, "partition_dim": 0}, (24, 8), "rows over tp 2"),
        ({"is_gtp_weight_remat": True, "pad_length": 6}, (42, 8), "rows over gtp_remat 4"),
        (
            {"is_gtp_weight_remat": True, "pad_length": 6, "tensor_model_parallel": True, "partition_dim": 0},
            (84, 8),
            "rows over tp 2, rows over gtp_remat 4",
        ),
        (
            {"is_gtp_weight_remat": True, "tensor_model_parallel": True, "partition_dim": 1},
            (48, 16),
            "columns over tp 2, rows over gtp_remat 4",
        ),
        (
            {"is_gtp_weight_remat": True, "pad_length": 1, "allreduce": False, "partition_dim": 1},
            (35, 8),
            "rows over expt_gtp_remat 3",
        ),
    ],
)
def test_selectors_and_the_manifest_speak_of_the_whole_matrix(attributes, shape, layout):
    groups = SimpleNamespace(tp=Group(2), expt_tp=Group(1), gtp_remat=Group(4), expt_gtp_remat=Group(3))
    chunk = torch.nn.Linear(8, 12, bias=False)
    for name, value in attributes.items():
        setattr(chunk.weight, name, value)
    (described,) = trainable([chunk], groups)
    assert described.info.shape == shape
    assert _layout(chunk.weight, {name: group.size() for name, group in vars(groups).items()}) == layout


def test_optimizer_state_is_not_saved():
    p = torch.nn.Parameter(torch.ones(6, 4))
    optimizer = TensorParallelMuon([p])
    p.is_gtp_weight_remat = True  # as the ranks see it that have others beside them
    methods = dict.fromkeys(("state_dict", "sharded_state_dict", "load_state_dict"))
    wrapper = SimpleNamespace(optimizer=optimizer, config=SimpleNamespace(), **methods)
    with pytest.raises(CheckpointError, match=r"shape \(6, 4\) .* cut a second time .* unproven: .*--no-save-optim"):
        SavedState(wrapper).sharded_state_dict({})
