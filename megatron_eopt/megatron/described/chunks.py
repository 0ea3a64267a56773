"""The parts of a Megatron GPT on the meta device, by Megatron's own builders and with its local layers."""

import copy
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._device
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from megatron_eopt.megatron import releases
from megatron_eopt.megatron.described.arguments import Parsed
from megatron_eopt.redirect import Redirection

META = torch.device("meta")
# Settings that torch's norms refuse; none is of consequence for their parameters.
_NOT_TORCHS = (
    "sequence_parallel",
    "persist_layer_norm",
    "layernorm_zero_centered_gamma",
    "memory_efficient_layer_norm",
)


def model_chunks(found: Parsed, groups: Any) -> list[Module]:
    """The model on this rank, one module per virtual pipeline stage, in the wrappers of training.

    Args:
        found: the arguments, with Megatron's parallel state initialized by them.
        groups: Megatron's ``ProcessGroupCollection``.
    """
    with _OnMeta():
        return [_wrapped(found.args, chunk) for chunk in _chunks(found, groups)]


def layers_of_gpu() -> list[Redirection]:
    """Let Megatron's local layers take the settings that only those of a GPU can follow."""
    looked_at = "it is only looked at, so it may stand in for that of a GPU"
    return [
        Redirection(
            owner="megatron.core.transformer.torch_norm:WrappedTorchNorm",
            name="__new__",
            make=_any_norm,
            reason=looked_at,
        ),
        Redirection(
            owner="megatron.core.transformer.dot_product_attention:DotProductAttention",
            name="__init__",
            make=_any_attention,
            reason=looked_at,
        ),
    ]


def _any_norm(real: Callable[..., Module]) -> Callable[..., Module]:
    def new(cls: Any, config: Any, hidden_size: int, eps: float = 1e-5, **kwargs: Any) -> Module:
        plain = copy.copy(config)
        for name in _NOT_TORCHS:
            setattr(plain, name, False)
        norm = real(cls, plain, hidden_size, eps)
        if config.sequence_parallel:
            for parameter in norm.parameters():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return norm

    return new


def _any_attention(real: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, config: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:
        plain = copy.copy(config)
        plain.context_parallel_size = 1
        real(self, plain, *args, **kwargs)

    return init


class _OnMeta(TorchFunctionMode):
    """Every tensor that is made is on the meta device, whichever device it was asked to be on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in torch.utils._device._device_constructors():
            kwargs["device"] = META
        return func(*args, **kwargs)


def _chunks(found: Parsed, groups: Any) -> Iterator[Module]:
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

    build = releases.gpt_builder(found.args, groups)
    rank, last = groups.pp.rank(), groups.pp.size() - 1
    stages = found.args.virtual_pipeline_model_parallel_size if last else None
    for stage in [None] if stages is None else range(stages):
        first_part = rank == 0 and not stage
        last_part = rank == last and (stages is None or stage == stages - 1)
        chunk = build(pre_process=first_part, post_process=last_part, vp_stage=stage)
        if found.transformer_engine:
            _replicate_down_projections(chunk)
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        yield chunk


def _replicate_down_projections(chunk: Module) -> None:
    """Make MLA's down projections whole on every tensor-parallel rank, as Transformer Engine's layers have them."""
    for module in chunk.modules():
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            layer = getattr(module, name, None)
            if layer is None:
                continue
            whole = Parameter(layer.weight.new_empty(layer.output_size, layer.input_size))
            marks = {"allreduce": True, "sequence_parallel": layer.config.sequence_parallel}
            for mark, value in {**marks, "tensor_model_parallel": False}.items():
                setattr(whole, mark, value)
            layer.weight = whole


def _wrapped(args: Namespace, chunk: Module) -> Module:
    """The chunk in the wrappers of training, which make the names and the dtype; the outer one without its buffers."""
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_model_config

    config = get_model_config(chunk)
    return _BaseDataParallel(config, Float16Module(config, chunk) if args.fp16 or args.bf16 else chunk)
