"""What SOAP keeps goes on bit for bit, wherever it is put."""

import copy
import pickle

import pytest
import torch

from megatron_eopt.matrices import GATE_UP
from megatron_eopt.optimizers.soap import SOAP
from tests.optimizers.several import parameters, run
from tests.optimizers.soap_reference import SETTINGS, SHAPES


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"use_kl_shampoo": True, "max_dim": 5}, torch.float32),
        ({"basis_of": "current"}, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_restored_optimizer_goes_on_bit_for_bit(dtype, settings, stop):
    settings = {**SETTINGS, **settings}
    straight, stopped = parameters(SHAPES, dtype), parameters(SHAPES, dtype)
    whole = SOAP(straight, **settings)
    run(whole, straight, range(8))
    first = SOAP(stopped, **settings)
    first.init_state()
    run(first, stopped, range(stop))
    second = SOAP(copy.deepcopy(stopped), max_dim=settings.get("max_dim", 10000))
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    resumed = second.param_groups[0]["params"]
    run(second, resumed, range(stop, 8))
    for p, q in zip(resumed, straight, strict=True):
        assert torch.equal(p, q)
        assert set(second.state[p]) == set(whole.state[q])
        assert all(torch.equal(second.state[p][key], value) for key, value in whole.state[q].items())


def test_a_checkpoint_of_step_0_begins_anew():
    params, expected = parameters(SHAPES), parameters(SHAPES)
    run(SOAP(expected, **SETTINGS), expected, range(3))
    optimizer = SOAP(params, **SETTINGS)
    optimizer.init_state()
    at_start = copy.deepcopy(optimizer.state_dict())
    run(optimizer, params, range(3, 6))
    optimizer.load_state_dict(at_start)
    for p, q in zip(params, parameters(SHAPES), strict=True):
        p.data.copy_(q)
    run(optimizer, params, range(3))
    assert all(torch.equal(p, q) for p, q in zip(params, expected, strict=True))


def test_a_state_of_other_sides_is_refused():
    (p,) = parameters([(6, 4)])
    optimizer = SOAP([p], max_dim=5)
    run(optimizer, [p], [0])
    with pytest.raises(ValueError, match="SOAP needs 'L' for the parameter of shape"):
        SOAP(parameters([(6, 4)])).load_state_dict(optimizer.state_dict())


def fused(p):
    return hasattr(p, "qkv_split_shapes")


@pytest.mark.parametrize("way", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_still_splits_what_is_fused(way):
    params = parameters([(16, 6), (16, 6)])
    params[0].logical_matrices, params[1].qkv_split_shapes = GATE_UP, [2, 1, 1]
    optimizer = SOAP(params, split_qkv=True, is_qkv_fn=fused, qkv_split_shapes=[8, 4, 4], **SETTINGS)
    run(optimizer, params, range(3))
    copied = way(optimizer)
    resumed = copied.param_groups[0]["params"]
    for p, q in zip(resumed, params, strict=True):
        p.__dict__.update(q.__dict__)  # torch leaves attributes of parameters out
    run(optimizer, params, range(3, 7))
    run(copied, resumed, range(3, 7))
    assert all(torch.equal(p, q) for p, q in zip(resumed, params, strict=True))
    new = SOAP(params, split_qkv=True, is_qkv_fn=fused, qkv_split_shapes=[8, 4, 4], **SETTINGS)
    new.load_state_dict(optimizer.state_dict())
    assert {key for key in new.state[params[1]] if key.startswith("Q_L")} == {"Q_L_0", "Q_L_1", "Q_L_2"}
