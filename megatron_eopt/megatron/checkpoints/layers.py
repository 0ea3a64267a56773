"""Layers whose parameters have other owners than those of the rest: a checkpoint keeps each layer under its own name.

Megatron stacks layers that are alike into one tensor of the checkpoint, and so their state: where some layers have
none, or another, the stack would have holes, which it refuses in the first save. It can name every layer instead; it
writes down in the checkpoint that it did, and reads that before it loads.
"""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist

from megatron_eopt.manifest import Family, rows
from megatron_eopt.megatron import releases

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)|(?<=\.weight)\d+$")
_STACKED = re.compile(r"\.layers\.(?!\d)")

type _Kind = tuple[str | None, int]

_apart = False


def settle(families: Iterable[Family], frozen: Iterable[str]) -> None:
    """Decide how this run's checkpoints keep its layers; all ranks call it together.

    Args:
        families: the manifest.
        frozen: names of this rank's parameters that no optimizer may have.

    Raises:
        ValueError: where experts of one layer have different owners in a run that saves in torch_dist, where Megatron
            can only stack them.
    """
    global _apart
    kinds: dict[str, set[_Kind]] = {}
    for row in rows(families):
        kinds.setdefault(_EXPERT.sub("*", row.name), set()).add((row.optimizer, len(row.matrices)))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sorted({_EXPERT.sub("*", name) for name in frozen}))
    for name in {name for names in everywhere for name in names}:
        kinds.setdefault(name, set()).add((None, 0))
    _check_experts(kinds)
    _apart = differ(kinds)


def differ(kinds: Mapping[str, set[Any]]) -> bool:
    """Whether layers differ in what is said of parameters that are alike but for the number of the layer."""
    of_layers: dict[str, set[frozenset[Any]]] = {}
    for name, found in kinds.items():
        of_layers.setdefault(_LAYER.sub("*", name), set()).add(frozenset(found))
    return any(len(found) > 1 for found in of_layers.values())


def _check_experts(kinds: Mapping[str, set[_Kind]]) -> None:
    args = releases.training_args()
    if getattr(args, "save", None) is None or getattr(args, "ckpt_format", None) != "torch_dist":
        return
    for name, found in sorted(kinds.items()):
        if len(found) > 1:
            owners = " and ".join(sorted({owner or "nobody" for owner, _ in found}))
            raise ValueError(
                f"experts of one layer ({name}) are treated differently (owners: {owners}), and Megatron stacks their "
                f"state in torch_dist checkpoints: let overrides select all experts of a layer, or leave --save away"
            )


def named_apart(build_metadata: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap Megatron's ``_build_sharded_state_dict_metadata``: it says that layers have names of their own."""

    @functools.wraps(build_metadata)
    def build_metadata_apart(*args: Any, **kwargs: Any) -> dict[str, Any]:
        metadata = build_metadata(*args, **kwargs)
        return metadata | {"non_homogeneous_layers": True} if _apart else metadata

    return build_metadata_apart


def stacked_problem(keys: Iterable[str]) -> str | None:
    """Why a checkpoint that stacks layers cannot serve a run in which they differ; None where it can.

    Args:
        keys: of the state of optimizers in the checkpoint.
    """
    stacked = next((key for key in sorted(keys) if _STACKED.search(key)), None)
    if not _apart or stacked is None:
        return None
    return (
        f"it stacks the state of all layers ({stacked}), which were treated alike when it was saved, and in this run "
        f"layers differ in their owners: leave away the overrides that single out layers (and what freezes some), or "
        f"pass --no-load-optim to load the weights alone and start with fresh optimizer state"
    )
