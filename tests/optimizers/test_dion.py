"""Dion on one rank: its steps against the formulas, and what it refuses."""

import copy

import pytest
import torch

from megatron_eopt.matrices import concatenated
from megatron_eopt.optimizers.dion import Dion
from tests.optimizers.dions import SHAPES, reference
from tests.optimizers.field import assert_close, drawn, gradient, matrix
from tests.optimizers.field import run as run_alone
from tests.optimizers.several import gradients_of, parameters, run

# Rounding of B Q is multiplied by how nearly its columns depend on each other: in these twenty steps by up to 400.
TOLERANCE = {torch.float32: 4e-5, torch.float64: 1e-12}


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        ({}, (4, 3, 5)),
        ({"momentum": 0.0, "weight_decay": 0.0}, (4, 3, 5)),
        ({"momentum": 0.8, "weight_decay": 0.5, "rank_fraction": 0.5}, (8, 5, 9)),
        ({"rank_fraction": 0.01}, (1, 1, 1)),
    ],
)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_twenty_steps_follow_the_formulas(dtype, settings, ranks):
    params = parameters(SHAPES, dtype)
    before, optimizer = copy.deepcopy(params), Dion(params, lr=0.05, **settings)
    gradients = gradients_of(optimizer, params, range(20))
    formula = {key: value for key, value in settings.items() if key != "rank_fraction"}
    for p, first, seen, rank in zip(params, before, gradients, ranks, strict=True):
        W, M, Q = reference(first, seen, 0.05, rank=rank, **formula)
        state = optimizer.state[p]
        assert_close(p.detach(), W, TOLERANCE[dtype])
        assert state["Q"].shape == (p.shape[1], rank)
        if dtype == torch.float64:
            signs = (state["Q"] * Q).sum(0).sign()  # of which QR leaves the choice
            assert_close(state["momentum_buffer"], M, 1e-11)
            assert_close(state["Q"] * signs, Q, 1e-11)


def test_with_the_full_rank_a_repeated_gradient_is_orthogonalized_at_last():
    """Power iterations of the same matrix turn to its singular vectors, and columns of norm 1 drop its values."""
    p = matrix(12, 8, dtype=torch.float64)
    before = p.detach().clone()
    # far apart singular values, so that each iteration gets nearer by a factor
    U, V = (torch.linalg.qr(drawn((n, 8), n, torch.float64)).Q for n in (12, 8))
    optimizer = Dion([p], lr=0.0, momentum=0.0, weight_decay=0.0, rank_fraction=1.0)
    for _ in range(60):
        p.grad = U @ torch.diag(2.0 ** -torch.arange(8.0, dtype=torch.float64)) @ V.T
        optimizer.step()
    assert torch.equal(p, before)
    optimizer.param_groups[0]["lr"] = 1.0
    optimizer.step()
    assert_close(before - p.detach(), (12 / 8) ** 0.5 * U @ V.T, 1e-9)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_of_bf16_weights_is_rounded_once_and_their_state_is_fp32(shape):
    p = matrix(*shape, dtype=torch.bfloat16)
    before, optimizer, gradients = p.detach().clone(), Dion([p], lr=0.05, weight_decay=0.0), []
    for step in range(20):
        gradients.append(gradient(p, step))
        run_alone(optimizer, p, [step])
        if step == 0:
            expected, _, _ = reference(before, gradients, 0.05, weight_decay=0.0, rank=optimizer.state[p]["Q"].shape[1])
            torch.testing.assert_close(p.detach().double(), expected, rtol=2**-8, atol=0)
    _, M, _ = reference(before, gradients, 0.05, rank=optimizer.state[p]["Q"].shape[1])
    assert {x.dtype for x in optimizer.state[p].values()} == {torch.float32}
    assert_close(optimizer.state[p]["momentum_buffer"], M, 1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_directions_that_a_gradient_lacks_get_no_step_and_are_found_later(dtype):
    """Where B Q has dependent columns, the formulas divide rounding by its norm, and ranks would round otherwise."""
    p = matrix(12, 8, dtype=dtype)
    before = p.detach().clone()
    optimizer = Dion([p], lr=1.0, weight_decay=0.0, rank_fraction=0.5)
    thin = drawn((12, 2), 1, dtype) @ drawn((2, 8), 2, dtype)
    p.grad = thin
    optimizer.step()
    values = torch.linalg.svdvals((before - p.detach()).double())
    assert values[1] > 0.1
    assert values[2] < 1e-5
    kept = optimizer.state[p]["Q"].clone()
    assert kept[:, 2:].norm(dim=0).min() > 0.1
    p.grad = thin + 0.1 * drawn((12, 8), 3, dtype)
    moved = p.detach().clone()
    optimizer.step()
    assert torch.linalg.svdvals((moved - p.detach()).double())[3] > 0.1


def test_a_zero_gradient_moves_nothing_and_keeps_the_basis():
    p = matrix(6, 4)
    optimizer = Dion([p], lr=0.1, weight_decay=0.0)
    optimizer.init_state()
    before, basis = p.detach().clone(), optimizer.state[p]["Q"].clone()
    p.grad = torch.zeros(6, 4)
    optimizer.step()
    assert torch.equal(p, before)
    assert torch.equal(optimizer.state[p]["Q"], basis)
    assert not optimizer.state[p]["momentum_buffer"].any()


def test_the_size_of_gradients_does_not_matter():
    one, other = matrix(12, 8), matrix(12, 8)
    for p, size in ((one, 1.0), (other, 2.0**-60)):
        optimizer = Dion([p], lr=0.05)
        for seed in range(5):
            p.grad = size * gradient(p, seed)
            optimizer.step()
    assert torch.equal(one, other)


def test_matrices_of_a_fused_parameter_step_as_parameters_of_their_own():
    parts = parameters([(16, 12), (8, 12)])
    whole = torch.nn.Parameter(torch.cat([p.detach() for p in parts]))
    whole.logical_matrices = concatenated(gate=16, up=8)
    together, apart = Dion([whole], lr=0.05), Dion(parts, lr=0.05)
    for step in range(3):
        whole.grad = drawn((24, 12), step)
        for p, g in zip(parts, whole.grad.split([16, 8]), strict=True):
            p.grad = g
        together.step()
        apart.step()
    assert_close(whole.detach(), torch.cat([p.detach() for p in parts]).double(), 1e-6)
    assert [matrix.name for matrix in together.described_matrices()[whole]] == ["gate", "up"]
    assert {key: x.shape for key, x in together.state[whole].items()} == {
        "momentum_buffer": (24, 12), "Q_0": (12, 3), "Q_1": (12, 2),
    }  # fmt: skip
    assert (together.matrices_updated, apart.matrices_updated) == (6, 6)


def test_the_predicted_size_is_that_of_the_first_update():
    params = parameters(SHAPES)
    before, optimizer = copy.deepcopy(params), Dion(params, lr=1.0, weight_decay=0.0)
    run(optimizer, params, [0])
    for p, old in zip(params, before, strict=True):
        [described] = optimizer.described_matrices()[p]
        assert (p - old).square().mean().sqrt().item() == pytest.approx(described.rms, rel=1e-4)
        assert (described.scheme, described.scale) == ("local", (p.shape[0] / p.shape[1]) ** 0.5)


def test_what_a_gpu_would_mask_stays_as_it_is():
    """On a GPU nothing waits for a flag: what is not accepted goes through the step."""
    p, q = parameters([(6, 4), (6, 4)])
    optimizer = Dion([p, q], lr=0.1)
    run(optimizer, [p, q], range(2))
    kept = [p.detach().clone(), *(x.clone() for x in optimizer.state[p].values())]
    p.grad, q.grad = torch.full((6, 4), torch.nan), torch.ones(6, 4)
    optimizer.step()
    assert all(map(torch.equal, kept, [p, *optimizer.state[p].values()]))
    assert optimizer.skipped_steps() == {"parameter 0 of group 0, of shape (6, 4)": 1}


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, float("nan")])
def test_a_fraction_out_of_its_range_is_refused(fraction):
    with pytest.raises(ValueError, match=r"Dion: rank_fraction must lie in \(0, 1\], got"):
        Dion(parameters(SHAPES), rank_fraction=fraction)
    optimizer = Dion(parameters(SHAPES))
    optimizer.param_groups[0]["rank_fraction"] = fraction
    with pytest.raises(ValueError, match=r"Dion: rank_fraction must lie in \(0, 1\], got"):
        run(optimizer, optimizer.param_groups[0]["params"], [0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0"),
        ({"split_qkv": True}, "split_qkv needs is_qkv_fn"),
        ({"lr": -1.0}, "lr must be a finite number of at least 0"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Dion(parameters(SHAPES), **settings)


def test_another_rank_than_that_of_the_state_is_refused():
    params = parameters(SHAPES)
    optimizer = Dion(params)
    run(optimizer, params, [0])
    with pytest.raises(ValueError, match=r"'Q' has shape \(16, 4\), expected \(16, 8\) for the parameter of"):
        Dion(params, rank_fraction=0.5).load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["rank_fraction"] = 0.5
    for _ in range(2):  # it is not forgotten
        with pytest.raises(ValueError, match=r"a basis of rank 4 for .* has rank_fraction 0.5: set it back"):
            run(optimizer, params, [1])
