"""What the flags of ``megatron-eopt plan`` give, and what is wrong with them; without torch, so at once."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

from megatron_eopt.tools.plan.sizes import MODELS, Model, Parallel, flag, numbers_of

OF_RUN = {"--world-size", "--full", "--json"}
OF_EXPERTS = {
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--moe-ffn-hidden-size",
    "--moe-shared-expert-intermediate-size",
    "--first-dense-layers",
}
OF_LATENT_ATTENTION = {"--q-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim", "--v-head-dim"}


def check(options: argparse.Namespace, flags: Sequence[str] | None) -> None:
    """Refuse what is wrong with the command's flags; ``flags`` are those of a run."""
    if flags is not None:
        _check_of_run(options, flags)
        return
    model = model_of(options)
    parallel = parallel_of(options)
    without_effect = {"without -- and the flags of a run": OF_RUN}
    if model.num_experts is None:
        without_effect["without --num-experts"] = OF_EXPERTS
    if model.kv_lora_rank is None:
        without_effect["without --kv-lora-rank"] = OF_LATENT_ATTENTION
    if options.sweep_gpus:
        without_effect["with --sweep-gpus"] = {"--data-parallel-size"}
    given = _given(options)
    for why, names in without_effect.items():
        if given & names:
            raise ValueError(f"{', '.join(sorted(given & names))} would have no effect {why}")
    if max(model.first_dense_layers, parallel.pipeline) > model.num_layers:
        raise ValueError(
            f"--first-dense-layers {model.first_dense_layers} or --pipeline-model-parallel-size {parallel.pipeline} is "
            f"more than {model.num_layers} layers"
        )
    if options.sweep_gpus is not None:
        gpus_of(options, parallel)


def _check_of_run(options: argparse.Namespace, flags: Sequence[str]) -> None:
    if not flags:
        raise ValueError("expected the flags of a pretrain command after --")
    unused = sorted(_given(options) - OF_RUN)
    if unused:
        raise ValueError(
            f"{', '.join(unused)} would have no effect: the flags after -- say all of the run but --world-size, and "
            f"rates are the default ones"
        )
    behind = sorted(OF_RUN & {each.partition("=")[0] for each in flags})
    if behind:
        raise ValueError(
            f"{', '.join(behind)} after -- would be for Megatron, which has no such flag: put it before --"
        )


def model_of(options: argparse.Namespace) -> Model:
    """The model by its name, by its sizes, or by both."""
    given: dict[str, Any] = {}
    for field in fields(Model):
        value = getattr(options, field.name)
        if value is not None:
            given[field.name] = value
    if options.model is not None:
        return replace(MODELS[options.model], **given)
    hidden = given.get("hidden_size")
    if hidden is not None:
        # as Megatron, which has two thirds of it with gate and up
        width = 64 * (8 * hidden // 3 // 64) if "swiglu" in given else 4 * hidden
        given.setdefault("ffn_hidden_size", width)
    missing = [flag(field.name) for field in fields(Model) if field.default is MISSING and field.name not in given]
    if missing:
        raise ValueError(f"name a --model, or give {', '.join(missing)}")
    return Model(**given)


def parallel_of(options: argparse.Namespace) -> Parallel:
    """Numbers of ranks."""
    sizes = {field.name: getattr(options, field.name) for field in fields(Parallel)}
    return Parallel(**sizes | {"expert_tensor": options.expert_tensor or options.tensor})


def gpus_of(options: argparse.Namespace, parallel: Parallel) -> list[int]:
    """Numbers of GPUs of a sweep."""
    of_stage = math.lcm(parallel.tensor, parallel.expert_tensor * parallel.expert)
    return numbers_of(options.sweep_gpus, of_stage * parallel.pipeline)


def _given(options: argparse.Namespace) -> set[str]:
    """Flags that differ from their defaults."""
    plan: argparse.ArgumentParser = options.parser
    given = set()
    for action in plan._actions:  # there is no public way
        if action.dest in options and getattr(options, action.dest) != plan.get_default(action.dest):
            given.add(action.option_strings[0])
    return given
