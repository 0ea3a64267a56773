"""What torch promises of every optimizer: closures, groups, state dicts, copies, schedulers, refusals."""

import copy
import io
import pickle

import pytest
import torch

from megatron_eopt.family import OPTIMIZERS
from tests.matrices.models import kinds
from tests.optimizers.family import (
    ELEMENTWISE,
    FURTHER,
    RECORDS,
    VARIANTS,
    build,
    every,
    every_class,
    every_class_with_state,
    every_variant,
    having,
    matrices,
    take,
)
from tests.optimizers.field import drawn
from tests.optimizers.on_gpu import captured, masking
from tests.orthogonalize.test_bases import KINDS, gradients_of_kind


def parameters(optimizer):
    return [p.detach().clone() for group in of_matrices(optimizer) for p in group["params"]]


def of_matrices(optimizer):
    return getattr(optimizer, "matrices", optimizer).param_groups


def as_dtype(params, dtype):
    return [torch.nn.Parameter(p.detach().to(dtype)) for p in params]


def assert_equal(one, other):
    for a, b in zip(parameters(one), parameters(other), strict=True):
        assert torch.equal(a, b)


@every_class
def test_a_closure_is_called_once_with_gradients_enabled(name):
    own, other = matrices(1), matrices(1)
    target = torch.ones(6, 4)
    called = []

    def closure():
        called.append(torch.is_grad_enabled())
        closed.zero_grad()
        loss = (own[0] - target).square().sum()
        loss.backward()
        return loss

    closed, plain = build(name, own), build(name, other)
    with torch.no_grad():
        loss = closed.step(closure)
    other[0].grad = 2 * (other[0].detach() - target)
    assert plain.step() is None
    assert called == [True]
    torch.testing.assert_close(loss, (matrices(1)[0] - target).square().sum())
    torch.testing.assert_close(own[0], other[0])


# What a second group says, of what an optimizer has, so that its steps are other ones.
OF_GROUP = {"lr": 0.05, "momentum": 0.5, "momentum_beta": 0.5, "betas": (0.3, 0.6), "ns_steps": 8}
OF_GROUP |= {"num_ns_steps": 7, "coefficient_type": "polar_express", "extra_scale_factor": 0.5}


@every_class
def test_groups_have_settings_of_their_own_and_may_be_added(name):
    together, apart, plain = (as_dtype(matrices(3), torch.float64) for _ in range(3))
    known = of_matrices(build(name, matrices(1)))[0]
    own = {key: value for key, value in OF_GROUP.items() if key in known} | RECORDS[name].first_group
    both = build(name, [{"params": together[:1]}, {"params": together[1:2], **own}])
    alone = [build(name, apart[:1]), build(name, [{"params": apart[1:2], **own}]), build(name, plain[1:2])]
    for step in range(6):
        if step == 2:
            both.add_param_group({"params": together[2:], **own})
            alone.append(build(name, [{"params": apart[2:], **own}]))
            if "k" in getattr(alone[-1], "counters", ()):
                alone[-1].init_state()  # with which the count begins
                alone[-1].param_groups[0]["k"] = 2  # the steps of an optimizer count for all its groups
        for several in (together, apart, plain):
            for number, p in enumerate(several):
                p.grad = drawn((6, 4), 10 * step + number, torch.float64)
        for each in (both, *alone):
            each.step()
    for ours, theirs in zip(together, apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)  # second moments of some are in fp32
    assert not torch.allclose(together[1], plain[1], rtol=1e-3)
    with pytest.raises(ValueError, match="lr must"):
        both.add_param_group({"params": matrices(1, seed=5), "lr": -1.0})
    assert len(of_matrices(both)) == 3


@every_variant
def test_a_stopped_run_goes_on_bit_for_bit(name):
    """From its state dict in a file, wherever it stopped and whatever the other optimizer was built with."""
    for dtype in (torch.float32, torch.bfloat16):
        straight = as_dtype(matrices(), dtype)
        whole = build(name, straight)
        take(whole, 6)
        for stop in (0, 1, 4):
            stopped = as_dtype(matrices(), dtype)
            first = build(name, stopped)
            first.init_state()
            take(first, stop)
            file = io.BytesIO()
            torch.save({"optimizer": first.state_dict(), "parameters": parameters(first)}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=True)
            resumed = [torch.nn.Parameter(p) for p in saved["parameters"]]
            second = build(name, resumed, lr=0.3)
            second.init_state()
            second.load_state_dict(saved["optimizer"])
            assert second.param_groups[0]["lr"] == 0.01
            take(second, 6 - stop, start=stop)
            for p, q in zip(resumed, straight, strict=True):
                assert torch.equal(p, q), (dtype, stop)
                for key, x in whole.state[q].items():
                    assert x.dtype == second.state[p][key].dtype, (key, dtype, stop)
                    assert torch.equal(x, second.state[p][key]), (key, dtype, stop)


# Kinds of parameters that are several matrices, of all that there are: rows by turns, one behind another, and stacks.
FUSED = [
    kinds()[name]
    for name in (
        "linear_qkv",
        "one query group",
        "mla kv_down",
        "linear_fc1",
        "experts fc1",
        "experts by turns (in, out)",
    )
]


@pytest.mark.parametrize("name", [name for name, (row, _) in VARIANTS.items() if row not in ELEMENTWISE])
def test_the_matrices_of_a_parameter_step_as_parameters(name):
    """But for momenta in bf16, whose random bits go by the name of a parameter."""
    settings = {"momentum_dtype": None} if name.endswith("in bf16") else {}
    for kind in FUSED:
        first, *steps = (kind.whole(12, seed) for seed in range(4))
        apart = as_dtype(first, torch.float64)
        whole = torch.nn.Parameter(kind.store([p.detach() for p in apart], 1)[0])
        whole.logical_matrices = kind.split
        fused, separate = build(name, [whole], **settings), build(name, apart, **settings)
        for step, gradients in enumerate(steps):
            if step == 2:  # torch copies a parameter without the attributes that it was given
                fused = copy.deepcopy(fused)
                [whole] = fused.param_groups[0]["params"]
            for p, g in zip(apart, gradients, strict=True):
                p.grad = g.double() * (0.01 + 0.3 * step)
            whole.grad = kind.store([p.grad for p in apart], 1)[0]
            fused.step()
            separate.step()
        expected = kind.store([p.detach() for p in apart], 1)[0]
        torch.testing.assert_close(whole.detach(), expected, rtol=1e-6, atol=1e-6)
        for number, p in enumerate(apart):  # state of a matrix has its number
            for key, x in separate.state[p].items():
                if f"{key}_{number}" in fused.state[whole]:
                    torch.testing.assert_close(fused.state[whole][f"{key}_{number}"], x, rtol=1e-4, atol=1e-6)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_as_on_a_gpu_is_that_of_a_cpu(name, dtype):
    """A GPU is not asked whether gradients are finite: a flag goes through the step, also through a captured one."""
    if name == "users_own":
        return
    both = [as_dtype(matrices(3), dtype) for _ in range(2)]
    flagged, plain = masking(build(name, both[0])), build(name, both[1])
    if hasattr(flagged, "cuda_graphs") and flagged.momentum_dtype is None and dtype == torch.float32:
        captured(flagged)
    flagged.init_state()
    for step, bad in enumerate([False, False, False, True, False]):
        for params in both:
            for i, p in enumerate(params):
                p.grad = drawn(p.shape, 10 * step + i).to(dtype)
        if bad:
            both[0][0].grad[2, 1] = torch.nan
            kept = [x.clone() for p in both[0] for x in (p, *flagged.state[p].values())]
            flagged.step()
            assert all(map(torch.equal, kept, (x for p in both[0] for x in (p, *flagged.state[p].values()))))
        else:
            flagged.step()
            plain.step()
        if step == 2:
            found = [x.clone() for p in both[0] for x in (p, *flagged.state[p].values())]
            expected = [x.clone() for q in both[1] for x in (q, *plain.state[q].values())]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=2**-7 if dtype == torch.bfloat16 else 1e-4, atol=1e-4)


@every_variant
def test_rows_that_are_scaled_stay_scaled(name):
    """Whatever an optimizer keeps of its weights: a step that is next to nothing leaves them where they are."""
    if name in FURTHER or name == "schedulefree":  # which averages as at the largest rate so far
        return
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
        params = as_dtype(matrices(), dtype)
        optimizer = build(name, params)
        factors = torch.tensor([1.0, 0.5, 1.0, 0.25, 0.0, 1.0])
        for steps in (0, 3):  # before the first step, too
            take(optimizer, steps)
            expected = [params[0].detach() * factors.to(dtype)[:, None], params[1].detach().clone()]
            optimizer.scale_rows(params[:1], [factors])
            assert all(map(torch.equal, params, expected))
        for group in optimizer.param_groups:
            group.update({"lr": 1e-9} | ({"weight_decay": 0.0} if "independent" in group.values() else {}))
        take(optimizer, 1)
        for found, wanted in zip(params, expected, strict=True):
            torch.testing.assert_close(found.detach(), wanted, rtol=tolerance, atol=tolerance)
        state = copy.deepcopy(optimizer.state_dict())["state"]  # which a graph would not let
        assert not any(x.requires_grad for kept in state.values() for x in kept.values() if torch.is_tensor(x))


@every_class
@pytest.mark.parametrize("way", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
def test_a_copy_is_another_optimizer_that_does_the_same(name, way):
    """Also one with a scheduler, which sets the step of the object that it was made for."""
    if name in ("users_own", "with_adamw"):
        return
    for steps in (0, 3):
        optimizer = build(name, matrices())
        optimizer._alpha = 0.5  # of a user's
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        take(optimizer, steps)
        other = way(optimizer)
        kept = parameters(other)
        take(optimizer, 3, start=steps)
        assert all(map(torch.equal, kept, parameters(other)))
        assert other._alpha == 0.5
        take(other, 3, start=steps)
        assert_equal(optimizer, other)


@every_class
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rate_may_be_a_tensor_of_one_entry(name, shape):
    """Which is loaded as it was saved, and may be changed in place."""
    rate, halved = torch.full(shape, 0.01), [build(name, matrices()), build(name, matrices(), lr=0.01)]
    own = build(name, matrices(), lr=rate)
    for each in (own, *halved):
        take(each, 2)
    rate.mul_(0.5)
    halved[1].param_groups[0]["lr"] = rate
    for group in halved[0].param_groups:
        group["lr"] *= 0.5
    halved[1].load_state_dict(copy.deepcopy(halved[1].state_dict()))
    for each in (own, *halved):
        take(each, 2, start=2)
    for p, *others in zip(parameters(own), *map(parameters, halved), strict=True):
        for q in others:
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@every_class
def test_a_parameter_without_gradient_is_left_as_it_is(name):
    p, q = matrices()
    optimizer = build(name, [p, q])
    before = q.detach().clone()
    for step in range(2):
        p.grad = matrices(1, seed=step)[0].detach()
        optimizer.step()
    assert torch.equal(q, before)


@pytest.mark.parametrize("name", having("maximize"))
def test_maximize_is_the_step_of_the_negated_gradient(name):
    up, down = matrices(1), matrices(1)
    for step in range(3):
        gradient = drawn((6, 4), step)
        up[0].grad, down[0].grad = gradient, -gradient
        if step == 0:
            ascends, descends = build(name, up, maximize=True), build(name, down)
        ascends.step()
        descends.step()
        assert torch.equal(up[0].grad, gradient)
    torch.testing.assert_close(up[0], down[0], rtol=0, atol=0)


@every
def test_parameters_of_several_dtypes_step_as_each_alone(name):
    dtypes = (torch.float32, torch.bfloat16, torch.float64)
    own, others = ([torch.nn.Parameter(matrices(1)[0].to(dtype)) for dtype in dtypes] for _ in range(2))
    together, alone = build(name, own), [build(name, [p]) for p in others]
    for step in range(3):
        for p, q in zip(own, others, strict=True):
            p.grad = drawn((6, 4), 1 + step).to(p.dtype)  # no multiple of the weight
            q.grad = p.grad.clone()
        together.step()
        for each in alone:
            each.step()
    for p, q in zip(own, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@every
def test_a_group_may_be_empty(name):
    own, other = matrices(), matrices()
    optimizer, expected = build(name, [{"params": []}, {"params": own}, {"params": []}]), build(name, other)
    for each in (optimizer, expected):
        take(each, 2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    take(optimizer, 1, start=2)
    take(expected, 1, start=2)
    assert_equal(optimizer, expected)


@every_class
def test_a_group_that_is_put_into_the_list_steps_or_is_refused(name):
    if name == "with_adamw":  # whose list is joined of two
        return
    own, other = matrices(3), matrices(3)
    put, added = build(name, own[:2]), build(name, other[:2])
    for each in (put, added):
        take(each, 1)
    clock = {"clock": 0} if "clock" in put.param_groups[0] else {}  # which counts steps
    put.param_groups.append({**put.param_groups[0], "params": own[2:], **clock})
    added.add_param_group({"params": other[2:]})
    for each in (put, added):
        take(each, 2, start=1)
    assert_equal(put, added)
    put.param_groups.append({"params": matrices(1)})
    with pytest.raises(ValueError, match=r"add it by add_param_group\(\)"):
        put.step()
    assert all(map(torch.equal, own, other))


@every_class
@pytest.mark.parametrize("steps_before", [0, 2])
def test_what_users_keep_stays_and_changes_no_step(name, steps_before):
    """In the state, and in groups, where it may be any tensor."""
    plain, own = build(name, matrices()), build(name, [{"params": matrices(), "mine": torch.arange(6.0)}])
    for each in (plain, own):
        take(each, steps_before)
    for p in of_matrices(own)[0]["params"]:
        own.state[p]["mine"] = torch.ones(1)
    other = build(name, matrices())
    for each in (plain, own):
        take(each, 3, start=steps_before)
    assert_equal(own, plain)
    other.load_state_dict(copy.deepcopy(own.state_dict()))
    assert torch.equal(other.param_groups[0]["mine"], torch.arange(6.0))
    for p, q in zip(of_matrices(own)[0]["params"], of_matrices(other)[0]["params"], strict=True):
        q.data.copy_(p.data)
    for each in (own, other):
        take(each, 2, start=9)
        assert all(each.state[p]["mine"] == 1 for p in of_matrices(each)[0]["params"])
    assert_equal(own, other)


@every_class_with_state
def test_a_tensor_that_users_put_in_the_state_is_taken(name):
    plain, own, began = (build(name, matrices()) for _ in range(3))
    began.state_dict() if name == "with_adamw" else began.init_state()
    for p, q in zip(own.param_groups[0]["params"], began.param_groups[0]["params"], strict=True):
        key, value = next(iter(began.state[q].items()))
        own.state[p][key] = value.clone()
    for each in (plain, own):
        take(each, 3)
    assert_equal(own, plain)


@every_class
def test_a_compiled_step_is_the_step(name):
    made = [build(name, matrices()) for _ in range(2)]
    take(made[0], 2)
    compiled = torch.compile(made[1].step, backend="eager")
    for step in range(2):
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in made[1].param_groups[0]["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        compiled()
    assert_equal(*made)


@every_variant
def test_a_state_of_no_steps_begins_at_weights_loaded_later(name):
    """As torch.distributed.checkpoint loads: into a state made before, also of an optimizer that has stepped."""
    expected = matrices()
    take(build(name, expected), 3)
    for steps in (0, 2):
        others = [torch.nn.Parameter(torch.full_like(p, 9.0).add(drawn((6, 4), 5))) for p in matrices()]
        optimizer = build(name, others)
        optimizer.init_state()
        at_start = copy.deepcopy(optimizer.state_dict())
        take(optimizer, steps, start=7)
        optimizer.load_state_dict(at_start)
        for p, q in zip(others, matrices(), strict=True):
            p.data.copy_(q)
        take(optimizer, 3)
        assert all(map(torch.equal, others, expected)), steps


@every_class
def test_a_step_leaves_what_torch_has_for_the_whole_process(name):
    before = torch.get_float32_matmul_precision(), torch.is_grad_enabled()
    torch.manual_seed(3)
    random = torch.random.get_rng_state()
    optimizer = build(name, matrices())
    take(optimizer, 2)
    assert (torch.get_float32_matmul_precision(), torch.is_grad_enabled()) == before
    assert torch.equal(torch.random.get_rng_state(), random)


@every_variant
def test_an_emptied_state_is_that_of_a_new_optimizer(name):
    """As loops of others reset an optimizer between phases of a training."""
    for cleared in (True, False):
        optimizer = build(name, matrices())
        take(optimizer, 4)
        expected = build(name, [torch.nn.Parameter(p) for p in parameters(optimizer)])
        if cleared:
            optimizer.state.clear()
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            optimizer.state[p] = {}
        for each in (optimizer, expected):
            take(each, 3, start=4)
        assert_equal(optimizer, expected)


@every_class
@pytest.mark.parametrize("moved_first", [True, False])
def test_a_parameter_takes_the_place_of_another(name, moved_first):
    """With its state, set before the group has it or after, as in renderers of splats; then one of another shape."""
    optimizer, kept = (build(name, matrices()) for _ in range(2))
    for each in (optimizer, kept):
        take(each, 2)
    for group in optimizer.param_groups:
        for i, old in enumerate(group["params"]):
            new = torch.nn.Parameter(old.detach().clone())
            state = optimizer.state.pop(old) if moved_first else None
            if moved_first:
                optimizer.state[new] = state
            group["params"][i] = new
            if not moved_first:
                optimizer.state[new] = optimizer.state.pop(old)
    for each in (optimizer, kept):
        take(each, 2, start=2)
    assert_equal(optimizer, kept)
    params = of_matrices(optimizer)[0]["params"]
    del optimizer.state[params[0]]
    [new] = params[:1] = matrices(1, (8, 4), seed=5)
    before = new.detach().clone()
    take(optimizer, 2)
    assert new.isfinite().all()
    assert not torch.equal(new, before)


@every
def test_a_parameter_that_goes_to_another_group_has_its_settings(name):
    p, q, r = matrices(3)
    optimizer = build(name, [{"params": [p, q], "lr": 0.05}, {"params": [r], "lr": 0.0}], weight_decay=0.0)
    take(optimizer, 2)
    before = [x.detach().clone() for x in (p, q, r)]
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
    take(optimizer, 1)
    assert [torch.allclose(*pair) for pair in zip(before, (p, q, r), strict=True)] == [False, True, True]


@every_class
def test_flat_partitions_are_refused_before_anything_changes(name):
    """ZeRO's are one vector in place of the parameters of a group."""
    params = matrices()
    optimizer = build(name, params)
    flat = torch.nn.Parameter(torch.cat([p.detach().flatten() for p in params]))
    before = flat.detach().clone()
    of_matrices(optimizer)[0]["params"][:] = [flat]
    flat.grad = torch.ones_like(flat)
    if name in ELEMENTWISE:
        optimizer.step()
        assert not torch.equal(flat, before)
        return
    with pytest.raises(ValueError, match=r"parameter 0 of group 0 has shape \(48,\).* fully_shard"):
        optimizer.step()
    assert torch.equal(flat, before)


@every_variant
def test_a_step_inside_autocast_is_the_step_outside(name):
    """Three steps of one optimizer in it, of another without; the closure stays inside."""
    dtypes = []

    def closure():
        dtypes.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    inside, outside = (build(name, matrices()) for _ in range(2))
    for step in range(3):
        gradients = [drawn((6, 4), 10 * step + i) for i in range(2)]
        for optimizer in (inside, outside):
            for p, gradient in zip(optimizer.param_groups[0]["params"], gradients, strict=True):
                p.grad = gradient.clone()
        outside.step()
        with torch.autocast("cpu", torch.bfloat16):
            inside.step(closure)
    assert dtypes == [torch.bfloat16] * 3
    assert_equal(inside, outside)
    for found, expected in zip(inside.state.values(), outside.state.values(), strict=True):
        for key, x in expected.items():
            assert torch.equal(found[key], x), key


@every_variant
def test_state_made_in_inference_mode_steps_as_any_other(name):
    """Trainers validate in it, and save their checkpoints."""
    saved, plain = (build(name, matrices()) for _ in range(2))
    with torch.inference_mode():
        getattr(saved, "eval_params", saved.init_state)()
        saved.state_dict()
    getattr(saved, "train_params", saved.init_state)()
    for optimizer in (saved, plain):
        take(optimizer, 2)
    assert_equal(saved, plain)


# Every optimizer, and further ways to follow factors.
WITH_FACTORS = {
    **{name: (name, {}) for name in OPTIMIZERS},
    "soap of KL factors": ("soap held", {}),
    "soap of KL factors, current": ("soap of current gradients", {"use_kl_shampoo": True}),
    "shampoo by eigh": ("shampoo held", {}),
    "psgd of a diagonal": ("psgd of a diagonal", {}),
}
whatever_factors = pytest.mark.parametrize(("name", "settings"), WITH_FACTORS.values(), ids=WITH_FACTORS)


@whatever_factors
def test_gradients_of_any_kind_and_size_leave_all_finite(name, settings):
    """As of tokens that a batch lacks, dead units, one sample, and of two sizes by turns."""
    sizes = [(1e-30, 1e-22), (1e-22, 1.0), (1.0, 1e-20), (1e4, 8e13), (8e13, 1e-15)]  # the bound on gradients is above
    cases = [(kind, wide, pair) for kind in KINDS for wide in (False, True) for pair in sizes]
    params = [torch.nn.Parameter(drawn((6, 32) if wide else (32, 6), i)) for i, (_, wide, _) in enumerate(cases)]
    optimizer = build(name, params, **settings)
    for step in range(8):
        for number, (p, (kind, wide, pair)) in enumerate(zip(params, cases, strict=True)):
            gradient = gradients_of_kind(kind, 32, torch.Generator().manual_seed(100 * step + number))
            gradient *= pair[step >= 3 and step % 2] / gradient.norm().clamp(min=1)
            p.grad = gradient.mT if wide else gradient
        optimizer.step()
        for case, p in zip(cases, params, strict=True):
            for key, x in {"weight": p, **optimizer.state[p]}.items():
                assert torch.isfinite(x).all(), (step, key, *case)
    assert not optimizer.skipped_steps()
