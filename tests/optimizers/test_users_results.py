"""What a user's own function returns in place of Newton-Schulz: not finite, of another shape, or nothing."""

import pytest
import torch

from megatron_eopt import Muon, MuonHyperball, TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.optimizers import MarsMuon
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
    """In place of a method: a sign; in one of the steps zero, or with a bad entry of the 6 x 4 matrix."""

    def __init__(self, bad=None):
        self.bad, self.strikes = bad, False

    def __call__(self, *arguments):
        grad = arguments[-1]
        result = grad.sign()
        if self.strikes and self.bad == 0:
            result.zero_()
        elif self.strikes and grad.shape == (6, 4):
            result[2, 1] = self.bad
        return result


def of_matrices(opt):
    return getattr(opt, "matrices", opt)


@pytest.mark.parametrize(("make", "name"), pairs)
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_with_a_result_that_is_not_finite_all_count_as_zero(make, name, bad, caplog):

    def run(function):
        p, q = matrix(), matrix(5, 7, seed=1)
        opt = MAKE[make]([("layer.weight", p), ("other.weight", q)])
        setattr(of_matrices(opt), name, function)
        for step in range(3):
            p.grad, q.grad, function.strikes = gradient(p, step), gradient(q, step), step == 1
            opt.step()
        return [p, q, *opt.state[p].values(), *opt.state[q].values()], of_matrices(opt).skipped_steps()

    (found, skipped), (expected, none) = run(Function(bad)), run(Function(0.0))
    assert all(map(torch.equal, found, expected))
    assert (skipped, none) == (1, 0)
    said = (
        "updates by your own orthogonalize are not finite, or above 2^50 in norm, of layer.weight: "
        "all updates of the step count as zero, 1 in all so far"
    )
    assert said in caplog.messages


def test_on_a_gpu_nobody_looks_at_flags():
    p, function = matrix(), Function(torch.nan)
    opt = TensorParallelMuon([p], lr=0.1, weight_decay=0.5)
    opt.orthogonalize_fn, function.strikes = function, True
    expected = p.detach() * 0.95
    p.grad = gradient(p, 1)
    masking(opt).step()
    torch.testing.assert_close(p.detach(), expected)
    p.grad[0, 0] = torch.nan
    before = [x.clone() for x in (p, opt.state[p]["momentum_buffer"])]
    opt.step()
    assert all(map(torch.equal, before, (p, opt.state[p]["momentum_buffer"])))


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
        p.grad = gradient(p, 1)
        expected = rf"^{name} of a matrix must return a tensor of shape \(6, 4\) on cpu .*{message}"
        with pytest.raises(ValueError, match=expected):
            opt.step()
