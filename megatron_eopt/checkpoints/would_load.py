"""Whether a checkpoint would load in a run with other flags, and whether that would go on with the same training."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_eopt.checkpoints.contents import Contents
from megatron_eopt.checkpoints.flags import FLAGS_OF_UPDATES, Flags, completed
from megatron_eopt.checkpoints.problems import Problem
from megatron_eopt.checkpoints.states import MAIN, distributed_format, state_keys
from megatron_eopt.family import ROWS

_MODEL = """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size swiglu
    normalization position_embedding_type untie_embeddings_and_output_weights add_bias_linear add_qkv_bias qk_layernorm
    attention_output_gate multi_latent_attention q_lora_rank kv_lora_rank num_experts moe_ffn_hidden_size
    moe_shared_expert_intermediate_size moe_shared_expert_gate mtp_num_layers""".split()
_SPLIT_BY_DEFAULT = ("default", "all")  # the same for optimizers whose state pairs rows with rows
_SIZES = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}
# The scheduler's names of what flags say.
_SCHEDULER = {"lr": "max_lr", "min_lr": "min_lr", "lr_decay_style": "lr_decay_style", "weight_decay": "end_wd"}
_ANEW = "or start the optimizer anew with --no-load-optim"


@dataclass(frozen=True)
class Comparison:
    """What a run would make of a checkpoint.

    Attributes:
        problems: what keeps it from loading, or from going on with the same training.
        notes: what differs and does no harm, and what was not compared.
    """

    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def would_load(contents: Contents, flags: Flags) -> Comparison:
    """Compare a checkpoint with the flags of a run.

    Args:
        contents: of the checkpoint.
        flags: if they are not a whole command line, only those that are given are compared.
    """
    run, saved = flags.values, _saved(contents)
    notes = []
    if not saved:
        notes.append("the checkpoint has no arguments of its run: the model and the settings were not compared")
    if not flags.whole:
        notes.append(
            "not a whole command line (--num-layers, --hidden-size and --num-attention-heads, without "
            "--use-checkpoint-args): what is not given was taken as it was saved"
        )
    if flags.ignored:
        notes.append(f"not compared: {', '.join(dict.fromkeys(flags.ignored))}")
    problems = [] if run.get("use_checkpoint_args") else list(_model(run, saved))
    notes += _sizes(run, saved)
    if run.get("no_load_optim") or run.get("finetune"):
        notes.append("the optimizer and the schedule start anew (--no-load-optim or --finetune)")
    elif not state_keys(contents) and not distributed_format(contents):
        problems.append(Problem("error", "the run wants optimizer state, and there is none", _anew("load it")))
    else:
        problems += [*_optimizer(contents, run, saved), *_precision(contents, run), *_schedule(contents, run)]
        row = ROWS.get(_kept(contents, saved))
        changed = [
            flag
            for flag in FLAGS_OF_UPDATES
            if flag.dest in flags.given and flags.given[flag.dest] != saved.get(flag.dest, flags.given[flag.dest])
        ]
        notes += [
            f"{flag.name} is {flags.given[flag.dest]} and was {saved[flag.dest]}: the update changes from here on"
            for flag in changed
            if row is None or flag.dest not in row.state_depends_on  # these are problems
        ]
    return Comparison(tuple(problems), tuple(notes))


def _saved(contents: Contents) -> dict[str, Any]:
    args = contents.args
    return completed(args) if {"num_layers", "hidden_size", "num_attention_heads"} <= args.keys() else args


def _model(run: dict[str, Any], saved: dict[str, Any]) -> Iterator[Problem]:
    names = list(_MODEL)
    if saved.get("position_embedding_type") == "learned_absolute":
        names.append("max_position_embeddings")
    if not saved.get("multi_latent_attention"):
        names = [name for name in names if not name.endswith("lora_rank")]
    for name in names:
        # A vocabulary often comes from a tokenizer instead of a flag, and then says nothing.
        if (
            name in run
            and name in saved
            and run[name] != saved[name]
            and not (name == "vocab_size" and not saved[name])
        ):
            flag = "--disable-bias-linear" if name == "add_bias_linear" else f"--{name.replace('_', '-')}"
            what = f"another model: {name} was {saved[name]} and is {run[name]}"
            yield Problem("error", what, f"give {flag} as it was: these parameters would not fit, or not be there")


def _sizes(run: dict[str, Any], saved: dict[str, Any]) -> Iterator[str]:
    changed = [
        f"{short} {saved[name]} to {run[name]}"
        for name, short in _SIZES.items()
        if name in run and saved.get(name) not in (None, run[name])
    ]
    if changed:
        yield f"{', '.join(changed)}: torch_dist loads at any sizes"


def _optimizer(contents: Contents, run: dict[str, Any], saved: dict[str, Any]) -> Iterator[Problem]:
    was, wanted = _kept(contents, saved), run.get("optimizer")
    flat = distributed_format(contents)
    if flat == "dp_reshardable":
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            if name in run and saved.get(name) not in (None, run[name]):
                what = f"the DistributedOptimizer's state is {flat}: it cannot change {_SIZES[name]}"
                yield Problem("error", what, "save it with --dist-ckpt-optim-fully-reshardable first, " + _ANEW)
    if wanted is None or wanted.removeprefix("dist_") == was:
        yield from _same_optimizer(run, saved, was)
        return
    wanted = wanted.removeprefix("dist_")
    what = f"it holds the state of {was}, and the run wants {wanted}"
    if was == "adam" and wanted in ROWS and ROWS[wanted].takes_adams:
        if flat:
            yield Problem("error", f"{what}; Adam's lies in flat buckets ({flat})", _anew("go on with adam"))
        elif not run.get("muon_momentum_from_adam"):
            advice = "--muon-momentum-from-adam takes Adam's first moment as momentum, " + _ANEW
            yield Problem("error", what, advice)
    elif wanted in ROWS and _state(wanted) < _state(was):
        lost = " and ".join(sorted(_state(was) - _state(wanted)))
        yield Problem("error", f"{what}: its {lost} would be dropped without a word", _anew(f"keep {was}"))
    else:
        yield Problem("error", f"{what}, of which something is missing", _anew(f"keep --optimizer {was}"))


def _same_optimizer(run: dict[str, Any], saved: dict[str, Any], was: str) -> Iterator[Problem]:
    row = ROWS.get(was)
    if row is None or row.owns == "all":
        return
    for name in (*row.state_depends_on, "muon_scalar_optimizer"):
        by_default = name == "muon_split" and getattr(row.cls, "pairs_rows", False)
        alike = _SPLIT_BY_DEFAULT if by_default and run.get(name) in _SPLIT_BY_DEFAULT else ()
        if name in run and saved.get(name) not in (None, run[name], *alike):
            what = f"{name} was {saved[name]} and is {run[name]}, which keeps other state"
            yield Problem("error", what, _anew(f"give --{name.replace('_', '-')} {saved[name]}"))


def _state(optimizer: str) -> set[str]:
    """What an optimizer of the table keeps."""
    return {*ROWS[optimizer].state, *ROWS[optimizer].further_state} if optimizer in ROWS else set()


def _precision(contents: Contents, run: dict[str, Any]) -> Iterator[Problem]:
    kept = state_keys(contents)
    if not kept or not ("bf16" in run or "fp16" in run):
        return
    half = bool(run.get("bf16") or run.get("fp16"))
    main = any(MAIN in states for states in kept.values())
    if half and not main:
        what = f"it is of a run in fp32, and the run in half precision wants {MAIN}, which is not there"
        yield Problem("error", what, _anew("go on in fp32"))
    if main and not half:
        what = f"it is of a run in half precision: in fp32, {MAIN} would be dropped and rounded parameters go on"
        yield Problem("error", what, _anew("give --bf16 or --fp16 as it was"))


def _schedule(contents: Contents, run: dict[str, Any]) -> Iterator[Problem]:
    if run.get("override_opt_param_scheduler") or run.get("use_checkpoint_opt_param_scheduler"):
        return
    saved = contents.common.get("opt_param_scheduler") or {}
    changed = [
        f"{flag} was {saved[name]} and is {run[flag]}"
        for flag, name in _SCHEDULER.items()
        if flag in run and name in saved and run[flag] != saved[name]
    ]
    steps = (run.get("lr_decay_iters") or run.get("train_iters") or 0) * (run.get("global_batch_size") or 0)
    if steps and saved.get("lr_decay_steps") not in (None, steps):
        changed.append(f"the schedule was {saved['lr_decay_steps']:,} samples long and is {steps:,}")
    if changed:
        advice = (
            "Megatron stops unless --override-opt-param-scheduler takes the flags', or "
            "--use-checkpoint-opt_param-scheduler the checkpoint's"
        )
        yield Problem("error", f"another schedule: {'; '.join(changed)}", advice)


def _kept(contents: Contents, saved: dict[str, Any]) -> str:
    """The optimizer whose state is there, by Megatron's name."""
    if saved.get("optimizer"):
        return str(saved["optimizer"]).removeprefix("dist_")
    states = {state for kept in state_keys(contents).values() for state in kept}
    if "momentum_buffer" in states:
        second = any(state.startswith("moment2_buffer") for state in states)
        return "adaptive_muon" if second else "muon"
    return "adam" if "exp_avg_sq" in states else "lion"


def _anew(otherwise: str) -> str:
    return f"{otherwise}, {_ANEW}"
