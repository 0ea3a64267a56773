"""What a user's own function returns in place of Newton-Schulz: not finite, of another shape, or nothing."""

import pytest
import torch

from megatron_eopt import Muon, MuonHyperball, TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.optimizers import MarsMuon
from megatron_eopt.optimizers.nonfinite import MAX_IN_A_ROW
from tests.optimizers.field import gradient, matrix
from tests.optimizers.on_gpu import masking
from tests.optimizers.test_orthogonalized import optimizer

FUNCTIONS = ("orthogonalize", "scaled_orthogonalize_fn", "orthogonalize_fn")
MAKE = {
    "base": lambda params: optimizer(params, weight_decay=0.5, use_nesterov=True),
    "muon": lambda params: TensorParallelMuon(params, lr=0.1, weight_decay=0.5),
    "with AdamW": lambda params: Muon(params, [], lr=0.1, weight_decay=0.5),
    "normuon": lambda params: TensorParallelAdaptiveMuon(params, lr=0.1, moment2_method="normuon"),
    "adamuon": lambda params: TensorParallelAdaptiveMuon(params, lr=0.1, moment2_method="adamuon"),
    "mars": lambda params: MarsMuon(params, lr=0.1),
    "hyperball": lambda params: MuonHyperball(params, lr=0.1),
}
# Some refuse to have functions that decide of what they set themselves.
TAKES = {"with AdamW": FUNCTIONS[:1], "normuon": FUNCTIONS[2:], "adamuon": FUNCTIONS[2:]}
pairs = [(make, name) for make in MAKE for name in TAKES.get(make, FUNCTIONS)]


class Function:
    """In place of a method: a sign, with a bad entry of the 6 x 4 matrix in one of the steps."""

    def __init__(self, bad=None):
        self.bad, self.strikes = bad, False

    def __call__(self, *arguments):
        grad = arguments[-1]
        result = grad.sign()
        if self.strikes and grad.shape == (6, 4):
            result[2, 1] = self.bad
        return result


def of_matrices(opt):
    return getattr(opt, "matrices", opt)


@pytest.mark.parametrize(("make", "name"), pairs)
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_result_that_is_not_finite_is_as_if_its_step_had_not_been(make, name, bad, caplog):
    """With a bad result in the second of three steps, a matrix goes on as with the first and the third alone."""

    def run(seeds, bad_at=None):
        p, q, function = matrix(), matrix(5, 7, seed=1), Function(bad)
        opt = MAKE[make]([("layer.weight", p), ("other.weight", q)])
        setattr(of_matrices(opt), name, function)
        for seed in seeds:
            p.grad, q.grad, function.strikes = gradient(p, seed), gradient(q, seed), seed == bad_at
            opt.step()
        return [p, *opt.state[p].values()], [q, *opt.state[q].values()], of_matrices(opt)

    (own, other, opt), (without, _, _), (_, undisturbed, _) = run((1, 2, 3), bad_at=2), run((1, 3)), run((1, 2, 3))
    assert all(map(torch.equal, own, without))
    assert all(map(torch.equal, other, undisturbed))
    assert opt.skipped_steps() == {"layer.weight": 1}
    said = (
        "updates by your own orthogonalize are not finite, or above 2^50 in norm, of layer.weight: "
        "their steps are skipped, 1 in all so far"
    )
    assert said in caplog.messages


@pytest.mark.parametrize("make", ["base", "muon"])
def test_several_in_a_row_are_an_error_and_nothing_has_changed(make):
    p, q = matrix(), matrix(5, 7, seed=1)
    opt = MAKE[make]([("layer.weight", p), ("other.weight", q)])
    opt.orthogonalize_fn = lambda x: x / 0 if x.shape == (6, 4) else x
    for step in range(MAX_IN_A_ROW - 1):
        p.grad, q.grad = gradient(p, step), gradient(q, step)
        opt.step()
    before = [x.clone() for x in (p, q, opt.state[q]["momentum_buffer"])]
    with pytest.raises(RuntimeError, match="updates by your own orthogonalize were not finite in 5 steps in a row"):
        opt.step()
    assert all(map(torch.equal, before, (p, q, opt.state[q]["momentum_buffer"])))
    del opt.orthogonalize_fn
    opt.step()  # is not refused


def test_on_a_gpu_the_step_is_masked():
    """Nobody looks at flags there."""
    p, q, function = matrix(), matrix(5, 7, seed=1), Function(torch.nan)
    opt = TensorParallelMuon([p, q], lr=0.1, weight_decay=0.5)
    opt.orthogonalize_fn, function.strikes = function, True
    p.grad, q.grad = gradient(p, 1), gradient(q, 1)
    opt.init_state()
    before, other = p.detach().clone(), q.detach().clone()
    masking(opt).step()
    assert torch.equal(p, before)
    assert not opt.state[p]["momentum_buffer"].any()
    assert q.isfinite().all()
    assert not torch.equal(q, other)


WRONG = {
    "nothing": (lambda x: None, "got None"),
    "shape": (lambda x: x[:1], r"got \(1, 4\)"),
    "larger": (lambda x: torch.cat([x, x]), r"got \(12, 4\)"),
    "complex": (lambda x: x.to(torch.complex64), "got .* of torch.complex64"),
    "device": (lambda x: x.to("meta"), "got .* on meta"),
}


@pytest.mark.parametrize(("make", "name"), [pair for pair in pairs if pair[1] != "orthogonalize"])
def test_another_result_is_an_error_that_names_the_function(make, name):
    for function, message in WRONG.values():
        p = matrix()
        opt = MAKE[make]([p])
        setattr(of_matrices(opt), name, function)
        p.grad, before = gradient(p, 1), p.detach().clone()
        expected = rf"^{name} of a matrix must return a tensor of shape \(6, 4\) on cpu .*{message}"
        with pytest.raises(ValueError, match=expected):
            opt.step()
        assert torch.equal(p, before)
        delattr(of_matrices(opt), name)
        opt.step()  # is not refused
