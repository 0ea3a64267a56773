"""Groups with an iteration and a scale of their own: they step, plan, count and resume as optimizers of their own."""

import pytest
import torch

from megatron_eopt import (
    Scion,
    TensorParallelAdaptiveMuon,
    TensorParallelMuon,
)
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
def test_groups_that_say_the_same_are_computed_as_one(method):
    plain = optimizer([{"params": group["params"]} for group in grouped()], method)
    said = {"num_ns_steps": 5, "coefficient_type": "quintic", "scale_mode": "spectral", "extra_scale_factor": 0.7}
    made = optimizer(grouped([said, {}, {"num_ns_steps": 5}, said]), method)
    assert_same(stepped(made), stepped(plain))
    assert made.explain() == plain.explain()
    assert len(made.prepare().plan.buckets) == len(plain.prepare().plan.buckets)


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


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), None, "x"])
def test_a_scale_that_is_no_number_is_refused(wrong):
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
