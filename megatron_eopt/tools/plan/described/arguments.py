"""Parse a pretrain command's flags by Megatron's parser, without running."""

import io
import logging
import math
import sys
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from megatron_eopt.megatron.releases import version

# What a description needs set, as it has no GPU and no Transformer Engine. No shape depends on any.
_SET: dict[str, Any] = {
    "load": None,  # nothing is read here, and the folder may be on another machine
    "transformer_impl": "local",
    "moe_token_dispatcher_type": "alltoall",
    "cpu_offloading_num_layers": 0,
    "cuda_graph_impl": "none",
    "no_persist_layer_norm": True,
    **dict.fromkeys("recompute_granularity fp8 fp4 te_precision_config_file non_persistent_ckpt_type".split()),
    **dict.fromkeys(
        """apply_layernorm_1p memory_efficient_layer_norm gradient_accumulation_fusion apply_rope_fusion
        moe_permute_fusion moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_enable_deepep
        overlap_moe_expert_parallel_comm use_transformer_engine_op_fuser use_te_activation_func tp_comm_overlap
        delay_wgrad_compute fine_grained_activation_offloading distribute_saved_activations enable_cuda_graph
        fp8_param_gather fp4_param_gather""".split(),
        False,
    ),
}
_ELSEWHERE = {
    "use_checkpoint_args": "--use-checkpoint-args takes the model's sizes from a checkpoint, and nothing is read here",
    "yaml_cfg": "--yaml-cfg replaces the flags",
    "hybrid_layer_pattern": "Megatron-Core makes hybrid models (--hybrid-layer-pattern) of Transformer Engine's layers",
    "hybrid_override_pattern": "Megatron-Core makes hybrid models of Transformer Engine's layers",
    "use_megatron_fsdp": "FSDP cuts parameters in a way of its own",
    "tensor_parallel_num_weight_shards": "Transformer Engine alone cuts weights twice",
    "expert_tensor_parallel_num_weight_shards": "Transformer Engine alone cuts weights twice",
}


def parsed(flags: Sequence[str], rank: int, world_size: int | None) -> tuple[Namespace, bool, tuple[str, ...]]:
    """Parse and validate a pretrain command's flags for one rank.

    Returned are Megatron's arguments, changed where a GPU would be needed; whether Transformer Engine's layers are
    requested; and notes for a user. A ValueError is for flags or models that cannot be described.
    """
    from megatron.training import arguments

    with refused("with this package refuses the flags"), ExitStack() as stack:
        stack.callback(setattr, sys, "argv", sys.argv)
        sys.argv = ["pretrain", *flags]  # Megatron's parser reads from here alone
        args = arguments.parse_args()
    for name, reason in _ELSEWHERE.items():
        if getattr(args, name, None):
            raise ValueError(f"{reason}: such a run cannot be described without a GPU")
    transformer_engine = args.transformer_impl != "local"
    notes = _notes(args) if transformer_engine else ()
    load = args.load
    for name, value in _SET.items():
        if hasattr(args, name):
            setattr(args, name, value)
    args.rank = rank
    args.world_size = world_size or _smallest_world(args)
    with refused("with this package refuses the flags"):
        arguments.validate_args(args)
    args.load = load
    _pad_vocabulary(args)
    return args, transformer_engine, notes


@contextmanager
def refused(what: str) -> Iterator[None]:
    """Raise what Megatron raises or exits with as a ValueError."""
    begin = f"Megatron-Core {version()} {what}"
    printed = io.StringIO()
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(printed):
            yield
    except SystemExit as error:
        last = (printed.getvalue().strip().splitlines() or [f"it exits with {error.code}"])[-1]
        raise ValueError(f"{begin}: {last.partition('error: ')[2] or last}") from error
    except Exception as error:  # Megatron raises anything, such as a ZeroDivisionError for what it does not check
        # an assertion of Megatron's that has no message is its own best description
        reason = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        raise ValueError(f"{begin}: {reason}") from error
    finally:
        logging.disable(disabled)


def _notes(args: Namespace) -> tuple[str, ...]:
    notes = [
        "layers are Megatron's local ones, not Transformer Engine's: a norm that TE keeps in the linear layer after it"
        " (linear_qkv.layer_norm_weight) is a layer of its own here (input_layernorm.weight)"
    ]
    if args.num_experts and args.moe_grouped_gemm:
        notes.append(
            "grouped experts are layers of their own: what TE names experts.linear_fc1.weight0 is"
            " experts.local_experts.0.linear_fc1.weight here"
        )
    return tuple(notes)


def _smallest_world(args: Namespace) -> int:
    tensor = args.tensor_model_parallel_size
    dense = tensor * args.context_parallel_size
    expert = (args.expert_tensor_parallel_size or tensor) * args.expert_model_parallel_size
    return math.lcm(dense, expert) * args.pipeline_model_parallel_size * args.num_distributed_optimizer_instances


def _pad_vocabulary(args: Namespace) -> None:
    """Pad the vocabulary as the tokenizer's builder would, without files."""
    from megatron.core.tokenizers.utils import build_tokenizer

    if getattr(args, "padded_vocab_size", None) is not None:
        return
    if args.vocab_size is None:
        raise ValueError(
            "the size of the vocabulary is the tokenizer's, and no tokenizer is read here: add --vocab-size (of the "
            "tokenizer), or --padded-vocab-size"
        )
    if args.vocab_size < 1:
        raise ValueError(f"--vocab-size is a number of tokens, at least 1, got {args.vocab_size}")
    if args.tokenizer_type == "NullTokenizer":
        build_tokenizer.build_tokenizer(args)
    elif getattr(args, "pad_vocab_size", True):
        args.padded_vocab_size = build_tokenizer.vocab_size_with_padding(args.vocab_size, args)
