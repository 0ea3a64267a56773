"""SOAP as its authors' README calls it, and as Megatron does with emerging-optimizers' arguments."""

from functools import partial

import emerging_optimizers.soap as oracle
import pytest
import torch

from megatron_eopt import SOAP
from tests.optimizers import several

# square, so that the first gradients span both sides: the basis of what they do not span is an accident of rounding
# square, so that the first gradients span both sides: the basis of what they do not span is an accident of rounding
parameters = partial(several.parameters, [(6, 6), (5, 5)])


class Authors:
    """Algorithm 3 of arXiv 2409.11321 as its authors' code runs it, for matrices, without weight decay."""

    def __init__(self, params, lr, betas, eps, precondition_frequency, correct_bias):
        self.params, self.state = params, {}
        self.lr, self.betas, self.eps, self.every, self.correct = lr, betas, eps, precondition_frequency, correct_bias

    @torch.no_grad()
    def step(self):
        b1, b2 = self.betas
        for i, p in enumerate(self.params):
            g = p.grad
            if i not in self.state:  # the first step makes the bases, and is not counted
                factors = [(1 - b2) * g @ g.T, (1 - b2) * g.T @ g]
                bases = [torch.linalg.eigh(factor).eigenvectors.flip(1) for factor in factors]
                self.state[i] = {"t": 0, "F": factors, "Q": bases, "m": torch.zeros_like(g), "v": torch.zeros_like(g)}
                continue
            s = self.state[i]
            s["t"] += 1
            left, right = s["Q"]
            s["m"] = b1 * s["m"] + (1 - b1) * g
            s["v"] = b2 * s["v"] + (1 - b2) * (left.T @ g @ right) ** 2
            c1, c2 = (1 - b ** s["t"] if self.correct else 1 for b in self.betas)
            update = left.T @ s["m"] @ right / c1 / ((s["v"].sqrt() + self.eps) / c2**0.5)
            p -= self.lr * left @ update @ right.T
            for side, new in enumerate([g @ g.T, g.T @ g]):
                s["F"][side] = b2 * s["F"][side] + (1 - b2) * new
            if s["t"] % self.every == 0:
                for side in (0, 1):
                    order = (s["Q"][side].T @ s["F"][side] @ s["Q"][side]).diag().argsort(descending=True)
                    s["v"] = s["v"][order] if side == 0 else s["v"][:, order]
                    s["Q"][side] = torch.linalg.qr(s["F"][side] @ s["Q"][side][:, order]).Q


@pytest.mark.parametrize(("frequency", "correct_bias"), [(1, True), (4, False), (10, True)])
def test_it_takes_the_steps_of_the_authors_code(frequency, correct_bias):
    params, others = (parameters(torch.float64) for _ in range(2))
    settings = {"lr": 3e-3, "betas": (0.95, 0.95), "precondition_frequency": frequency, "correct_bias": correct_bias}
    ours = SOAP(params, weight_decay=0, max_precond_dim=10000, **settings)
    theirs = Authors(others, eps=1e-8, **settings)
    for step in range(25):
        several.run(ours, params, [step])
        several.run(theirs, others, [step])
        for p, q in zip(params, others, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def test_the_defaults_are_the_authors():
    group = SOAP(parameters()).param_groups[0]
    published = {"lr": 3e-3, "betas": (0.95, 0.95), "eps": 1e-8, "weight_decay": 0.01, "precondition_frequency": 10}
    assert {key: group[key] for key in published} == published
    assert group["shampoo_beta"] == group["betas"][1]  # theirs is -1, which means that


@pytest.mark.parametrize("use_eigh", [False, True])
def test_emerging_optimizers_arguments_make_its_steps(use_eigh):
    arguments = {"lr": 0.01, "betas": (0.9, 0.95), "shampoo_beta": 0.9, "eps": 1.0, "weight_decay": 0.1}
    arguments |= {"nesterov": True, "correct_bias": True, "use_kl_shampoo": False, "use_eigh": use_eigh}
    params, copies = parameters(), parameters()
    # what the page for people who come from it says to add
    ours = SOAP(params, **arguments, basis_of="current", precondition_frequency=1)
    theirs = oracle.SOAP(copies, **arguments, fp32_matmul_prec="highest", qr_fp32_matmul_prec="highest")
    with torch.compiler.set_stance("force_eager"):
        several.run(ours, params, range(10))
        several.run(theirs, copies, range(10))
    for p, q in zip(params, copies, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
