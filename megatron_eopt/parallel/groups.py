"""Process groups of ranks that differ in several dimensions of a mesh, or along several axes of Megatron's."""

from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import ProcessGroup

Partition = tuple[tuple[int, ...], ...]
"""Global ranks of each of several groups."""

_groups: WeakKeyDictionary[ProcessGroup, dict[Partition, ProcessGroup]] = WeakKeyDictionary()
"""Groups over several dimensions or axes, made once for each world: it takes all their ranks to make one."""


def joint_group(partition: Partition, own: tuple[int, ...]) -> ProcessGroup:
    """The group of this rank's part: all ranks, or one made at the first call of all ranks of the mesh.

    Args:
        partition: of the ranks that call together, or this rank's part of it alone.
        own: this rank's part.

    Raises:
        ValueError: if only some ranks of the world have the mesh, and its groups are made by splitting communicators.
    """
    world = dist.group.WORLD
    assert world is not None, "a DTensor has a process group"
    if len(own) == world.size():
        return world
    if sum(map(len, partition)) == world.size():
        wanted, local = partition, False
    elif getattr(world, "bound_device_id", None) is None:
        wanted, local = (own,), True
    else:
        raise ValueError(
            f"ranks {own} need a group, but only some of the {world.size()} ranks ask for it, and all have to take "
            f"part where init_process_group was given a device_id: leave that out"
        )
    known = _groups.setdefault(world, {})
    if wanted not in known:
        made = [dist.new_group(ranks, use_local_synchronization=local) for ranks in map(list, wanted)]
        known[wanted] = made[wanted.index(own)]  # type: ignore[assignment]
    return known[wanted]
