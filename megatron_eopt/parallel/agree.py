"""That the ranks of a group have the same plan."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_eopt.parallel.compare import fingerprint, first_difference
from megatron_eopt.parallel.exchange import lowest
from megatron_eopt.parallel.plan import Plan


def same_plan(plan: Plan, groups: Mapping[str, ProcessGroup], device: torch.device) -> None:
    """Check once that the plan is the same on all ranks of all groups.

    Raises:
        ValueError: on every rank of a group where it is not, naming the first parameter that differs.
    """
    for label, group in sorted(groups.items()):
        own = torch.tensor(list(bytes.fromhex(fingerprint(plan, label))), dtype=torch.int32, device=device)
        least, most = lowest(own, group), -lowest(-own, group)
        if torch.equal(least, most):
            continue
        plans: list[Plan | None] = [None] * group.size()
        dist.all_gather_object(plans, plan, group=group)
        others = ((rank, other) for rank, other in enumerate(plans) if other is not None)
        found = [(rank, first_difference(plans[0], other, label)) for rank, other in others]  # type: ignore[arg-type]
        rank, difference = next((rank, difference) for rank, difference in found if difference is not None)
        raise ValueError(
            f"the optimizer's plan differs between ranks 0 and {rank} of group {label!r}: {difference}. Ranks that "
            f"share parameters need the same parameters in the same order, with the same settings"
        )
