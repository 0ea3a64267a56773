"""TensorParallelMuon, as those call it who know the original: positions, names, overrides, copies of parameters."""

import copy
import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from megatron_eopt import TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.matrices import Split
from megatron_eopt.optimizers import MuonHyperball, PolarGrad, Scion
from megatron_eopt.orthogonalize import get_coefficients
from tests.distributed.ranks import run_ranks

LR, BETA, DECAY = 0.05, 0.9, 0.2
SHAPES = [(6, 10), (12, 4), (5, 5)]


def parameters(shapes=SHAPES, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(shapes=SHAPES, steps=3, seed=1, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(steps)]


def iterated(x, steps=5, kind="quintic"):
    """Newton-Schulz on one matrix, in its dtype."""
    x = x / x.norm()
    for a, b, c in get_coefficients(kind, steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def spectral(rows, cols):
    return max(rows, cols) ** 0.5


def reference(params, steps, settings_of, update=lambda u, index: spectral(*u.shape) * iterated(u)):
    """Parameters after steps whose (nesterov, kind of decay) are ``settings_of(step, index)``."""
    ps, ms = [p.detach().clone() for p in params], [torch.zeros_like(p) for p in params]
    for step, of_step in enumerate(steps):
        for i, g in enumerate(of_step):
            nesterov, kind = settings_of(step, i)
            if kind == "l2":
                g = g + DECAY * ps[i]
            else:
                ps[i] = ps[i] - {"decoupled": LR * DECAY, "independent": DECAY, "palm": LR**2 * DECAY}[kind] * ps[i]
            ms[i] = BETA * ms[i] + (1 - BETA) * g
            ps[i] = ps[i] - LR * update((1 - BETA) * g + BETA * ms[i] if nesterov else ms[i], i)
    return ps


def optimizer(params, cls=TensorParallelMuon, **changed):
    # fp64 is not rounded to bf16, and without the precision of Newton-Schulz nothing but the rule is compared
    given = {"lr": LR, "momentum": BETA, "weight_decay": DECAY, "fp32_matmul_prec": "highest"}
    return cls(params, **{**given, **changed})


def run(opt, params, steps):
    for of_step in steps:
        for p, g in zip(params, of_step, strict=True):
            p.grad = g.clone()
        opt.step()


def assert_near(params, expected):
    for p, q in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=1e-6, atol=1e-6)


def assert_equal(params, expected):
    assert all(torch.equal(p, q) for p, q in zip(params, expected, strict=True))


def method(decoupled):
    return "decoupled" if decoupled else "l2"


def test_all_arguments_by_position():
    params, steps = parameters(), gradients()
    args = (LR, BETA, False, DECAY, False, False, None, None, "highest", "polar_express", 8, "spectral", 0.5, None)
    opt = TensorParallelMuon(params, *args, "duplicated")
    expected = reference(
        params, steps, lambda *_: (False, "l2"), lambda u, _: 0.5 * spectral(*u.shape) * iterated(u, 8, "polar_express")
    )
    run(opt, params, steps)
    assert_near(params, expected)


BOTH = list(itertools.product([True, False], repeat=2))


@pytest.mark.parametrize(("nesterov", "decoupled"), BOTH)
@pytest.mark.parametrize(("of_group", "of_group_decoupled"), BOTH)
@pytest.mark.parametrize("how", ["constructor", "add_param_group", "load_state_dict", "between steps"])
def test_the_groups_own_value_counts(nesterov, decoupled, of_group, of_group_decoupled, how):
    params, steps = parameters(), gradients()
    before = 1 if how == "between steps" else 0

    def settings_of(step, index):
        own = index == 1 and step >= before
        return (of_group, method(of_group_decoupled)) if own else (nesterov, method(decoupled))

    expected = reference(params, steps, settings_of)
    own = {"nesterov": of_group, "use_decoupled_weight_decay": of_group_decoupled}
    given = {"nesterov": nesterov, "use_decoupled_weight_decay": decoupled}
    groups = [{"params": [params[0], params[2]]}, {"params": [params[1]]}]
    if how == "constructor":
        opt = optimizer([groups[0], {**groups[1], **own}], **given)
    elif how == "add_param_group":
        opt = optimizer([groups[0]], **given)
        opt.add_param_group({**groups[1], **own})
    elif how == "load_state_dict":
        saved = optimizer([groups[0], {**groups[1], **own}], **given).state_dict()
        opt = optimizer(groups, nesterov=not nesterov, use_decoupled_weight_decay=not decoupled)
        opt.load_state_dict(saved)
    else:
        opt = optimizer(groups, **given)
        run(opt, params, steps[:1])
        opt.param_groups[1].update(own)
    run(opt, params, steps[before:])
    assert_near(params, expected)
    default = {key: value != (how == "load_state_dict") for key, value in given.items()}
    different = [{key: each[key] for key in each if each[key] != default[key]} for each in (given, own)]
    assert opt.settings().get("of_groups", {}) == {i: each for i, each in enumerate(different) if each}


@pytest.mark.parametrize("kind", ["decoupled", "l2", "independent", "palm"])
@pytest.mark.parametrize("cls", [TensorParallelMuon, PolarGrad, "adamuon"])
def test_kinds_of_weight_decay(kind, cls):
    given = {} if cls == "adamuon" else {"cls": cls}
    if cls == "adamuon":
        given = {"cls": TensorParallelAdaptiveMuon, "moment2_method": "adamuon"}
    by_argument, by_group, decayed = parameters(), parameters(), parameters()
    steps = gradients(steps=1)
    run(optimizer(by_argument, weight_decay_method=kind, **given), by_argument, steps)
    run(optimizer([{"params": by_group, "weight_decay_method": kind}], **given), by_group, steps)
    assert_equal(by_argument, by_group)
    # the first step of the same optimizer without decay, from where decay puts the parameter or the gradient
    factor = {"decoupled": LR * DECAY, "independent": DECAY, "palm": LR**2 * DECAY, "l2": 0.0}[kind]
    of_l2 = DECAY if kind == "l2" else 0.0
    steps = [[g + of_l2 * p.detach() for g, p in zip(steps[0], decayed, strict=True)]]
    for p in decayed:
        p.data *= 1 - factor
    run(optimizer(decayed, **{**given, "weight_decay": 0.0}), decayed, steps)
    assert_near(by_argument, decayed)


def test_a_kind_that_contradicts_the_flag_is_refused():
    for kind in ("decoupled", "independent", "palm"):
        with pytest.raises(
            ValueError, match=f"weight_decay_method '{kind}' contradicts use_decoupled_weight_decay False"
        ):
            optimizer(parameters(), weight_decay_method=kind, use_decoupled_weight_decay=False)
    with pytest.raises(ValueError, match=r"namo compares the norms .* which L2 decay would add to"):
        optimizer(parameters(), TensorParallelAdaptiveMuon, moment2_method="namo", weight_decay_method="l2")
    opt = optimizer(parameters(), TensorParallelAdaptiveMuon, moment2_method="namo")
    params, before = opt.param_groups[0]["params"], parameters()
    opt.param_groups[0].update(use_decoupled_weight_decay=False)
    with pytest.raises(ValueError, match="namo compares the norms"):
        run(opt, params, gradients(steps=1))
    assert_equal(params, before)


@pytest.mark.parametrize("cls", [TensorParallelMuon, TensorParallelAdaptiveMuon])
def test_the_positional_order_of_emerging_optimizers_is_refused(cls):
    message = (
        rf"{cls.__name__}: nesterov must be True or False, got 0.1: the positional order of emerging-optimizers is "
        r"\(params, lr, momentum, weight_decay\), here it is another; give all but params by name"
    )
    with pytest.raises(TypeError, match=message):
        cls(parameters(), 0.02, 0.95, 0.1)


@pytest.mark.parametrize("key", ["nesterov", "use_decoupled_weight_decay", "split_qkv", "cuda_graphs"])
@pytest.mark.parametrize("value", [1, 0.0, None, "no"])
def test_a_flag_that_is_no_bool_is_a_type_error(key, value):
    with pytest.raises(TypeError, match=f"TensorParallelMuon: {key} must be True or False, got {value!r}"):
        optimizer(parameters(), **{key: value})
    if key in ("nesterov", "use_decoupled_weight_decay"):
        saved = optimizer(parameters()).state_dict()
        saved["param_groups"][0][key] = value
        opt = optimizer(parameters())
        with pytest.raises(TypeError, match=f"{key} must be True or False"):
            opt.load_state_dict(saved)
        assert isinstance(opt.param_groups[0][key], bool)


OLD_GROUPS = [
    {"lr": LR, "momentum": BETA, "weight_decay": DECAY},  # ours before, and emerging-optimizers'
    {"lr": LR, "momentum_beta": BETA, "weight_decay": DECAY},  # Megatron's first one
    {"lr": LR, "momentum_beta": BETA, "weight_decay": DECAY, "use_nesterov": False, "use_decoupled_weight_decay": True},
]


@pytest.mark.parametrize("group", OLD_GROUPS)
def test_a_state_dict_of_the_original_goes_on(group):
    params, steps = parameters(), gradients(steps=4)
    expected = reference(params, steps, lambda *_: (False, "decoupled"))
    first = optimizer(params, nesterov=False)
    run(first, params, steps[:2])
    saved = {
        "state": {i: {"momentum_buffer": first.state[p]["momentum_buffer"].clone()} for i, p in enumerate(params)},
        "param_groups": [{**group, "params": [0, 1, 2]}],
    }
    resumed = [torch.nn.Parameter(p.detach().clone()) for p in params]
    opt = optimizer(resumed, nesterov="use_nesterov" in group, momentum=0.1)
    opt.load_state_dict(saved)
    assert "momentum_beta" not in opt.param_groups[0]
    run(opt, resumed, steps[2:])
    assert_near(resumed, expected)


def test_the_other_name_of_a_setting_is_taken_over_or_refused():
    p, q, r = parameters()
    opt = optimizer([{"params": [p], "momentum_beta": 0.5, "use_nesterov": False}])
    opt.add_param_group({"params": [q], "momentum_beta": 0.5, "momentum": 0.5})
    assert [group["momentum"] for group in opt.param_groups] == [0.5, 0.5]
    assert [group["nesterov"] for group in opt.param_groups] == [False, True]
    message = "TensorParallelMuon reads 'momentum', of which 'momentum_beta' is another name, but a group has momentum="
    with pytest.raises(ValueError, match=message):
        opt.add_param_group({"params": [r], "momentum_beta": 0.5, "momentum": 0.6})
    assert len(opt.param_groups) == 2
    opt.param_groups[1]["momentum_beta"] = 0.7
    with pytest.raises(ValueError, match=message):
        opt.step()


class Plain(TensorParallelMuon):
    def orthogonalize(self, p, grad):
        return 2 * super().orthogonalize(p, grad)


class All(TensorParallelMuon):
    def orthogonalize(self, p, grad, **group_settings):
        return 2 * super().orthogonalize(p, grad, **group_settings)


class OfACopy(TensorParallelMuon):
    def orthogonalize(self, p, grad, **group_settings):
        wide = p.detach().float().clone()
        vars(wide).update(vars(p))
        return 2 * super().orthogonalize(wide, grad, **group_settings)


class Some(TensorParallelMuon):
    def orthogonalize(self, p, grad, num_ns_steps=5, scale_mode="spectral"):
        return 2 * super().orthogonalize(p, grad, num_ns_steps=num_ns_steps, scale_mode=scale_mode)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("kind", ["decoupled", "l2", "palm"])
@pytest.mark.parametrize("cls", [Plain, All, OfACopy, Some])
def test_an_override_of_any_signature_steps(cls, kind, nesterov):
    params, steps = parameters(), gradients()
    params[1].is_qkv = True
    own = {"num_ns_steps": 10, "scale_mode": "unit_rms_norm"}

    def doubled(u, index):
        if index == 0:
            return 2 * spectral(*u.shape) * iterated(u)
        parts = u.split([6, 3, 3]) if index == 1 else [u]
        return torch.cat([2 * (len(x) / x.shape[1]) ** 0.5 * iterated(x, 10) for x in parts])

    expected = reference(params, steps, lambda *_: (nesterov, kind), doubled)
    split = {"split_qkv": True, "is_qkv_fn": lambda p: hasattr(p, "is_qkv"), "qkv_split_shapes": (6, 3, 3)}
    groups = [{"params": params[:1]}, {"params": params[1:], **own}]
    run(optimizer(groups, cls, weight_decay_method=kind, nesterov=nesterov, **split), params, steps)
    assert_near(params, expected)


@pytest.mark.parametrize("cls", [TensorParallelMuon, PolarGrad, Scion, MuonHyperball])
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_failing_override_leaves_no_trace(cls, steps_before):
    class Fails(cls):
        now = False

        def orthogonalize(self, p, grad):
            if self.now and p.shape == SHAPES[2]:
                raise RuntimeError("in the step")
            return super().orthogonalize(p, grad)

    params = parameters()
    decay = {"weight_decay": 0.0} if cls in (Scion, MuonHyperball) else {}
    opt = optimizer(params, Fails, **decay)
    run(opt, params, gradients(steps=steps_before))
    before, state = [p.detach().clone() for p in params], copy.deepcopy(opt.state_dict()["state"])
    opt.now = True
    with pytest.raises(RuntimeError, match="in the step"):
        run(opt, params, gradients(steps=1, seed=7))
    assert_equal(params, before)
    after = opt.state_dict()["state"]
    if cls is MuonHyperball and not steps_before:  # it measures its matrices before the first step
        state = {i: {"momentum_buffer": 0 * p, "radius": p.norm()} for i, p in enumerate(before)}
    assert {i: kept.keys() for i, kept in after.items()} == {i: kept.keys() for i, kept in state.items()}
    assert all(torch.equal(value, state[i][key]) for i, kept in after.items() for key, value in kept.items())
    opt.now = False
    run(opt, params, gradients(steps=1, seed=8))
    others = parameters()
    run(optimizer(others, cls, **decay), others, [*gradients(steps=steps_before), *gradients(steps=1, seed=8)])
    assert_near(params, others)


def with_attributes_of(p, x):
    vars(x).update(vars(p))
    return x


def test_orthogonalize_takes_any_tensor_for_the_parameter():
    params = parameters([(12, 4), (6, 10), (2, 6, 4)], dtype=torch.bfloat16)
    params[0].is_qkv = True
    params[2].logical_matrices = Split(stacked=2)
    split = {"split_qkv": True, "is_qkv_fn": lambda p: hasattr(p, "is_qkv"), "qkv_split_shapes": (2, 1, 1)}
    groups = [{"params": params[:2], "num_ns_steps": 10}, {"params": params[2:]}]
    opt = optimizer(groups, nesterov=False, weight_decay=0.0, momentum=0.0, **split)
    for p, g in zip(params, gradients([p.shape for p in params], 1)[0], strict=True):
        update, own = g.float(), {"num_ns_steps": 10} if p.ndim == 2 else {}
        direct = opt.orthogonalize(p, update)
        wide = opt.orthogonalize(with_attributes_of(p, p.detach().float()), update, **own)
        clone = opt.orthogonalize(with_attributes_of(p, p.detach().clone()), update, **own)
        torch.testing.assert_close(wide, direct, rtol=1e-5, atol=1e-5)
        assert torch.equal(clone, wide)
        # the step does the same
        q = torch.nn.Parameter(with_attributes_of(p, p.detach().float()))
        with_attributes_of(p, q)
        alone = optimizer([{"params": [q], **own}], nesterov=False, weight_decay=0.0, momentum=0.0, lr=1.0, **split)
        before = q.detach().clone()
        run(alone, [q], [[update]])
        torch.testing.assert_close(before - q.detach(), wide, rtol=1e-5, atol=1e-5)
    assert opt.newton_schulz_calls == 0


@pytest.mark.parametrize("known", [True, False])
def test_settings_that_orthogonalize_is_given_count(known):
    (p, *_), (g, *_) = parameters(), gradients(steps=1)[0]
    opt = optimizer([{"params": [p], "num_ns_steps": 10, "extra_scale_factor": 0.5}])
    x = p if known else p.detach().clone()
    expected = spectral(6, 10) * iterated(g, 10 if known else 5) * (0.5 if known else 1.0)
    torch.testing.assert_close(opt.orthogonalize(x, g), expected)
    own = {"num_ns_steps": 8, "coefficient_type": "polar_express", "scale_mode": "unit_rms_norm"}
    expected = (6 / 10) ** 0.5 * iterated(g, 8, "polar_express") * (0.5 if known else 1.0)
    torch.testing.assert_close(opt.orthogonalize(x, g, lr=1.0, **own), expected)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        opt.orthogonalize(x, g, num_ns_steps=0)
    with pytest.raises(ValueError, match=r"grad must have the shape of p, \(6, 10\), got \(10, 6\)"):
        opt.orthogonalize(x, g.mT)
    # and change nothing for the parameters
    torch.testing.assert_close(opt.orthogonalize(p, g), 0.5 * spectral(6, 10) * iterated(g, 10))


def test_orthogonalize_refuses_what_the_constructor_would():
    opt = optimizer(parameters(), split_qkv=True, is_qkv_fn=lambda p: hasattr(p, "is_qkv"), qkv_split_shapes=(2, 1, 1))
    with pytest.raises(ValueError, match=r"TensorParallelMuon orthogonalizes matrices, but p has shape \(3,\)"):
        opt.orthogonalize(torch.ones(3), torch.ones(3))
    fused = torch.ones(6, 4)
    fused.is_qkv = True
    with pytest.raises(ValueError, match="6 rows is not a whole number of query groups"):
        opt.orthogonalize(fused, torch.ones(6, 4))


def _on_two_ranks(rank, _):
    groups = SimpleNamespace(tp=dist.group.WORLD, expt_tp=dist.group.WORLD)
    (whole, *_), (g, *_) = parameters(), gradients(steps=1)[0]
    p = torch.nn.Parameter(whole.detach().chunk(2)[rank].clone())
    p.tensor_model_parallel, p.partition_dim = True, 0
    opt = optimizer([p], pg_collection=groups)
    copied = with_attributes_of(p, p.detach().clone())
    update = g.chunk(2)[rank].contiguous()
    return (
        opt.orthogonalize(p, update),
        opt.orthogonalize(copied, update),
        opt.orthogonalize(copied, update, num_ns_steps=10),
    )


def test_a_copy_of_a_shard_lies_as_the_shard_does():
    (g, *_) = gradients(steps=1)[0]
    results = run_ranks(_on_two_ranks, 2)
    for index, steps in enumerate([5, 5, 10]):
        found = torch.cat([of_rank[index] for of_rank in results])
        torch.testing.assert_close(found, spectral(6, 10) * iterated(g, steps))


def test_without_an_override_three_dimensions_are_refused_unless_they_are_declared():
    stack = torch.nn.Parameter(torch.ones(2, 3, 4))
    with pytest.raises(ValueError, match="or declare a stack of 2 matrices"):
        TensorParallelMuon([stack])
    stack.logical_matrices = Split(stacked=2)
    TensorParallelMuon([stack])


@pytest.mark.parametrize("kind", ["decoupled", "l2", "independent", "palm"])
@pytest.mark.parametrize("cls", [TensorParallelMuon, Plain])
def test_gradients_are_never_written_to(cls, kind):
    params = parameters()
    opt = optimizer(params, cls, weight_decay_method=kind)
    for p, g in zip(params, gradients(steps=1)[0], strict=True):
        p.grad = g.clone()
    before = [p.grad.clone() for p in params]
    opt.step()
    assert_equal([p.grad for p in params], before)


def test_a_closure_has_gradients_and_its_loss_comes_back():
    (p, *_) = parameters()
    start = p.detach().clone()
    opt = optimizer([p])

    def closure():
        opt.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert opt.step(closure).item() == start.square().sum().item()
    assert_near([p], reference([start], [[2 * start]], lambda *_: (True, "decoupled")))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"is_qkv_fn": None}, "split_qkv needs is_qkv_fn"),
        ({"qkv_split_shapes": None}, "qkv_split_shapes"),
        ({"qkv_split_shapes": (6, 6)}, "3 or 4 positive integers, got 2"),
        ({"qkv_split_shapes": (6, 3, 3.0)}, "must be integers"),
        ({"qkv_split_shapes": (6, 3, -3)}, "must be positive"),
        ({"qkv_split_shapes": (5, 2, 1)}, "12 rows is not a whole number of query groups"),
    ],
)
def test_each_wrong_split_is_a_value_error_of_its_own(changed, message):
    p = parameters()[1]
    given = {"split_qkv": True, "is_qkv_fn": lambda p: True, "qkv_split_shapes": (6, 3, 3), **changed}
    with pytest.raises(ValueError, match=message):
        optimizer([p], **given)


def test_state_that_is_made_before_lets_torchs_checkpoints_read_an_independent_decay():
    model = torch.nn.Linear(4, 6, bias=False)
    before = model.weight.detach().clone()
    opt = optimizer([model.weight], weight_decay_method="independent")
    opt.init_state()
    assert get_optimizer_state_dict(model, opt)["state"]["weight"]["momentum_buffer"].shape == (6, 4)
    assert torch.equal(model.weight, before)
