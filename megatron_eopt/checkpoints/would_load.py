"""Whether a run would load a checkpoint, without Megatron."""

import argparse
import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_eopt.checkpoints.contents import Contents
from megatron_eopt.checkpoints.problems import Problem
from megatron_eopt.checkpoints.states import MAIN, base, blocks_of, distributed_format, state_keys
from megatron_eopt.family import OPTIMIZERS, OptimizerSpec
from megatron_eopt.optimizers.weight_average import AverageRule

# Flags by the names of Megatron's arguments, and their types.
_OF_MODEL: dict[type, str] = {
    int: """num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size
        q_lora_rank kv_lora_rank num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size mtp_num_layers
        max_position_embeddings""",
    str: "normalization position_embedding_type",
    bool: """swiglu untie_embeddings_and_output_weights add_bias_linear add_qkv_bias qk_layernorm attention_output_gate
        multi_latent_attention moe_shared_expert_gate""",
}
_OF_RUN: dict[type, str] = {
    int: """tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size
        expert_tensor_parallel_size train_iters lr_decay_iters lr_warmup_iters global_batch_size""",
    float: "lr min_lr weight_decay",
    str: "optimizer optimizer_momentum_dtype optimizer_weight_average lr_decay_style ckpt_format",
    bool: """group_query_attention bf16 fp16 no_load_optim finetune use_checkpoint_args override_opt_param_scheduler
        use_checkpoint_opt_param_scheduler""",
}
_MODEL = " ".join(_OF_MODEL.values()).split()
_FLAGS = {name: kind for each in (_OF_MODEL, _OF_RUN) for kind, names in each.items() for name in names.split()}
# Those of optimizers but rates, which are the schedule's.
_OF_OPTIMIZERS = tuple(flag for row in OPTIMIZERS.values() for flag in row.flags if not flag.field)
_OF_LOADING = ("muon_momentum_from_adam", "muon_scalar_optimizer")
_SPELLED = {
    "add_bias_linear": "--disable-bias-linear",
    "use_checkpoint_opt_param_scheduler": "--use-checkpoint-opt_param-scheduler",
}
_DEFAULTS: dict[str, Any] = {
    **{name: False for name, kind in _FLAGS.items() if kind is bool},
    **{flag.dest: flag.default for flag in _OF_OPTIMIZERS},
    "add_bias_linear": True,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "optimizer": "adam",
    "optimizer_momentum_dtype": "fp32",
    **dict.fromkeys(("num_experts", "mtp_num_layers", "moe_shared_expert_intermediate_size")),
    **dict.fromkeys(("tensor_model_parallel_size", "pipeline_model_parallel_size"), 1),
    "optimizer_weight_average": None,
    "min_lr": 0.0,
    "lr_decay_style": "linear",
    "weight_decay": 0.01,
}
_NEAR = 0.9  # difflib's ratio of a misspelling; Megatron's other flags are farther
_ALWAYS_GIVEN = {"num_layers", "hidden_size", "num_attention_heads"}
SIZES = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "context_parallel_size": "CP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}
# flag -> the scheduler's name
_SCHEDULER = {"lr": "max_lr", "min_lr": "min_lr", "lr_decay_style": "lr_decay_style", "weight_decay": "end_wd"}
_ANEW = "or start the optimizer anew with --no-load-optim"


Flags = tuple[dict[str, Any], list[str]]  # values by Megatron's arguments, and flags that are not compared


def parse_flags(flags: Sequence[str]) -> Flags:
    """Parse a command line; a ``ValueError`` is for its mistakes."""
    unset = argparse.SUPPRESS
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=unset, exit_on_error=False)
    for name, kind in _FLAGS.items():
        if kind is bool:
            action = "store_false" if _DEFAULTS[name] else "store_true"
            typed = _flag(name)  # Megatron takes both spellings
            spellings = {typed, typed.replace("opt-param", "opt_param"), typed.replace("opt_param", "opt-param")}
            parser.add_argument(*spellings, dest=name, action=action)
        else:
            parser.add_argument(_flag(name), type=kind)
    for flag in _OF_OPTIMIZERS:
        of_value = {key: value for key, value in flag.options.items() if key in ("action", "type")}
        parser.add_argument(flag.name, dest=flag.dest, **of_value)
    try:
        known, rest = parser.parse_known_args(flags)
    except argparse.ArgumentError as error:
        raise ValueError(f"the flags after --: {error}") from error
    ignored = list(dict.fromkeys(each.partition("=")[0] for each in rest if each.startswith("--")))
    names = [*map(_flag, _FLAGS), *(flag.name for flag in _OF_OPTIMIZERS)]
    for name in ignored:
        if near := difflib.get_close_matches(name, names, 1, _NEAR):
            raise ValueError(f"the flags after --: unknown flag {name}, did you mean {near[0]}?")
    return vars(known), ignored


def would_load(contents: Contents, given: dict[str, Any], ignored: list[str]) -> tuple[list[Problem], list[str]]:
    """What keeps a run from loading and continuing; then notes.

    Notes say what differs and does no harm, and what was not compared. What a whole command line does not give has
    Megatron's default; of another only what is given is compared.
    """
    whole = given.keys() >= _ALWAYS_GIVEN and not given.get("use_checkpoint_args")
    run, saved = _completed({**_DEFAULTS, **given}) if whole else given, contents.args
    if saved.keys() >= _ALWAYS_GIVEN:
        saved = _completed(saved)
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
    problems = [] if run.get("use_checkpoint_args") else list(_model(run, saved))
    if sizes := _changed(SIZES, run, saved):
        listed = ", ".join(f"{SIZES[name]} {saved[name]} to {run[name]}" for name in sizes)
        notes.append(f"{listed}: torch_dist loads at any sizes")
    if run.get("no_load_optim") or run.get("finetune"):
        notes.append("the optimizer and the schedule start anew (--no-load-optim or --finetune)")
    elif not state_keys(contents) and not distributed_format(contents):
        problems.append(_error("the run wants optimizer state, and there is none", "load it"))
    else:
        problems += [*_optimizer(contents, run, saved), *_precision(contents, run), *_schedule(contents, run)]
        of_average, said = _average(contents, run)
        problems, notes = problems + of_average, notes + said
        row = OPTIMIZERS.get(_kept(contents, saved))
        others = (*_OF_LOADING, *(row.state_depends_on if row else ()))  # of no update, or problems
        for flag in _OF_OPTIMIZERS:
            now = given.get(flag.dest)
            was = saved.get(flag.dest, now)
            if flag.dest in given and flag.dest not in others and now != was:
                notes.append(f"{flag.name} is {now} and was {was}: the update changes from here on")
    return problems, notes


def _model(run: dict[str, Any], saved: dict[str, Any]) -> Iterator[Problem]:
    skipped = set()
    if saved.get("position_embedding_type") != "learned_absolute":
        skipped.add("max_position_embeddings")
    if not saved.get("multi_latent_attention"):
        skipped |= {"q_lora_rank", "kv_lora_rank"}
    if not saved.get("vocab_size"):  # often a tokenizer's
        skipped.add("vocab_size")
    for name in _MODEL:
        if name not in skipped and name in run and name in saved and run[name] != saved[name]:
            what = f"another model: {name} was {saved[name]} and is {run[name]}"
            advice = f"give {_flag(name)} as it was: these parameters would not fit, or not be there"
            yield Problem("error", what, advice)


def _optimizer(contents: Contents, run: dict[str, Any], saved: dict[str, Any]) -> Iterator[Problem]:
    was, flat = _kept(contents, saved), distributed_format(contents)
    if flat == "dp_reshardable":
        for name in _changed(("tensor_model_parallel_size", "pipeline_model_parallel_size"), run, saved):
            what = f"the DistributedOptimizer's state is {flat}: it cannot change {SIZES[name]}"
            yield _error(what, "save it with --dist-ckpt-optim-fully-reshardable first")
    wanted = run.get("optimizer", was).removeprefix("dist_")
    what = f"it holds the state of {was}, and the run wants {wanted}"
    rows = (OPTIMIZERS.get(name) for name in (was, wanted))
    kept, keeps = (row.state_keys if row else set() for row in rows)
    if wanted == was:
        row = OPTIMIZERS.get(was)
        if row is None or row.owns == "all":
            return
        for name in _changed([*row.state_depends_on, "muon_scalar_optimizer"], run, saved):
            if name in ("muon_split", "muon_split_qkv") and _split(row, saved) == _split(row, {**saved, **run}):
                continue
            advice = f"give {_flag(name)} {saved[name]}"
            if name == "muon_split_qkv":
                advice = "leave --muon-no-split-qkv away" if saved[name] else "give --muon-no-split-qkv"
            yield _error(f"{name} was {saved[name]} and is {run[name]}, which keeps other state", advice)
    elif was == "adam" and wanted in OPTIMIZERS and OPTIMIZERS[wanted].takes_adams:
        if flat:
            yield _error(f"{what}; Adam's is in flat buckets ({flat})", "go on with adam")
        elif not run.get("muon_momentum_from_adam"):
            yield _error(what, "--muon-momentum-from-adam takes Adam's first moment as momentum")
    elif wanted in OPTIMIZERS and keeps < kept:
        lost = " and ".join(sorted(kept - keeps))
        yield _error(f"{what}: its {lost} would be dropped without a word", f"keep {was}")
    else:
        yield _error(f"{what}, of which something is missing", f"keep --optimizer {was}")


def _split(row: OptimizerSpec, args: dict[str, Any]) -> tuple[str, bool]:
    """How a run splits fused parameters, and whether also QKV."""
    name = args.get("muon_split", "default")
    if name != "default":
        return name, True
    splits_qkv = args.get("muon_split_qkv", True)
    if row.cls.traits.pairs_rows and splits_qkv:
        return "all", True  # which is the default where state pairs rows with rows
    return name, splits_qkv


def _average(contents: Contents, run: dict[str, Any]) -> tuple[list[Problem], list[str]]:
    blocks = blocks_of(contents.common.get("optimizer"))
    kept = next((AverageRule.of(block["average"]["schedule"]) for block in blocks if block.get("average")), None)
    was, now = None if kept is None else str(kept), run.get("optimizer_weight_average")
    exported = was is not None and any(block["average"]["exported"] for block in blocks)
    if was is not None and "optimizer_weight_average" not in run:  # a part of a command line
        unsaid = f"the average {was} of weights: the flags name none, and a run without --optimizer-weight-average"
        if not exported:
            return [], [f"{unsaid} leaves it in the checkpoint"]
        what, advice = f"{unsaid} is refused, as its model is the average", f"give --optimizer-weight-average {was}"
        return [Problem("warning", what, f"{advice}, {_ANEW}")], []
    if exported and now is None:
        what = f"its model is the average {was} of weights, and the run has none and would go on from it"
        return [_error(what, f"give --optimizer-weight-average {was}")], []
    if was is not None and now is None:
        return [], [f"the average {was} of weights is not loaded: the run has none"]
    if now is not None and AverageRule.parse(str(now)) != kept:
        return [], [f"the average of weights begins anew: it is {now} and was {was or 'none'}"]
    return [], []


def _precision(contents: Contents, run: dict[str, Any]) -> Iterator[Problem]:
    kept = state_keys(contents)
    if not kept or not ("bf16" in run or "fp16" in run):
        return
    half = bool(run.get("bf16") or run.get("fp16"))
    main = any(MAIN in states for states in kept.values())
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
    known = {flag: (saved[name], run[flag]) for flag, name in _SCHEDULER.items() if flag in run and name in saved}
    changed = [f"{flag} was {was} and is {now}" for flag, (was, now) in known.items() if was != now]
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
    """The saved optimizer's name for ``--optimizer``."""
    if saved.get("optimizer"):
        return str(saved["optimizer"]).removeprefix("dist_")
    keys = {base(state) for kept in state_keys(contents).values() for state in kept}
    if "momentum_buffer" in keys:
        return "adaptive_muon" if "moment2_buffer" in keys else "muon"
    return "adam" if "exp_avg_sq" in keys else "lion"


def _changed(names: Sequence[str] | Mapping[str, Any], run: dict[str, Any], saved: dict[str, Any]) -> list[str]:
    return [name for name in names if name in run and saved.get(name) not in (None, run[name])]


def _completed(values: dict[str, Any]) -> dict[str, Any]:
    """Arguments with the values that Megatron derives."""
    done = dict(values)
    hidden, heads = done["hidden_size"], done["num_attention_heads"]
    if done.get("ffn_hidden_size") is None:
        done["ffn_hidden_size"] = int(4 * hidden * 2 / 3 / 64) * 64 if done.get("swiglu") else 4 * hidden
    if done.get("kv_channels") is None:
        done["kv_channels"] = hidden // heads
    if not done.get("group_query_attention") or done.get("num_query_groups") is None:
        done["num_query_groups"] = heads
    done["num_experts"] = done.get("num_experts") or None
    done["add_qkv_bias"] = bool(done.get("add_qkv_bias") or done.get("add_bias_linear"))
    if done["num_experts"] and done.get("moe_ffn_hidden_size") is None:
        done["moe_ffn_hidden_size"] = done["ffn_hidden_size"]
    return done


def _flag(name: str) -> str:
    return _SPELLED.get(name, f"--{name.replace('_', '-')}")


def _error(what: str, otherwise: str) -> Problem:
    return Problem("error", what, f"{otherwise}, {_ANEW}")
