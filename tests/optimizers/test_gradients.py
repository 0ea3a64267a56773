"""Gradients that no step can take: sparse, placed otherwise, not finite, too large, or not there on every rank."""

import logging

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from megatron_eopt import TensorParallelMuon
from megatron_eopt.settings.groups import MOMENTUM_STEPS
from megatron_eopt.step.nonfinite import LARGEST_NORM, MAX_IN_A_ROW, NonFinite
from tests.distributed.ranks import run_ranks
from tests.optimizers.family import OPTIMIZERS, RECORDS, build, every, every_class, every_variant, matrices
from tests.optimizers.field import gradient, matrix
from tests.optimizers.on_gpu import masking


@every_class
def test_a_sparse_gradient_is_refused_before_anything_changes(name):
    first, second = matrices()
    optimizer = build(name, [first, second])
    before = first.detach().clone()
    first.grad, second.grad = torch.ones(6, 4), torch.ones(6, 4).to_sparse()
    message = r"takes dense gradients, but that of parameter 1 .* is sparse \(torch\.sparse_coo\)"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(first, before)
    assert not getattr(optimizer, "matrices", optimizer).state


def _gradients_that_lie_otherwise(rank, world_size, names):
    mesh = init_device_mesh("cpu", (world_size,))
    found = {}
    for name in names:
        whole = torch.nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Replicate()]))
        whole.grad = DTensor.from_local(torch.ones(6, 4), mesh, [Partial()])
        cut = torch.nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
        cut.grad = distribute_tensor(torch.ones(6, 4), mesh, [Shard(1)])
        for parameter in (whole, cut):
            before = parameter.to_local().detach().clone()
            optimizer = build(name, [("weight", parameter)])
            with pytest.raises(ValueError, match="lie as their parameters") as caught:
                optimizer.step()
            assert torch.equal(parameter.to_local(), before)
            assert not getattr(optimizer, "matrices", optimizer).state
            found.setdefault(name, []).append(str(caught.value))
    return found


@pytest.fixture(scope="module")
def lying_otherwise(selected):
    return run_ranks(_gradients_that_lie_otherwise, 2, [name for name in selected("name") if name in OPTIMIZERS])


@every
def test_gradients_that_lie_otherwise_are_refused(lying_otherwise, name):
    found, others = lying_otherwise
    assert found[name] == others[name]
    assert "that of weight has placements (Partial(sum),), and the parameter (" in found[name][0]
    assert "parameter.grad.redistribute(placements=parameter.placements)" in found[name][0]


def counting(optimizer, name):
    """Let counters of groups go on, as on a GPU, whose host does not know of a skipped step."""
    if hasattr(optimizer, "counters"):
        for group in optimizer.param_groups:
            for key in {*optimizer.counters, MOMENTUM_STEPS} & group.keys():
                group[key] += 1


@every_variant
@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("where", ["cpu", "gpu"])
def test_a_bad_gradient_skips_the_whole_step(name, at, where):
    """In fp32 the squares of 1e20 are infinite, and those of 1e16 can be, over a small gradient before."""

    def run(bad=None):
        p, q = matrix(), matrix(5, 7, seed=1)
        opt = build(name, [p, q])
        inner = getattr(opt, "matrices", opt)
        opt.init_state()
        if where == "gpu":
            masking(opt)
        for step in range(3):
            if step == at and bad is None and where == "gpu":
                counting(inner, name)
            if step == at and bad is None:
                continue
            p.grad, q.grad = gradient(p, step), gradient(q, step)
            # on a GPU the first step also begins some state, such as norms to be held
            states = [] if at == 0 and where == "gpu" else [*opt.state[p].values(), *opt.state[q].values()]
            before = [x.clone() for x in (p, q, *states)]
            if step == at:
                p.grad[2, 1] = bad
            opt.step()
            if step == at:
                assert all(map(torch.equal, before, (p, q, *states)))
        return [p, q, *opt.state[p].values(), *opt.state[q].values()], inner.skipped_steps()

    expected, none = run()
    for bad in (torch.nan, torch.inf, 1e16, -1e30) if name in OPTIMIZERS else (torch.nan, 1e20):
        found, skipped = run(bad)
        assert all(map(torch.equal, found, expected)), bad
        assert (skipped, none) == (1, 0)


@pytest.mark.parametrize("make", ["users_own", "muon", "lion"])
def test_several_in_a_row_are_an_error_before_anything_changes(make, caplog):
    p, q = matrix(), matrix(5, 7, seed=1)
    opt = build(make, [("layer.weight", p), ("other.weight", q)])
    before = p.detach().clone(), q.detach().clone()
    with caplog.at_level(logging.WARNING):
        for step in range(MAX_IN_A_ROW - 1):
            p.grad, q.grad = torch.full_like(p, torch.nan), gradient(q, step)
            opt.step()
    assert [record.message for record in caplog.records] == [
        "gradients are not finite, or above 2^50 in norm, of layer.weight: the whole step is skipped, "
        f"{count} in all so far"
        for count in range(1, MAX_IN_A_ROW)
    ]
    with pytest.raises(RuntimeError, match=r"not finite in 5 steps in a row, .* of layer\.weight: nothing is trained"):
        opt.step()
    assert all(map(torch.equal, before, (p, q)))
    caplog.clear()
    p.grad = gradient(p, 0)
    opt.step()
    assert not caplog.records
    assert not torch.equal(p, before[0])


def judging(*names):
    return NonFinite(lambda: names, torch.device("cpu"))


def test_what_another_rank_says_counts(caplog):
    good = [torch.ones(2, 2), None]
    skipping = judging("a", "b")
    assert skipping.accept(good, lambda flag: flag) == 1
    assert skipping.accept(good, torch.zeros_like) == 0
    assert skipping.total == 1
    assert "of another rank: the whole step is skipped" in caplog.text
    with pytest.raises(RuntimeError, match="on some of the ranks that share it, none on others; here b has none"):
        skipping.accept(good, lambda flag: -torch.ones_like(flag))
    assert skipping.accept(good, lambda flag: flag) == 1


@every
@pytest.mark.parametrize("at", [0, 3])
def test_a_gradient_of_norm_1e15_is_a_step_like_others(name, at):
    """Which no product of its squares makes infinite, nor the weights absurd."""
    p = matrix()
    before = p.detach().clone()
    opt = build(name, [p])
    for step in range(6):
        p.grad = 1e-6 * gradient(p, step)
        if step == at:
            p.grad *= 1e15 / p.grad.norm()
        opt.step()
        assert all(x.isfinite().all() for x in [p, *filter(torch.is_tensor, opt.state[p].values())])
    assert not torch.equal(p, before)
    assert opt.skipped_steps() == 0
    assert RECORDS[name].unbounded or p.abs().max() < 20


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_large_and_empty_gradients_are_taken(dtype):
    largest = min(LARGEST_NORM / 64, torch.finfo(dtype).max)
    large = torch.full((64, 64), largest, dtype=dtype)
    assert judging("a", "b", "c").accept([large, large.new_empty(0, 4), torch.zeros_like(large)]) == 1


@pytest.mark.parametrize("bad", [{}, {1: 1e300}, {3: torch.nan}, {4: torch.inf}])
def test_gradients_of_several_dtypes_are_judged_by_one_bound(bad, caplog):
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float64, torch.float32)
    values = [bad.get(i, value) for i, value in enumerate((1.0, 1e14, 1.0, 1.0, 1.0))]
    gradients = [torch.full((2, 2), value, dtype=dtype) for value, dtype in zip(values, dtypes, strict=True)]
    assert judging(*"abcdef").accept([*gradients, None]) == (not bad)
    assert all(f"of {'abcde'[i]}: the whole" in caplog.text for i in bad)


def test_a_copy_to_the_host_is_awaited_on_its_own_device(monkeypatch):
    """Which need not be the current one: an event of that one's stream would tell nothing of the copy."""
    log = []

    class Event:
        def record(self, stream=None):
            log.append(("recorded on", stream))

        def query(self):
            return there

        def synchronize(self):
            log.append("awaited")

    empty, there = torch.empty, True
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **kwargs: empty(*size, **kwargs))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"the stream of {device}")
    nonfinite = judging("a")
    nonfinite._device = torch.device("cuda:1")
    usable = torch.ones(1, dtype=torch.bool)
    for _ in range(3):
        nonfinite._report([0], [False], usable, False)
    recorded = ("recorded on", "the stream of cuda:1")
    assert log == [recorded] * 3  # a copy that is there costs no call that waits
    there = False
    nonfinite._report([0], [False], usable, False)
    assert log == [recorded] * 4 + ["awaited"]


def said(caplog):
    """What was warned of steps without a gradient."""
    return [record.message for record in caplog.records if "had a gradient" in record.message]


@every
def test_a_group_without_a_gradient_in_two_steps_is_told_once(name, caplog):
    p, q, r = matrix(), matrix(5, 7, seed=1), matrix(4, 6, seed=2)
    opt = build(name, [{"params": [p, q]}, {"params": [r]}])
    before = p.detach().clone()
    for _ in range(4):
        r.grad = gradient(r, 0)
        opt.step()
        assert len(said(caplog)) <= 1
    [message] = said(caplog)
    assert message.startswith(f"{type(opt).__name__}: in two steps no parameter of a whole group had a gradient")
    assert "so these 2 stay as they are: parameter 0 of group 0, of shape " in message
    assert "fully_shard and the like replace the parameters of a model, so build the optimizer after them" in message
    assert torch.equal(p, before)


def test_what_is_frozen_later_is_told_of(caplog):
    p = matrix()
    opt = TensorParallelMuon([p])
    p.grad = gradient(p, 0)
    opt.step()
    p.requires_grad_(False)
    opt.zero_grad()
    opt.step()
    assert said(caplog) == []
    opt.step()
    [message] = said(caplog)
    assert "they are frozen. PEFT, also by TRL's peft_config" in message


def test_a_gradient_of_one_parameter_of_a_group_is_enough(caplog):
    p, q = matrix(), matrix(5, 7, seed=1)
    opt = TensorParallelMuon([p, q])
    q.grad = gradient(q, 0)
    opt.step()
    opt.step(lambda: (p.square().sum() + q.square().sum()).backward())
    for _ in range(3):  # a step without any gradient, and one with them
        opt.zero_grad()
        opt.step()
        p.grad = gradient(p, 0)
        opt.step()
    other = TensorParallelMuon([{"params": []}])
    other.step()
    other.step()
    assert said(caplog) == []


def test_a_good_step_starts_the_count_anew():
    p = matrix()
    opt = build("users_own", [p])
    for step in range(4 * MAX_IN_A_ROW):
        p.grad = torch.full_like(p, torch.nan) if step % MAX_IN_A_ROW else gradient(p, step)
        opt.step()
    assert opt.skipped_steps() == 4 * (MAX_IN_A_ROW - 1)
