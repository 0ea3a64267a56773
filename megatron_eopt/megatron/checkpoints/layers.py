"""Layers whose parameters have other optimizers than those of the rest: a checkpoint keeps each under its own name.

Megatron stacks layers that are alike into one tensor of the checkpoint, and so their state. Where some layers have no
state, or another, the stack would have holes, which Megatron refuses in the first save. It can name every layer
instead; it writes down in the checkpoint that it did, and reads that before it loads.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.utils import unwrap_model

from megatron_eopt.manifest import Family, rows
from megatron_eopt.megatron import releases

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)|(?<=\.weight)\d+$")
_SETTING = "non_homogeneous_layers"  # Megatron's name for it
_MARK = "megatron_eopt_layers_differ"


def layers_differ(families: Iterable[Family], frozen: Iterable[str]) -> bool:
    """Whether layers differ in the optimizers of parameters that are alike; all ranks call it together.

    Args:
        families: the manifest.
        frozen: names of this rank's parameters that no optimizer may have.

    Raises:
        ValueError: where experts of one layer have different optimizers in a run that saves in torch_dist, where
            Megatron can only stack them.
    """
    kinds: dict[str, set[tuple[str | None, int]]] = {}
    for row in rows(families):
        kinds.setdefault(_EXPERT.sub("*", row.name), set()).add((row.optimizer, len(row.matrices)))
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, sorted({_EXPERT.sub("*", name) for name in frozen}))
    for name in {name for names in everywhere for name in names}:
        kinds.setdefault(name, set()).add((None, 0))
    _check_experts(kinds)
    of_layers: dict[str, set[frozenset[Any]]] = {}
    for name, found in kinds.items():
        of_layers.setdefault(_LAYER.sub("*", name), set()).add(frozenset(found))
    return any(len(found) > 1 for found in of_layers.values())


def _check_experts(kinds: Mapping[str, set[tuple[str | None, int]]]) -> None:
    args = releases.training_args()
    if getattr(args, "save", None) is None or getattr(args, "ckpt_format", None) != "torch_dist":
        return
    for name, found in sorted(kinds.items()):
        if len(found) > 1:
            optimizers = " and ".join(sorted({optimizer or "none" for optimizer, _ in found}))
            raise ValueError(
                f"experts of one layer ({name}) are treated differently (optimizers: {optimizers}), and Megatron "
                f"stacks their state in torch_dist checkpoints: let overrides select all experts of a layer, or leave "
                f"--save away"
            )


def keep_apart(model_chunks: Sequence[Any]) -> None:
    """Let every layer of a model have a name of its own in the checkpoints of ``megatron.training``."""
    for chunk in unwrap_model(list(model_chunks)):
        setattr(chunk, _MARK, True)


def undecided(build_metadata: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap Megatron's ``_build_sharded_state_dict_metadata``, which knows no model: :func:`named_apart` decides."""

    @functools.wraps(build_metadata)
    def build_metadata_undecided(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {_SETTING: None} | build_metadata(*args, **kwargs)

    return build_metadata_undecided


def named_apart(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's ``generate_state_dict``: it names each layer of a model of which :func:`keep_apart` was called.

    What is loaded has the names that the checkpoint says; where it says nothing, the metadata are :func:`undecided`.
    """
    signature = inspect.signature(generate)

    @functools.wraps(generate)
    def generate_apart(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        apart = any(getattr(chunk, _MARK, False) for chunk in given["model"])
        for name in ("model_sd_kwargs", "optim_sd_kwargs"):
            metadata = (given.get(name) or {}).get("metadata") or {}
            if metadata.get(_SETTING, ...) is None:
                metadata.pop(_SETTING)
                metadata |= {_SETTING: True} if apart else {}
        return generate(*args, **kwargs)

    return generate_apart
