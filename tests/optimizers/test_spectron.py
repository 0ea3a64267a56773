import copy
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt.matrices import concatenated, experts
from megatron_eopt.optimizers.spectron import Spectron, factor_pairs
from megatron_eopt.orthogonalize.spectral import start_vector

SHAPES = [(24, 16), (10, 40), (18, 18)]
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def parameters(shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params, step):
    for index, p in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + index)
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def run(optimizer, params, steps):
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def spectron(params, **settings):
    return Spectron(params, **{"rank": 4, "fp32_matmul_prec": "highest", **settings})


def orthogonal(M):
    X = M / M.norm()
    for a, b, c in QUINTIC:
        S = X.T @ X
        X = a * X + X @ (b * S + c * S @ S)
    return X


def largest(W, u, steps):
    for _ in range(steps):
        v = W.T @ u
        v = v / v.norm()
        u = W @ v
        u = u / u.norm()
    return u @ W @ v, u


def factor_steps(factors, gradients, lr, beta=0.9, wd=0.01, power=1):
    """Spectron from the formulas, in fp64; ``gradients`` has for each step what maps A, B to theirs."""
    A, B = (X.double() for X in factors)
    mA, mB = torch.zeros_like(A), torch.zeros_like(B)
    uA, uB = start_vector(len(A)).double(), start_vector(len(B)).double()
    for of_step in gradients:
        gA, gB = of_step(A, B)
        A, B = A - lr * wd * A, B - lr * wd * B
        mA, mB = beta * mA + (1 - beta) * gA, beta * mB + (1 - beta) * gB
        (sA, uA), (sB, uB) = largest(A, uA, power), largest(B, uB, power)
        rate = lr / (sA + sB + 1)
        A, B = A - rate * orthogonal(mA), B - rate * orthogonal(mB)
    return A, B


def reference_steps(W, gradients, lr, rank=4, **settings):
    U, S, Vh = torch.linalg.svd(W.detach().double())
    factors = U[:, :rank] * S[:rank].sqrt(), Vh[:rank].T * S[:rank].sqrt()
    of_steps = [lambda A, B, G=G: (G.double() @ B, G.double().T @ A) for G in gradients]
    A, B = factor_steps(factors, of_steps, lr, **settings)
    return A @ B.T


def assert_close(actual, expected, tolerance):
    error = (actual.detach().double() - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, float(error)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"momentum_beta": 0.0, "weight_decay": 0.5}, {"beta": 0.0, "wd": 0.5}),
        (
            {"momentum_beta": 0.95, "weight_decay": 0.0, "num_power_iterations": 3},
            {"beta": 0.95, "wd": 0.0, "power": 3},
        ),
        ({"rank": 1}, {"rank": 1}),
        ({"rank": 10}, {"rank": 10}),
    ],
)
def test_twenty_steps_follow_the_formulas(ours, theirs):
    params = parameters()
    before, gradients = copy.deepcopy(params), [[] for _ in params]
    optimizer = spectron(params, lr=0.05, **ours)
    for step in range(20):
        set_gradients(params, step)
        for seen, p in zip(gradients, params, strict=True):
            seen.append(p.grad.clone())
        optimizer.step()
        assert all(torch.equal(p.grad, seen[-1]) for seen, p in zip(gradients, params, strict=True))
    for p, first, seen in zip(params, before, gradients, strict=True):
        assert_close(p, reference_steps(first, seen, lr=0.05, **theirs), 1e-6)


def test_bf16_weights_and_gradients_are_rounded_once():
    # factors are kept in fp32, so the weight is what the formulas give, rounded: off by 2^-9 of an entry at most
    params = parameters(dtype=torch.bfloat16)
    before, gradients = copy.deepcopy(params), [[] for _ in params]
    optimizer = spectron(params, lr=0.05)
    for step in range(20):
        set_gradients(params, step)
        for seen, p in zip(gradients, params, strict=True):
            seen.append(p.grad)
        optimizer.step()
    for p, first, seen in zip(params, before, gradients, strict=True):
        expected = reference_steps(first, seen, lr=0.05)
        assert p.dtype == torch.bfloat16
        assert {x.dtype for x in optimizer.state[p].values()} == {torch.float32}
        torch.testing.assert_close(p.double(), expected, rtol=2**-8, atol=1e-6)


def test_bf16_products_of_the_iteration_stay_near_the_formulas():
    (p,) = parameters(SHAPES[:1])
    gradient, before = torch.randn(24, 16, generator=torch.Generator().manual_seed(1)), p.detach().clone()
    p.grad = gradient
    spectron([p], lr=0.1, fp32_matmul_prec="medium").step()
    start = reference_steps(before, [], lr=0.0)
    step = reference_steps(before, [gradient], lr=0.1) - start
    assert (p.detach() - start - step).norm() <= 0.02 * step.norm()


def test_no_step_changes_a_weight_by_more_than_lr():
    params = parameters()
    optimizer = spectron(params, lr=0.1, weight_decay=0.0)
    run(optimizer, params, [0])
    for step in range(1, 10):
        before = [p.detach().clone() for p in params]
        run(optimizer, params, [step])
        for p, old in zip(params, before, strict=True):
            # 1.033 is what the iteration makes of the largest singular values, one step what sigma lags behind
            assert 0.01 < torch.linalg.matrix_norm(p.detach() - old, ord=2) <= 1.05 * 0.1


def test_the_projection_is_reported_and_is_the_closest(caplog):
    params = parameters()
    expected = []
    for p in params:
        S = torch.linalg.svdvals(p.detach().double())
        expected.append((S[4:].norm() / S.norm()).item())
    closest = [reference_steps(p, [], lr=0.0) for p in params]
    optimizer = spectron([(f"layer.{i}.weight", p) for i, p in enumerate(params)], lr=1e-9)
    assert optimizer.projection_errors == {}
    run(optimizer, params, [0])
    assert list(optimizer.projection_errors) == ["layer.0.weight", "layer.1.weight", "layer.2.weight"]
    assert list(optimizer.projection_errors.values()) == pytest.approx(expected, rel=1e-5)
    for p, of_p in zip(params, closest, strict=True):
        assert_close(p, of_p, 1e-6)
    assert "Spectron projects 3 weights to their rank, which changes them by" in caplog.text
    run(optimizer, params, [1])
    assert caplog.text.count("projects") == 1


def test_steps_with_a_rate_of_zero_before_the_first_change_nothing():
    params, straight = parameters(), parameters()
    before = [p.detach().clone() for p in params]
    optimizer = spectron(params, lr=0.0, weight_decay=0.5)
    run(optimizer, params, range(3))
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
    assert not optimizer.projection_errors
    optimizer.param_groups[0]["lr"] = 0.05
    run(optimizer, params, range(3, 6))
    run(spectron(straight, lr=0.05, weight_decay=0.5), straight, range(3, 6))
    assert all(torch.equal(p, q) for p, q in zip(params, straight, strict=True))


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
def test_a_later_step_with_a_rate_of_zero_leaves_weight_and_factors_bit_equal(rate):
    params = parameters()
    optimizer = spectron(params, lr=0.05, weight_decay=0.5)
    run(optimizer, params, range(3))
    before = copy.deepcopy([(p, optimizer.state[p]) for p in params])
    optimizer.param_groups[0]["lr"] = rate
    run(optimizer, params, range(3, 5))
    for p, (old, state) in zip(params, before, strict=True):
        assert torch.equal(p, old)
        for key in ("factor_A", "factor_B"):
            assert torch.equal(optimizer.state[p][key], state[key])
        assert not torch.equal(optimizer.state[p]["momentum_buffer_A"], state["momentum_buffer_A"])


def test_a_learning_rate_as_a_tensor():
    ours, plain = parameters(), parameters()
    run(spectron(ours, lr=torch.tensor(0.05)), ours, range(3))
    run(spectron(plain, lr=0.05), plain, range(3))
    for p, q in zip(ours, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("transposed", [False, True])
def test_pairs_of_factors_follow_the_formulas(transposed):
    A, B = parameters([(24, 4), (16, 4)])
    first = A.detach().clone(), B.detach().clone()
    if transposed:
        B = torch.nn.Parameter(B.detach().T.contiguous())
    optimizer = Spectron([factor_pairs([(A, B)], lr=0.05, weight_decay=0.1)], fp32_matmul_prec="highest")
    gradients = []
    for step in range(20):
        set_gradients([A, B], step)
        gradients.append((A.grad.double(), (B.grad.T if transposed else B.grad).double()))
        optimizer.step()
    of_steps = [lambda A, B, both=both: both for both in gradients]
    expected = factor_steps(first, of_steps, lr=0.05, wd=0.1)
    assert_close(A, expected[0], 1e-6)
    assert_close(B.T if transposed else B, expected[1], 1e-6)
    assert set(optimizer.state[A]) == {"momentum_buffer", "u"}
    assert optimizer.state[B]["momentum_buffer"].shape == B.shape


def test_a_pair_steps_together_or_not_at_all():
    A, B, C, D = parameters([(24, 4), (16, 4), (6, 3), (3, 5)])
    optimizer = Spectron([factor_pairs([(("a", A), ("b", B)), (("c", C), ("d", D))])])
    before = [x.detach().clone() for x in (A, B, C, D)]
    set_gradients([A, C, D], 0)
    optimizer.step()
    changed = [not torch.equal(x, old) for x, old in zip((A, B, C, D), before, strict=True)]
    assert changed == [False, False, True, True]


def fused(kind):
    """A parameter of several matrices, these as parameters of their own, and the settings for it."""
    parts = parameters([(16, 12), (8, 12), (8, 12)]) if kind != "experts" else parameters([(8, 12)] * 3)
    if kind == "experts":
        whole = torch.nn.Parameter(torch.stack([p.detach() for p in parts]))
        whole.logical_matrices = experts(3)
        return whole, parts, torch.stack, {}
    if kind == "declared":
        whole = torch.nn.Parameter(torch.cat([p.detach() for p in parts]))
        whole.logical_matrices = concatenated(gate=16, up=8, further=8)
        return whole, parts, torch.cat, {}

    def interleaved(each):
        return torch.cat([part for group in range(2) for part in (x.chunk(2)[group] for x in each)])

    whole = torch.nn.Parameter(interleaved([p.detach() for p in parts]))
    settings = {"split_qkv": True, "is_qkv_fn": lambda p: p is whole, "qkv_split_shapes": [8, 4, 4]}
    return whole, parts, interleaved, settings


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


def test_the_closure_has_gradients_and_its_loss_is_returned():
    (p,) = parameters(SHAPES[:1])
    optimizer = spectron([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        expected = p.square().sum().item()
        assert optimizer.step(closure).item() == expected
    assert p.square().sum() < expected


def test_a_parameter_without_gradient_is_left_as_it_is():
    p, q = parameters(SHAPES[:2])
    optimizer = spectron([p, q])
    before = q.detach().clone()
    run(optimizer, [p], range(2))
    assert torch.equal(q, before)
    assert q not in optimizer.state
    run(optimizer, [p, q], range(2))  # projected in its own first step
    assert torch.linalg.matrix_rank(q) == 4


def through_state_dict(optimizer, params):
    resumed = copy.deepcopy(params)
    new = made(resumed)
    new.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return new


def through_a_template(optimizer, params):
    resumed = copy.deepcopy(params)
    new = made(resumed)
    new.init_state()
    buffer = pickle.dumps(optimizer.state_dict())
    new.load_state_dict(pickle.loads(buffer))
    return new


def made(params):
    return spectron([{"params": params[:1], "rank": 2}, {"params": params[1:]}], lr=0.05, num_power_iterations=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stop", [0, 3])
@pytest.mark.parametrize(
    "way",
    [
        through_state_dict,
        through_a_template,
        lambda optimizer, params: copy.deepcopy(optimizer),
        lambda optimizer, params: pickle.loads(pickle.dumps(optimizer)),
    ],
    ids=["state_dict", "init_state and a pickled state_dict", "deepcopy", "pickle"],
)
def test_a_restored_optimizer_goes_on_bit_for_bit(way, stop, dtype):
    straight, stopped = parameters(dtype=dtype), parameters(dtype=dtype)
    run(made(straight), straight, range(6))
    first = made(stopped)
    first.init_state()
    run(first, stopped, range(stop))
    second = way(first, stopped)
    resumed = [p for group in second.param_groups for p in group["params"]]
    assert all(p is not q for p, q in zip(resumed, stopped, strict=True))
    run(second, resumed, range(stop, 6))
    assert all(torch.equal(p, q) for p, q in zip(resumed, straight, strict=True))
    assert len(second.projection_errors) == (0 if stop else 3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("bad_at", [1, 2])
def test_a_gradient_that_is_not_finite_is_as_if_its_step_had_not_been(bad, bad_at):
    def go(steps, bad_at=None):
        params = parameters(SHAPES[:2])
        optimizer = spectron(params, lr=0.1, weight_decay=0.5)
        for step in steps:
            set_gradients(params, step)
            if step == bad_at:
                params[0].grad[2, 1] = bad
            optimizer.step()
        return params, optimizer

    (p, q), optimizer = go((1, 2, 3), bad_at=bad_at)
    (expected_p, _), without = go(tuple(step for step in (1, 2, 3) if step != bad_at))
    (_, expected_q), _ = go((1, 2, 3))
    assert torch.equal(p, expected_p)
    for key, value in without.state[expected_p].items():
        assert torch.equal(optimizer.state[p][key], value), key
    assert torch.equal(q, expected_q)
    assert optimizer.skipped_steps() == {"parameter 0 of group 0, of shape (24, 16)": 1}


def test_settings_of_torch_are_left_as_they_are():
    params = parameters()
    torch.manual_seed(3)
    seen = torch.random.get_rng_state(), torch.get_float32_matmul_precision(), torch.is_grad_enabled()
    run(spectron(params, fp32_matmul_prec="medium"), params, [0])
    assert torch.equal(torch.random.get_rng_state(), seen[0])
    assert (torch.get_float32_matmul_precision(), torch.is_grad_enabled()) == seen[1:]


class HostReads(TorchDispatchMode):
    """Counts what would wait for a GPU: values that are read on the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_only_the_steps_that_project_read_values_on_the_host():
    params = parameters()
    A, B = parameters([(24, 4), (16, 4)])
    optimizer = spectron([{"params": params}, factor_pairs([(A, B)])], lr=0.05)
    counts = []
    for step in range(3):
        set_gradients([*params, A, B], step)
        optimizer._prepare([*params, A, B])
        # the gradients' own check reads on a CPU alone, and is left out here
        with HostReads() as reads, torch.no_grad():
            optimizer._take(torch.ones(5, dtype=torch.bool))
        counts.append(reads.count)
    assert counts[0] > 0
    assert counts[1:] == [0, 0]


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


def test_parameters_may_be_replaced_by_copies_before_the_first_step():
    params, straight = parameters(), parameters()
    optimizer = spectron(params, lr=0.05)
    optimizer.init_state()
    optimizer.state.clear()
    optimizer.param_groups[0]["params"] = copies = copy.deepcopy(params)
    run(optimizer, copies, range(2))
    run(spectron(straight, lr=0.05), straight, range(2))
    assert all(torch.equal(p, q) for p, q in zip(copies, straight, strict=True))
