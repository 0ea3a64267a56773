"""SOAP takes the steps of emerging-optimizers 0.3.0."""

import copy

import emerging_optimizers.soap as oracle
import pytest
import torch

from megatron_eopt.optimizers.soap import SOAP
from tests.optimizers.test_lion import parameters, run, set_gradients


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
    # the KL form of the oracle starts from factors of 1 / eps, ours from the identity
    settings = {**COMMON, "use_kl_shampoo": use_kl}
    shapes = [(6, 4), (4, 6), (5, 5)]
    params = parameters(shapes)
    ours = SOAP(params, basis_method=method, **LIKE_THE_ORACLE, **settings)
    run(ours, params, range(10))
    copies = copy.deepcopy(params)
    theirs = oracle.SOAP(copies, use_eigh=method == "eigh", **ORACLE, **settings)
    for p, q in zip(params, copies, strict=True):
        state = {key: value.clone() for key, value in ours.state[p].items()}
        state["step"] = int(state.pop("steps"))
        state["exp_avg"] = state["Q_L"].T @ state["exp_avg"] @ state["Q_R"]  # theirs lies in the eigenbasis
        theirs.state[q] = state
    steps_of_both(ours, theirs, params, copies, range(10, 30))
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=2e-5)
