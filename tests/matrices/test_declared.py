import pytest
import torch

from megatron_eopt.matrices import GATE_UP, WHOLE, declare, declared_for, declared_split, tag_declared, undeclare

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
    assert declared_for("decoder.layers.0.in_proj.weight") == GATE_UP
    declare("decoder.*", GATE_UP)
    with pytest.raises(ValueError, match=r"'decoder.\*' is declared already, otherwise"):
        declare("decoder.*", WHOLE)
    undeclare("decoder.*")
    declare("decoder.*", WHOLE)
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"decoder\.layers\.0\.in_proj\.weight is declared twice, differently: by "):
        tag_declared([("decoder.layers.1.weight", parameter), ("decoder.layers.0.in_proj.weight", parameter)])
    assert declared_split(parameter) is None


def test_only_a_split_is_a_declaration():
    with pytest.raises(TypeError, match=r"the logical matrices of 'decoder.\*' are declared by a Split, got list"):
        declare("decoder.*", [2, 1, 1])
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    parameter.logical_matrices = [2, 1, 1]
    with pytest.raises(
        ValueError, match=r"logical_matrices of a parameter of shape \(4, 4\) has to be a Split, got li"
    ):
        declared_split(parameter)
