"""What Spectron refuses, and by which message."""

import pytest
import torch

from megatron_eopt.optimizers.spectron import factor_pairs
from tests.optimizers.several import run
from tests.optimizers.spectrons import SHAPES, parameters, spectron


def test_a_pair_has_two_factors():
    with pytest.raises(ValueError, match="a pair has two factors, got 3 in pair 0"):
        factor_pairs([parameters()])


def test_a_state_of_another_rank_is_refused():
    params = parameters()
    optimizer = spectron(params, lr=0.05)
    run(optimizer, params, [0])
    with pytest.raises(ValueError, match="group 0 has rank=3, but the state was saved with 4"):
        spectron(params, rank=3).load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["rank"] = 3
    for _ in range(2):  # it is not forgotten
        with pytest.raises(ValueError, match=r"keeps factors of rank 4 .* whose group now has rank 3"):
            run(optimizer, params, [1])


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_a_weight_that_has_no_factors_is_refused_before_anything_changes(value):
    p, q = parameters(SHAPES[:2])
    with torch.no_grad():
        q.fill_(value)
    before = p.detach().clone()
    optimizer = spectron([("first", p), ("second", q)])
    with pytest.raises(ValueError, match="cannot take factors from second: a matrix of it is zero"):
        run(optimizer, [p, q], [0])
    assert torch.equal(p, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 17}, r"rank must lie in \[1, 16\] for .* of shape \(24, 16\), a matrix \(24, 16\), got 17"),
        ({"num_ns_steps": 7}, "7"),
        ({"coefficient_type": "nonsense"}, "nonsense"),
    ],
)
def test_wrong_settings_are_refused_at_construction_and_in_a_new_group(settings, message):
    p, q = parameters([(24, 16), (24, 16)])
    with pytest.raises(ValueError, match=message):
        spectron([p], **settings)
    optimizer = spectron([p])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [q], **settings})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_power_iterations": 0}, "num_power_iterations must be a whole number of at least 1, got 0"),
        ({"tp_mode": "blockwise"}, "with tp_mode blockwise the singular values of factors"),
        ({"tp_mode": "other"}, "unknown tp_mode 'other'"),
        ({"fp32_matmul_prec": "exact"}, "unknown fp32_matmul_prec 'exact'"),
        ({"split_qkv": True}, "split_qkv needs is_qkv_fn"),
    ],
)
def test_wrong_settings_of_the_optimizer_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        spectron(parameters(), **settings)


def bad_qkv():
    p = torch.nn.Parameter(torch.ones(32, 12))
    return [p], {"split_qkv": True, "is_qkv_fn": lambda q: True, "qkv_split_shapes": [9, 3, 3]}


def small_part():
    p = torch.nn.Parameter(torch.ones(36, 12))
    return [p], {"split_qkv": True, "is_qkv_fn": lambda q: True, "qkv_split_shapes": [30, 3, 3]}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ([torch.nn.Parameter(torch.ones(5))], {}), r"has shape \(5,\): give it to another optimizer"),
        (lambda: ([torch.nn.Parameter(torch.ones(3, 5, 5))], {}), "or declare a stack of 3 matrices"),
        (lambda: ([torch.nn.Parameter(torch.ones(5, 5, dtype=torch.complex64))], {}), "in floating point of 16 bits"),
        (bad_qkv, r"32 rows over all ranks are not a multiple of the 15 of one query group \[9, 3, 3\]"),
        (small_part, r"rank must lie in \[1, 3\] for .* \(k\), a matrix \(3, 12\), got 4"),
        (lambda: ([{"params": parameters(SHAPES), "pairs": True}], {}), "an even number of factors, got 3"),
        (lambda: ([factor_pairs([parameters([(9, 4), (8, 5)])])], {}), r"\(9, 4\) and \(8, 5\) have no rank in common"),
    ],
)
def test_parameters_that_cannot_be_are_refused_at_construction(make, message):
    params, settings = make()
    with pytest.raises(ValueError, match=message):
        spectron(params, **settings)
