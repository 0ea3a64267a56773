"""The update at TP=k is the update at TP=1."""

from dataclasses import dataclass, field

import pytest
import torch

from megatron_eopt import TensorParallelMuon
from megatron_eopt.orthogonalize.kernels import KERNELS, Kernel
from megatron_eopt.parallel.collectives import counters
from megatron_eopt.parallel.cost import DEFAULT_RATES
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import cut, gathered, groups_of, marked, message_of, placed, shard, sharded
from tests.optimizers.field import assert_close, drawn
from tests.optimizers.on_gpu import masking

EXACT = ("duplicated", "distributed", "owner", "gram", "auto")


@dataclass(frozen=True)
class Case:
    """One parameter: its global shape, the attributes on its shards, and settings of the optimizer."""

    name: str
    shape: tuple[int, int]
    attributes: dict = field(default_factory=dict)
    split: tuple[int, ...] | None = None
    settings: dict = field(default_factory=dict)


SHAPES = {"tall": (96, 36), "wide": (36, 96), "square": (48, 48)}
CASES = [
    *(Case(f"{kind} dim {dim}", shape, sharded(dim)) for kind, shape in SHAPES.items() for dim in (0, 1)),
    Case("fused qkv", (4 * 16, 48), sharded(0), (8, 4, 4)),
    Case("gated qkv", (4 * 24, 40), sharded(0), (8, 8, 4, 4)),
    Case("one query group for all ranks", (48, 40), sharded(0), (32, 8, 8)),
    Case("fused qkv of own shapes", (4 * 16, 48), sharded(0, qkv_split_shapes=[8, 4, 4]), (1, 1, 1)),
    Case("replicated", (40, 24)),
    Case("replicated with a partition_dim", (40, 24), {"partition_dim": 0, "tensor_model_parallel": False}),
    Case("replicated fused qkv", (4 * 16, 48), {"partition_dim": 0}, (8, 4, 4)),
    Case("expert", (32, 96), {"partition_dim": 1, "expert_tp": True}),
    Case("cubic, unit rms", (96, 32), sharded(0), None, {"coefficient_type": "cubic5", "scale_mode": "unit_rms_norm"}),
    Case("rank 2", (48, 32), sharded(1)),
    Case("zero", (48, 32), sharded(0)),
    Case("tiny", (48, 32), sharded(1)),
]


def whole(case):
    """A global parameter with its gradient."""
    p, g = drawn((2, *case.shape), len(case.name))
    if case.name == "rank 2":
        g = g[:, :2] @ g[:2, :]
    return p, g * {"zero": 0.0, "tiny": 1e-12}.get(case.name, 1.0)


def updated(case, p, g, groups, tp_mode, precision):
    p = marked(p.clone(), **case.attributes)
    optimizer = TensorParallelMuon(
        [p],
        lr=0.1,
        split_qkv=case.split is not None,
        is_qkv_fn=lambda parameter: True,
        qkv_split_shapes=case.split,
        fp32_matmul_prec=precision,
        pg_collection=groups,
        tp_mode=tp_mode,
        **case.settings,
    )
    p.grad = g.clone()
    optimizer.step()
    assert torch.equal(p.grad, g)
    return p.detach()


def on_ranks(rank, world_size, precision):
    results = {}
    for case in CASES:
        is_cut = case.attributes.get("tensor_model_parallel") or case.attributes.get("expert_tp")
        dim = case.attributes["partition_dim"] if is_cut else None
        for tp_mode in EXACT:
            if is_cut and case.shape[dim] % world_size:
                continue
            p, g = (cut(x, case.attributes, rank, world_size) for x in whole(case))
            counters.reset()
            result = updated(case, p, g, groups_of(), tp_mode, precision)
            del counters.calls["agree"]  # on the plan at start, and on who has a gradient
            calls = dict(counters.calls)
            results[case.name, tp_mode] = gathered(result, dim), calls
    return results


@pytest.fixture(scope="module", params=[2, 3, pytest.param(4, marks=pytest.mark.full)])
def results(request):
    return run_ranks(on_ranks, request.param, "highest")


@pytest.mark.parametrize("tp_mode", EXACT)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_update_equals_that_of_one_rank(results, case, tp_mode):
    expected = updated(case, *whole(case), None, "duplicated", "highest")
    if (case.name, tp_mode) not in results[0]:
        assert len(results) == 3
        return
    for result in results:
        actual = result[case.name, tp_mode][0]
        assert_close(actual, expected)
        assert torch.equal(actual, results[0][case.name, tp_mode][0])
        if tp_mode == "duplicated":  # the same products on the same numbers
            assert torch.equal(actual, expected)


def test_collectives_are_counted(results):
    first = results[0]
    assert first["tall dim 0", "duplicated"][1] == {"all_gather": 1}
    assert first["tall dim 0", "distributed"][1] == {"all_reduce": 6}  # the norm and five Gram matrices
    assert first["tall dim 0", "owner"][1] == {"all_to_all": 2}
    assert first["tall dim 0", "gram"][1] == {"all_reduce": 2}  # quintic has one restart
    for tp_mode in ("gram", "distributed"):
        assert first["tall dim 1", tp_mode][1] == {"all_to_all": 2}  # cut along the short side
    for tp_mode in EXACT:
        assert first["replicated", tp_mode][1] == {}
    if len(results) == 3:
        return
    assert first["fused qkv", "duplicated"][1] == {"all_gather": 2}  # q, and k with v
    assert first["fused qkv", "owner"][1] == {"all_to_all": 4}
    # q is cut along its short side, as k and v are: on two ranks the first has nothing of these, on four they differ
    cut_inside_a_group = first["one query group for all ranks", "distributed"][1]
    assert cut_inside_a_group == {"all_to_all": 4 if len(results) == 2 else 6}


@pytest.mark.wide
def test_medium_precision_is_as_exact():
    expected = {case.name: updated(case, *whole(case), None, "duplicated", "medium") for case in CASES}
    for (name, tp_mode), (actual, _) in run_ranks(on_ranks, 2, "medium")[0].items():
        if tp_mode in ("duplicated", "owner"):
            assert torch.equal(actual, expected[name]), name
        else:  # partial Gram matrices are rounded to bf16 before they are summed
            assert (actual - expected[name]).norm() <= 2e-2 * expected[name].norm(), name


def without_groups(rank, world_size, tp_mode):
    return message_of(lambda: TensorParallelMuon([shard(torch.ones(4, 4))], tp_mode=tp_mode))


def test_shards_without_a_group_are_refused():
    message = run_ranks(without_groups, 2, "duplicated")[0]
    assert "of shape (4, 4) is marked as sharded, but no process group completes it" in message
    assert run_ranks(without_groups, 2, "blockwise") == [None, None]


# Several of each kind, in numbers that 2, 3 and 4 ranks do not divide, in two groups of parameters.
TOGETHER = [(24, 60, 0), (60, 24, 1), (48, 48, 1), (24, 60, None)] * 5 + [(24, 60, 1), (12, 48, 0)]


def together(rank, world_size, tp_mode, precision="highest"):
    """Three steps of one optimizer; the global parameters."""
    generator = torch.Generator().manual_seed(0)
    lying = [((rows, cols), {} if dim is None else sharded(dim)) for rows, cols, dim in TOGETHER]
    parameters = [placed(torch.randn(s, generator=generator), each, rank, world_size) for s, each in lying]
    optimizer = TensorParallelMuon(
        [{"params": parameters[:7], "weight_decay": 0.3}, {"params": parameters[7:], "lr": 0.2}],
        lr=0.1,
        fp32_matmul_prec=precision,
        pg_collection=groups_of(world_size),
        tp_mode=tp_mode,
    )
    for step in range(3):
        for index, (parameter, (shape, attributes)) in enumerate(zip(parameters, lying, strict=True)):
            parameter.grad = cut(torch.randn(shape, generator=generator), attributes, rank, world_size)
            if (step, index) == (1, 3):  # replicated: no other rank waits for it
                parameter.grad = None
        optimizer.step()
    dims = [dim if world_size > 1 else None for *_, dim in TOGETHER]
    return [gathered(parameter.detach(), dim) for parameter, dim in zip(parameters, dims, strict=True)]


def together_in_all_modes(rank, world_size):
    return {tp_mode: together(rank, world_size, tp_mode) for tp_mode in EXACT}


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_an_optimizer_of_many_matrices_takes_the_steps_of_one_rank(world_size):
    expected = together(0, 1, "duplicated")
    for result in run_ranks(together_in_all_modes, world_size):
        for tp_mode, parameters in result.items():
            for actual, wanted in zip(parameters, expected, strict=True):
                # three updates of 0.1 and 0.2, each off by at most 1e-5 of the largest entry
                assert_close(actual, wanted, 3e-5, tp_mode)


def bad_gradients(rank, world_size):
    """What each rank sees of a gradient that is not finite, or not there, on rank 0 alone."""
    parameters = [shard(torch.eye(6)) for _ in range(2)]
    optimizer = TensorParallelMuon(list(zip("ab", parameters, strict=True)), pg_collection=groups_of(), tp_mode="auto")
    for parameter in parameters:
        parameter.grad = torch.ones(6, 6) + torch.eye(6)
    if rank == 0:
        parameters[0].grad[1, 1] = torch.nan
    optimizer.step()
    moved = [not torch.equal(parameter, torch.eye(6)) for parameter in parameters]
    momentum = optimizer.state[parameters[0]]["momentum_buffer"].abs().max().item()
    if rank == 0:
        parameters[0].grad = None
    before = parameters[1].detach().clone()
    try:
        optimizer.step()
    except RuntimeError as error:
        return moved, momentum, optimizer.skipped_steps(), str(error), torch.equal(parameters[1], before)


def test_a_bad_gradient_on_one_rank_is_left_out_on_all_and_a_missing_one_is_an_error():
    for moved, momentum, skipped, error, untouched in run_ranks(bad_gradients, 2):
        assert moved == [False, True]
        assert momentum == 0
        assert skipped == {"a": 1}
        assert "a has a gradient on some of the ranks that share it, none on others" in error
        assert untouched


def missing_as_on_a_gpu(rank, world_size):
    """A step in which rank 0 has no gradient of ``a``, and neither has ``b`` on any: masked, and read later."""
    parameters = [shard(torch.eye(6)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones(6, 6) + torch.eye(6)
    named = list(zip("abc", parameters, strict=True))
    optimizer = TensorParallelMuon(named, pg_collection=groups_of(), tp_mode="owner")
    optimizer.step()
    masking(optimizer)._session.nonfinite._report = lambda: None
    parameters[0].grad = None if rank == 0 else parameters[0].grad
    parameters[1].grad = None
    before = [x.detach().clone() for p in parameters for x in (p, optimizer.state[p]["momentum_buffer"])]
    optimizer.step()
    after = [x.detach() for p in parameters for x in (p, optimizer.state[p]["momentum_buffer"])]
    return list(map(torch.equal, before, after))


def test_on_a_gpu_ranks_without_a_gradient_make_the_step_with_the_others():
    assert run_ranks(missing_as_on_a_gpu, 2) == [[True] * 4 + [False] * 2] * 2


def different_plans(rank, world_size):
    parameters = [shard(torch.ones(4, 4 + 2 * (rank == 1 and name == "b"))) for name in "ab"]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer = TensorParallelMuon(list(zip("ab", parameters, strict=True)), pg_collection=groups_of(), tp_mode="owner")
    return message_of(optimizer.step), torch.equal(parameters[0], torch.ones(4, 4))


def test_ranks_with_different_parameters_end_at_start_with_the_first_one_that_differs():
    for message, untouched in run_ranks(different_plans, 2):
        assert "plan differs between ranks 0 and 1 of group 'tp': 'b' has the shape (8, 4) in the one" in message
        assert untouched


def a_kernel_that_fails(rank, world_size):
    """A kernel of symmetric products that cannot be made on rank 1."""
    if rank == 1:
        KERNELS["blocked"] = Kernel(lambda precision: 1 / 0)
    matrix = shard(torch.ones(4, 6), 1)
    optimizer = TensorParallelMuon([matrix], pg_collection=groups_of(), symmetric_products="blocked")
    try:
        optimizer.prepare()
    except RuntimeError as error:
        return str(error)


def test_a_kernel_that_fails_on_one_rank_ends_the_start_of_all():
    first, second = run_ranks(a_kernel_that_fails, 2)
    assert first.startswith("the kernel 'blocked' of symmetric products cannot serve: it fails on another rank")
    assert second.startswith("the kernel 'blocked' of symmetric products cannot serve: ZeroDivisionError")


def measured(rank, world_size):
    """The rates of two optimizers, of which the second resumes the first, and whether a step ran."""
    optimizers = []
    for _ in range(2):
        p = shard(torch.ones(4, 8), 1)
        p.grad = torch.eye(4, 8)
        optimizers.append(TensorParallelMuon([p], pg_collection=groups_of(), tp_mode="auto", plan_rates="measure"))
    first, second = optimizers
    first.step()
    second.load_state_dict(first.state_dict())
    second.step()
    rates = second.prepare().rates
    assert f"modelled at {rates.flops / 1e12:.3g} TFLOP/s" in second.explain()
    return first.prepare().rates, second.prepare().rates


def test_measured_rates_are_the_same_on_all_ranks_and_kept_by_a_checkpoint():
    results = run_ranks(measured, 2)
    assert results[0] == results[1]
    first, second = results[0]
    assert first == second != DEFAULT_RATES
