"""What Spectron steps with together: groups with settings of their own, pairs, and the matrices of a parameter."""

import pytest
import torch

from megatron_eopt.optimizers.spectron import Spectron, factor_pairs
from tests.optimizers.field import assert_close
from tests.optimizers.several import run, set_gradients
from tests.optimizers.spectrons import SHAPES, fused, parameters, reference_steps, spectron


def test_groups_have_settings_of_their_own():
    settings = [
        {"lr": 0.05, "rank": 3, "momentum_beta": 0.5, "weight_decay": 0.3},
        {"lr": 0.01, "rank": 5, "momentum_beta": 0.95, "weight_decay": 0.0},
    ]
    params, before, gradients = parameters(), parameters(), [[] for _ in SHAPES]
    optimizer = spectron([{"params": params[:1], **settings[0]}, {"params": params[1:2]}], **settings[1])
    optimizer.add_param_group({"params": params[2:], **settings[0]})
    for step in range(3):
        run(optimizer, params, [step])
        for seen, p in zip(gradients, params, strict=True):
            seen.append(p.grad)
    for index, which in enumerate((0, 1, 0)):
        lr, rank, beta, wd = settings[which].values()
        expected = reference_steps(before[index], gradients[index], lr, rank, beta=beta, wd=wd)
        assert_close(params[index], expected, 1e-6)


def test_a_group_has_an_iteration_of_its_own_and_may_change_it():
    cubic = [(1.5, -0.5, 0.0)]
    params, alone = parameters(), parameters()
    optimizer = spectron(
        [{"params": params[:1], "coefficient_type": cubic, "num_ns_steps": 1}, {"params": params[1:]}], lr=0.05
    )
    run(optimizer, params, range(2))
    optimizer.param_groups[1] |= {"coefficient_type": cubic, "num_ns_steps": 1}
    run(optimizer, params, range(2, 4))
    first = spectron(alone[:1], lr=0.05, coefficient_type=cubic, num_ns_steps=1)
    rest = spectron(alone[1:], lr=0.05)
    for step in range(4):
        if step == 2:
            rest.newton_schulz = first.newton_schulz
            rest.param_groups[0] |= {"coefficient_type": cubic, "num_ns_steps": 1}
        set_gradients(alone, step)
        first.step()
        rest.step()
    for p, q in zip(params, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_a_pair_steps_together_or_not_at_all():
    A, B, C, D = parameters([(24, 4), (16, 4), (6, 3), (3, 5)])
    optimizer = Spectron([factor_pairs([(("a", A), ("b", B)), (("c", C), ("d", D))])])
    before = [x.detach().clone() for x in (A, B, C, D)]
    set_gradients([A, C, D], 0)
    optimizer.step()
    changed = [not torch.equal(x, old) for x, old in zip((A, B, C, D), before, strict=True)]
    assert changed == [False, False, True, True]


@pytest.mark.parametrize("kind", ["qkv", "declared", "experts"])
def test_a_fused_parameter_is_stepped_as_its_matrices(kind):
    whole, parts, join, settings = fused(kind)
    together, apart = spectron([whole], lr=0.05, **settings), spectron(parts, lr=0.05)
    for step in range(4):
        set_gradients(parts, step)
        whole.grad = join([p.grad for p in parts])
        together.step()
        apart.step()
    torch.testing.assert_close(whole.detach(), join([p.detach() for p in parts]), rtol=1e-6, atol=1e-6)
    assert together.state[whole]["factor_A_1"].shape == (8, 4)


def test_matrices_are_counted():
    whole, _, _, settings = fused("qkv")
    p, A, B = parameters([(10, 12), (24, 4), (16, 4)])
    optimizer = spectron([{"params": [whole, p]}, factor_pairs([(A, B)])], **settings)
    assert optimizer.matrices_per_step == 6
    run(optimizer, [whole, p, A, B], range(2))
    assert optimizer.newton_schulz_calls == 12
    p.grad = None
    optimizer.step()
    assert optimizer.newton_schulz_calls == 17
