import copy
import math
import pickle
from types import SimpleNamespace

import emerging_optimizers.soap as oracle
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron_eopt.optimizers.soap import SOAP
from tests.distributed.ranks import run_ranks
from tests.optimizers.test_lion import parameters, run, set_gradients

SHAPES = [(6, 4), (4, 6), (5, 5), (5,), (), (0, 3)]
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.95), "shampoo_beta": 0.8, "weight_decay": 0.1, "precondition_frequency": 3}


def reference_steps(
    p,
    gradients,
    lr=3e-3,
    betas=(0.95, 0.95),
    shampoo_beta=0.95,
    eps=1e-8,
    weight_decay=0.01,
    precondition_frequency=10,
    basis_method="qr",
    basis_of="previous",
    use_kl_shampoo=False,
    max_dim=10000,
):
    """The algorithm for one tensor in fp64, from arXiv 2409.11321 (algorithm 3) and, for KL, 2509.03378."""
    p = p.detach().double()
    m, v, moments = torch.zeros_like(p), torch.zeros_like(p), 0
    dims = [dim for dim, size in enumerate(p.shape) if p.ndim == 2 and p.numel() and size <= max_dim]
    F, Q = {}, {}

    def rotate(x, back=False):
        left, right = (Q.get(dim, torch.eye(x.shape[dim], dtype=x.dtype)) for dim in (0, 1)) if Q else (None, None)
        return x if left is None else left @ x @ right.T if back else left.T @ x @ right

    def absorb(t, g):
        nonlocal v
        values = {dim: (Q[dim].T @ F[dim] @ Q[dim]).diag() for dim in Q}
        inverse = {dim: Q[dim] @ (x.clamp(min=1e-6 * x.max()) ** -1).diag() @ Q[dim].T for dim, x in values.items()}
        for dim in dims:
            h = g if dim == 0 else g.T
            middle = inverse.get(1 - dim, torch.eye(h.shape[1], dtype=h.dtype)) / h.shape[1] if use_kl_shampoo else None
            new = h @ h.T if middle is None else h @ middle @ h.T
            total = sum(shampoo_beta**i for i in range(t))  # an average of all gradients so far, newer ones heavier
            F[dim] = new if t == 1 else ((total - 1) * F[dim] + new) / total
            if t == 1:
                Q[dim] = torch.linalg.eigh(F[dim])[1].flip(1)
            elif t % precondition_frequency == 0:
                order = (Q[dim].T @ F[dim] @ Q[dim]).diag().argsort(descending=True)
                v = v[order] if dim == 0 else v[:, order]
                eigh = basis_method == "eigh"
                Q[dim] = torch.linalg.eigh(F[dim])[1].flip(1) if eigh else torch.linalg.qr(F[dim] @ Q[dim][:, order])[0]

    for t, g in enumerate(gradients, 1):
        g = g.double()
        if basis_of == "current" or t == 1:
            absorb(t, g)
        if not (dims and basis_of == "previous" and t == 1):
            moments += 1
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * rotate(g) ** 2
            n = rotate(m) / (1 - betas[0] ** moments) / ((v / (1 - betas[1] ** moments)).sqrt() + eps)
            p = p * (1 - lr * weight_decay) - lr * rotate(n, back=True)
        if basis_of == "previous" and t > 1:
            absorb(t, g)
    return p


def follows(steps=20, dtype=torch.float32, shapes=SHAPES, tolerance=1e-6, scale=1.0, **settings):
    params = parameters(shapes, dtype)
    before, gradients = copy.deepcopy(params), [[] for _ in params]
    optimizer = SOAP(params, **settings)
    for step in range(steps):
        set_gradients(params, step, scale)
        for seen, p in zip(gradients, params, strict=True):
            seen.append(p.grad.clone())
        optimizer.step()
        assert all(torch.equal(p.grad, seen[-1]) for seen, p in zip(gradients, params, strict=True))
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
    {"max_dim": 5},
    {"max_dim": 3},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_twenty_steps_of_fp64_parameters_follow_the_formula(settings):
    follows(dtype=torch.float64, tolerance=1e-7, **{**SETTINGS, "eps": 1e-6, **settings})


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_twenty_steps_follow_the_formula(settings):
    # of shapes whose first gradients span both sides: a basis of what they do not span is another one in fp32
    shapes = [(5, 5), (9, 4), (4, 9), (5,), (), (0, 3)]
    # current gradients are diagonal in their own basis, and a large eps hides the rounding beside the diagonal
    eps = 1.0 if "basis_of" in settings else 1e-2
    follows(shapes=shapes, **{**SETTINGS, "eps": eps, "max_dim": 5, **settings})


@pytest.mark.parametrize("settings", [{}, {"precondition_frequency": 1}, {"use_kl_shampoo": True}], ids=str)
def test_twenty_steps_of_bf16_parameters_follow_it_but_for_the_rounding_of_each(settings):
    # a step rounds p once, by at most 2^-9 of it; the reference rounds nothing in twenty
    shapes = [(5, 5), (9, 4), (4, 9), (5,)]
    tolerance = 20 * 2**-9
    follows(20, torch.bfloat16, shapes, tolerance, **{**SETTINGS, "eps": 1e-2, "max_dim": 5, **settings})


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


def test_bases_are_refreshed_at_their_frequency_and_stay_orthogonal():
    (p,) = parameters([(6, 4)])
    optimizer = SOAP([p], precondition_frequency=4)
    seen = []
    for step in range(9):
        run(optimizer, [p], [step])
        basis = optimizer.state[p]["Q_L"].clone()
        torch.testing.assert_close(basis.T @ basis, torch.eye(6), rtol=0, atol=1e-5)
        seen.append(basis)
    changed = [step for step in range(1, 9) if not torch.equal(seen[step], seen[step - 1])]
    assert changed == [3, 7]


def test_squares_are_permuted_with_the_columns_of_the_basis():
    # a diagonal gradient has unit vectors as its basis: the second is the larger from the second step on
    p = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = SOAP([p], lr=1.0, betas=(0.0, 0.5), shampoo_beta=0.0, weight_decay=0.0, precondition_frequency=1)
    for sizes in ([2.0, 1.0], [1.0, 3.0]):
        p.grad = torch.tensor(sizes).diag()
        optimizer.step()
    squares = optimizer.state[p]["exp_avg_sq"]
    torch.testing.assert_close(squares, torch.tensor([[4.5, 0.0], [0.0, 0.5]]))
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
        optimizer = SOAP([p], shampoo_beta=0.999, use_kl_shampoo=use_kl, basis_method="eigh", precondition_frequency=1)
        for g in gradients * 100:
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


def steps_of_both(ours, theirs, params, copies, steps, scale=1.0):
    for step in steps:
        set_gradients(params, step, scale)
        set_gradients(copies, step, scale)
        ours.step()
        with torch.compiler.set_stance("force_eager"):  # theirs is compiled, which takes longer than the steps
            theirs.step()


ORACLE = {"fp32_matmul_prec": "highest", "qr_fp32_matmul_prec": "highest"}
LIKE_THE_ORACLE = {"basis_of": "current", "precondition_frequency": 1}
COMMON = {"lr": 0.01, "betas": (0.9, 0.95), "shampoo_beta": 0.8, "weight_decay": 0.1}


@pytest.mark.parametrize("method", ["qr", "eigh"])
def test_equals_emerging_optimizers_from_the_first_step(method):
    # an eps that hides the rounding beside the diagonal, which differs
    common = {**COMMON, "eps": 1.0}
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


def through_state_dict(optimizer, params):
    new = SOAP(copy.deepcopy(params), max_dim=optimizer.param_groups[0]["max_dim"])
    new.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    return new


@pytest.mark.parametrize("settings", [{}, {"use_kl_shampoo": True, "max_dim": 5}, {"basis_of": "current"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "way",
    [
        through_state_dict,
        lambda optimizer, params: copy.deepcopy(optimizer),
        lambda optimizer, params: pickle.loads(pickle.dumps(optimizer)),
    ],
    ids=["state_dict", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_restored_optimizer_goes_on_bit_for_bit(way, dtype, settings, stop):
    settings = {**SETTINGS, **settings}
    straight, stopped = parameters(SHAPES, dtype), parameters(SHAPES, dtype)
    whole = SOAP(straight, **settings)
    run(whole, straight, range(8))
    first = SOAP(stopped, **settings)
    first.init_state()
    run(first, stopped, range(stop))
    second = way(first, stopped)
    resumed = second.param_groups[0]["params"]
    run(second, resumed, range(stop, 8))
    for p, q in zip(resumed, straight, strict=True):
        assert torch.equal(p, q)
        assert set(second.state[p]) == set(whole.state[q])
        assert all(torch.equal(second.state[p][key], value) for key, value in whole.state[q].items())


def test_a_checkpoint_of_step_0_begins_anew():
    params, expected = parameters(SHAPES), parameters(SHAPES)
    run(SOAP(expected, **SETTINGS), expected, range(3))
    optimizer = SOAP(params, **SETTINGS)
    optimizer.init_state()
    at_start = copy.deepcopy(optimizer.state_dict())
    run(optimizer, params, range(3, 6))
    optimizer.load_state_dict(at_start)
    for p, q in zip(params, parameters(SHAPES), strict=True):
        p.data.copy_(q)
    run(optimizer, params, range(3))
    assert all(torch.equal(p, q) for p, q in zip(params, expected, strict=True))


def test_a_state_of_other_sides_is_refused():
    (p,) = parameters([(6, 4)])
    optimizer = SOAP([p], max_dim=5)
    run(optimizer, [p], [0])
    with pytest.raises(ValueError, match="SOAP needs 'L' for the parameter of shape"):
        SOAP(parameters([(6, 4)])).load_state_dict(optimizer.state_dict())


def test_groups_have_settings_of_their_own():
    settings = [
        {**SETTINGS, "eps": 1e-6, "basis_of": "current", "basis_method": "eigh", "use_kl_shampoo": False},
        {**SETTINGS, "eps": 1e-3, "basis_of": "previous", "basis_method": "qr", "precondition_frequency": 2},
    ]
    shapes = [(5, 5), (4, 4), (3,)]
    params, before = parameters(shapes, torch.float64), parameters(shapes, torch.float64)
    gradients = [[] for _ in params]
    optimizer = SOAP([{"params": params[:1], **settings[0]}, {"params": params[1:2]}], **settings[1])
    optimizer.add_param_group({"params": params[2:], **settings[0]})
    for step in range(6):
        run(optimizer, params, [step])
        for seen, p in zip(gradients, params, strict=True):
            seen.append(p.grad)
    for index, which in enumerate((0, 1, 0)):
        expected = reference_steps(before[index], gradients[index], **settings[which])
        torch.testing.assert_close(params[index].detach(), expected, rtol=1e-7, atol=1e-7)


def test_maximize_goes_the_other_way():
    ours, mirrored = parameters(SHAPES), parameters(SHAPES)
    a, b = SOAP(ours, maximize=True, **SETTINGS), SOAP(mirrored, **SETTINGS)
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(mirrored, step, scale=-1.0)
        a.step()
        b.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, mirrored, strict=True))


def test_the_closure_has_gradients_and_its_loss_is_returned():
    (p,) = parameters([(6, 4)])
    optimizer = SOAP([p], lr=torch.tensor(0.01))

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    expected = p.square().sum().item()
    with torch.no_grad():
        assert optimizer.step(closure).item() == expected
        optimizer.step(closure)
    assert p.square().sum() < expected


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


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("at", [1, 3])
def test_a_gradient_that_is_not_finite_changes_nothing(at, bad):
    params, untouched = parameters([(5, 5), (5,)]), None
    optimizer = SOAP(params, **{**SETTINGS, "precondition_frequency": 1})
    for step in range(1, 5):
        set_gradients(params, step)
        if step == at:
            params[0].grad[2, 1] = bad
            untouched = copy.deepcopy((params[0].detach(), dict(optimizer.state.get(params[0], {}))))
        optimizer.step()
        if step == at:
            assert torch.equal(params[0], untouched[0])
            assert all(torch.equal(optimizer.state[params[0]][key], value) for key, value in untouched[1].items())
    assert optimizer.skipped_steps() == {"parameter 0 of group 0, of shape (5, 5)": 1}
    assert all(p.isfinite().all() for p in params)
    assert optimizer.state[params[0]]["steps"] == 3


def test_zero_gradients_move_nothing_and_later_ones_do():
    (p,) = parameters([(6, 4)])
    optimizer = SOAP([p], use_kl_shampoo=True, weight_decay=0.0, precondition_frequency=1)
    before = p.detach().clone()
    for _ in range(3):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(p, before)
    run(optimizer, [p], range(3))
    assert p.isfinite().all()
    assert not torch.equal(p, before)


def test_a_step_leaves_the_precision_of_products_as_it_was():
    (p,) = parameters([(6, 4)])
    before = torch.get_float32_matmul_precision()
    run(SOAP([p], fp32_matmul_prec="medium"), [p], range(2))
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, r"SOAP: lr must be a finite number of at least 0, got -1\.0"),
        ({"lr": math.inf}, "SOAP: lr must be a finite number of at least 0, got inf"),
        ({"weight_decay": math.nan}, "SOAP: weight_decay must be a finite number of at least 0, got nan"),
        ({"betas": (0.9, 1.0)}, r"SOAP: betas must be two numbers in \[0, 1\), got \(0\.9, 1\.0\)"),
        ({"shampoo_beta": -1}, r"SOAP: shampoo_beta must lie in \[0, 1\), got -1"),
        ({"eps": 0}, "SOAP: eps must be a finite number above 0, got 0"),
        ({"precondition_frequency": 0}, "SOAP: precondition_frequency must be a whole number of at least 1, got 0"),
        ({"precondition_frequency": 1.5}, r"precondition_frequency must be a whole number of at least 1, got 1\.5"),
        ({"max_dim": -1}, "SOAP: max_dim must be a whole number of at least 0, got -1"),
        ({"basis_method": "svd"}, "unknown basis_method of SOAP 'svd': expected one of qr, eigh"),
        ({"basis_of": "next"}, "unknown basis_of of SOAP 'next': expected one of previous, current"),
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


def test_three_dimensions_are_refused():
    p, q = parameters([(6, 4), (2, 3, 4)])
    with pytest.raises(ValueError, match=r"at most two dimensions, but parameter 1 of group 0, .* has 3: give it to"):
        SOAP([p, q])
    optimizer = SOAP([("layer.weight", p)])
    with pytest.raises(ValueError, match=r"but experts\.weight has 3"):
        optimizer.add_param_group({"params": [("experts.weight", q)]})


@pytest.mark.parametrize(
    ("parameter", "gradient", "message"),
    [
        (torch.ones(5, 3), torch.ones(5, 3).to_sparse(), r"parameter 1 .* is sparse \(torch\.sparse_coo\)"),
        (torch.ones(5, dtype=torch.complex64), torch.ones(5, dtype=torch.complex64), "parameter 1 .* is complex"),
    ],
)
def test_a_gradient_of_another_kind_is_refused_before_anything_changes(parameter, gradient, message):
    (p,) = parameters([(6, 4)])
    q = torch.nn.Parameter(parameter)
    optimizer = SOAP([p, q])
    set_gradients([p], 1)
    q.grad = gradient
    with pytest.raises(ValueError, match=f"SOAP takes real, dense gradients, but that of {message}"):
        optimizer.step()
    assert not optimizer.state


def _sharded(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    matrix, vector = parameters([(6, 4), (5,)])

    def distributed(x, placement):
        return torch.nn.Parameter(distribute_tensor(x.detach(), mesh, [placement]))

    marked = copy.deepcopy(matrix)
    marked.partition_dim, marked.tensor_model_parallel = 0, True
    groups = SimpleNamespace(tp=mesh.get_group(), expt_tp=None)
    said = []
    for parameter, collection in [(distributed(matrix, Shard(1)), None), (marked, groups), (marked, None)]:
        try:
            SOAP([parameter], pg_collection=collection)
            said.append("")
        except ValueError as error:
            said.append(str(error))
    params = [distributed(matrix, Replicate()), distributed(vector, Shard(0))]
    optimizer = SOAP(params, pg_collection=groups, **SETTINGS)
    for step in range(5):
        whole = parameters([(6, 4), (5,)])
        set_gradients(whole, step)
        for p, q, placement in zip(params, whole, (Replicate(), Shard(0)), strict=True):
            p.grad = distribute_tensor(q.grad, mesh, [placement])
        optimizer.step()
    return said, [p.full_tensor().detach() for p in params]


def test_sharded_matrices_are_refused_and_what_is_elementwise_or_whole_trains_as_on_one_rank():
    params = parameters([(6, 4), (5,)])
    run(SOAP(params, **SETTINGS), params, range(5))
    for said, found in run_ranks(_sharded, 2):
        assert len(said) == 3
        assert all("SOAP needs whole matrices, but of parameter 0" in each for each in said)
        assert all(torch.equal(p, q) for p, q in zip(found, params, strict=True))


def test_megatrons_mark_on_one_rank_is_no_shard():
    (p,) = parameters([(6, 4)])
    p.partition_dim, p.tensor_model_parallel = 0, True
    run(SOAP([p]), [p], range(2))
    assert p.isfinite().all()
