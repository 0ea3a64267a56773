"""What is loaded of a torch_dist checkpoint, what is refused, and what is told.

Also read before the build: what the run that saved had decided, for bit-equal resumes.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_eopt.checkpoints.contents import CheckpointError, forget_metadata, read_blob, read_layout
from megatron_eopt.checkpoints.gate import Load
from megatron_eopt.checkpoints.states import BLOCK, MAIN, base, blocks_of, holding, split_key
from megatron_eopt.checkpoints.sums import CHECKSUMS, Sums, saved_sums
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.agreement import distinct, from_rank_0, say, union
from megatron_eopt.megatron.checkpoints import matching
from megatron_eopt.megatron.checkpoints.sharding import sharded_tensors, state_key
from megatron_eopt.megatron.checkpoints.whole import checksums, contents_of, damage_of, loaded_tensors, resumed
from megatron_eopt.megatron.support.run import on
from megatron_eopt.optimizers.base import KERNEL, RATES
from megatron_eopt.optimizers.modifiers import OPTIONAL
from megatron_eopt.optimizers.state import MOMENTUM_BUFFER
from megatron_eopt.optimizers.step_choice import STEP_KERNELS
from megatron_eopt.optimizers.weight_average import AVERAGE, TRAINED
from megatron_eopt.parallel.plan import TpMode
from megatron_eopt.redirect import around
from megatron_eopt.registry import list_optimizers, optimizer_class
from megatron_eopt.routing import ParamPattern, compare, from_json, to_json

FORMAT = 1  # of what this package writes down; it grows when an older release could not read a checkpoint any more
FRESH = "pass --no-load-optim to load the weights alone and start with fresh optimizer state"
_FIRST_MOMENT = "exp_avg"
_SECOND_MOMENT = "exp_avg_sq"
_DISTRIBUTED_MAIN = "param"  # the main copy, in what Megatron's distributed optimizer saves by parameter
_FLAT = ".distributed."  # in keys of flat buffers
_STACKED = re.compile(r"\.layers\.(?!\d)")
_DECISIONS = (KERNEL, RATES, STEP_KERNELS)  # settings of groups that a run has decided
# With these Megatron loads no optimizer state, or chooses between two folders.
_NOT_READ = ("finetune", "no_load_optim", "moe_use_upcycling", "non_persistent_ckpt_type")

Shapes = Mapping[str, tuple[int, ...] | None]  # key -> global shape; None is any shape
Group = tuple[str, Mapping[str, Any]]  # class of its optimizer, and settings


class Stored(NamedTuple):
    """What a checkpoint holds, as sent to all ranks."""

    damage: str | None  # why it cannot be read
    shapes: dict[str, tuple[int, ...]]  # global, by key
    dtypes: dict[str, torch.dtype]
    optimizer: Any  # the common state of it
    checksums: Any  # as they were read; None where there are none


def read_stored(folder: Path) -> Stored:
    """What a checkpoint's metadata say that it holds."""
    try:
        contents = contents_of(folder)
    except CheckpointError as error:
        return Stored(str(error), {}, {}, None, None)
    return Stored(
        damage_of(contents),
        {key: tensor.shape for key, tensor in contents.tensors.items()},
        {key: tensor.dtype for key, tensor in contents.tensors.items()},
        contents.common.get("optimizer"),
        contents.common.get(CHECKSUMS),
    )


@around
def checked_load(
    load: Callable[..., Any], sharded_state_dict: Any, checkpoint_dir: str, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``dist_checkpointing.load``: checks that requested optimizer state is there."""
    optimizers = list(holding(sharded_state_dict, BLOCK))
    with_state = optimizers or "optimizer" in sharded_state_dict
    stored = from_rank_0(lambda: read_stored(Path(checkpoint_dir))) if with_state else None
    contents_of.cache_clear()  # nobody asks again
    if stored is None:
        return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    if not optimizers:  # of ours; Megatron checks the rest itself
        wanted = union(requested_of({"optimizer": sharded_state_dict["optimizer"]}))
        problem = of_another(None, wanted, blocks_of(stored.optimizer))
        if problem:
            raise CheckpointError(f"{checkpoint_dir}: {problem}")
        return load(sharded_state_dict, checkpoint_dir, *args, **kwargs)
    _renumber(optimizers, stored.shapes)
    _leave_averages(optimizers, stored.shapes)
    if stored.damage is None:
        _leave_out_missing(optimizers, stored)
    tensors = list(sharded_tensors(sharded_state_dict))
    problem = stored.damage or problem_of(optimizers, stored) or _of_buffers(tensors, stored.shapes)
    if problem:
        raise CheckpointError(f"{checkpoint_dir}: {problem}")
    saved: Sums = {}
    if any(each[BLOCK]["checksums"] for each in optimizers):
        saved = _sums_of(stored, checkpoint_dir)
    if dist.get_rank() == 0 and (warning := other_padding(tensors, stored.shapes)):
        say(f"warning: {warning}")
    request = matching.taken_out(sharded_state_dict)
    of_state = [(split_key(t.key)[0], t) for t in sharded_tensors(request)]
    report_converted((name, stored.dtypes.get(t.key, t.dtype), t.dtype) for name, t in of_state if name)
    result = load(request, checkpoint_dir, *args, **kwargs)
    loaded = result[0] if isinstance(result, tuple) else result
    if saved:
        _compare(saved, stored, request, loaded, checkpoint_dir)
    loaded.pop(CHECKSUMS, None)
    matching.put_back(sharded_state_dict, loaded, stored.optimizer)
    return result


@around
def with_optimizer(
    load: Callable[..., Any], model: Any, optimizer: Any, opt_param_scheduler: Any, *args: Any, **kwargs: Any
) -> Any:
    """Replaces ``load_checkpoint``: optimizers see what was loaded, and keep rates.

    For ``--override-opt-param-scheduler`` Megatron 0.20 gives every group ``--lr`` and ``--min-lr`` after the load.
    """
    ours = hasattr(optimizer, "megatron_eopt")
    if ours and kwargs.get("skip_load_to_model_and_opt"):
        kwargs["skip_load_to_model_and_opt"] = False
    of_run = matching.schedules(optimizer) if ours else []
    try:
        result = load(model, optimizer, opt_param_scheduler, *args, **kwargs)
    finally:
        forget_metadata()  # nobody asks again
    if ours and on(releases.training_args(), "override_opt_param_scheduler") and opt_param_scheduler is not None:
        matching.restore_schedules(optimizer, of_run)
        opt_param_scheduler.step(0)
    return result


def _sums_of(stored: Stored, folder: str) -> Sums:
    entries = {key: prod(shape) for key, shape in stored.shapes.items()}
    try:
        return saved_sums(stored.checksums, stored.optimizer, entries)
    except CheckpointError as error:
        raise CheckpointError(
            f"{folder}: {error}. Load another checkpoint, or pass --no-checksums to load this one without comparing"
        ) from None


def _compare(saved: Sums, stored: Stored, requested: Any, loaded: dict[str, Any], folder: str) -> None:
    tensors = (t for t in loaded_tensors(requested, loaded) if stored.shapes.get(t.key) == tuple(t.global_shape))
    sums = checksums(t for t in tensors if stored.dtypes[t.key] == t.dtype)
    without = sorted(sums.keys() - saved.keys())
    if without:
        say(
            f"warning: {len(without)} tensors have no checksum in the checkpoint, such as {without[0]}: nothing says "
            f"whether they are what was saved, which is right for quantized parameters alone"
        )
    changed = []
    for key in sorted(sums.keys() & saved.keys()):
        value, entries = sums[key]
        # of a vocabulary with another padding, another number of entries was loaded
        if entries == saved[key][1] and value != saved[key][0]:
            changed.append(key)
    if changed:
        raise CheckpointError(
            f"{folder}: {len(changed)} tensors are not what was saved, such as {changed[0]}: their bytes have changed "
            f"since. megatron-eopt verify-checkpoint says where; load another checkpoint, or a good copy of this one"
        )


def problem_of(optimizers: Sequence[dict[Any, Any]], stored: Stored) -> str | None:
    """Why the checkpoint cannot serve, the same on every rank."""
    blocks = blocks_of(stored.optimizer)
    problem = too_new(max((block.get("format", 0) for block in blocks), default=0))
    if problem:
        return problem
    if not any(split_key(key)[0] for key in stored.shapes):
        if any(_FLAT in key for key in stored.shapes):
            return (
                f"it holds the state of Adam in flat buffers of the distributed optimizer, which say nothing of "
                f"parameters: save it with --dist-ckpt-optim-fully-reshardable, or {FRESH}"
            )
        return f"it holds no optimizer state (it was saved with --no-save-optim, or converted): {FRESH}"
    optional = {AVERAGE}
    if any(each[BLOCK].get("modifies") for each in optimizers):
        optional |= {*OPTIONAL}
    if any(each[BLOCK]["import_adam"] for each in optimizers) and has_adams_alone(stored.shapes):
        optional |= {_SECOND_MOMENT, _DISTRIBUTED_MAIN}
        _ask_for_adams(optimizers, stored)
    requested_here = [(each[BLOCK]["optimizer"], requested_of(each)) for each in optimizers]
    for of_ranks in zip(*distinct(requested_here), strict=True):
        name = of_ranks[0][0]
        wanted: dict[str, tuple[int, ...] | None] = {}
        for _, shapes in of_ranks:
            wanted |= shapes
        problem = _of_average(wanted, stored.shapes)
        problem = problem or mismatch(name, wanted, stored.shapes, optional) or of_another(name, wanted, blocks)
        if problem:
            return problem
    return stacks_layers(stored.shapes) if any(each[BLOCK]["layers_differ"] for each in optimizers) else None


def _ask_for_adams(optimizers: Sequence[dict[Any, Any]], stored: Stored) -> None:
    """Ask for Adam's first moments in place of momenta."""
    theirs = {MOMENTUM_BUFFER: _FIRST_MOMENT}
    if any(split_key(key)[0] == _DISTRIBUTED_MAIN for key in stored.shapes):
        theirs[MAIN] = _DISTRIBUTED_MAIN
    for value in _requested(optimizers):
        name, parameter = split_key(value.key)
        if name in theirs:
            value.key = state_key(theirs[name], parameter)


def _requested(optimizers: Iterable[dict[Any, Any]]) -> Iterator[ShardedTensor | ShardedTensorFactory]:
    for each in optimizers:
        for value in nested_values(each):
            if isinstance(value, ShardedTensor | ShardedTensorFactory):
                yield value


def _renumber(optimizers: Iterable[dict[Any, Any]], stored: Iterable[str]) -> None:
    """Ask for state by the numbers of optimizers in ``stored``."""
    # Megatron numbers those of the layer-wise optimizer (chained_1.optimizer...); without it, experts have one more.
    numbers = {split_key(key): key.partition("optimizer.")[0] for key in stored}
    for value in _requested(optimizers):
        for key in {split_key(tensor.key) for tensor in sharded_tensors([value])} & numbers.keys():
            value.key = numbers[key] + value.key[value.key.index("optimizer.") :]


def _leave_out_missing(optimizers: Iterable[dict[Any, Any]], stored: Stored) -> None:
    """Take out of the request what modifiers keep and the checkpoint lacks, or say what they drop."""
    missing = set[str]()
    wanted = set[str]()
    blocks = [each[BLOCK] for each in optimizers if each[BLOCK].get("modifies")]
    for states in (of_parameter for block in blocks for of_parameter in block["state"].values()):
        for state in [state for state in states if base(state) in OPTIONAL]:
            there = [tensor for tensor in states[state] if tensor.key in stored.shapes]
            wanted |= {tensor.key for tensor in states[state]}
            if len(there) < len(states[state]):
                missing.add(base(state))
            states[state] = there
    for state in union(missing):
        say(f"the checkpoint lacks {state} of some parameters, which modifiers of this run keep: it begins anew there")
    unused = {base(split_key(key)[0]) for key in stored.shapes.keys() - {*union(wanted)}} & {*OPTIONAL}
    for state in sorted(unused) if blocks else ():
        say(f"the checkpoint holds {state} of some parameters, which no modifier of this run keeps: it is left out")


def _leave_averages(optimizers: Sequence[dict[Any, Any]], stored: Iterable[str]) -> None:
    """Take averages of weights, and what belongs to them, out of a request if there are none."""
    there = {split_key(key)[0] for key in stored}
    for each in optimizers:
        states = matching.torch_state(each).get("state")
        if isinstance(states, dict):  # which it is not on a rank without parameters
            for values in states.values():
                for key in {AVERAGE, TRAINED} - there if isinstance(values, dict) else ():
                    values.pop(key, None)


def _of_average(wanted: Iterable[str], stored: Iterable[str]) -> str | None:
    """Why a checkpoint whose model is an average cannot serve."""
    parameters = {split_key(key)[1] for key in wanted}
    if any(state == TRAINED and name in parameters for state, name in map(split_key, {*stored} - {*wanted})):
        return (
            f"its model is an average of weights (--save-weight-average), and this run, which has none, would go on "
            f"from it: name its --optimizer-weight-average, or {FRESH}"
        )
    return None


def _of_buffers(requested: Iterable[ShardedTensor], stored: Iterable[str]) -> str | None:
    """Why state by parameter is none of flat buffers, on all ranks alike."""
    if any(_FLAT in key for key in stored) or not union(_FLAT for tensor in requested if _FLAT in tensor.key):
        return None
    return (
        f"it holds all state by parameter, and this run has that of what is no matrix in flat buffers, which Megatron "
        f"lays out beside those of whole matrices: pass --no-use-layer-wise-param-layout, or {FRESH}"
    )


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
            reason = f"it is of another model, or of other settings of the optimizer; {FRESH}"
            return f"{key} has shape {stored[key]} in it, and this run needs {shape}: {reason}"
    return None


def _other_states(name: str, parameter: str, wanted: Shapes, stored: Shapes) -> str:
    needs = {split_key(key)[0] for key in wanted if split_key(key)[1] == parameter}
    has = {split_key(key)[0] for key in stored if split_key(key)[1] == parameter} - {""}
    if not has and parameter not in stored:
        return f"{parameter} is not in it: it is of another model"
    reason = "another optimizer wrote it, or this one with other settings; resume with that one, or"
    of_adam = has - {MAIN, _DISTRIBUTED_MAIN} == {_FIRST_MOMENT, _SECOND_MOMENT} and has_adams_alone(stored)
    if not has and any(_FLAT in key for key in stored):
        reason = (
            "it is in flat buffers of the distributed optimizer. Resume with --use-distributed-optimizer and the "
            "same sizes, and save with --dist-ckpt-optim-fully-reshardable to change them, or"
        )
    elif MAIN in has ^ needs and _DISTRIBUTED_MAIN not in has:
        saved, now = ("bf16", "fp32") if MAIN in has else ("fp32", "bf16")
        reason = f"it is of a run in {saved}, and this one is in {now}; resume in {saved}, or"
    elif of_adam and needs - {MAIN} == {MOMENTUM_BUFFER}:
        reason = "Adam wrote it. Pass --muon-momentum-from-adam to make its first moment the momentum, or"
    listed = ", ".join(sorted(has)) or "no state"
    return f"it holds {listed} for {parameter}, and {name} needs {', '.join(sorted(needs))}: {reason} {FRESH}"


def has_adams_alone(stored: Collection[str]) -> bool:
    """Whether there are first moments, and no momenta."""
    states = {split_key(key)[0] for key in stored if key.startswith("optimizer.")}
    return _FIRST_MOMENT in states and MOMENTUM_BUFFER not in states


def of_another(name: str | None, wanted: Iterable[str], blocks: Sequence[Mapping[str, Any]]) -> str | None:
    """Why state that another of our optimizers wrote cannot serve."""
    ours = {optimizer_class(each).__name__ for each in list_optimizers()}
    parameters = {split_key(key)[1] for key in wanted}
    for block in blocks if name is None or name in ours else ():
        wrote = block["optimizer"]
        shared = sorted(parameters & {key for group in block["groups"] for key in group["names"]})
        if shared and wrote != name and wrote in ours:
            taker = name or "an optimizer of Megatron"
            taken = f"{wrote} wrote the state of {shared[0]}, and {taker} would take it for its own"
            return f"{taken}: resume with that one, or {FRESH}"
    return None


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


def requested_of(optimizer: Any) -> dict[str, tuple[int, ...] | None]:
    """Key -> shape of requested tensors; None for padded vocabularies."""
    return {t.key: None if t.allow_shape_mismatch else t.global_shape for t in sharded_tensors(optimizer)}


def other_padding(requested: Iterable[ShardedTensor], stored: Mapping[str, tuple[int, ...]]) -> str | None:
    """What becomes of a vocabulary that was padded otherwise."""
    for tensor in requested:
        was = stored.get(tensor.key, tensor.global_shape)
        if tensor.allow_shape_mismatch and was != tensor.global_shape:
            return (
                f"the vocabulary is padded otherwise than in the checkpoint ({tensor.key} is {tensor.global_shape}, "
                f"and was {was}): rows that only one of them has are dropped, or begin anew; "
                f"--make-vocab-size-divisible-by sets the padding"
            )
    return None


def report_converted(state: Iterable[tuple[str, torch.dtype, torch.dtype]]) -> None:
    """Say which state is converted to this run's dtype."""
    converted = union(f"{name} from {was} to {now}" for name, was, now in state if was != now)
    if converted:
        say(f"the state of the checkpoint is converted: {', '.join(converted)}")


def report_changes(saved: dict[str, Any] | None, families: Sequence[ParamPattern]) -> None:
    """Say what changed since the save; an unreadable manifest passes."""
    if saved is None or dist.get_rank() != 0:
        return
    try:
        changes = compare(from_json(saved), from_json(to_json(families)))
    except ValueError as error:
        changes = [f"not known, since {error}"]
    for line in changes:
        say(f"changed since the checkpoint: {line}")


class Decided(NamedTuple):
    """Decisions of the run that saved; empty where unknown."""

    tp_mode: TpMode | None = None
    settings: Mapping[str, dict[str, Any]] = {}  # class of an optimizer -> kernels and rates in its groups


def decided_before(args: Any, megatron_fsdp: bool) -> Decided:
    """Decisions in the checkpoint to load; empty if unreadable."""
    if not on(args, "load") or on(args, *_NOT_READ):
        return Decided()
    try:
        path = resumed(Path(args.load), getattr(args, "ckpt_step", None))
        if path is None or path.name == "release":  # which is without optimizer state
            return Decided()
        modes, groups = (_decided_in_fsdp_dtensor if megatron_fsdp else _decided_in_torch_dist)(path)
    except Exception:  # whatever is wrong with it, the load says
        return Decided()
    settings: dict[str, dict[str, Any]] = {}
    for name, group in groups:
        of_class = settings.setdefault(name, {})
        for key in _DECISIONS:
            if key in group:
                of_class.setdefault(key, group[key])
    mode = next((mode for mode in modes if mode in get_args(TpMode)), None)
    return Decided(mode, settings)


def _decided_in_torch_dist(path: Path) -> tuple[list[Any], list[Group]]:
    """The modes of optimizers, and the settings of groups."""
    modes = []
    groups = []
    for block in blocks_of(contents_of(path).common.get("optimizer")):
        modes.append(block["settings"].get("tp_mode"))
        groups += [(block["optimizer"], group["settings"]) for group in block["groups"]]
    return modes, groups


def _decided_in_fsdp_dtensor(path: Path) -> tuple[list[Any], list[Group]]:
    blobs = read_layout(path).blobs

    def read(key: str) -> Any:
        return json.loads(Load().load_saved(read_blob(path, blobs[key])))

    groups = [tuple(read(key)) for key in blobs if key.startswith("optimizer.settings.")]
    return [read(f"optimizer.{BLOCK}.run")["tp_mode"]], groups
