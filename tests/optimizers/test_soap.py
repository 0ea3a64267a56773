"""SOAP takes the steps of its papers: the basis, the moments seen in it, and what is left out."""

import copy

import pytest
import torch

from megatron_eopt.optimizers.soap import SOAP
from tests.optimizers.several import gradients_of, parameters, run, set_gradients
from tests.optimizers.soap_reference import SETTINGS, SHAPES, reference_steps


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


def test_the_first_gradient_makes_bases_alone_and_plain_adam_moves_at_once():
    p, q = parameters([(4, 4), (4,)])
    before, adam = copy.deepcopy([p, q]), copy.deepcopy(q)
    optimizer = SOAP([p, q], **SETTINGS)
    run(optimizer, [p, q], [0])
    assert torch.equal(p, before[0])
    assert not torch.equal(q, before[1])
    run(optimizer, [p, q], range(1, 10))
    assert not torch.equal(p, before[0])
    reference = torch.optim.AdamW([adam], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(10):
        set_gradients([p, adam], step)
        reference.step()
    torch.testing.assert_close(q, adam, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("max_dim", "sides"), [(6, "LR"), (5, "R"), (4, "R"), (3, ""), (0, "")])
def test_sides_that_are_too_long_have_no_factor(max_dim, sides):
    (p,) = parameters([(6, 4)], torch.bfloat16)
    optimizer = SOAP([p], max_dim=max_dim)
    optimizer.init_state()
    state = optimizer.state[p]
    assert {key for key in state if state[key].ndim == 2} == {"exp_avg", "exp_avg_sq"} | {
        name for side in sides for name in (side, f"Q_{side}")
    }
    for side in sides:
        n = {"L": 6, "R": 4}[side]
        assert state[side].shape == state[f"Q_{side}"].shape == (n, n)
    assert all(tensor.dtype == torch.float32 for key, tensor in state.items() if key != "steps")


@pytest.mark.parametrize("basis_of", ["previous", "current"])
@pytest.mark.parametrize(("frequency", "expected"), [(4, [5, 9, 13]), (3, [4, 7, 10, 13]), (1, list(range(2, 15)))])
def test_bases_are_refreshed_in_the_steps_of_the_authors_code_and_stay_orthogonal(frequency, expected, basis_of):
    (p,) = parameters([(6, 4)])
    optimizer = SOAP([p], precondition_frequency=frequency, basis_of=basis_of)
    seen = []
    for step in range(14):
        run(optimizer, [p], [step])
        basis = optimizer.state[p]["Q_L"].clone()
        torch.testing.assert_close(basis.T @ basis, torch.eye(6), rtol=0, atol=1e-5)
        seen.append(basis)
    # the first step makes them, and their code counts from there
    assert [step + 1 for step in range(1, 14) if not torch.equal(seen[step], seen[step - 1])] == expected


@pytest.mark.parametrize(("sort_bases", "expected"), [("before", [4.5, 0.5]), ("after", [0.5, 4.5])])
def test_squares_are_permuted_with_the_columns_of_the_basis_that_are_sorted_before(sort_bases, expected):
    # a diagonal gradient has unit vectors as its basis: the second is the larger from the second step on
    p = torch.nn.Parameter(torch.zeros(2, 2))
    settings = {"lr": 1.0, "betas": (0.0, 0.5), "shampoo_beta": 0.0, "weight_decay": 0.0, "precondition_frequency": 1}
    optimizer = SOAP([p], sort_bases=sort_bases, **settings)
    for sizes in ([2.0, 1.0], [1.0, 3.0]):
        p.grad = torch.tensor(sizes).diag()
        optimizer.step()
    squares = optimizer.state[p]["exp_avg_sq"]
    torch.testing.assert_close(squares, torch.tensor(expected).diag())
    torch.testing.assert_close(optimizer.state[p]["Q_L"].abs(), torch.tensor([[0.0, 1.0], [1.0, 0.0]]))


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


def test_groups_have_settings_of_their_own():
    settings = [
        {**SETTINGS, "eps": 1e-6, "basis_of": "current", "basis_method": "eigh", "use_kl_shampoo": False},
        {**SETTINGS, "eps": 1e-3, "basis_of": "previous", "basis_method": "qr", "precondition_frequency": 2},
    ]
    shapes = [(5, 5), (4, 4), (3,)]
    params, before = parameters(shapes, torch.float64), parameters(shapes, torch.float64)
    optimizer = SOAP([{"params": params[:1], **settings[0]}, {"params": params[1:2]}], **settings[1])
    optimizer.add_param_group({"params": params[2:], **settings[0]})
    gradients = gradients_of(optimizer, params, range(6))
    for index, which in enumerate((0, 1, 0)):
        expected = reference_steps(before[index], gradients[index], **settings[which])
        torch.testing.assert_close(params[index].detach(), expected, rtol=1e-7, atol=1e-7)


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


def test_zero_gradients_after_the_first_move_nothing_that_is_not_finite():
    (p,) = parameters([(6, 4)])
    optimizer = SOAP([p], use_kl_shampoo=True, shampoo_beta=0.0, precondition_frequency=1)
    run(optimizer, [p], range(2))
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    run(optimizer, [p], range(3))
    assert p.isfinite().all()


def test_a_step_leaves_the_precision_of_products_as_it_was():
    (p,) = parameters([(6, 4)])
    before = torch.get_float32_matmul_precision()
    run(SOAP([p], fp32_matmul_prec="medium"), [p], range(2))
    assert torch.get_float32_matmul_precision() == before


def test_megatrons_mark_on_one_rank_is_no_shard():
    (p,) = parameters([(6, 4)])
    p.partition_dim, p.tensor_model_parallel = 0, True
    run(SOAP([p]), [p], range(2))
    assert p.isfinite().all()
