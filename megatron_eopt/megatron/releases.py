"""What differs between Megatron-Core 0.18 to 0.20; imports none."""

import importlib
import importlib.util
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any

from torch.nn import Module

from megatron_eopt.redirect import Redirection, Redirections, becomes

SUPPORTED = ("0.19", "0.18")  # the latest first
MAIN, MAIN_AS_OF = "0.20", "22 August 2026"  # what Megatron's main branch was to become, and when it was tried


def caveat(release: str) -> str | None:
    """What was not tried of a release; None for :data:`SUPPORTED` ones."""
    if number(release) <= number(SUPPORTED[0]):
        return None
    if number(release) == number(MAIN):
        return (
            f"megatron-core {release} is supported as Megatron's main branch was on {MAIN_AS_OF}: what has changed "
            f"since then is untried"
        )
    return f"megatron-core {release} is newer than {MAIN}, the latest that was tried"


def number(release: str) -> tuple[int, int]:
    """The first two numbers of a release; zeros where missing."""
    major, minor, *_ = *re.findall(r"\d+", release), "0", "0"
    return int(major), int(minor)


def before_0_19(release: str) -> bool:
    """Whether it cuts no weights a second time, and ends no step under an FSDP.

    Before 0.19 overlapped gathers also fail for a rank that has no other to gather from, and Megatron-FSDP lacks the
    functions by which several optimizers are one.
    """
    return number(release) < (0, 19)


def scalar_optimizers(release: str) -> tuple[str, ...]:
    """Names for ``muon_scalar_optimizer`` that a release builds."""
    return ("adam",) if before_0_19(release) else ("adam", "lion")


def distributed_optimizer(release: str) -> dict[str, Any]:
    """What ``--use-distributed-optimizer`` means, as facts of ``support``'s Run.

    0.18 and 0.20 lay gradient buffers out for whole matrices; 0.19's ``pretrain`` does not.
    """
    facts = {"layer_wise": True, "data_parallel": 2}
    if number(release) != (0, 19):
        facts |= {"whole_matrices": True, "ddp.use_distributed_optimizer": True}
    return facts


def version() -> str:
    """The imported release, without a commit after ``+``."""
    return str(importlib.import_module("megatron.core").__version__).partition("+")[0]


def core_optimizer(name: str = "") -> ModuleType:
    """Megatron's module of optimizers, or one in it."""
    return importlib.import_module(f"megatron.core.optimizer{name}")


def has_training() -> bool:
    """Whether ``megatron.training`` and what it needs can be imported."""
    try:
        importlib.import_module("megatron.training.training")
    except ImportError:
        return False
    return True


def package_not_needed() -> Redirections:
    """Let Megatron build optimizers without the emerging-optimizers package."""
    reason = "the optimizers that Megatron builds are ours"
    return Redirections([Redirection(core_optimizer(), "HAVE_EMERGING_OPTIMIZERS", becomes(True), reason)])


def check_supported() -> None:
    """Raise an ImportError for a release without a registry of optimizers."""
    if importlib.util.find_spec("megatron.core.optimizer.emerging_optimizers") is None:
        raise ImportError(f"megatron_eopt needs megatron-core 0.18 or later, found {version()}: upgrade megatron-core")


def training_args() -> Any:
    """The arguments of ``megatron.training``; None where it is not running."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def training_writers() -> tuple[Any, Any]:
    """Megatron's TensorBoard and W&B writers; None for a missing one."""
    known = sys.modules.get("megatron.training.global_vars")
    return getattr(known, "_GLOBAL_TENSORBOARD_WRITER", None), getattr(known, "_GLOBAL_WANDB_WRITER", None)


def gradients_for_norm(optimizer: Any) -> list[Any]:
    """This rank's gradients in the norm of Megatron's optimizer."""
    gradients = getattr(optimizer, "get_grads_for_grad_norm", None) or optimizer.get_main_grads_for_grad_norm
    return list(gradients())


def mark_row_parallel(model_chunks: Iterable[Module]) -> None:
    """Mark Transformer Engine's row-parallel weights as cut by columns.

    Megatron tells Transformer Engine's layers of experts of no parallelism, so they mark every weight as cut along its
    rows. Releases before 0.19 correct that for grouped experts only.
    """
    for chunk in model_chunks:
        for module in chunk.modules():
            if any(base.__name__ == "TERowParallelLinear" for base in type(module).__mro__):
                module.weight.partition_dim = 1  # type: ignore[union-attr]


def mark_sinks(model_chunks: Iterable[Module]) -> None:
    """Mark learnable attention sinks as shards of their heads.

    Megatron does not, and so leaves those of all ranks but the first out of the gradient's norm (MLM 7452, finding 8).
    """
    for chunk in model_chunks:
        for name, sinks in chunk.named_parameters():
            if name.rpartition(".")[2] == "softmax_offset":
                attributes = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
                vars(sinks).update(attributes)


def linear_attention_rows(module: Any) -> dict[str, int]:
    """Global rows of matrices in linear attention's ``in_proj``, if any."""
    if hasattr(module, "in_proj_split_names"):  # from 0.19 on
        sizes = zip(module.in_proj_split_names, module.in_proj_split_sections, strict=True)
        return {name: size * module.tp_size for name, size in sizes}
    if all(hasattr(module, each) for each in ("qk_dim", "v_dim", "num_value_heads")):
        qk = module.qk_dim
        v = module.v_dim
        heads = module.num_value_heads
        return {"query": qk, "key": qk, "value": v, "z": v, "beta": heads, "alpha": heads}
    return {}


def delta_product_rows(module: Any) -> dict[str, int]:
    """Global rows of matrices in a gated delta product's ``in_proj`` (0.20).

    Each Householder step has its own V, K and b.
    """
    steps = range(module.num_householder)
    group = module.ngroups * module.d_state
    return {
        "z": module.d_inner,
        **{f"V{step}": module.d_inner for step in steps},
        **{f"K{step}": group for step in steps},
        "Q": group,
        **{f"b{step}": module.nheads for step in steps},
        "a": module.nheads,
    }


def gpt_builder(args: Namespace, groups: Any) -> Callable[..., Module]:
    """Builds a GPT's stage of ``pre_process``, ``post_process``, ``vp_stage``."""
    from megatron.training import argument_utils

    if not hasattr(argument_utils, "gpt_config_from_args"):  # before 0.19 the builder is the script's, not Megatron's
        return partial(_gpt_of_script, args, groups)
    config = argument_utils.gpt_config_from_args(args)
    return partial(config.get_builder_cls()(config).build_model, groups)


def _gpt_of_script(args: Namespace, groups: Any, vp_stage: int | None, **stage: bool) -> Module:
    """What the pretrain_gpt.py of 0.18 builds."""
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.training.arguments import core_transformer_config_from_args

    config = core_transformer_config_from_args(args)
    of_layers = (config, False, args.normalization)
    prediction = None
    if args.mtp_num_layers:
        layers = gpt_layer_specs.get_gpt_decoder_layer_specs(*of_layers, vp_stage=vp_stage)
        prediction = gpt_layer_specs.get_gpt_mtp_block_spec(config, layers[-1], False, vp_stage=vp_stage)
    same = ("position_embedding_type", "rotary_percent", "rotary_base")
    return GPTModel(
        config=config,
        transformer_layer_spec=gpt_layer_specs.get_gpt_decoder_block_spec(*of_layers, vp_stage=vp_stage),
        mtp_block_spec=prediction,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        pg_collection=groups,
        **{name: getattr(args, name) for name in same},
        **stage,
    )
