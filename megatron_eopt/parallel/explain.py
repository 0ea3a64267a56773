"""A plan as a table, for people."""

from collections.abc import Sequence

from megatron_eopt.parallel.cost import (
    Cost,
    Costs,
    Work,
    Works,
    largest_iteration,
    plan_cost,
    step_parts,
)
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.plan_records import Bucket, Plan, TpMode, grouped
from megatron_eopt.parallel.rectangles import Shape
from megatron_eopt.parallel.workspace import DEFAULT_WORKSPACE, Workspace
from megatron_eopt.screen import aligned, counted, figure, megabytes

_COMPARED: tuple[TpMode, ...] = ("duplicated", "distributed", "blockwise")
_COLUMNS = ("matrices", "group", "scheme", "TFLOP", "sent MB", "calls")


def explain(
    plan: Plan,
    works: Works,
    workspace: Workspace = DEFAULT_WORKSPACE,
    parameters: Sequence[int] | None = None,
) -> str:
    """A table of costs by shape and scheme, beside other schemes.

    ``parameters`` are those that the matrices are of, as in :func:`~megatron_eopt.parallel.plan.make_plan`.
    """
    rows = []
    numbers = dict.fromkeys(works, "")
    if len(works) > 1:
        numbers = {name: f" #{number}" for number, name in enumerate(works, 1)}
    costs = Costs(plan, works)
    sharing = {plan.one_of(bucket).group for bucket in plan.buckets if bucket.scheme == "share"}

    def kind(bucket: Bucket) -> tuple[Shape, str, str, str]:
        matrix = plan.one_of(bucket)
        group = matrix.group if matrix.ranks > 1 else "-"
        return matrix.shape, group, bucket.scheme, numbers.get(matrix.iteration, "")

    for ((height, width), group, scheme, number), buckets in grouped(plan.buckets, kind).items():  # of several chunks
        count = sum(len(bucket.matrices) for bucket in buckets)
        cost = costs.of_buckets(buckets)
        rows.append(_row(f"{count} of {height} x {width}{number}", group, scheme, cost))
    whole = costs.of_buckets(plan.buckets)
    buckets_end = len(rows)
    rows.append(_row(f"all {len(plan.matrices)}: this plan", "", "", whole))
    for mode in _COMPARED:
        other = make_plan(plan.matrices, mode, works, sharing, workspace, parameters)
        rows.append(_row(mode, "", "", plan_cost(other, works)))
    lines = aligned(_COLUMNS, rows, _COLUMNS[3:])
    lines.insert(len(lines) - len(rows) + buckets_end, "")
    lines += ["", "Each line is of the rank that is busiest with it, in one step."]
    lines.append(_memory(plan, works, workspace))
    for name, one in works.items():
        steps = f"{numbers[name].strip()}: {name}" if numbers[name] else counted(len(one.settings.schedule), "step")
        lines.append(f"{steps}:")
        lines += [f"  {form}" for form in _forms(plan, one, name)]
    lines.append("blockwise is an approximation.")
    return "\n".join(lines)


def _forms(plan: Plan, work: Work, name: str) -> list[str]:
    """What the buckets of an iteration run, in words."""
    found = dict[str, None]()
    for bucket in plan.buckets:
        matrix = plan.one_of(bucket)
        shape = matrix.rectangles[0].shape if bucket.scheme == "blockwise" else matrix.shape
        if matrix.iteration == name and 0 not in shape:
            iteration = work.compiled(shape, bucket.scheme)
            form = "standard form"
            if iteration.restarts is not None:
                form = f"Gram form with {counted(len(iteration.restarts), 'restart')}"
            dtype = str(iteration.dtype).removeprefix("torch.")
            share = iteration.products.share(min(shape))
            found[f"{form} in {dtype}, {share:.0%} of a symmetric product computed"] = None
    return list(found)


def _memory(plan: Plan, works: Works, workspace: Workspace) -> str:
    of_chunks, of_iterations, of_hooks = step_parts(plan, works, workspace)
    largest = largest_iteration(plan.matrices, works)
    chunks = 1 + max((bucket.chunk for bucket in plan.buckets), default=0)
    beside, what = max((of_iterations, "iterations"), (of_hooks, "momentum and update of shards"))
    more = "A parameter, a shard and an iteration are not cut."
    if of_chunks + beside > workspace.bytes + largest:
        more = "That is more than the workspace: a parameter, a shard, an iteration is not cut."
    gib = figure(workspace.bytes / 2**30)
    return (
        f"Temporaries: at most {megabytes(of_chunks + beside)} MB, in {counted(chunks, 'chunk')}.\n"
        f"The workspace is {megabytes(workspace.bytes)} MB ({gib} GiB); beside it an iteration of the largest\n"
        f"matrix may take {megabytes(largest)} MB.\n"
        f"Peak: {megabytes(of_chunks)} MB of chunks, {megabytes(beside)} MB of {what}.\n{more}"
    )


def explain_offloaded(state: Sequence[int]) -> str:
    """State in host memory, by bytes of chunks."""
    there = max(state[::2]) + max(state[1::2], default=0)  # in two slots, which take turns
    return (
        f"State in host memory: {megabytes(sum(state))} MB of this rank, which a step copies to the device and back; "
        f"at most {megabytes(there)} MB are there."
    )


def _row(name: str, group: str, scheme: str, cost: Cost) -> list[str]:
    flops = figure(cost.flops / 1e12)
    sent = figure(cost.bytes / 1e6)
    return [name, group, scheme, flops, sent, f"{cost.collectives:,}"]
