"""Muon of plain torch, and AdamW beside it, take the steps of formulas, in fp64, fp32 and bf16."""

import copy
import operator

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, StepLR

from megatron_eopt import TensorParallelMuon
from megatron_eopt.optimizers.scion import Scion
from megatron_eopt.optimizers.with_adamw import Muon, WithAdamW
from megatron_eopt.orthogonalize.coefficients import get_coefficients
from megatron_eopt.plain import OptimizerConfig, build_optimizer
from tests.optimizers.field import assert_close_in_bf16
from tests.plain.made import (
    adamw_reference,
    gradients,
    muon,
    muon_reference,
    parameters,
    run,
    values,
)

STEPS = 20
ADAM = {"betas": (0.8, 0.9), "eps": 1e-6}


@pytest.mark.parametrize("nesterov", [False, True])
def test_twenty_steps_are_those_of_the_references(nesterov):
    """In fp64, where Newton-Schulz does not make differences of rounding visible."""
    tall, wide, convolution, vector, embedding = params = parameters(
        (12, 5), (6, 9), (4, 3, 2, 2), (7,), (11, 4), dtype=torch.float64
    )
    starts, steps = values(params), gradients(params, STEPS)
    rest = [{"params": [vector, embedding], "weight_decay": 0.1}]
    adam = {"adam_betas": (0.8, 0.9), "adam_eps": 1e-6, "adam_lr": 0.01}
    of_matrices = {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1, "coefficient_type": "quintic"}
    run(Muon([tall, wide, convolution], rest, nesterov=nesterov, **of_matrices, **adam), params, steps)
    for i, p in enumerate(params):
        own = [of_step[i] for of_step in steps]
        if i < 3:
            expected = muon_reference(starts[i], own, 0.03, 0.9, 0.1, get_coefficients("quintic", 5), nesterov)
        else:
            expected = adamw_reference(starts[i], own, 0.01, (0.8, 0.9), 1e-6, 0.1)
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-6)


def test_matrices_in_bf16_follow_the_reference():
    *matrices, vector = params = parameters((12, 7), (7, 12), (4, 3, 2, 2), (9,), dtype=torch.bfloat16)
    starts, steps = values(params), gradients(params, STEPS)
    run(Muon(matrices, [vector], lr=0.05, momentum=0.8), params, steps)
    for i, p in enumerate(matrices):
        start, own = starts[i].double(), [of_step[i].double() for of_step in steps]
        assert_close_in_bf16(p.detach(), start, muon_reference(start, own, 0.05, 0.8), roundings=STEPS)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_takes_the_steps_of_its_formula_and_of_torch(dtype, fused):
    torch.manual_seed(0)
    own = torch.nn.ModuleDict({"layer": torch.nn.Linear(5, 6), "norm": torch.nn.LayerNorm(6)}).to(dtype)
    other = copy.deepcopy(own)
    params, others = list(own.parameters()), list(other.parameters())
    decays = [0.3 if p.ndim > 1 else 0.0 for p in params]
    groups = [{"params": [p], "weight_decay": decay} for p, decay in zip(others, decays, strict=True)]
    starts, steps = values(params), gradients(params, STEPS)
    config = OptimizerConfig(name="adamw", lr=0.05, weight_decay=0.3, fused=fused, **ADAM)
    run(build_optimizer(own, config), params, steps)
    run(torch.optim.AdamW(groups, lr=0.05, **ADAM, fused=fused), others, steps)
    for i, (p, q, start) in enumerate(zip(params, others, starts, strict=True)):
        assert torch.equal(p, q)
        start, of_p = start.double(), [of_step[i].double() for of_step in steps]
        expected = adamw_reference(start, of_p, 0.05, weight_decay=decays[i], **ADAM)
        # torch keeps the moments in bf16 too: an update is off by less than 2^-4, and each step is rounded
        near = 2**-4 * (expected - start).abs().max() + STEPS**0.5 * 2**-8 * start.abs().max()
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=1e-6 if dtype.itemsize == 4 else near)


def test_add_param_group_adds_matrices():
    a, b, vector, later = params = parameters((4, 4), (5, 4), (4,), (3, 4))
    optimizer = Muon([a], [vector], lr=0.02, adam_lr=0.01)
    optimizer.add_param_group({"params": [b], "lr": 0.5, "ns_steps": 7})
    optimizer.add_param_group({"params": later})
    assert [(len(g["params"]), g["lr"], g["ns_steps"]) for g in optimizer.matrices.param_groups] == [
        (1, 0.02, 5),
        (1, 0.5, 7),
        (1, 0.02, 5),
    ]
    assert [group["params"] for group in optimizer.param_groups] == [[a], [vector], [b], [later]]
    assert [group["lr"] for group in copy.deepcopy(optimizer.param_groups)] == [0.02, 0.01, 0.5, 0.02]
    before = values(params)
    run(optimizer, params, gradients(params, 1))
    assert all((p.detach() != old).all() for p, old in zip(params, before, strict=True))


CHANGES = {
    "append": lambda groups: groups.append({}),
    "set": lambda groups: operator.setitem(groups, 0, {}),
    "+=": lambda groups: operator.iadd(groups, [{}]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_list_of_groups_is_refused(name):
    optimizer, _ = muon((4, 4), (4,))
    with pytest.raises(TypeError, match=r"add a group by add_param_group\(\)"):
        CHANGES[name](optimizer.param_groups)


A, B, VECTOR = parameters((4, 4), (5, 4), (4,))


@pytest.mark.parametrize(
    ("matrices", "rest", "error", "message"),
    [
        (B, [], TypeError, "muon_params must be a list of parameters or of groups, got one tensor"),
        ([A], B, TypeError, "adam_params must be a list of parameters or of groups, got one tensor"),
        ([], [], ValueError, "empty parameter list"),
        ([{"params": []}], [VECTOR], ValueError, r"at least one matrix: for all else take torch\.optim\.AdamW"),
        ([A], [A], ValueError, "more than one parameter group"),
    ],
)
def test_what_cannot_be_parameters_is_refused(matrices, rest, error, message):
    with pytest.raises(error, match=message):
        Muon(matrices, rest)


def test_a_gradient_that_adamw_refuses_moves_no_matrix():
    optimizer, params = muon((4, 4), (6, 4))
    before = values(params)
    params[0].grad, params[1].grad = torch.ones(4, 4), torch.ones(6, 4).to_sparse()
    with pytest.raises(ValueError, match="AdamW in Muon takes dense gradients"):
        optimizer.step()
    assert torch.equal(params[0], before[0])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf, 1e20, 1e16])
def test_a_gradient_too_large_for_adamw_skips_the_step(bad, fused):
    """The second moment of 1e20 would be infinite, and its parameter never move again."""
    both = [parameters((4, 4), (6, 4), (3,)) for _ in range(2)]
    made = [Muon([a], [("embedding", b), ("norm", c)], adam_fused=fused) for a, b, c in both]
    first, second, third = gradients(both[0], 3)
    second[2][1] = bad
    run(made[0], both[0], [first, second, third])
    run(made[1], both[1], [first, third])
    assert all(map(torch.equal, *both))
    assert made[0].skipped_steps() == 1


@pytest.mark.parametrize(
    ("key", "value"),
    [("adam_lr", -1.0), ("adam_lr", torch.nan), ("lr", None), ("betas", (1.0, 0.9)), ("eps", 0), ("weight_decay", -1)],
)
def test_a_load_refuses_what_adamw_cannot_have(key, value):
    optimizer, _ = muon((4, 4), (3,), steps=1)
    before = copy.deepcopy(optimizer.state_dict())
    state = copy.deepcopy(before)
    state["param_groups"][1][key] = value
    with pytest.raises((TypeError, ValueError), match=f"AdamW in Muon: {key} must "):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[1][key] == before["param_groups"][1][key]


@pytest.mark.parametrize("key", ["lr", "betas", "amsgrad", "adam_lr_at"])
def test_a_setting_that_a_state_lacks_is_adamws_present_one(key):
    optimizer, params = muon((4, 4), (3,), steps=1, adam_lr=0.3)
    state = copy.deepcopy(optimizer.state_dict())
    present = state["param_groups"][1].pop(key)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[1][key] == present
    assert key not in state["param_groups"][1]
    run(optimizer, params, gradients(params, 1))


@pytest.mark.parametrize("cls", [Muon, TensorParallelMuon])
def test_a_field_of_execution_is_refused_as_an_argument(cls):
    given = [parameters((4, 4)), []] if cls is Muon else [parameters((4, 4))]
    with pytest.raises(TypeError, match=r"field of Execution, pass execution=Execution\(momentum_dtype=\.\.\.\)"):
        cls(*given, momentum_dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("wrong", "right"), [("nestrov", "nesterov"), ("num_ns_steps", "ns_steps"), ("adam_beta", "adam_betas")]
)
def test_an_unknown_argument_is_refused_with_the_nearest(wrong, right):
    with pytest.raises(TypeError, match=rf"Muon\(\) got an unexpected .* {wrong!r}, did you mean {right!r}\?$"):
        Muon(parameters((4, 4)), [], **{wrong: 3})


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def of_four_groups(**settings):
    """Muon with two groups of matrices and two of AdamW, each of which has its own first rate."""
    a, b, embedding, vector = params = parameters((4, 4), (5, 4), (6, 4), (4,))
    rest = [{"params": [embedding]}, {"params": [vector], "lr": 6e-3}]
    optimizer = Muon([{"params": [a]}, {"params": [b], "lr": 0.05}], rest, **{"lr": 0.02, "adam_lr": 3e-3, **settings})
    return optimizer, params


@pytest.mark.parametrize(
    "given",
    [
        [1e-3, 2e-3, 4e-3, 8e-3],
        [1e-3, 1e-3, 4e-3, 1e-3],  # as the first group's, but not all are
        [0.02, 0.05, 1e-3, 2e-3],  # AdamW's alone
        [0.01, 0.05, 3e-3, 6e-3],  # of one group of matrices alone
    ],
    ids=str,
)
def test_each_group_steps_by_the_rate_that_was_set_for_it(given):
    optimizer, params = of_four_groups(weight_decay=0.0)
    starts, steps = values(params), gradients(params, 3)
    for of_step in steps:
        for group, rate in zip(optimizer.param_groups, given, strict=True):
            group["lr"] = rate
        run(optimizer, params, [of_step])
        assert rates(optimizer) == given
    for i, (p, start, rate) in enumerate(zip(params, starts, given, strict=True)):
        own = [of_step[i] for of_step in steps]
        expected = muon_reference(start, own, rate, 0.95) if i < 2 else adamw_reference(start, own, rate)
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=1e-6)


def test_a_rate_that_falls_to_adamws_leaves_that_alone():
    """Also in a run that is resumed where the two are equal, and until all rates are set."""
    settings = {"lr": 4e-3, "adam_lr": 1e-3}
    optimizer, params = muon((4, 4), (4,), **settings)
    for rate in (2e-3, 1e-3):
        optimizer.param_groups[0]["lr"] = rate
        run(optimizer, params, gradients(params, 1))
        assert rates(optimizer) == [rate, 1e-3]
    resumed, others = muon((4, 4), (4,), **settings)
    resumed.load_state_dict(optimizer.state_dict())
    for each, some in ((optimizer, params), (resumed, others)):
        run(each, some, gradients(some, 1))
        assert rates(each) == [1e-3, 1e-3]
        for group in each.param_groups:
            group["lr"] = 5e-4
        run(each, some, gradients(some, 1))
        assert rates(each) == pytest.approx([5e-4, 1.25e-4])


def test_a_first_rate_of_zero_has_no_ratio():
    optimizer, params = of_four_groups(lr=0.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.01
    run(optimizer, params, gradients(params, 1))
    assert rates(optimizer) == [0.01] * 4


def layer_decay(optimizer):
    """As timm sets rates: a scale of its own for each group."""
    for group, scale in zip(optimizer.param_groups, (0.125, 0.5, 0.125, 1.0), strict=True):
        group.setdefault("lr_scale", scale)
    while True:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * group["lr_scale"]
        yield


def of_torch(make):
    """A scheduler of torch as steps of a generator."""

    def schedule(optimizer):
        scheduler = make(optimizer)
        while True:
            yield
            scheduler.step()

    return schedule


SCHEDULES = {
    "layer decay": layer_decay,
    "a function each": of_torch(lambda o: LambdaLR(o, [lambda t, n=n: (1 + n) / (1 + t) for n in range(4)])),
    "one is constant": of_torch(lambda o: LambdaLR(o, [lambda t: 1 / (1 + t)] * 3 + [lambda t: 1.0])),
    "to one floor": of_torch(lambda o: CosineAnnealingLR(o, 3, eta_min=1e-4)),
    "warm-up": of_torch(lambda o: LambdaLR(o, lambda t: t / 4)),
    "halved": of_torch(lambda o: StepLR(o, 1, 0.5)),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_of_each_group_is_followed_as_in_torch(name):
    optimizer, params = of_four_groups()
    groups = [{"params": [p], "lr": rate} for p, rate in zip(parameters(*[(1,)] * 4), rates(optimizer), strict=True)]
    plain = torch.optim.SGD(groups)
    both = SCHEDULES[name](optimizer), SCHEDULES[name](plain)
    for _ in range(5):
        list(map(next, both))
        plain.step()
        run(optimizer, params, gradients(params, 1))
        assert rates(optimizer) == pytest.approx(rates(plain))


def test_a_state_of_torchs_muon_is_refused_by_name():
    torchs = torch.optim.Muon(parameters((4, 4)))
    optimizer, _ = muon((4, 4), (6, 4))
    with pytest.raises(ValueError, match=r"a state of torch\.optim\.Muon, .*: TensorParallelMuon loads it"):
        optimizer.load_state_dict(torchs.state_dict())


def test_around_takes_what_adamw_needs_from_torchs_defaults():
    matrix, embedding = params = parameters((4, 4), (6, 4))
    optimizer = WithAdamW(Scion([matrix], lr=0.01, radius=1.0), [embedding], {"lr": 3e-3})
    run(optimizer, params, gradients(params, 1))
    (group,) = optimizer.adamw.param_groups
    assert (group["lr"], group["betas"], group["eps"], group["weight_decay"]) == (3e-3, (0.9, 0.999), 1e-8, 0.01)
    with pytest.raises(ValueError, match=r"AdamW in Scion: lr must be a finite number of at least 0, got -1"):
        WithAdamW(Scion([matrix], lr=0.01, radius=1.0), [embedding], {"lr": -1})
