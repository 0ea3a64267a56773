"""What the ranks of a group have to agree upon: flags of a step, and the plan."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.parallel.compare import fingerprint, first_difference
from megatron_eopt.parallel.exchange import counters
from megatron_eopt.parallel.plan import Plan


def lowest(x: Tensor, group: ProcessGroup) -> Tensor:
    """Element-wise minimum of ``x`` over the ranks of a group, in a new tensor where ``x`` is.

    Not among the exchanges that a plan predicts; counted as ``agree``.
    """
    on_device = x.to(_device(group, x.device), copy=True)
    counters.count("agree", on_device.numel() * on_device.element_size())
    dist.all_reduce(on_device, dist.ReduceOp.MIN, group=group)
    return on_device.to(x.device)


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


def _device(group: ProcessGroup, device: torch.device) -> torch.device:
    """Where tensors of a collective have to be: on the GPU if the group knows no other."""
    if device.type == "cpu" and dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return device
