"""Groups with an iteration and a scale of their own: they step, plan, count and resume as optimizers of their own."""

import copy

import pytest
import torch

from megatron_eopt import (
    Scion,
    TensorParallelAdaptiveMuon,
    TensorParallelMuon,
)
from megatron_eopt.family import OPTIMIZERS
from tests.optimizers.field import drawn, matrix
from tests.plain.made import assert_same


def is_qkv(p):
    return getattr(p, "is_qkv", False)


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
METHODS = [None, "adamuon not aligned", "namo"]


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


@pytest.mark.parametrize("method", [None, "normuon"])
def test_settings_of_groups_travel_with_the_state(method):
    made = optimizer(grouped(), method)
    stepped(made)
    state = copy.deepcopy(made.state_dict())
    assert {key: state["param_groups"][0][key] for key in OWN[0]} == OWN[0]
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
                group[key] = made.defaults[key]
            group.update(settings)
        fresh = optimizer(grouped(own), method, **memory)
        take_weights(fresh, made)
        assert_same(stepped(made, [5]), stepped(fresh, [5]))


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


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (TensorParallelMuon, {"use_muon": False}, "one has use_muon=False: give it to AdamW"),
        (Scion, {"algorithm": "adamw"}, "one has algorithm='adamw': give it to AdamW"),
        (Scion, {"max_lr": 3.0}, "lr must lie in .*, got 3.0"),  # as Megatron's scheduler would raise lr to
    ],
)
def test_a_group_that_says_what_no_step_would_do_is_refused(cls, settings, message):
    with pytest.raises(ValueError, match=message):
        cls([{"params": [matrix(4, 6)], **settings}], lr=0.1)


@pytest.mark.parametrize("other", [{}, {"moment2_method": "normuon"}])
def test_a_second_moment_of_one_group_is_none_of_another(other):
    def stepped(*groups):
        parameters = [matrix(6, 10, number) for number, _ in enumerate(groups)]
        made = TensorParallelMuon([{"params": [p], **group} for p, group in zip(parameters, groups, strict=True)])
        for seed in range(2):
            step(made, seed)
        return weights(made)

    adamuon = {"moment2_method": "adamuon"}
    [alone] = stepped(adamuon)
    assert torch.equal(stepped(adamuon, other)[0], alone)


@pytest.mark.parametrize("name", ["muon", "soap", "dion", "spectron", "lion"])
def test_a_parameter_that_goes_to_another_group_has_its_settings(name):
    rank = {"rank": 2} if name == "spectron" else {}
    a, b, c = (matrix(6, 4, number) for number in range(3))
    opt = OPTIMIZERS[name].cls([{"params": [a, b], "lr": 0.1}, {"params": [c], "lr": 0.0}], weight_decay=0.0, **rank)

    def moved():
        before = [p.detach().clone() for p in (a, b, c)]
        for p in (a, b, c):
            p.grad = drawn((6, 4), 7)
        opt.step()
        return [not torch.allclose(x, p) for x, p in zip(before, (a, b, c), strict=True)]

    moved()
    assert moved() == [True, True, False]
    opt.param_groups[1]["params"].insert(0, opt.param_groups[0]["params"].pop())
    assert moved() == [True, False, False]


def test_a_default_may_be_for_one_group_alone():
    """The decay rate of a second moment, which the optimizer has for the groups that have one."""
    groups = [{"params": [matrix(6, 4)], "moment2_method": "normuon"}, {"params": [matrix(4, 6)]}]
    assert TensorParallelMuon(groups, beta2=0.9).param_groups[0]["beta2"] == 0.9
    with pytest.raises(ValueError, match="beta2 has no effect with moment2_method 'none'"):
        TensorParallelMuon([matrix(6, 4)], beta2=0.9)
