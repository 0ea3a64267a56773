import pytest
import torch

from megatron_eopt.matrices import (
    GATE_UP,
    WHOLE,
    check_split_shapes,
    declare,
    declared_split,
    query_key_value,
    split_of,
    tag_declared,
    undeclare,
)

FC1, IN_PROJ = "*.linear_fc1.weight", "decoder.layers.*.in_proj.weight"


@pytest.fixture(autouse=True)
def patterns():
    yield
    for pattern in (FC1, IN_PROJ, "decoder.*"):
        undeclare(pattern)


def test_parameters_are_tagged_by_their_names():
    declare(FC1, GATE_UP)
    declare(IN_PROJ, WHOLE)
    names = ["a.linear_fc1.weight", "decoder.layers.0.in_proj.weight", "a.linear_fc2.weight", "b.linear_fc1.weight"]
    parameters = [torch.nn.Parameter(torch.ones(4, 4)) for _ in names]
    parameters[3].logical_matrices = WHOLE
    assert tag_declared(zip(names, parameters, strict=True)) == names[:2]
    assert [declared_split(parameter) for parameter in parameters] == [GATE_UP, WHOLE, None, WHOLE]


def test_two_declarations_of_one_parameter_have_to_agree():
    declare(IN_PROJ, GATE_UP)
    declare("decoder.*", GATE_UP)
    twice = torch.nn.Parameter(torch.ones(4, 4))
    tag_declared([("decoder.layers.0.in_proj.weight", twice)])
    assert declared_split(twice) == GATE_UP
    declare("decoder.*", WHOLE)
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"decoder\.layers\.0\.in_proj\.weight is declared twice, differently: by "):
        tag_declared([("decoder.layers.1.weight", parameter), ("decoder.layers.0.in_proj.weight", parameter)])
    assert declared_split(parameter) is None


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (None, "needs qkv_split_shapes: 3 or 4 positive integers, got None"),
        ([2, 1], r"3 or 4 positive integers, got \[2, 1\]"),
        ([2, 1, 1, 1, 1], "positive integers"),
        ([2, 1.0, 1], r"3 or 4 positive integers, got \[2, 1.0, 1\]"),
        ([2, True, 1], "positive integers"),
        ([2, 0, 1], r"positive integers, got \[2, 0, 1\]"),
        ([2, -1, 1], "positive integers"),
    ],
)
def test_wrong_shapes_are_said(shapes, message):
    with pytest.raises(ValueError, match=message):
        check_split_shapes(shapes)


def test_a_gate_makes_four_parts():
    assert check_split_shapes([4, 4, 2, 2]) == (4, 4, 2, 2)
    with pytest.raises(ValueError, match=r"3 positive integers, got"):
        check_split_shapes([4, 4, 2, 2], (3,))


def fused(**attributes):
    parameter = torch.nn.Parameter(torch.ones(8, 4))
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


@pytest.mark.parametrize(
    ("attributes", "is_qkv", "shapes", "split"),
    [
        ({}, None, (2, 1, 1), None),
        ({}, False, (2, 1, 1), None),
        ({}, True, [2, 1, 1], query_key_value((2, 1, 1))),
        ({"qkv_split_shapes": [2, 2, 2, 2]}, True, (2, 1, 1), query_key_value((2, 2, 2, 2))),
        ({"qkv_split_shapes": [2, 2, 2, 2]}, None, None, None),
        ({"logical_matrices": GATE_UP, "qkv_split_shapes": [2, 1, 1]}, True, (2, 1, 1), GATE_UP),
        ({"logical_matrices": WHOLE}, True, None, WHOLE),
    ],
)
def test_what_an_optimizer_is_told_becomes_a_split(attributes, is_qkv, shapes, split):
    tells = None if is_qkv is None else lambda parameter: is_qkv
    assert split_of(fused(**attributes), tells, shapes) == split


def test_a_projection_needs_its_shapes():
    with pytest.raises(ValueError, match="split_qkv needs qkv_split_shapes: 3 or 4 positive integers, got None"):
        split_of(fused(), lambda parameter: True)
    with pytest.raises(ValueError, match=r"3 positive integers, got \[2, 2, 2, 2\]"):
        split_of(fused(qkv_split_shapes=[2, 2, 2, 2]), lambda parameter: True, lengths=(3,))
