"""Whether torch_dist checkpoints stack the layers of a model.

Megatron stacks layers, and their state, into one tensor. Where layers have different state, it would refuse the holes
in the first save: then it is told to name every layer, which the checkpoint says.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from megatron.core.utils import unwrap_model

from megatron_eopt.megatron import releases
from megatron_eopt.megatron.consensus import union
from megatron_eopt.megatron.support.facts import on
from megatron_eopt.redirect import Original, around
from megatron_eopt.routing import ParamPattern, rows

_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)|(?<=\.weight)\d+$")
_MARK = "megatron_eopt_layers_differ"


class ParamSignature(NamedTuple):
    """How a run treats a parameter."""

    optimizer: str | None
    matrices: int = 0
    state_bytes: int = 0


def layers_differ(families: Iterable[ParamPattern], frozen: Iterable[str]) -> bool:
    """Whether layers have different optimizers or state; one layer's experts may not."""
    treated: dict[str, set[ParamSignature]] = defaultdict(set)  # by name, that of experts without their numbers
    for row in rows(families):
        name = _EXPERT.sub("*", row.name)
        treated[name].add(ParamSignature(row.optimizer, len(row.matrices), row.state_bytes))
    for name in union(_EXPERT.sub("*", name) for name in frozen):
        treated[name].add(ParamSignature(None))
    args = releases.training_args()
    if on(args, "save") and getattr(args, "ckpt_format", None) == "torch_dist":
        _refuse_unlike_experts(treated)
    of_layers: dict[str, set[frozenset[ParamSignature]]] = defaultdict(set)
    for name, treatments in treated.items():
        of_layers[_LAYER.sub("*", name)].add(frozenset(treatments))
    return any(len(different) > 1 for different in of_layers.values())


def _refuse_unlike_experts(treated: Mapping[str, set[ParamSignature]]) -> None:
    for name, treatments in sorted(treated.items()):
        if len(treatments) > 1:
            optimizers = " and ".join(sorted({each.optimizer or "none" for each in treatments}))
            raise ValueError(
                f"experts of one layer ({name}) are treated differently (optimizers: {optimizers}), and Megatron "
                f"stacks their state in torch_dist checkpoints: let overrides select all experts of a layer, or leave "
                f"--save away"
            )


def set_per_layer_keys(model_chunks: Sequence[Any], apart: bool) -> None:
    """Set whether checkpoints name every layer of a model."""
    for chunk in unwrap_model(list(model_chunks)):
        setattr(chunk, _MARK, apart)


@around
def name_layers(generate: Original, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``generate_state_dict``: a save names the layers that :func:`set_per_layer_keys` marked."""
    given = inspect.signature(generate).bind(*args, **kwargs).arguments
    of_model = given.get("model_sd_kwargs") or {}
    of_optimizer = given.get("optim_sd_kwargs") or {}
    # a load names them as the checkpoint does
    if not of_optimizer.get("is_loading") and any(getattr(chunk, _MARK, False) for chunk in given["model"]):
        for metadata in (of_model.get("metadata"), of_optimizer.get("metadata")):
            if metadata is not None:  # as for the torch format
                metadata["non_homogeneous_layers"] = True
    return generate(*args, **kwargs)
