"""The flags of a Megatron run that decide what it can load, parsed without Megatron."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from megatron_eopt.family import FAMILY

_INTEGERS = """num-layers hidden-size ffn-hidden-size num-attention-heads num-query-groups kv-channels vocab-size
    num-experts moe-ffn-hidden-size moe-shared-expert-intermediate-size mtp-num-layers max-position-embeddings
    q-lora-rank kv-lora-rank tensor-model-parallel-size pipeline-model-parallel-size context-parallel-size
    expert-model-parallel-size expert-tensor-parallel-size train-iters lr-decay-iters lr-warmup-iters
    global-batch-size""".split()
_NUMBERS = "lr min-lr weight-decay".split()
_WORDS = "normalization position-embedding-type optimizer lr-decay-style ckpt-format".split()
_SWITCHES = """swiglu untie-embeddings-and-output-weights group-query-attention add-qkv-bias qk-layernorm
    attention-output-gate multi-latent-attention moe-shared-expert-gate bf16 fp16 no-load-optim finetune
    use-checkpoint-args override-opt-param-scheduler use-checkpoint-opt_param-scheduler""".split()

# Those of optimizers, but for rates, which the schedule has.
_OF_OPTIMIZERS = tuple(flag for row in FAMILY for flag in row.flags if not flag.field)
_OF_LOADING = ("muon_momentum_from_adam", "muon_scalar_optimizer")
FLAGS_OF_UPDATES = tuple(flag for flag in _OF_OPTIMIZERS if flag.dest not in _OF_LOADING)
"""Flags whose values may change from one run to the next, and the update with them."""

_ALWAYS_GIVEN = ("num_layers", "hidden_size", "num_attention_heads")
_DEFAULTS: dict[str, Any] = {
    **{flag.replace("-", "_"): False for flag in _SWITCHES},
    **{flag.dest: flag.default for flag in _OF_OPTIMIZERS},
    "add_bias_linear": True,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "optimizer": "adam",
    "num_experts": None,
    "mtp_num_layers": None,
    "moe_shared_expert_intermediate_size": None,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "min_lr": 0.0,
    "lr_decay_style": "linear",
    "weight_decay": 0.01,
}


@dataclass(frozen=True)
class Flags:
    """A run's flags, by the names of Megatron's arguments.

    Attributes:
        given: those that were given.
        whole: whether it is the whole command line of a run, so that what is not given has Megatron's default.
        ignored: flags that say nothing about loading, or that are not known here.
    """

    given: dict[str, Any]
    whole: bool
    ignored: tuple[str, ...]

    @property
    def values(self) -> dict[str, Any]:
        """All that is known of the run: what was given, and the defaults if that was all."""
        return completed({**_DEFAULTS, **self.given}) if self.whole else self.given


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"the flags after --: {message}")


def parse_flags(flags: Sequence[str]) -> Flags:
    """Parse what matters of a command line; the rest is listed, not checked.

    Raises:
        ValueError: for a known flag with a value that it cannot have.
    """
    parser = _Parser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for names, kind in ((_INTEGERS, int), (_NUMBERS, float), (_WORDS, str)):
        for name in names:
            parser.add_argument(f"--{name}", type=kind)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    for flag in _OF_OPTIMIZERS:
        of_value = {key: value for key, value in flag.options.items() if key in ("action", "type")}
        parser.add_argument(flag.name, dest=flag.dest, **of_value)
    parser.add_argument("--disable-bias-linear", dest="add_bias_linear", action="store_false")
    known, rest = parser.parse_known_args(flags)
    given = vars(known)
    whole = all(name in given for name in _ALWAYS_GIVEN) and not given.get("use_checkpoint_args")
    return Flags(given, whole, tuple(each for each in rest if each.startswith("--")))


def completed(values: dict[str, Any]) -> dict[str, Any]:
    """The sizes that Megatron derives from others, where they are not given.

    Args:
        values: arguments by name; needs the number of layers, the hidden size and the number of heads.
    """
    done = dict(values)
    hidden, heads = done["hidden_size"], done["num_attention_heads"]
    if done.get("ffn_hidden_size") is None:
        done["ffn_hidden_size"] = int(4 * hidden * 2 / 3 / 64) * 64 if done.get("swiglu") else 4 * hidden
    if done.get("kv_channels") is None:
        done["kv_channels"] = hidden // heads
    if not done.get("group_query_attention") or done.get("num_query_groups") is None:
        done["num_query_groups"] = heads
    if done.get("num_experts") and done.get("moe_ffn_hidden_size") is None:
        done["moe_ffn_hidden_size"] = done["ffn_hidden_size"]
    return done
