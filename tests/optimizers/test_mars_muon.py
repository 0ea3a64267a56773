"""MARS-Muon on one rank: its formulas written out, resumes, skipped steps and refusals."""

import io

import pytest
import torch

from megatron_eopt.optimizers.mars_muon import MarsMuon, corrected
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from tests.matrices.models import merge_rows, split_rows
from tests.optimizers.field import (
    SHAPES,
    TOLERANCE,
    assert_close,
    assert_close_in_bf16,
    factor,
    gradient,
    matrix,
)

# What multiplies the gradients of steps, whose norms are near sqrt(84) = 9, in turn.
SIZES = {"all clipped": (1.0,), "some clipped": (0.05, 0.1, 0.15, 0.2), "none clipped": (0.01,)}
QKV = {"split_qkv": True, "is_qkv_fn": lambda p: hasattr(p, "qkv_split_shapes")}


def reference(p, gradients, lr, momentum=0.95, gamma=0.025, nesterov=False, decay=0.01, l2=False):
    """MARS (arXiv 2411.10438, approximate form) before Muon with the size ``sqrt(max(rows, cols))``, in fp64."""
    w, m, last, clipped = p.detach().double().clone(), 0.0, None, []
    for g in (g.double() for g in gradients):
        c = g if last is None else g + gamma * momentum / (1 - momentum) * (g - last)
        clipped.append(bool(c.norm() > 1))
        c = c / c.norm() if clipped[-1] else c
        c, last = c + (decay * w if l2 else 0), g
        m = momentum * m + (1 - momentum) * c
        u = momentum * m + (1 - momentum) * c if nesterov else m
        w = w - lr * (0 if l2 else decay) * w - lr * max(w.shape) ** 0.5 * factor(u)
    return w, clipped


def run(opt, params, steps, sizes=(1.0,)):
    for step in steps:
        for p in params:
            p.grad = gradient(p, step) * sizes[step % len(sizes)]
        opt.step()


def gradients(p, steps, sizes):
    return [gradient(p, step) * sizes[step % len(sizes)] for step in range(steps)]


def states(opt, p):
    return {key: value.clone() for key, value in opt.state[p].items()}


@pytest.mark.parametrize(
    "settings",
    [{}, {"nesterov": True, "gamma": 0.2}, {"momentum": 0.8, "decay": 0.3}, {"momentum": 0.8, "l2": True}],
    ids=lambda settings: "-".join(settings) or "paper",
)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_twenty_steps_follow_the_formula(dtype, shape, sizes, settings):
    p = matrix(*shape, dtype=dtype)
    expected, clipped = reference(p, gradients(p, 20, sizes), 0.01, **settings)
    assert (any(clipped), all(clipped)) == (sizes != SIZES["none clipped"], sizes == SIZES["all clipped"])
    own = {key: value for key, value in settings.items() if key not in ("decay", "l2")}
    own |= {"weight_decay": settings.get("decay", 0.01), "use_decoupled_weight_decay": "l2" not in settings}
    opt = MarsMuon([p], 0.01, fp32_matmul_prec="highest", **own)
    run(opt, [p], range(20), sizes)
    assert_close(p.detach(), expected, TOLERANCE[dtype])
    assert list(opt.state[p]) == ["momentum_buffer", "previous_gradient", "has_previous"]
    assert torch.equal(opt.state[p]["previous_gradient"], gradients(p, 20, sizes)[-1])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bf16_parameters_follow_it_as_far_as_they_can(shape, sizes):
    # the correction and the clipping round once each: 2^-9 of a gradient, far below the 2^-6 of a step of the bound
    p = matrix(*shape, dtype=torch.bfloat16)
    before = p.detach().double()
    expected, _ = reference(p, gradients(p, 20, sizes), 0.02, momentum=0.8, decay=0.0)
    opt = MarsMuon([p], 0.02, 0.8, weight_decay=0.0)
    run(opt, [p], range(20), sizes)
    assert_close_in_bf16(p.detach(), before, expected, roundings=20)
    assert {key: x.dtype for key, x in opt.state[p].items()} == {
        "momentum_buffer": torch.bfloat16,
        "previous_gradient": torch.bfloat16,
        "has_previous": torch.float32,
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_correction_is_rounded_once_and_none_is_exact(dtype):
    g, last = matrix(dtype=dtype).detach(), matrix(seed=1, dtype=dtype).detach()
    first, later = corrected([g, g], [last, last], [torch.tensor(0.0), torch.tensor(1.0)], 0.475)
    assert torch.equal(first, g)
    exact = g.double() + 0.475 * (g.double() - last.double())
    assert ((later.double() - exact).abs() <= torch.finfo(dtype).eps * (exact.abs() + g.abs() + last.abs())).all()
    assert torch.equal(g, matrix(dtype=dtype))  # which stays as it is, as does what it is compared with
    assert torch.equal(last, matrix(seed=1, dtype=dtype))


@pytest.mark.parametrize(("settings", "steps"), [({}, 1), ({"gamma": 0.0}, 5), ({"momentum": 0.0}, 5)])
def test_without_a_correction_or_clipping_it_is_muon_bit_for_bit(settings, steps):
    p, q = matrix(), matrix()
    muons = {key: value for key, value in settings.items() if key != "gamma"}
    run(MarsMuon([p], 0.02, **settings), [p], range(steps), SIZES["none clipped"])
    run(TensorParallelMuon([q], 0.02, nesterov=False, **muons), [q], range(steps), SIZES["none clipped"])
    assert torch.equal(p, q)


def test_a_gradient_of_zeros_is_a_previous_gradient_and_none_is_not():
    p, q = matrix(), matrix(seed=1)
    opt = MarsMuon([p, q], 0.05, fp32_matmul_prec="highest")
    zero, own = torch.zeros_like(p), [gradient(p, step) * 0.02 for step in range(2)]
    expected, _ = reference(p, [zero, *own], 0.05)
    of_q, _ = reference(q, own, 0.05)
    for for_p, for_q in zip([zero, *own], [None, *own], strict=True):
        p.grad, q.grad = for_p, for_q
        opt.step()
    assert_close(p.detach(), expected, 1e-5)
    assert_close(q.detach(), of_q, 1e-5)


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)], ids=["number", "tensor"])
def test_steps_with_a_rate_of_zero_make_no_previous_gradient_before_the_first(rate):
    p, q = matrix(), matrix()
    opt = MarsMuon([p], lr=rate)
    for _ in range(2):  # as torch.distributed.checkpoint makes state
        p.grad = torch.zeros_like(p)
        opt.step()
    assert not any(value.any() for value in opt.state[p].values())
    opt.param_groups[0]["lr"] = 0.05
    straight = MarsMuon([q], lr=0.05)
    run(opt, [p], range(2))
    run(straight, [q], range(2))
    for each in (opt, straight):  # later ones do: the momentum goes on
        each.param_groups[0]["lr"] = 0.0
    run(opt, [p], [2])
    run(straight, [q], [2])
    assert torch.equal(p, q)
    assert torch.equal(opt.state[p]["previous_gradient"], gradient(p, 2))
    assert opt.state[p]["has_previous"] == straight.state[q]["has_previous"] == 1


def test_groups_have_a_gamma_of_their_own():
    several = [matrix(seed=seed) for seed in range(3)]
    groups = [{"params": several[:1]}, {"params": several[1:2], "gamma": 0.3}, {"params": several[2:], "gamma": 0.0}]
    gammas = zip(several, (0.1, 0.3, 0.0), strict=True)
    expected = [reference(p, gradients(p, 5, (1.0,)), 0.02, gamma=gamma)[0] for p, gamma in gammas]
    opt = MarsMuon(groups, 0.02, gamma=0.1, fp32_matmul_prec="highest")
    run(opt, several, range(5))
    for p, each in zip(several, expected, strict=True):
        assert_close(p.detach(), each, 1e-5)


def test_the_parts_of_a_fused_projection_are_clipped_by_norms_of_their_own():
    shapes = (4, 2, 1)
    p = matrix(21, 5, dtype=torch.float64, qkv_split_shapes=shapes)
    parts = [torch.nn.Parameter(part.clone()) for part in split_rows(p.detach(), shapes)]
    fused, alone = MarsMuon([p], lr=0.05, **QKV), MarsMuon(parts, lr=0.05)
    for step in range(4):
        p.grad = gradient(p, step) * 0.15  # norms of sqrt(rows * 5) times that: q above 1, and k and v below
        for part, g in zip(parts, split_rows(p.grad, shapes), strict=True):
            part.grad = g.clone()
        fused.step()
        alone.step()
    assert_close(p.detach(), merge_rows([part.detach() for part in parts], shapes), 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("before", [0, 1, 3])
def test_a_restored_optimizer_goes_on_bit_for_bit(before, dtype):
    straight, stopped = matrix(dtype=dtype), matrix(dtype=dtype)
    whole, first = MarsMuon([straight], 0.05), MarsMuon([stopped], 0.05)
    run(whole, [straight], range(6))
    first.init_state()
    run(first, [stopped], range(before))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    resumed = torch.nn.Parameter(stopped.detach().clone())
    second = MarsMuon([resumed], 0.3, gamma=0.5)
    second.init_state()  # as a checkpoint needs it before it loads
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.param_groups[0]["gamma"] == 0.025
    run(second, [resumed], range(before, 6))
    assert torch.equal(resumed, straight)
    for key, value in whole.state[straight].items():
        assert torch.equal(second.state[resumed][key], value), key
        assert second.state[resumed][key].dtype == value.dtype


def test_gradients_are_not_written_to():
    p = matrix()
    opt = MarsMuon([p], 0.05)
    for step in range(3):
        run(opt, [p], [step])
        assert torch.equal(p.grad, gradient(p, step))


class Mine(MarsMuon):
    """A user's."""

    fails = False

    def orthogonalize(self, p, grad, **settings):
        if self.fails:
            raise RuntimeError("in the step")
        return super().orthogonalize(p, grad, **settings)


def test_an_orthogonalize_of_a_subclass_steps_and_leaves_no_trace_where_it_fails():
    p, q = matrix(), matrix()
    mine, plain = (cls([x], 0.05, fp32_matmul_prec="highest") for cls, x in ((Mine, p), (MarsMuon, q)))
    run(mine, [p], range(3))
    run(plain, [q], range(3))
    torch.testing.assert_close(p, q)
    before, kept = p.detach().clone(), states(mine, p)
    mine.fails = True
    with pytest.raises(RuntimeError, match="in the step"):
        run(mine, [p], [3])
    assert torch.equal(p, before)
    assert all(torch.equal(mine.state[p][key], value) for key, value in kept.items())


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_a_gamma_out_of_its_range_is_refused_before_anything_changes(value):
    p = matrix()
    message = f"MarsMuon: gamma must be a finite number of at least 0, got {value}"
    with pytest.raises(ValueError, match=message):
        MarsMuon([p], gamma=value)
    opt = MarsMuon([p], 0.05)
    with pytest.raises(ValueError, match=message):
        opt.add_param_group({"params": [matrix(seed=1)], "gamma": value})
    run(opt, [p], [0])
    before, kept = p.detach().clone(), states(opt, p)
    opt.param_groups[0]["gamma"] = value
    with pytest.raises(ValueError, match=message):
        run(opt, [p], [1])
    assert torch.equal(p, before)
    assert all(torch.equal(opt.state[p][key], each) for key, each in kept.items())


def test_a_gamma_of_several_entries_and_the_state_of_muon_are_refused():
    p, q = matrix(), matrix()
    with pytest.raises(TypeError, match="gamma must be a number, or a tensor of one entry"):
        MarsMuon([p], gamma=torch.ones(2))
    of_muon, opt = TensorParallelMuon([q]), MarsMuon([p])
    run(of_muon, [q], [0])
    state = of_muon.state_dict()
    with pytest.raises(ValueError, match=r"MarsMuon cannot load a state of TensorParallelMuon"):
        opt.load_state_dict(state)
    del state["param_groups"][0]["state_of"]
    with pytest.raises(ValueError, match=r"MarsMuon needs 'previous_gradient' for the parameter of shape \(6, 4\)"):
        opt.load_state_dict(state)
