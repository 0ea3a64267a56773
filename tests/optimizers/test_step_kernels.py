"""Kernels of a step beside torch's passes, bit for bit: natively where there is a GPU, else in Triton's interpreter.

Triton asks for its interpreter when it is first imported, so these tests run in a process of their own, which a test
starts where it is missing.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_eopt import Execution, TensorParallelMuon
from megatron_eopt.matrices import (
    ATTRIBUTE,
    GATE_UP,
    experts,
    interleaved_gate_up,
    per_shard,
    query_key_value,
    transposed,
)
from megatron_eopt.optimizers.heavy_ball_muon import HeavyBallMuon
from megatron_eopt.step.momenta import step_kernels
from megatron_eopt.step.momenta.momentum_stack import Update
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, groups_of, placed, sharded
from tests.optimizers.family import build, having
from tests.optimizers.field import drawn
from tests.optimizers.on_gpu import captured, masking

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SERVES = INTERPRETED or torch.cuda.is_available()
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
interpreted = pytest.mark.skipif(not SERVES, reason="runs in a process that interprets Triton")
ranks_interpret = pytest.mark.skipif(not INTERPRETED, reason="the ranks are on the CPU, and interpret Triton")
without_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

BF16 = torch.bfloat16
SHAPES = [(20, 12), (20, 12), (12, 33), (70, 20)]
STEPS = 3
VARIANTS = {
    "plain": {},
    "no look-ahead": {"nesterov": False},
    "l2": {"weight_decay": 0.1, "weight_decay_method": "l2"},
    "independent": {"weight_decay": 0.1, "weight_decay_method": "independent"},
    "no decay": {"weight_decay": 0.0},
    "a small momentum": {"momentum": 0.3},
    "no momentum": {"momentum": 0.0},
    "momenta in bf16": {"momentum_dtype": BF16},
    "momenta in bf16, l2": {"momentum_dtype": BF16, "weight_decay": 0.1, "weight_decay_method": "l2"},
    "sent in fp32": {"fp32_matmul_prec": "highest"},
    "cautious decay": {"weight_decay": 0.1, "cautious_weight_decay": True},
    "state in host memory": {"offload_fraction": 1.0},
    "many chunks": {"workspace": 2**14},
}
METHODS = ("adamuon", "normuon", "namo")
RELATIVES = {
    **{name: (name, {}) for name in having("step_kernels") if name not in ("muon", "adaptive_muon")},
    **{method: ("adaptive_muon", {"moment2_method": method}) for method in METHODS},
    "adamuon, not aligned": ("adaptive_muon", {"moment2_method": "adamuon", "align_rms": False}),
    "cautious decay": ("muon", {"weight_decay": 0.1, "cautious_weight_decay": True}),
    "adamuon of held norms": ("muon_hyperball", {"moment2_method": "adamuon"}),
    "normuon of held norms": ("muon_hyperball", {"moment2_method": "normuon"}),
    "namo of held norms": ("muon_hyperball", {"moment2_method": "namo"}),
    "polargrad, looking ahead": ("polargrad", {"nesterov": True}),
    "mars_muon, l2": ("mars_muon", {"nesterov": True, "weight_decay": 0.1, "weight_decay_method": "l2", "gamma": 0.5}),
    "mars_muon, momenta in bf16": ("mars_muon", {"momentum_dtype": BF16, "gamma": 0.5}),
    "mars_muon, many chunks": ("mars_muon", {"workspace": 2**14}),
    "mars_muon, state in host memory": ("mars_muon", {"offload_fraction": 1.0}),
    "polargrad, l2": ("polargrad", {"nesterov": True, "weight_decay": 0.1, "weight_decay_method": "l2"}),
}
SIZED = ("polargrad", "polargrad, looking ahead", "muon_hyperball", "mars_muon")  # by what whole matrices have
# Whose square roots a CPU does not round to nearest, or whose sums of a line it takes in another order, unlike a GPU.
ROOTS = ("adamuon", "adamuon, not aligned", "normuon")


@without_triton
@pytest.mark.skipif(SERVES, reason="they run here")
@pytest.mark.parametrize("which", ["not wide", pytest.param("wide", marks=pytest.mark.wide)])
def test_kernels_and_torch_agree_in_the_interpreter(which):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", which, __file__]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout


def of_shapes(dtype=torch.float32, shapes=SHAPES):
    return [nn.Parameter(drawn(shape, n).to(DEVICE, dtype)) for n, shape in enumerate(shapes)]


def stepped(optimizer, parameters, steps=STEPS, dtype=None):
    """Weights and state after steps, in the second of which a gradient is not finite, in the third one is missing."""
    for step in range(steps):
        for n, p in enumerate(parameters):
            p.grad_dtype = dtype or p.dtype
            p.grad = drawn(p.shape, 100 * step + n + 10).to(p.device, p.grad_dtype)
        if step == 1:
            parameters[0].grad.view(-1)[0] = torch.nan
        if step == 2:
            parameters[-1].grad = None
        optimizer.step()
    state = [x for p in parameters for x in optimizer.state[p].values() if isinstance(x, torch.Tensor)]
    return [*(p.detach() for p in parameters), *state]


def both(row, params=of_shapes, on=masking, groups=list, more=None, **settings):
    """What both forms leave of an optimizer's steps."""
    left = []
    for form in ("torch", "triton"):
        parameters = params()
        optimizer = on(build(row, groups(parameters), step_kernels=form, **settings))
        left.append(stepped(optimizer, parameters, **(more or {})))
    by_torch, by_triton = left
    assert len(by_torch) == len(by_triton)
    return list(zip(by_torch, by_triton, strict=True))


def assert_equal(pairs, rooted=False):
    for n, (expected, found) in enumerate(pairs):
        assert found.dtype == expected.dtype
        if rooted and DEVICE == "cpu":
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-6)
            continue
        if DEVICE == "cuda":  # where torch's own kernels may fuse other operations, which the iteration makes larger
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
            continue
        assert torch.equal(expected, found), (
            f"tensor {n}: off by {(expected.double() - found.double()).abs().max():.1e}"
        )


@interpreted
@pytest.mark.parametrize("on", [lambda optimizer: optimizer, masking], ids=["on a CPU", "with a flag"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
def test_steps_are_those_of_torch(dtype, on):
    assert_equal(both("muon", lambda: of_shapes(dtype), on))


@pytest.mark.wide
@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
@pytest.mark.parametrize("variant", VARIANTS)
def test_settings_have_the_same_effect(variant, dtype):
    assert_equal(both("muon", lambda: of_shapes(dtype), **VARIANTS[variant]))


@interpreted
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in RELATIVES), *((name, BF16) for name in SIZED)]
)
def test_relatives_take_the_same_steps(name, dtype):
    row, settings = RELATIVES[name]
    assert_equal(both(row, lambda: of_shapes(dtype), **settings), rooted=name in ROOTS)


@interpreted
@pytest.mark.parametrize("nesterov", [False, True])
def test_nuclear_norms_are_of_momenta_as_they_are_kept(nesterov):
    pairs = both("polargrad", nesterov=nesterov, momentum_dtype=BF16, lr=0.1)
    starts = of_shapes()
    for start, (expected, found) in zip(starts, pairs, strict=False):
        step = (expected - start).norm()
        assert (found - expected).norm() <= 1e-3 * step  # of momenta in fp32, which torch takes
    assert_equal(pairs[len(starts) :])


@interpreted
def test_heavy_balls_of_more_dimensions_take_the_same_steps():
    left = []
    for form in ("torch", "triton"):
        parameters = of_shapes(shapes=[(6, 3, 2, 2), (20, 12)])
        optimizer = HeavyBallMuon(parameters, lr=0.02, weight_decay=0.1, execution=Execution(step_kernels=form))
        left.append(stepped(optimizer, parameters))
    assert_equal(zip(*left, strict=True))


def lying_otherwise():
    transposed, apart = (p.detach() for p in of_shapes(BF16, [(12, 20), (24, 24)]))
    parameters = [nn.Parameter(transposed.T), nn.Parameter(apart[::2, ::2])]
    return [*parameters, *of_shapes(shapes=[(0, 5), (1, 5), (3, 1100), (1100, 3)])]


@interpreted
@pytest.mark.parametrize(("dtype", "method"), [(None, "none"), *((torch.float32, each) for each in ("none", *METHODS))])
def test_gradients_may_be_wider_and_lie_otherwise(dtype, method):
    pairs = both("muon", lying_otherwise, lr=0.02, more={"dtype": dtype}, moment2_method=method)
    assert_equal(pairs, rooted=method in ROOTS)


@interpreted
def test_a_rule_of_momenta_that_kernels_lack_is_refused():
    def sums(momenta, gradients, beta, nesterov, ok):
        raise AssertionError("kernels do not call it")

    class Own(TensorParallelMuon):
        def update(self, stack):
            u = yield stack.momentum(sums)
            return Update((yield stack.orthogonalize(u)), stack.scale)

    parameters = of_shapes()
    before = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="no rule sums of momenta: set step_kernels='torch'"):
        Own(parameters, execution=Execution(step_kernels="triton")).step()
    assert_equal(zip(before, [p.detach() for p in parameters], strict=True))


def of_weights(self, stack):
    u = yield stack.momentum()
    O = yield stack.orthogonalize(u)
    norms = torch.stack([weight.norm() for weight in stack.shards("weight")])
    return Update(O, stack.scale * norms)


def of_gradients_in_a_group(self, stack):
    u = yield stack.momentum()
    if stack.group_number:
        u = [g.clone() for g in stack.shards("gradient")]
    return Update((yield stack.orthogonalize(u)), stack.scale)


@interpreted
@pytest.mark.parametrize("update", [of_weights, of_gradients_in_a_group])
def test_a_rule_of_a_users_takes_the_steps_of_torch(update):
    def stepped(form):
        parameters = of_shapes(shapes=[(8, 4), (8, 4)])
        for p in parameters:
            p.logical_matrices = query_key_value([2, 1, 1])
        groups = [{"params": [p]} for p in parameters]
        cls = type("Own", (TensorParallelMuon,), {"update": update})
        optimizer = cls(groups, lr=0.1, weight_decay=0.0, execution=Execution(step_kernels=form))
        for n in range(STEPS):
            for p in parameters:
                p.grad = drawn(p.shape, n).to(DEVICE)
            optimizer.step()
        return [p.detach() for p in parameters]

    torch.testing.assert_close(stepped("triton"), stepped("torch"))


LOGICAL = {
    "query, key and value": ((64, 12), query_key_value([8, 4, 4])),
    "heads": ((64, 12), query_key_value([8, 4, 4], per_head=True)),
    "gate and up": ((32, 12), GATE_UP),
    "experts": ((3, 10, 16), experts(3)),
    "experts of gate and up": ((3, 12, 8), experts(3, GATE_UP)),
    "experts (in, out)": ((3, 8, 12), transposed(experts(3, GATE_UP))),
    "experts by turns (in, out)": ((3, 8, 12), transposed(experts(3, interleaved_gate_up(1)))),
    "columns": ((12, 32), transposed(per_shard(a=None, b=None))),
    "a transposed matrix": ((12, 32), transposed()),
}


BY_TORCH = {
    "muon": ("muon", {}),
    "bf16 momenta": ("muon", {"momentum_dtype": BF16}),
    **{method: ("muon", {"moment2_method": method}) for method in METHODS},
    **{name: RELATIVES[name] for name in SIZED},
}


@pytest.mark.wide
@interpreted
@pytest.mark.parametrize("of", BY_TORCH)
@pytest.mark.parametrize("name", LOGICAL)
def test_logical_matrices_take_the_same_steps(name, of):
    (row, settings), (shape, split) = BY_TORCH[of], LOGICAL[name]

    def params():
        several, single = of_shapes(shapes=[shape, (12, 8)])
        setattr(several, ATTRIBUTE, split)
        return [several, single]

    assert_equal(both(row, params, **settings), rooted=of in ROOTS)


@interpreted
@pytest.mark.parametrize("method", ["none", *METHODS])
def test_groups_have_their_own_settings(method):
    def groups(parameters):
        a, b, c, d = parameters
        own = {"weight_decay": 0.2, "weight_decay_method": "palm", "momentum": 0.5}
        own |= {} if method == "none" else {"beta2": 0.3}
        return [
            {"params": [a, c], "nesterov": False, "lr": 0.5},
            {"params": [b], "extra_scale_factor": 0.3},
            {"params": [d], **own},
        ]

    assert_equal(both("muon", groups=groups, lr=0.02, moment2_method=method), rooted=method in ROOTS)


@interpreted
@pytest.mark.parametrize("name", ["muon", "adamuon", "normuon", *SIZED])
def test_rates_may_be_tensors_as_in_a_captured_step(name):
    row, settings = RELATIVES.get(name, (name, {}))
    l2 = {} if row == "muon_hyperball" else {"weight_decay": 0.3, "weight_decay_method": "l2"}

    def groups(parameters):
        return [{"params": parameters[:2]}, {"params": parameters[2:], **l2}]

    pairs = both(row, on=captured, groups=groups, more={"steps": 2}, **{"lr": 0.1, **settings})
    assert_equal(pairs, rooted=name in ROOTS)


@interpreted
def test_tables_are_made_again_only_where_an_address_changes(monkeypatch):
    sent = []
    send = step_kernels.on_device
    monkeypatch.setattr(step_kernels, "on_device", lambda *given: sent.append(given) or send(*given))
    parameters = of_shapes()
    optimizer = TensorParallelMuon(parameters, lr=0.02, execution=Execution(step_kernels="triton"))
    for step in range(4):
        for n, p in enumerate(parameters):
            new = drawn(p.shape, 10 * step + n).to(p.device)
            p.grad = new if p.grad is None or step == 3 else p.grad.copy_(new)
        before = len(sent)
        kept = [p.grad for p in parameters]
        optimizer.step()
        assert (len(sent) > before) == (step in (0, 3)), step
        del kept


@interpreted
def test_what_kernels_cannot_do_is_refused_by_name():
    parameters = [("w", nn.Parameter(torch.randn(8, 6, device=DEVICE, dtype=torch.float64)))]
    parameters[0][1].grad = torch.ones_like(parameters[0][1])
    with pytest.raises(ValueError, match=r"step_kernels='triton' cannot serve: w is in torch.float64"):
        TensorParallelMuon(parameters, execution=Execution(step_kernels="triton")).step()


@pytest.mark.skipif(SERVES, reason="kernels serve here")
def test_a_cpu_takes_torch_and_refuses_kernels():
    (p,) = of_shapes(shapes=[(4, 3)])
    p.grad = torch.ones_like(p)
    optimizer = TensorParallelMuon([p])
    optimizer.step()
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"step_kernels='triton' cannot serve: no GPU.* 'torch' serves|cannot serve"):
        TensorParallelMuon([p], execution=Execution(step_kernels="triton")).step()
    assert torch.equal(p, before)


def on_some_ranks(rank, ranks, name):
    row, more = RELATIVES[name]
    cases = [
        (drawn((48, 20), 7), drawn((48, 20), 17), sharded(0)),
        (drawn((20, 48), 8), drawn((20, 48), 18), sharded(1)),
    ]
    parameters = [placed(weight, attributes, rank, ranks) for weight, _, attributes in cases]
    optimizer = build(row, parameters, lr=0.02, pg_collection=groups_of(ranks), step_kernels="triton", **more)
    for p, (_, gradient, attributes) in zip(parameters, cases, strict=True):
        p.grad = cut(gradient, attributes, rank, ranks)
    optimizer.step()
    return [p.detach() for p in parameters]


@pytest.mark.wide
@ranks_interpret
@pytest.mark.parametrize("name", [*METHODS, *SIZED])
def test_two_ranks_step_as_one_does(name):
    [(tall, wide)] = run_ranks(on_some_ranks, 1, name)
    parts = run_ranks(on_some_ranks, 2, name)
    assert_equal([(tall, torch.cat([part[0] for part in parts])), (wide, torch.cat([part[1] for part in parts], 1))])
