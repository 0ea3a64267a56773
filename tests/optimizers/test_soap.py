"""SOAP takes the steps of its papers: the basis, the moments seen in it, and what is left out."""

import copy

import emerging_optimizers.soap as oracle
import pytest
import torch

from megatron_eopt.optimizers.soap import SOAP
from tests.optimizers.several import gradients_of, parameters, run, set_gradients
from tests.optimizers.soap_reference import SETTINGS, SHAPES, polar, reference_steps


def follows(steps=20, dtype=torch.float32, shapes=SHAPES, tolerance=1e-6, **settings):
    params = parameters(shapes, dtype)
    before, optimizer = copy.deepcopy(params), SOAP(params, **settings)
    gradients = gradients_of(optimizer, params, range(steps))
    for p, first, seen in zip(params, before, gradients, strict=True):
        expected = reference_steps(first, seen, **settings)
        assert p.dtype == dtype
        assert (p.detach().double() - first.double()).abs().sum() > 0.01 or not p.numel()
        torch.testing.assert_close(p.detach().double(), expected, rtol=tolerance, atol=tolerance)
    return optimizer


VARIANTS = [
    {},
    {"basis_method": "eigh"},
    {"precondition_frequency": 1},
    {"use_kl_shampoo": True, "shampoo_beta": 0.9},
    {"basis_of": "current"},
    {"basis_of": "current", "basis_method": "eigh", "precondition_frequency": 1},
    {"sort_bases": "after", "precondition_frequency": 1},
    {"sort_bases": "after", "precondition_frequency": 1, "use_kl_shampoo": True},
    {"sort_bases": "after", "basis_method": "eigh"},
    {"weight_norm": "hold", "use_kl_shampoo": True, "precondition_frequency": 1},
    {"orthogonalize": True, "nesterov": True, "precondition_frequency": 1, "correct_bias": False, "max_dim": 5},
    {"orthogonalize": True, "weight_norm": "hold"},
    {"weight_norm": "hold", "max_dim": 4, "weight_decay": 0.0, "nesterov": True},
    {"max_dim": 5},
    {"max_dim": 3},
    {"nesterov": True},
    {"correct_bias": False},
    {"weight_decay_method": "independent"},
    {"weight_decay_method": "palm", "lr": 0.3, "weight_decay": 0.5},
    {"correct_bias": False, "nesterov": True, "use_kl_shampoo": True, "basis_of": "current"},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_twenty_steps_of_fp64_parameters_follow_the_formula(settings):
    # without correction the first factor is rounded, and so is the basis of what the first gradient does not span
    shapes = SHAPES if settings.get("correct_bias", True) else [(5, 5), (5,), (), (0, 3)]
    follows(shapes=shapes, dtype=torch.float64, tolerance=1e-7, **{**SETTINGS, "eps": 1e-6, **settings})


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_twenty_steps_follow_the_formula(settings):
    # of shapes whose first gradients span both sides: a basis of what they do not span is another one in fp32
    shapes = [(5, 5), (9, 4), (4, 9), (5,), (), (0, 3)]
    # current gradients are diagonal in their own basis, and a large eps hides the rounding beside the diagonal
    eps = 1.0 if "basis_of" in settings else 1e-2
    follows(shapes=shapes, **{**SETTINGS, "eps": eps, "max_dim": 5, **settings})


@pytest.mark.parametrize(
    "settings", [{}, {"precondition_frequency": 1}, {"use_kl_shampoo": True}, {"basis_of": "current"}], ids=str
)
def test_twenty_steps_of_bf16_parameters_follow_it_but_for_the_rounding_of_each(settings):
    shapes = [(5, 5), (9, 4), (4, 9), (30,)]
    settings = {**SETTINGS, "eps": 1e-2, "max_dim": 5, "weight_decay": 0.5, "lr": 0.1, **settings}
    params = parameters(shapes, torch.bfloat16)
    before = copy.deepcopy(params)
    gradients = gradients_of(SOAP(params, **settings), params, range(20))
    for p, first, seen in zip(params, before, gradients, strict=True):
        expected = reference_steps(first, seen, **settings)
        way = (expected - first.detach().double()).norm()
        # a step rounds p once (see field.py), and what is kept is fp32; few entries stray to twice that
        bound = 2 * 20**0.5 * 2**-8 / 7**0.5 * expected.norm()
        assert (p.detach().double() - expected).norm() <= bound
        assert way > 30 * bound


def test_adam_in_the_eigenbasis_is_the_same_for_a_rotated_problem():
    # what tells SOAP from Adam: rotations of rows and of columns commute with its steps
    turns = [torch.linalg.qr(torch.randn(n, n, generator=torch.Generator().manual_seed(n)).double())[0] for n in (5, 4)]
    straight, turned = parameters([(5, 4)], torch.float64), parameters([(5, 4)], torch.float64)
    turned[0].data = turns[0] @ turned[0].data @ turns[1].T
    settings = {"max_dim": 5, "eps": 1e-6, "lr": 0.1, "use_kl_shampoo": True}
    a, b = SOAP(straight, **settings), SOAP(turned, **settings)
    for step in range(20):
        set_gradients(straight, step)
        turned[0].grad = turns[0] @ straight[0].grad @ turns[1].T
        a.step()
        b.step()
    torch.testing.assert_close(turns[0] @ straight[0].detach() @ turns[1].T, turned[0].detach(), rtol=1e-6, atol=1e-6)


def divergence(L, R, gradients):
    """What KL-Shampoo minimizes, twice that of N(0, L x R) from the gradients but for a constant; and its last term."""
    fit = torch.stack([(torch.linalg.solve(L, g) @ torch.linalg.solve(R, g.T)).trace() for g in gradients]).mean()
    return len(R) * torch.logdet(L) + len(L) * torch.logdet(R) + fit, fit


def test_kl_factors_minimize_the_divergence_from_the_gradients():
    generator = torch.Generator().manual_seed(3)
    spread = torch.logspace(0, 1.5, 20, dtype=torch.float64).view(5, 4)  # no product of rows' and columns' spreads
    mix = torch.ones(4, 4, dtype=torch.float64).tril()
    gradients = [torch.randn(5, 4, generator=generator, dtype=torch.float64) * spread @ mix for _ in range(40)]
    factors = {}
    for use_kl in (True, False):
        p = torch.nn.Parameter(torch.zeros(5, 4, dtype=torch.float64))
        optimizer = SOAP([p], shampoo_beta=0.995, use_kl_shampoo=use_kl, basis_method="eigh", precondition_frequency=1)
        for g in gradients * 25:
            p.grad = g
            optimizer.step()
        factors[use_kl] = [optimizer.state[p][key] for key in ("L", "R")]
    (L, R), plain = factors[True], factors[False]
    least, fit = divergence(L, R, gradients)
    assert fit.item() == pytest.approx(20, rel=0.02)  # at the minimum it is the number of entries
    of_plain, fit_of_plain = divergence(*plain, gradients)
    at_best_scale = of_plain - fit_of_plain + 20 * (fit_of_plain / 20).log() + 20
    assert least < at_best_scale - 0.1
    for _ in range(10):
        for side, factor in enumerate((L, R)):
            noise = torch.randn(factor.shape, generator=generator, dtype=torch.float64) * 0.2
            root = torch.linalg.cholesky(factor)
            other = root @ torch.matrix_exp(noise + noise.T) @ root.T
            assert divergence(*((other, R) if side == 0 else (L, other)), gradients)[0] > least


def test_a_parameter_without_gradient_is_left_as_it_is_and_its_steps_do_not_count():
    p, q = parameters([(6, 4), (5, 5)])
    late = copy.deepcopy(q)
    optimizer = SOAP([p, q], **SETTINGS)
    run(optimizer, [p], range(3))
    assert torch.equal(q, late)
    assert q not in optimizer.state
    p.grad = None
    run(optimizer, [q], range(3, 6))
    run(SOAP([late], **SETTINGS), [late], range(3, 6))
    assert torch.equal(q, late)


@pytest.mark.parametrize("settings", [{}, {"use_kl_shampoo": True}, {"basis_of": "current"}], ids=str)
def test_zero_gradients_make_no_basis_and_the_next_one_is_the_first(settings):
    (p,), (q,) = parameters([(6, 4)]), parameters([(6, 4)])
    optimizer = SOAP([p], **settings)
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p, q)
    # a state there is: torch makes the one that it loads a checkpoint into by such steps
    assert all(not value.any() for value in optimizer.state[p].values())
    run(optimizer, [p], range(4))
    run(SOAP([q], **settings), [q], range(4))
    assert torch.equal(p, q)


# SOAP-Muon, as modded-nanogpt's third track runs it.

SOAP_MUON = {"lr": 0.0375, "betas": (0.95, 0.9), "shampoo_beta": 0.9, "weight_decay": 0.0, "precondition_frequency": 1}
SOAP_MUON |= {"correct_bias": False, "nesterov": True, "orthogonalize": True}


class Authors:
    """The matrices of pull request 321, for one: without its gates and floors, and from the second gradient on."""

    def __init__(self, p, lr, mu, beta):
        self.p, self.lr, self.mu, self.beta, self.started = p.detach().clone(), lr, mu, beta, False

    def step(self, g):
        if not self.started:
            self.F = [(1 - self.beta) * g @ g.T, (1 - self.beta) * g.T @ g]
            self.Q = [torch.linalg.eigh(factor).eigenvectors.flip(1) for factor in self.F]
            self.M, self.V, self.started = torch.zeros_like(g), torch.zeros_like(g), True
            return
        self.M = self.mu * self.M + (1 - self.mu) * g
        ahead = (1 - self.mu) * g + self.mu * self.M
        projected = self.Q[0].T @ ahead @ self.Q[1]
        self.V = self.beta * self.V + (1 - self.beta) * projected**2
        self.p -= self.lr * polar(self.Q[0] @ (projected / (self.V.sqrt() + 1e-8)) @ self.Q[1].T)
        for side, new in enumerate([g @ g.T, g.T @ g]):
            self.F[side] = self.beta * self.F[side] + (1 - self.beta) * new
            order = (self.Q[side].T @ self.F[side] @ self.Q[side]).diag().argsort(descending=True)
            self.V = self.V[order] if side == 0 else self.V[:, order]
            self.Q[side] = torch.linalg.qr(self.F[side] @ self.Q[side][:, order]).Q


@pytest.mark.parametrize("shape", [(5, 5), (6, 6)])
def test_it_takes_the_steps_of_the_record_but_for_gates_and_floors(shape):
    (p,) = parameters([shape], torch.float64)
    theirs, optimizer = Authors(p, 0.0375, 0.95, 0.9), SOAP([p], **SOAP_MUON)
    for step in range(25):
        set_gradients([p], step)
        theirs.step(p.grad)
        optimizer.step()
    torch.testing.assert_close(p.detach(), theirs.p, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "size"), [("shape_scaling", 2.0**0.5), ("spectral", 8.0**0.5), ("unit_rms_norm", 2**0.5)]
)
def test_all_singular_values_of_an_update_are_its_scale(mode, size):
    (p,) = parameters([(8, 4)])
    optimizer = SOAP([p], lr=1.0, weight_decay=0.0, precondition_frequency=1, orthogonalize=True, scale_mode=mode)
    for step in range(6):
        before = p.detach().clone()
        set_gradients([p], step)
        optimizer.step()
    values = torch.linalg.svdvals(before - p.detach())
    torch.testing.assert_close(values, torch.full((4,), size), rtol=0.01, atol=0)


def steps_of_both(ours, theirs, params, copies, steps):
    for step in steps:
        set_gradients(params, step)
        set_gradients(copies, step)
        ours.step()
        with torch.compiler.set_stance("force_eager"):  # theirs is compiled, which takes longer than the steps
            theirs.step()


# The steps of emerging-optimizers 0.3.0.

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


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("nesterov", [False, True], ids=["plain momentum", "nesterov"])
@pytest.mark.parametrize("use_kl", [False, True], ids=["plain", "KL"])
def test_equals_emerging_optimizers_where_rounding_is_a_part_of_steps(use_kl, nesterov, every, monkeypatch):
    """With the eps of training: most of the first update is rounding, and so are bases of what no gradient spans."""
    common = {**COMMON, "nesterov": nesterov, "use_kl_shampoo": use_kl}
    shapes = [(64, 64), (96, 64), (64, 64), (64, 96)]
    params = parameters(shapes)
    copies = parameters(shapes)
    ours = SOAP(params, basis_of="current", precondition_frequency=every, **common)
    theirs = oracle.SOAP(copies, **ORACLE, **common)
    refresh = oracle.soap.update_eigenbasis_and_exp_avgs

    def now_and_then(eigenbasis_list, exp_avg, exp_avg_sq, **others):
        """Their refresh in some steps: 0.3.0 makes one in each."""
        if step % every:
            return eigenbasis_list, exp_avg, exp_avg_sq
        return refresh(eigenbasis_list=eigenbasis_list, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, **others)

    monkeypatch.setattr(oracle.soap, "update_eigenbasis_and_exp_avgs", now_and_then)
    for step in range(12):
        before = [q.detach().clone() for q in copies]
        steps_of_both(ours, theirs, params, copies, [step])
        for p, q, start in zip(params, copies, before, strict=True):
            assert (p - q).norm() < 5e-3 * (q - start).norm(), (step, p.shape)


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


@pytest.mark.parametrize("use_kl", [False, True], ids=["plain", "KL"])
def test_the_first_step_of_current_bases_is_no_larger_than_adams(use_kl):
    (p,) = parameters([(128, 128)])
    before = p.detach().clone()
    optimizer = SOAP([p], lr=1.0, weight_decay=0, use_kl_shampoo=use_kl, basis_of="current")
    run(optimizer, [p], [0])
    assert (p.detach() - before).square().mean().sqrt() < 1.01
