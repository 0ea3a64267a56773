"""What SOAP refuses, and that nothing is changed then."""

import pytest

from megatron_eopt.matrices import GATE_UP, experts
from megatron_eopt.optimizers.soap import SOAP
from tests.optimizers.several import parameters


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precondition_frequency": 0}, "SOAP: precondition_frequency must be a whole number of at least 1, got 0"),
        ({"precondition_frequency": 1.5}, r"precondition_frequency must be a whole number of at least 1, got 1\.5"),
        ({"max_dim": -1}, "SOAP: max_dim must be a whole number of at least 0, got -1"),
        ({"basis_method": "svd"}, "SOAP: unknown basis_method 'svd': expected one of qr, eigh"),
        ({"basis_of": "next"}, "SOAP: unknown basis_of 'next': expected one of previous, current"),
        ({"weight_decay_method": "l2"}, "SOAP: unknown weight_decay_method 'l2': expected one of decoupled, indep"),
        ({"fp32_matmul_prec": "x"}, "unknown fp32_matmul_prec 'x': expected one of low, medium, high, highest"),
    ],
)
def test_wrong_settings_are_refused_at_construction_and_in_a_new_group(settings, message):
    p, q = parameters([(6, 4), (5,)])
    with pytest.raises(ValueError, match=message):
        SOAP([p], **settings)
    optimizer = SOAP([p])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [q], **settings})
    assert len(optimizer.param_groups) == 1


def test_three_dimensions_are_refused_unless_they_are_declared_as_a_stack():
    p, q = parameters([(6, 4), (2, 3, 4)])
    with pytest.raises(
        ValueError, match=r"SOAP takes matrices and vectors, but parameter 1 of group 0.* has shape \(2, 3"
    ):
        SOAP([p, q])
    optimizer = SOAP([("layer.weight", p)])
    message = "but experts.weight has shape .*: give it to another optimizer .* or declare a stack of 2 matrices"
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [("experts.weight", q)]})
    q.logical_matrices = experts(2)
    optimizer.add_param_group({"params": [("experts.weight", q)]})
    assert len(optimizer.param_groups) == 2


@pytest.mark.parametrize(
    ("attributes", "settings", "message"),
    [
        ({"logical_matrices": GATE_UP}, {}, r"a parameter of shape \(9, 4\) is not what was declared of it"),
        ({"logical_matrices": experts(3)}, {}, r"has shape \(9, 4\)"),
        ({}, {"qkv_split_shapes": [2, 1, 1]}, "9 rows over all ranks are not a multiple"),
        ({"qkv_split_shapes": [1, 1]}, {}, "qkv_split_shapes: 3 or 4 positive integers"),
        ({}, {}, "split_qkv needs qkv_split_shapes"),
        ({}, {"is_qkv_fn": None}, "split_qkv needs is_qkv_fn"),
    ],
)
def test_splits_that_do_not_fit_are_refused(attributes, settings, message):
    p, q = parameters([(9, 4), (9,)])
    vars(p).update(attributes)
    with pytest.raises(ValueError, match=message):
        SOAP([q, p], split_qkv=True, **{"is_qkv_fn": lambda p: True, **settings})
