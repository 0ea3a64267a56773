"""SOAP takes the steps of emerging-optimizers 0.3.0."""

import copy

import emerging_optimizers.soap as oracle
import pytest
import torch

from megatron_eopt.optimizers.soap import SOAP
from tests.optimizers.several import parameters, run, set_gradients


def steps_of_both(ours, theirs, params, copies, steps):
    for step in steps:
        set_gradients(params, step)
        set_gradients(copies, step)
        ours.step()
        with torch.compiler.set_stance("force_eager"):  # theirs is compiled, which takes longer than the steps
            theirs.step()


ORACLE = {"fp32_matmul_prec": "highest", "qr_fp32_matmul_prec": "highest"}
LIKE_THE_ORACLE = {"basis_of": "current", "precondition_frequency": 1}
COMMON = {"lr": 0.01, "betas": (0.9, 0.95), "shampoo_beta": 0.8, "weight_decay": 0.1}


@pytest.mark.parametrize("correct_bias", [True, False], ids=["corrected", "uncorrected"])
@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
@pytest.mark.parametrize("method", ["qr", "eigh"])
def test_equals_emerging_optimizers_from_the_first_step(method, nesterov, correct_bias):
    # an eps that hides the rounding beside the diagonal, which differs
    common = {**COMMON, "eps": 1.0, "nesterov": nesterov, "correct_bias": correct_bias}
    common["weight_decay_method"] = "independent" if nesterov else "palm"
    params, copies = parameters([(5, 5), (6, 6)]), parameters([(5, 5), (6, 6)])
    ours = SOAP(params, basis_method=method, **LIKE_THE_ORACLE, **common)
    theirs = oracle.SOAP(copies, use_eigh=method == "eigh", **ORACLE, **common)
    steps_of_both(ours, theirs, params, copies, range(20))
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        for key in ("L", "R", "exp_avg_sq"):
            torch.testing.assert_close(ours.state[p][key], theirs.state[q][key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use_kl", [False, True], ids=["plain", "KL"])
@pytest.mark.parametrize("method", ["qr", "eigh"])
def test_equals_emerging_optimizers_once_the_gradients_span_both_sides(method, use_kl):
    settings, begin = {**COMMON, "use_kl_shampoo": use_kl}, 100 if use_kl else 10  # KL's first gradient weighs 1 / eps
    shapes = [(6, 4), (4, 6), (5, 5)]
    params = parameters(shapes)
    ours = SOAP(params, basis_method=method, **LIKE_THE_ORACLE, **settings)
    run(ours, params, range(begin))
    copies = copy.deepcopy(params)
    theirs = oracle.SOAP(copies, use_eigh=method == "eigh", **ORACLE, **settings)
    for p, q in zip(params, copies, strict=True):
        state = {key: value.clone() for key, value in ours.state[p].items()}
        state["step"] = int(state.pop("steps"))
        state["exp_avg"] = state["Q_L"].T @ state["exp_avg"] @ state["Q_R"]  # theirs lies in the eigenbasis
        theirs.state[q] = state
    steps_of_both(ours, theirs, params, copies, range(begin, begin + 20))
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=2e-5)


@pytest.mark.parametrize(("size", "scale"), [(6, 1), (6, 1e-3), (16, 1), (16, 1e-3), (64, 1)])
def test_its_rekls_makes_the_same_first_steps(size, scale):
    params, copies = parameters([(size, size)]), parameters([(size, size)])
    ours = SOAP(params, lr=0.01, betas=(0.9, 0.95), use_kl_shampoo=True, use_eigh=True, **LIKE_THE_ORACLE)
    theirs = oracle.REKLS(copies, lr=0.01)
    for step in range(6):
        moves = []
        for (p,), optimizer in ((params, ours), (copies, theirs)):
            before = p.detach().clone()
            set_gradients([p], step)
            p.grad *= scale
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
            moves.append((p.detach() - before) / 0.01)
        ours_moved, theirs_moved = moves
        sizes = [move.square().mean().sqrt() for move in moves]
        torch.testing.assert_close(*sizes, rtol=0.1 if step == 0 else 0.01, atol=0)
        if step:  # most of the first is full steps of rounding
            torch.testing.assert_close(ours_moved, theirs_moved, rtol=0, atol=0.05)


@pytest.mark.parametrize("use_kl", [False, True], ids=["plain", "KL"])
def test_the_first_step_of_current_bases_is_no_larger_than_adams(use_kl):
    (p,) = parameters([(128, 128)])
    before = p.detach().clone()
    optimizer = SOAP([p], lr=1.0, weight_decay=0, use_kl_shampoo=use_kl, basis_of="current")
    run(optimizer, [p], [0])
    assert (p.detach() - before).square().mean().sqrt() < 1.01
