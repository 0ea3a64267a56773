"""Settings of groups: their iteration and scale are as an optimizer's alone; names of other packages; refusals."""

import copy
import inspect
import logging
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_eopt import (
    SOAP,
    DistributedMuon,
    Scion,
    Spectron,
    TensorParallelAdaptiveMuon,
    TensorParallelMuon,
)
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.megatron.summary import summary
from tests.optimizers.family import build, every, matrices
from tests.optimizers.field import drawn, matrix, run
from tests.optimizers.on_gpu import captured
from tests.optimizers.test_muon import is_qkv
from tests.plain.made import assert_same

COMMON = {
    "lr": 0.1,
    "fp32_matmul_prec": "highest",
    "extra_scale_factor": 0.7,
    "split_qkv": True,
    "is_qkv_fn": is_qkv,
    "qkv_split_shapes": (4, 2, 2),
}
OWN = [
    {"num_ns_steps": 7, "coefficient_type": "polar_express"},
    {"scale_mode": "unit_rms_norm", "extra_scale_factor": 0.5},
    {},
    {"coefficient_type": [(2.0, -1.5, 0.5)], "scale_mode": "shape_scaling"},
]
METHODS = [None, "adamuon", "adamuon not aligned", "normuon", "namo"]


def optimizer(groups, method=None, **settings):
    if method is None:
        return TensorParallelMuon(groups, **{**COMMON, **settings})
    name, *rest = method.split()
    return TensorParallelAdaptiveMuon(groups, moment2_method=name, align_rms=not rest, **{**COMMON, **settings})


def parameters(number=0):
    """Of every group, in shapes that other groups have too; the first one has no gradient in some steps."""
    return [
        matrix(6, 10, number, is_quiet=True),
        matrix(10, 6, number + 1),
        matrix(16, 10, number + 2, is_qkv=True),
    ]


def grouped(own=OWN):
    return [{"params": parameters(10 * number), **settings} for number, settings in enumerate(own)]


def in_fp64(groups):
    for p in (p for group in groups for p in group["params"]):
        p.data = p.data.double()
    return groups


def step(made, seed):
    for p in (p for group in made.param_groups for p in group["params"]):
        gradient = drawn(p.shape, seed) + p.detach()
        p.grad = None if seed == 1 and hasattr(p, "is_quiet") else gradient
    made.step()


def weights(made):
    return [p.detach().clone() for group in made.param_groups for p in group["params"]]


def take_weights(made, other):
    for p, q in zip((p for group in made.param_groups for p in group["params"]), weights(other), strict=True):
        p.data.copy_(q)


def stepped(made, seeds=range(3)):
    for seed in seeds:
        step(made, seed)
    return weights(made)


@pytest.mark.parametrize("method", METHODS)
def test_groups_are_what_optimizers_of_their_own_would_be(method):
    groups = in_fp64(grouped())
    alone = [optimizer(group["params"], method, **own) for group, own in zip(groups, OWN, strict=True)]
    expected = [p for each in alone for p in stepped(each)]
    actual = stepped(optimizer(in_fp64(grouped()), method))
    # groups of one iteration are one stack, which rounds otherwise, in fp64; second moments are in fp32
    bound = 1e-12 if method is None else 1e-6
    assert all((a - b).abs().max() <= bound * b.abs().max() for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_groups_that_say_the_same_are_planned_and_computed_as_one(method):
    plain = optimizer([{"params": group["params"]} for group in grouped()], method)
    said = {"num_ns_steps": 5, "coefficient_type": "quintic", "scale_mode": "spectral", "extra_scale_factor": 0.7}
    made = optimizer(grouped([said, {}, {"num_ns_steps": 5}, said]), method)
    assert_same(stepped(made), stepped(plain))
    assert made.explain() == plain.explain()
    assert len(made.prepare().plan.buckets) == len(plain.prepare().plan.buckets)


def test_the_plan_says_what_each_setting_gets():
    made = optimizer(grouped())
    table = made.explain()
    plan = made.prepare().plan
    of_buckets = {plan.matrices[bucket.matrices[0]].iteration for bucket in plan.buckets}
    own = f"5 Newton-Schulz steps of {((2.0, -1.5, 0.5),) * 5}"
    assert of_buckets == {"7 Newton-Schulz steps of polar_express", "5 Newton-Schulz steps of quintic", own}
    # at the end of the lines of its buckets, and once below with its restarts
    assert all(f": {name}, " in table for name in of_buckets)
    names = [matrix.name.split(",")[0] for matrix in plan.matrices]
    assert names[4::5] == [f"parameter 2 of group {number}" for number in range(4)]
    assert sorted(i for bucket in made.prepare().plan.buckets for i in bucket.matrices) == list(range(20))
    # matrices of two groups that differ in the scale alone are in one bucket
    assert len(plan.buckets) == len(optimizer(grouped(), "namo").prepare().plan.buckets)


WRONG = [
    ({"scale_mode": "spectal"}, "unknown scale_mode 'spectal': expected one of spectral, unit_rms_norm"),
    ({"coefficient_type": "quintc"}, "unknown coefficient type 'quintc'"),
    ({"coefficient_type": 3}, r"a coefficient set is a non-empty list of \(a, b, c\), .* got 3"),
    ({"coefficient_type": [(1.0, 2.0)]}, r"a coefficient set is a non-empty list of \(a, b, c\)"),
    ({"num_ns_steps": 0}, "num_ns_steps must be a whole number of at least 1, got 0"),
    ({"num_ns_steps": None}, "num_ns_steps must be a whole number of at least 1, got None"),
    ({"num_ns_steps": 7}, "quintic has 5 polynomials .* so it cannot be served in 7 Newton-Schulz steps"),
    ({"coefficient_type": "cubic5", "num_ns_steps": 4}, "cubic5 is served in exactly 5 Newton-Schulz steps, got 4"),
    ({"extra_scale_factor": "0.2"}, "extra_scale_factor must be a number, or a tensor of one entry, got '0.2'"),
    ({"extra_scale_factor": float("nan")}, "extra_scale_factor must be a finite number above 0, got nan"),
]


@pytest.mark.parametrize(("own", "message"), WRONG)
def test_wrong_settings_of_a_group_are_refused_by_the_number_of_the_group(own, message):
    with pytest.raises((TypeError, ValueError), match=f"group 1: .*{message}"):
        optimizer([{"params": [matrix()]}, {"params": [matrix()], **own}])
    made, untouched = optimizer(grouped()), optimizer(grouped())
    step(made, 0), step(untouched, 0)
    with pytest.raises((TypeError, ValueError), match=f"group 4: .*{message}"):
        made.add_param_group({"params": [matrix()], **own})
    state = made.state_dict()
    state["param_groups"][2].update(own)
    with pytest.raises((TypeError, ValueError), match=f"group 2: .*{message}"):
        made.load_state_dict(state)
    assert [set(group) for group in made.param_groups] == [set(group) for group in untouched.param_groups]
    assert_same(stepped(made), stepped(untouched))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"extra_scale_factor": None}, "must be a number, .* got None"),
        ({"scale_mode": ["spectral"]}, "unknown scale_mode"),
    ],
)
def test_the_constructor_refuses_what_groups_may_not_say(settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        optimizer([matrix()], **settings)


@pytest.mark.parametrize("method", [None, "normuon"])
def test_settings_of_groups_travel_with_the_state(method):
    made = optimizer(grouped(), method)
    stepped(made)
    state = copy.deepcopy(made.state_dict())
    assert {key: state["param_groups"][0][key] for key in OWN[0]} == OWN[0]
    assert {group["symmetric_products"] for group in state["param_groups"]} == {"torch"}
    assert all(group["plan_rates"] == state["param_groups"][0]["plan_rates"] for group in state["param_groups"])
    resumed = optimizer(grouped([{}] * 4), method)
    stepped(resumed, [5])  # planned for equal settings
    resumed.load_state_dict(state)
    take_weights(resumed, made)
    assert_same(stepped(resumed, [3, 4]), stepped(made, [3, 4]))


@pytest.mark.parametrize("method", [None, "adamuon"])
def test_a_changed_setting_is_in_force_in_the_next_step(method):
    # without a memory, so that a fresh optimizer does the same
    memory = {"momentum": 0.0, **({} if method is None else {"beta2": 0.0})}
    made = optimizer(grouped([{}] * 4), method, **memory)
    stepped(made)
    for own in (OWN, OWN[::-1], [{"extra_scale_factor": 0.25 * number} for number in range(1, 5)]):
        for group, settings in zip(made.param_groups, own, strict=True):
            for key in ("num_ns_steps", "coefficient_type", "scale_mode", "extra_scale_factor"):
                group.pop(key, None)
            group.update(settings)
        fresh = optimizer(grouped(own), method, **memory)
        take_weights(fresh, made)
        assert_same(stepped(made, [5]), stepped(fresh, [5]))


def test_a_setting_that_was_changed_to_a_wrong_one_is_refused_before_anything_is_changed():
    made = optimizer(grouped())
    before = stepped(made)
    momenta = [state["momentum_buffer"].clone() for state in made.state.values()]
    made.param_groups[2]["num_ns_steps"] = 0
    with pytest.raises(ValueError, match="at least 1, got 0"):
        step(made, 3)
    assert_same(weights(made), before)
    assert_same([state["momentum_buffer"] for state in made.state.values()], momenta)


def test_one_rung_serves_all_groups():
    made = TensorParallelMuon(
        [{"params": [matrix(8, 8)], "num_ns_steps": 10}, {"params": [matrix(8, 8)]}], symmetric_products="blocked"
    )
    step(made, 0)
    assert [group["symmetric_products"] for group in made.param_groups] == ["blocked", "blocked"]
    made.add_param_group({"params": [matrix(8, 8)], "scale_mode": "unit_rms_norm"})
    step(made, 0)
    assert made.param_groups[2]["symmetric_products"] == "blocked"
    assert made.param_groups[2]["plan_rates"] == made.param_groups[0]["plan_rates"]


def test_shorter_schedules_than_were_fitted_together_are_noted(caplog):
    with caplog.at_level(logging.WARNING):
        optimizer([{"params": [matrix()], "num_ns_steps": 5}, {"params": [matrix()], "num_ns_steps": 3}])
    assert [record.getMessage()[:38] for record in caplog.records] == ["3 Newton-Schulz steps of quintic are f"]


@pytest.mark.parametrize("method", METHODS)
def test_the_first_update_has_the_size_predicted_for_its_group(method):
    own = [{**settings, "weight_decay": 0.0, "momentum": 0.9 - number / 10} for number, settings in enumerate(OWN[:3])]
    groups = [{"params": [matrix(12, 48, number)], **settings} for number, settings in enumerate(own)]
    made = optimizer(groups, method, coefficient_type="polar_express", num_ns_steps=9)
    before = weights(made)
    step(made, 0)
    for old, new, group in zip(before, weights(made), made.param_groups, strict=True):
        actual = ((old - new) / 0.1).square().mean().sqrt().item()
        assert actual == pytest.approx(made.predicted_rms(12, 48, group), rel=0.03)
    plain = optimizer([matrix()], method, coefficient_type="polar_express", num_ns_steps=9)
    assert made.predicted_rms(12, 48) == plain.predicted_rms(12, 48)


@pytest.mark.parametrize("method", [None, "normuon"])
def test_matrices_that_took_part_are_counted(method):
    made = optimizer(grouped(), method)
    assert (made.newton_schulz_calls, made.matrices_per_step) == (0, 20)  # two, and q, k and v, in four groups
    step(made, 0)
    assert made.newton_schulz_calls == 20
    step(made, 1)  # four without a gradient
    assert made.newton_schulz_calls == 36
    made.add_param_group({"params": [matrix()]})
    assert made.matrices_per_step == 21
    step(made, 2)
    assert made.newton_schulz_calls == 57
    made.orthogonalize(made.param_groups[0]["params"][0], torch.ones(6, 10))
    for p in (p for group in made.param_groups for p in group["params"]):
        p.grad = None
    made.step()
    assert made.newton_schulz_calls == 57
    assert optimizer([matrix()]).newton_schulz_calls == 0


def test_a_step_that_is_made_parameter_by_parameter_counts_too():
    class Doubled(TensorParallelMuon):
        def orthogonalize(self, p, grad, **group_settings):
            return 2 * super().orthogonalize(p, grad, **group_settings)

    made, plain = Doubled(grouped(), **COMMON), optimizer(grouped(), lr=0.2, weight_decay=0.005)
    for actual, expected in zip(stepped(made, [0]), stepped(plain, [0]), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
    assert made.newton_schulz_calls == 20


def test_a_captured_step_is_the_step_of_all_groups_and_counts():
    plain, graphed = optimizer(grouped()), captured(optimizer(grouped()))
    for made in (plain, graphed):
        made.result = stepped(made, [0, 2, 3])
        assert made.newton_schulz_calls == 60
    assert_same(graphed.result, plain.result)
    graphed.param_groups[1]["scale_mode"] = "spectral"
    with pytest.raises(RuntimeError, match="only learning rate and weight decay may change"):
        step(graphed, 4)
    assert graphed.newton_schulz_calls == 60
    assert_same(weights(graphed), weights(plain))


def test_a_checkpoint_says_which_groups_have_settings_of_their_own():
    assert optimizer(grouped()).settings()["of_groups"] == {0: OWN[0], 1: OWN[1], 3: OWN[3]}
    assert optimizer(grouped()).settings()["extra_scale_factor"] == 0.7
    assert "of_groups" not in optimizer(grouped([{}, {}])).settings()


def test_the_summary_says_how_many_matrices_get_what():
    text = summary([optimizer(grouped())])
    assert " on this rank, tp_mode duplicated (argument), " in text
    assert (
        "20 matrices orthogonalized (5 by 5 steps of custom, 10 by 5 steps of quintic, 5 by 7 steps of polar_express, "
        "highest precision, symmetric products by torch), 20 local (exact), first update RMS 0.1 to 0.7 "
    ) in text
    text = summary([optimizer(grouped([{}, {"scale_mode": "unit_rms_norm"}]))])
    assert "10 matrices orthogonalized (10 by 5 steps of quintic, highest precision, " in text


def after_a_step(**settings):
    p = torch.nn.Parameter(torch.eye(6, 4))
    made = TensorParallelMuon([{"params": [p], **settings}], lr=0.1)
    p.grad = torch.ones_like(p)
    made.step()
    return made, p


def test_a_coefficient_that_is_written_to_is_in_force_in_the_next_step():
    steps = [[3.4445, -4.775, 2.0315] for _ in range(5)]
    settings = {"num_ns_steps": 5, "lr": 0.1}
    made, p = after_a_step(coefficient_type=steps, **settings)
    other, q = after_a_step(coefficient_type=copy.deepcopy(steps), **settings)
    steps[0][0] = 2.0
    other.param_groups[0]["coefficient_type"] = [[2.0, -4.775, 2.0315], *steps[1:]]
    made.step()
    other.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("old", [0.1, torch.tensor(0.1)])
def test_a_rate_may_become_a_number_of_numpy(old):
    made, p = after_a_step(lr=old)
    before = p.detach().clone()
    made.param_groups[0]["lr"] = np.float64(0.2)
    made.step()
    assert not torch.equal(p, before)


def test_a_flag_that_becomes_a_number_is_refused():
    made, _ = after_a_step()
    made.param_groups[0]["nesterov"] = 1
    with pytest.raises(TypeError, match="nesterov must be True or False, got 1"):
        made.step()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), None, "x"])
def test_a_scale_that_is_no_number_is_refused_before_anything_changes(wrong):
    class Scaled(TensorParallelMuon):
        def scale_factor_fn(self, rows, cols):
            return wrong

    p = torch.nn.Parameter(torch.eye(6, 4))
    made, before = Scaled([p], lr=0.1), p.detach().clone()
    p.grad = torch.ones_like(p)
    for _ in range(2):  # the second step is not refused for the first
        with pytest.raises(ValueError, match="scale_factor_fn of 6 rows and 4 columns must return a number, got "):
            made.step()
    assert torch.equal(p, before)
    assert not any(x.any() for x in made.state[p].values())


OTHER_NAMES = [
    (Scion, {"spectral_radius": 3.0}, {"radius": 3.0}),
    (Spectron, {"num_power_iter": 3, "rank": 2}, {"num_power_iterations": 3, "rank": 2}),
    (SOAP, {"use_eigh": True, "precondition_frequency": 1}, {"basis_method": "eigh", "precondition_frequency": 1}),
    (SOAP, {"use_eigh": False, "precondition_frequency": 1}, {"basis_method": "qr", "precondition_frequency": 1}),
    (SOAP, {"max_precond_dim": 4}, {"max_dim": 4}),
]


@pytest.mark.parametrize(("kind", "other", "own"), OTHER_NAMES)
def test_both_names_make_the_same_steps_and_the_default_others(kind, other, own):
    neither = {key: value for key, value in own.items() if key in other}
    weights = {"other": other, "own": own, "neither": neither}
    for way, settings in weights.items():
        weights[way] = matrix()
        run(kind([weights[way]], lr=0.01, **settings), weights[way], range(5))
    assert torch.equal(weights["other"], weights["own"])
    is_default = own.get("basis_method") == "qr"
    assert torch.equal(weights["neither"], weights["own"]) == is_default


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: Scion(p, radius=50.0, spectral_radius=1.0), TypeError, "spectral_radius is another name for radius"),
        (lambda p: Spectron(p, 1e-3, 2, 0.9, 0.0, 2, num_power_iter=1), TypeError, "num_power_iterations"),
        (lambda p: SOAP(p, use_eigh=True, basis_method="qr"), TypeError, "use_eigh is another name for basis_method"),
        (lambda p: SOAP(p, use_eigh="yes"), ValueError, "SOAP: unknown basis_method 'yes'"),
        (lambda p: SOAP(p, use_eigen=True), TypeError, "use_eigen"),
        (lambda p: TensorParallelMuon(p, spectral_radius=1.0), TypeError, "spectral_radius"),
    ],
)
def test_two_names_of_one_argument_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call([matrix()])


@pytest.mark.parametrize(
    "kind", [*(row.cls for row in OPTIMIZERS.values()), DistributedMuon], ids=lambda kind: kind.__name__
)
def test_an_unknown_argument_is_refused(kind):
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'weight_deca'"):
        kind([matrix()], weight_deca=0.1)


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_a_rate_of_minus_one_is_refused_wherever_it_comes_from(key):
    message = f"TensorParallelMuon: {key} must be a finite number of at least 0, got -1"
    with pytest.raises(ValueError, match=message):
        TensorParallelMuon([matrix()], **{key: -1})
    made, _ = after_a_step()
    with pytest.raises(ValueError, match=message):
        made.add_param_group({"params": [matrix()], key: -1})
    made.param_groups[0][key] = -1
    with pytest.raises(ValueError, match=message):
        made.step()


NUMBERS = [-1, 0, 0.5, 1, 2, 2.5, 64, math.nan, math.inf]
OTHERS = ["nonsense", None, True, False, (2.0, 0.9), [0.5], "spectral", "unit_rms_norm", "hold", "brake", "match"]
FURTHER = ["normuon", "l2", "independent", "low", "eigh", "current", "after", "kempnerforge", "cans"]


def refusal(name, params, settings):
    try:
        build(name, params, **settings)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


@every
def test_what_a_constructor_refuses_a_group_is_refused_too(name):
    """One setting beside defaults. A group may be stricter: there one sees whether a default was given."""
    taken = inspect.signature(OPTIMIZERS[name].cls.__init__).parameters
    made = build(name, matrices())
    refused = 0
    for key in sorted((made.defaults.keys() | made.settings_of_groups().keys()) & taken.keys()):
        for value in [*NUMBERS, *OTHERS, *FURTHER]:
            if (message := refusal(name, matrices(), {key: value})) is None:
                continue
            refused += 1
            of_group = refusal(name, [{"params": matrices(), key: value}], {})
            assert of_group is not None, f"{key}={value!r}: {message}"
    assert refused > 20


@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm"])
def test_soaps_scale_is_refused_at_every_door_where_nothing_is_orthogonalized(mode):
    message = f"scale_mode '{mode}' has no effect without orthogonalize"
    scaled = {"params": matrices(1), "scale_mode": mode}
    with pytest.raises(ValueError, match=message):
        SOAP(matrices(), scale_mode=mode)
    with pytest.raises(ValueError, match=message):
        SOAP([{"params": matrices(1)}, scaled])
    with pytest.raises(ValueError, match=message):
        SOAP([{**scaled, "orthogonalize": False}], orthogonalize=True, scale_mode="shape_scaling")
    made = SOAP(matrices())
    with pytest.raises(ValueError, match=message):
        made.add_param_group(dict(scaled))
    assert len(made.param_groups) == 1
    # where one group orthogonalizes, or all but one do, the scale is theirs
    SOAP([{**scaled, "orthogonalize": True}])
    SOAP(
        [{"params": matrices(1), "orthogonalize": False}, {"params": matrices(1)}], orthogonalize=True, scale_mode=mode
    )


ORDERS = """
import torch
from megatron_eopt.family import OPTIMIZERS
for row in OPTIMIZERS.values():
    optimizer = row.cls([torch.nn.Parameter(torch.ones(128, 128))])
    print(optimizer.settings(), optimizer.settings_of_groups(), list(optimizer.param_groups[0]))
"""


def test_settings_have_one_order_in_every_process():
    """Ranks compare them by a hash of what is printed."""
    printed = set()
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", ORDERS], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True
        )
        assert ran.returncode == 0, ran.stderr
        printed.add(ran.stdout)
    assert len(printed) == 1
