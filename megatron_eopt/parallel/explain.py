"""A plan as a table, for people."""

from collections.abc import Sequence
from math import prod

from megatron_eopt.parallel.cost import (
    DEFAULT_RATES,
    HOST_BYTES,
    Cost,
    Costs,
    Rates,
    Work,
    Works,
    largest_iteration,
    plan_cost,
    step_parts,
)
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.records import Bucket, Plan, Shape, TpMode
from megatron_eopt.parallel.workspace import DEFAULT_WORKSPACE, OF_ENTRY, Workspace, chunk_bytes

_COMPARED: tuple[TpMode, ...] = ("duplicated", "distributed", "blockwise")
_COLUMNS = ("group", "scheme", "GFLOP", "MB sent", "collectives", "ms")
_LINE = "{:<24}{:>20}{:>18}{:>15}{:>13}{:>13}{:>13}"


def explain(plan: Plan, work: Works, rates: Rates = DEFAULT_RATES, workspace: Workspace = DEFAULT_WORKSPACE) -> str:
    """A table of costs by shape and scheme, beside other schemes."""
    sharing = frozenset(plan.matrices[b.matrices[0]].group for b in plan.buckets if b.scheme == "share")
    lines = [_LINE.format("matrices", *_COLUMNS), "-" * len(_LINE.format("", *_COLUMNS))]
    works = {"": work} if isinstance(work, Work) else work
    numbers = {name: f"#{number}" for number, name in enumerate(works, 1)} if len(works) > 1 else {}
    costs, alike = Costs(plan, work, rates), dict[tuple[Shape, str, str, str], list[Bucket]]()
    for bucket in plan.buckets:  # of several chunks
        matrix = plan.matrices[bucket.matrices[0]]
        kind = matrix.shape, matrix.group if matrix.ranks > 1 else "-", bucket.scheme, numbers.get(matrix.iteration, "")
        alike.setdefault(kind, []).append(bucket)
    for ((rows, cols), group, scheme, number), buckets in alike.items():
        called = f"{sum(len(bucket.matrices) for bucket in buckets)} of {rows} x {cols}"
        line = _row(called, group, scheme, costs.of_buckets(buckets))
        lines.append(f"{line}  {number}" if number else line)
    whole, apart = costs.of_buckets(plan.buckets), sum(costs.of_buckets(each).seconds for each in alike.values())
    lines += ["", _row(f"all {len(plan.matrices)}: this plan", "", "", whole)]
    for mode in _COMPARED:
        other = make_plan(plan.matrices, mode, work, rates, sharing, workspace)
        lines.append(_row(mode, "", "", plan_cost(other, work, rates)))
    flops, sent, latency = rates.flops / 1e12, rates.bytes / 1e9, rates.latency * 1e6
    modelled = f"{flops:.3g} TFLOP/s, {sent:.3g} GB/s and {latency:.3g} us a collective"
    lines += ["", f"Of the busiest rank in one step, modelled at {modelled}, nothing overlapped."]
    if apart > 1.01 * whole.seconds:
        lines.append("Each line is of the rank that is the busiest with its matrices: one rank has not all of that.")
    lines.append(_memory(plan, work, workspace))
    for name, one in works.items():
        steps = f"{numbers[name]}: {name}" if numbers else f"{len(one.schedule)} steps"
        form = "standard form only"
        if one.restarts is not None:
            form = f"Gram form with {len(one.restarts)} restart{'' if len(one.restarts) == 1 else 's'}"
        (_, first), *later = one.shares
        of_larger = ",\n" * bool(later) + ", ".join(f"{part:.0%} from {rows}" for rows, part in later)
        lines.append(f"{steps}, {form}, {first:.0%} of a symmetric product computed{of_larger}.")
    return "\n".join([*lines, "blockwise is an approximation."])


def _memory(plan: Plan, work: Works, workspace: Workspace) -> str:
    of_chunks, of_iterations, of_hooks = step_parts(plan, work, workspace)
    largest, mib = largest_iteration(plan.matrices, work), 2**20
    chunks = 1 + max((bucket.chunk for bucket in plan.buckets), default=0)
    called = "1 chunk" if chunks == 1 else f"{chunks} chunks"
    beside, what = max((of_iterations, "iterations"), (of_hooks, "the momentum and update of whole shards"))
    told = (
        f"Temporaries: at most {figure((of_chunks + beside) / mib)} MiB, in {called}. The workspace is "
        f"{figure(workspace.bytes / mib)} MiB;\nbeside it an iteration of the largest matrix may take "
        f"{figure(largest / mib)} MiB.\nAt the peak {figure(of_chunks / mib)} MiB are of chunks at work, and "
        f"{figure(beside / mib)} MiB of {what}.\n"
    )
    if of_chunks + beside <= workspace.bytes + largest:
        return f"{told}One parameter, one shard and one iteration are not cut."
    told += "That is more than the workspace, because one parameter, one shard and one iteration are not cut:\n"
    causes, taken = [], chunk_bytes(plan, workspace)
    if of_chunks > workspace.for_chunks(largest):
        of_chunk = (plan.matrices[b.matrices[0]] for b in plan.buckets if b.chunk == taken.index(max(taken)))
        name, another = max(of_chunk, key=lambda m: prod(m.shape)).name, ", with the state of the next,"
        causes.append(f"the chunk of {name}{another * bool(workspace.state)} takes {figure(of_chunks / mib)} MiB")
    if of_hooks > max(of_iterations, workspace.iteration):
        shard = max((rectangle for m in plan.matrices for rectangle in m.rectangles), key=lambda x: x.numel)
        (rows, cols), entries = shard.shape, figure(shard.numel * OF_ENTRY / mib)
        causes.append(f"momentum and update of the largest shard, {rows} x {cols}, take {entries} MiB")
        causes[-1] += f" ({OF_ENTRY} bytes an entry)"
    return f"{told}{',\n'.join(causes)}."


def explain_offloaded(state: Sequence[int], seconds: Sequence[float]) -> str:
    """State in host memory, by bytes and seconds of chunks."""
    copied, mib = [nbytes / HOST_BYTES * 1e3 for nbytes in state], 2**20
    waits = copied[0] + sum(max(0.0, there - 1e3 * work) for there, work in zip(copied[1:], seconds, strict=False))
    there = (max(state[::2]) + max(state[1::2], default=0)) / mib  # in two slots, which take turns
    return (
        f"State in host memory: {figure(sum(state) / mib)} MiB of this rank, which a step copies to the device and "
        f"back; at most {figure(there)} MiB are there.\nAt {HOST_BYTES / 1e9:.3g} GB/s {figure(sum(copied))} ms each "
        f"way: the step waits {figure(waits)} ms, and the predicted time of its chunks hides the rest."
    )


def _row(name: str, group: str, scheme: str, cost: Cost) -> str:
    figures = (figure(cost.flops / 1e9), figure(cost.bytes / 1e6), str(cost.collectives), figure(cost.seconds * 1e3))
    return _LINE.format(name, group, scheme, *figures)


def figure(value: float) -> str:
    """A number in three digits, or without decimals."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
