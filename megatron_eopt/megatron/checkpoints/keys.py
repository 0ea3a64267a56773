"""Keys of tensors in torch_dist checkpoints: which a run asks for, and whether a checkpoint can serve it.

Megatron stacks layers, and their state, into one tensor. Where layers have different state, it would refuse the holes
in the first save: then it is told to name every layer, which the checkpoint says.
"""

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.utils import unwrap_model

from megatron_eopt.checkpoints.states import BLOCK, MAIN, Block, StateDict, base, split_key
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.consensus import distinct, log_rank0, union
from megatron_eopt.megatron.support.facts import on
from megatron_eopt.redirect import Original, around
from megatron_eopt.registry import list_optimizers, optimizer_class
from megatron_eopt.routing import ParamPattern, rows
from megatron_eopt.settings.modifiers import OPTIONAL
from megatron_eopt.step.state import MOMENTUM_BUFFER

type Sharded = ShardedTensor | ShardedTensorFactory
"""What Megatron's model says of a parameter: a factory makes several tensors of it (gate and up of a SwiGLU's fc1)."""
type Shapes = Mapping[str, tuple[int, ...] | None]
"""Global shapes by key; None is any shape."""

FORMAT = 1  # of what this package writes down; it grows when an older release could not read a checkpoint any more
FRESH = "pass --no-load-optim to load the weights alone and start with fresh optimizer state"
OF_ANOTHER = "another optimizer wrote it, or this one with other settings; resume with that one, or"

_FIRST_MOMENT = "exp_avg"
_SECOND_MOMENT = "exp_avg_sq"
_DISTRIBUTED_MAIN = "param"  # the main copy, in what Megatron's distributed optimizer saves by parameter
_FLAT = ".distributed."  # in keys of flat buffers
_STACKED = re.compile(r"\.layers\.(?!\d)")
_LAYER = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)|(?<=\.weight)\d+$")
_MARK = "megatron_eopt_layers_differ"  # attribute of a model chunk


def state_key(key: str, parameter_key: str) -> str:
    """Megatron's key of a state tensor."""
    return f"optimizer.state.{key}.{parameter_key}"


def sharded_tensors(state_dict: Any) -> Iterator[ShardedTensor]:
    """The tensors of a state dict, with those of factories."""
    for value in nested_values(state_dict):
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, ShardedTensorFactory):
            yield from sharded_tensors(value.build())


def stacked_index(parameter: Sharded) -> int:
    """Index among the layers and experts stacked under a key."""
    first = next(sharded_tensors([parameter]))
    index = 0
    for axis in range(first.prepend_axis_num):
        index = index * first.global_shape[axis] + first.global_offset[axis]
    return index


def layers_differ(families: Iterable[ParamPattern], frozen: Iterable[str]) -> bool:
    """Whether layers have different optimizers or state; one layer's experts may not."""
    treated: dict[str, set[tuple[str, int, int]]] = defaultdict(set)  # by name, that of experts without their numbers
    for row in rows(families):
        name = _EXPERT.sub("*", row.name)
        treated[name].add((row.optimizer or "none", len(row.matrices), row.state_bytes))
    for name in union(_EXPERT.sub("*", name) for name in frozen):
        treated[name].add(("none", 0, 0))
    args = releases.training_args()
    saves = on(args, "save") and getattr(args, "ckpt_format", None) == "torch_dist"
    of_layers: dict[str, set[frozenset[tuple[str, int, int]]]] = defaultdict(set)
    for name, treatments in sorted(treated.items()):
        if saves and len(treatments) > 1:
            optimizers = " and ".join(sorted({optimizer for optimizer, *_ in treatments}))
            raise ValueError(
                f"experts of one layer ({name}) are treated differently (optimizers: {optimizers}), and Megatron "
                f"stacks their state in torch_dist checkpoints: let overrides select all experts of a layer, or leave "
                f"--save away"
            )
        of_layers[_LAYER.sub("*", name)].add(frozenset(treatments))
    return any(len(different) > 1 for different in of_layers.values())


def set_per_layer_keys(model_chunks: Sequence[Any], apart: bool) -> None:
    """Set whether checkpoints name every layer of a model."""
    for chunk in unwrap_model(list(model_chunks)):
        setattr(chunk, _MARK, apart)


@around
def name_layers(generate: Original, *args: Any, **kwargs: Any) -> Any:
    """Replaces ``generate_state_dict``: a save names the layers that :func:`set_per_layer_keys` marked."""
    given = inspect.signature(generate).bind(*args, **kwargs).arguments
    metadata = (given.get("model_sd_kwargs") or {}).get("metadata")  # None for the torch format
    is_loading = (given.get("optim_sd_kwargs") or {}).get("is_loading")  # by the names of the checkpoint
    if metadata is not None and not is_loading and any(getattr(chunk, _MARK, False) for chunk in given["model"]):
        metadata["non_homogeneous_layers"] = True
    return generate(*args, **kwargs)


def fitted(optimizers: Sequence[StateDict], stored: Collection[str]) -> list[StateDict]:
    """Requests of our optimizers by stored keys, without what may be missing; all ranks together."""
    # Megatron numbers those of the layer-wise optimizer (chained_1.optimizer...); without it, experts have one more.
    numbers = {split_key(key): key.partition("optimizer.")[0] for key in stored}

    def numbered(value: Sharded) -> str:
        own, optimizer, rest = value.key.partition("optimizer.")
        first = next(sharded_tensors([value]))
        return numbers.get(split_key(first.key), own) + optimizer + rest

    requests = _with_keys(numbered, optimizers)
    _leave_out_missing(requests, stored)
    if not _imports_adam(optimizers, stored):
        return requests
    momenta = set[str]()
    theirs = {MOMENTUM_BUFFER: _FIRST_MOMENT}
    if any(split_key(key)[0] == _DISTRIBUTED_MAIN for key in stored):
        theirs[MAIN] = _DISTRIBUTED_MAIN

    def of_adam(value: Sharded) -> str:
        state, parameter = split_key(value.key)
        if state == MOMENTUM_BUFFER:
            momenta.add(f"{parameter} {stacked_index(value)}")
        return state_key(theirs[state], parameter) if state in theirs else value.key

    requests = _with_keys(of_adam, requests)
    log_rank0(f"--muon-momentum-from-adam: the momenta of {len(union(momenta))} parameters are Adam's first moments")
    return requests


def _with_keys(key_of: Callable[[Sharded], str], optimizers: Sequence[StateDict]) -> list[StateDict]:
    """Copies of requests, with other keys of what is sharded."""

    def renamed(value: Any) -> Any:
        if isinstance(value, ShardedTensor | ShardedTensorFactory):
            return replace(value, key=key_of(value))
        return value

    requests: list[StateDict] = dict_list_map_outplace(renamed, list(optimizers))
    return requests


def _leave_out_missing(requests: Iterable[StateDict], stored: Collection[str]) -> None:
    """Take out what modifiers keep and the checkpoint lacks, and say so; or say what they drop."""
    missing = set[str]()
    requests = list(requests)
    wanted = {tensor.key for tensor in sharded_tensors(requests)}
    blocks = [each[BLOCK] for each in requests if each[BLOCK].get("modifies")]
    for block in blocks:
        for states in block["state"].values():
            for state in [state for state in states if base(state) in OPTIONAL]:
                there = [tensor for tensor in states[state] if tensor.key in stored]
                if len(there) < len(states[state]):
                    missing.add(base(state))
                states[state] = there
    for state in union(missing):
        log_rank0(
            f"the checkpoint lacks {state} of some parameters, which modifiers of this run keep: it begins anew there"
        )
    unused = {base(split_key(key)[0]) for key in {*stored} - {*union(wanted)}} & {*OPTIONAL}
    for state in sorted(unused) if blocks else ():
        log_rank0(
            f"the checkpoint holds {state} of some parameters, which no modifier of this run keeps: it is left out"
        )


def shapes_of(request: Any) -> dict[str, tuple[int, ...] | None]:
    """Key -> shape of requested tensors; None for padded vocabularies."""
    return {t.key: None if t.allow_shape_mismatch else t.global_shape for t in sharded_tensors(request)}


def problem_of(optimizers: Sequence[StateDict], stored: Shapes, blocks: Sequence[Block]) -> str | None:
    """Why a checkpoint cannot serve our optimizers, the same on every rank.

    Args:
        optimizers: their :func:`fitted` requests.
        stored: what the checkpoint holds.
        blocks: what our optimizers wrote into it.
    """
    problem = too_new(max((block.get("format", 0) for block in blocks), default=0))
    if problem:
        return problem
    optional = set[str]()
    if any(each[BLOCK].get("modifies") for each in optimizers):
        optional |= {*OPTIONAL}
    if _imports_adam(optimizers, stored):
        optional |= {_SECOND_MOMENT, _DISTRIBUTED_MAIN}
    of_ranks = distinct([(each[BLOCK]["optimizer"], shapes_of(each)) for each in optimizers])
    for requests in zip(*of_ranks, strict=True):
        wanted: dict[str, tuple[int, ...] | None] = {}
        for _, shapes in requests:
            wanted |= shapes
        name = requests[0][0]
        problem = mismatch(name, wanted, stored, optional) or of_another(name, wanted, blocks)
        if problem:
            return problem
    if any(each[BLOCK]["layers_differ"] for each in optimizers):
        return stacks_layers(stored)
    return None


def too_new(written: int) -> str | None:
    """Why this format cannot be read; None if it can."""
    if written <= FORMAT:
        return None
    formats = f"format {written}; this one reads up to {FORMAT}"
    return f"it was written by a later release of megatron_eopt ({formats}): update the package"


def mismatch(name: str, wanted: Shapes, stored: Shapes, optional: Set[str] = frozenset()) -> str | None:
    """Why ``stored`` cannot serve; ``optional`` states need not be loaded."""
    parameters = {split_key(key)[1] for key in wanted}
    differing = sorted(wanted.keys() - stored.keys())
    for key in sorted(stored.keys() - wanted.keys()):
        state, parameter = split_key(key)
        if state and parameter in parameters and base(state) not in optional:
            differing.append(key)
    if differing:
        return _other_states(name, split_key(differing[0])[1], wanted, stored)
    for key, shape in wanted.items():
        if shape is not None and stored[key] != shape:
            return (
                f"{key} has shape {stored[key]} in it, and this run needs {shape}: it is of another model, or of other "
                f"settings of the optimizer; {FRESH}"
            )
    return None


def _other_states(name: str, parameter: str, wanted: Shapes, stored: Shapes) -> str:
    needs = _states_of(parameter, wanted)
    has = _states_of(parameter, stored)
    if not has and parameter not in stored:
        return f"{parameter} is not in it: it is of another model"
    reason = OF_ANOTHER
    of_adam = has - {MAIN, _DISTRIBUTED_MAIN} == {_FIRST_MOMENT, _SECOND_MOMENT} and _has_adams_alone(stored)
    if not has and _has_flat(stored):
        reason = (
            "it is in flat buffers of the distributed optimizer. Resume with --use-distributed-optimizer and the "
            "same sizes, and save with --dist-ckpt-optim-fully-reshardable to change them, or"
        )
    elif of_adam and needs - {MAIN} == {MOMENTUM_BUFFER}:
        reason = "Adam wrote it. Pass --muon-momentum-from-adam to make its first moment the momentum, or"
    return other_states(parameter, has, name, needs, reason)


def other_states(parameter: str, has: Iterable[str], taker: str, needs: Iterable[str], reason: str) -> str:
    """Says which states a parameter has in a checkpoint, and needs."""
    listed = ", ".join(sorted(has)) or "no state"
    return f"it holds {listed} for {parameter}, and {taker} needs {', '.join(sorted(needs))}: {reason} {FRESH}"


def of_another(name: str | None, wanted: Iterable[str], blocks: Sequence[Block]) -> str | None:
    """Why state that another of our optimizers wrote cannot serve."""
    ours = {optimizer_class(each).__name__ for each in list_optimizers()}
    if name is not None and name not in ours:
        return None
    parameters = {split_key(key)[1] for key in wanted}
    for block in blocks:
        wrote = block["optimizer"]
        if wrote == name or wrote not in ours:
            continue
        names = {key for group in block["groups"] for key in group["names"]}
        for shared in sorted(parameters & names):
            return taken_for_its_own(wrote, shared, name or "an optimizer of Megatron")
    return None


def taken_for_its_own(wrote: str, parameter: str, taker: str) -> str:
    """Says that state of equal names is not the same state."""
    return (
        f"{wrote} wrote the state of {parameter}, and {taker} would take it for its own: resume with that one, or "
        f"{FRESH}"
    )


def stacks_layers(stored: Iterable[str]) -> str | None:
    """Why a checkpoint of stacked layers cannot serve."""
    for key in sorted(stored):
        if split_key(key)[0] and _STACKED.search(key):
            return (
                f"it stacks the state of all layers ({key}), which were treated alike when it was saved, and in this "
                f"run layers differ in their optimizers: leave away the overrides that single out layers (and what "
                f"freezes some), or {FRESH}"
            )
    return None


def of_buffers(requested: Iterable[ShardedTensor], stored: Iterable[str]) -> str | None:
    """Why state by parameter is none of flat buffers, on all ranks alike."""
    if _has_flat(stored) or not union(_FLAT for tensor in requested if _FLAT in tensor.key):
        return None
    return (
        f"it holds all state by parameter, and this run has that of what is no matrix in flat buffers, which Megatron "
        f"lays out beside those of whole matrices: pass --no-use-layer-wise-param-layout, or {FRESH}"
    )


def _imports_adam(optimizers: Iterable[StateDict], stored: Iterable[str]) -> bool:
    """Whether Adam's first moments become momenta."""
    return any(each[BLOCK]["import_adam"] for each in optimizers) and _has_adams_alone(stored)


def _has_adams_alone(stored: Iterable[str]) -> bool:
    """Whether there are first moments, and no momenta."""
    states = {split_key(key)[0] for key in stored if key.startswith("optimizer.")}
    return _FIRST_MOMENT in states and MOMENTUM_BUFFER not in states


def _states_of(parameter: str, keys: Iterable[str]) -> set[str]:
    return {state for state, of_parameter in map(split_key, keys) if of_parameter == parameter} - {""}


def _has_flat(keys: Iterable[str]) -> bool:
    return any(_FLAT in key for key in keys)
