"""Whether a run would load a checkpoint, without Megatron."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from megatron_eopt.checkpoints.contents import Contents
from megatron_eopt.checkpoints.faults import Problem
from megatron_eopt.checkpoints.states import MAIN, blocks_of
from megatron_eopt.family import OPTIMIZERS, OptimizerSpec
from megatron_eopt.optimizers.weight_average import AverageRule
from megatron_eopt.tools.verify.optimizers import distributed_format, state_keys

SIZES = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}
_NUMBERS_OF_MODEL = """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels
    q_lora_rank kv_lora_rank num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size
    mtp_num_layers""".split()
# With Megatron's defaults, which count in a whole command line.
_CHOICES_OF_MODEL: dict[str, Any] = {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "swiglu": False,
    "untie_embeddings_and_output_weights": False,
    "add_bias_linear": True,
    "qk_layernorm": False,
    "attention_output_gate": False,
    "group_query_attention": False,
    "multi_latent_attention": False,
    "moe_shared_expert_gate": False,
}
_OF_RUN: dict[str, Any] = {
    "optimizer": "adam",
    "optimizer_weight_average": None,
    "lr_decay_style": "linear",
    "bf16": False,
    "fp16": False,
    "no_load_optim": False,
    "finetune": False,
    "use_checkpoint_args": False,
    "override_opt_param_scheduler": False,
    "use_checkpoint_opt_param_scheduler": False,
}
_NUMBERS_OF_RUN = [*SIZES, "train_iters", "lr_decay_iters", "global_batch_size"]
# Those of optimizers but rates, which are the schedule's.
_OF_OPTIMIZERS = tuple(flag for row in OPTIMIZERS.values() for flag in row.flags if not flag.field)
_DEFAULTS = {**_CHOICES_OF_MODEL, **_OF_RUN, **{flag.dest: flag.default for flag in _OF_OPTIMIZERS}}
_ALWAYS_GIVEN = {"num_layers", "hidden_size", "num_attention_heads"}
# flag -> the scheduler's name
SCHEDULER = {"lr": "max_lr", "min_lr": "min_lr", "lr_decay_style": "lr_decay_style", "weight_decay": "end_wd"}
_ANEW = "or start the optimizer anew with --no-load-optim"

Flags = tuple[dict[str, Any], list[str]]  # values by Megatron's arguments, and flags that are not compared


def parse_flags(flags: Sequence[str]) -> Flags:
    """Parse a command line; a ``ValueError`` is for its mistakes."""
    unset = argparse.SUPPRESS
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=unset, exit_on_error=False)
    for name in (*_NUMBERS_OF_MODEL, *_NUMBERS_OF_RUN):
        parser.add_argument(_flag(name), type=int)
    for name in ("lr", "min_lr", "weight_decay"):
        parser.add_argument(_flag(name), type=float)
    for name, default in {**_CHOICES_OF_MODEL, **_OF_RUN}.items():
        if isinstance(default, bool):
            parser.add_argument(_flag(name), dest=name, action="store_false" if default else "store_true")
        else:
            parser.add_argument(_flag(name))
    for flag in _OF_OPTIMIZERS:
        options = {key: value for key, value in flag.options.items() if key in ("action", "type")}
        parser.add_argument(flag.name, dest=flag.dest, **options)
    try:
        # of which Megatron takes both spellings
        known, rest = parser.parse_known_args([word.replace("-opt_param-", "-opt-param-") for word in flags])
    except argparse.ArgumentError as error:
        raise ValueError(f"the flags after --: {error}") from error
    return vars(known), list(dict.fromkeys(word.partition("=")[0] for word in rest if word.startswith("--")))


def would_load(contents: Contents, given: dict[str, Any], ignored: list[str]) -> tuple[list[Problem], list[str]]:
    """What keeps a run from loading and continuing; then notes.

    Notes say what differs and does no harm, and what was not compared.
    """
    whole = given.keys() >= _ALWAYS_GIVEN and not given.get("use_checkpoint_args")
    run = {**_DEFAULTS, **given} if whole else given
    saved = contents.args
    notes = []
    if not saved:
        notes.append("the checkpoint has no arguments of its run: the model and the settings were not compared")
    if not whole:
        notes.append(
            "not a whole command line (--num-layers, --hidden-size and --num-attention-heads, without "
            "--use-checkpoint-args): what is not given was taken as it was saved"
        )
    if ignored:
        notes.append(f"not compared: {', '.join(ignored)}")
    problems = []
    if not run.get("use_checkpoint_args"):
        for name in _changed([*_NUMBERS_OF_MODEL, *_CHOICES_OF_MODEL], run, saved):
            what = f"another model: {name} was {saved[name]} and is {run[name]}"
            advice = f"give {_flag(name)} as it was: these parameters would not fit, or not be there"
            problems.append(Problem("error", what, advice))
    if sizes := _changed(SIZES, run, saved):
        listed = ", ".join(f"{SIZES[name]} {saved[name]} to {run[name]}" for name in sizes)
        notes.append(f"{listed}: torch_dist loads at any sizes")
    if run.get("no_load_optim") or run.get("finetune"):
        notes.append("the optimizer and the schedule start anew (--no-load-optim or --finetune)")
    elif not state_keys(contents) and not distributed_format(contents):
        problems.append(_error("the run wants optimizer state, and there is none", "load it"))
    else:
        problems += _optimizer(contents, run, saved)
        problems += _average(contents, run)
        problems += _precision(contents, run)
        problems += _schedule(contents, run)
        row = OPTIMIZERS.get(_name(saved))
        of_state = {"muon_momentum_from_adam", "muon_scalar_optimizer", *(row.state_depends_on if row else ())}
        for flag in _OF_OPTIMIZERS:
            if flag.dest not in of_state and _changed([flag.dest], given, saved):
                change = f"is {given[flag.dest]} and was {saved[flag.dest]}"
                notes.append(f"{flag.name} {change}: the update changes from here on")
    return problems, notes


def _optimizer(contents: Contents, run: dict[str, Any], saved: dict[str, Any]) -> Iterator[Problem]:
    flat = distributed_format(contents)
    if flat == "dp_reshardable":
        for name in _changed(("tensor_model_parallel_size", "pipeline_model_parallel_size"), run, saved):
            what = f"the DistributedOptimizer's state is {flat}: it cannot change {SIZES[name]}"
            yield _error(what, "save it with --dist-ckpt-optim-fully-reshardable first")
    was = _name(saved)
    wanted = _name({"optimizer": was, **run})
    row = OPTIMIZERS.get(wanted)
    what = f"it holds the state of {was}, and the run wants {wanted}"
    if wanted != was:
        if was != "adam" or row is None or not row.takes_adams:
            yield _error(what, f"keep --optimizer {was}")
        elif flat:
            yield _error(f"{what}; Adam's is in flat buckets ({flat})", "go on with adam")
        elif not run.get("muon_momentum_from_adam"):
            yield _error(what, "--muon-momentum-from-adam takes Adam's first moment as momentum")
    elif row is not None and row.owns == "matrices":
        for name in _changed([*row.state_depends_on, "muon_scalar_optimizer"], run, saved):
            if name in ("muon_split", "muon_split_qkv") and _split(row, saved) == _split(row, {**saved, **run}):
                continue
            what = f"{name} was {saved[name]} and is {run[name]}, which keeps other state"
            yield _error(what, f"set {_flag(name)} as it was")


def _split(row: OptimizerSpec, args: dict[str, Any]) -> tuple[str, bool]:
    """How a run splits fused parameters, and whether also QKV."""
    name = args.get("muon_split", "default")
    if name != "default":
        return name, True
    splits_qkv = args.get("muon_split_qkv", True)
    if row.cls.traits.pairs_rows and splits_qkv:
        return "all", True  # which is the default where state pairs rows with rows
    return name, splits_qkv


def _average(contents: Contents, run: dict[str, Any]) -> Iterator[Problem]:
    averages = [block["average"] for block in blocks_of(contents.common.get("optimizer")) if block.get("average")]
    if not averages or "optimizer_weight_average" not in run:
        return
    was = str(AverageRule.of(averages[0]["schedule"]))
    now = run["optimizer_weight_average"]
    if now == was:
        return
    advice = f"give --optimizer-weight-average {was}"
    if now is None and any(average["exported"] for average in averages):
        yield _error(f"its model is the average {was} of weights, and the run has none and would go on from it", advice)
    else:
        what = f"the average of weights is {now} and was {was}: what there is of it is left out"
        yield Problem("warning", what, f"{advice} to go on with it")


def _precision(contents: Contents, run: dict[str, Any]) -> Iterator[Problem]:
    if not state_keys(contents) or not ("bf16" in run or "fp16" in run):
        return
    half = bool(run.get("bf16") or run.get("fp16"))
    main = any(MAIN in states for states in state_keys(contents).values())
    if half and not main:
        what = f"it is of a run in fp32, and the run in half precision wants {MAIN}, which is not there"
        yield _error(what, "go on in fp32")
    if main and not half:
        what = f"it is of a run in half precision: in fp32, {MAIN} would be dropped and rounded parameters go on"
        yield _error(what, "give --bf16 or --fp16 as it was")


def _schedule(contents: Contents, run: dict[str, Any]) -> Iterator[Problem]:
    if run.get("override_opt_param_scheduler") or run.get("use_checkpoint_opt_param_scheduler"):
        return
    saved = contents.common.get("opt_param_scheduler") or {}
    changed = []
    for flag, name in SCHEDULER.items():
        if flag in run and name in saved and run[flag] != saved[name]:
            changed.append(f"{flag} was {saved[name]} and is {run[flag]}")
    steps = (run.get("lr_decay_iters") or run.get("train_iters") or 0) * (run.get("global_batch_size") or 0)
    if steps and saved.get("lr_decay_steps") not in (None, steps):
        changed.append(f"the schedule was {saved['lr_decay_steps']:,} samples long and is {steps:,}")
    if changed:
        advice = (
            "Megatron stops unless --override-opt-param-scheduler takes the flags', or "
            "--use-checkpoint-opt_param-scheduler the checkpoint's"
        )
        yield Problem("error", f"another schedule: {'; '.join(changed)}", advice)


def _name(args: dict[str, Any]) -> str:
    return str(args.get("optimizer") or "an unknown optimizer").removeprefix("dist_")


def _changed(names: Iterable[str], run: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    return [name for name in names if name in run and name in saved and run[name] != saved[name]]


def _flag(name: str) -> str:
    if name == "add_bias_linear":
        return "--disable-bias-linear"
    return f"--{name.replace('_', '-')}"


def _error(what: str, otherwise: str) -> Problem:
    return Problem("error", what, f"{otherwise}, {_ANEW}")
