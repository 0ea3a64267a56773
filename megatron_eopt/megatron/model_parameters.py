"""Parameters of a Megatron model, with global names and shapes."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_eopt.from_config import get_qkv_split_shapes
from megatron_eopt.matrices import tag_declared
from megatron_eopt.parallel.attributes import is_expert, is_sharded
from megatron_eopt.parallel.dtensor import tells_its_chunk
from megatron_eopt.routing.selectors import ParameterInfo, unwrapped
from megatron_eopt.step.parameters import NAME, SAVED_BY_LAYOUT


@dataclass(frozen=True)
class ModelParameter:
    """A parameter of this rank."""

    tensor: Tensor  # the parameter, or this rank's shard of it
    info: ParameterInfo  # what selectors see: its global name and shape, and the attributes that Megatron set
    chunk: Any  # the model chunk that has it
    path: str  # of its module in the chunk

    @property
    def name(self) -> str:
        """Its name in the whole model."""
        return self.info.name


def parameters_of(model_chunks: Sequence[Any], pg_collection: Any) -> list[ModelParameter]:
    """All parameters of this rank, frozen ones too, each once, in order."""
    found = []
    for chunk in model_chunks:
        for name, parameter, path in _named(chunk):
            found.append(ModelParameter(parameter, _info(name, parameter, pg_collection), chunk, path))
    return found


def trainable(model_chunks: Sequence[Any], pg_collection: Any) -> list[ModelParameter]:
    """All parameters that require a gradient, each once, in order."""
    return [each for each in parameters_of(model_chunks, pg_collection) if each.tensor.requires_grad]


def frozen_names(model_chunks: Sequence[Any]) -> list[str]:
    """Global names of the parameters that require no gradient."""
    return [name for chunk in model_chunks for name, p, _ in _named(chunk) if not p.requires_grad]


def tag_as_megatron(model_chunks: Sequence[Any], pg_collection: Any) -> None:
    """Set the attributes that Megatron sets before it reads overrides.

    They are ``expert_tp``, and ``is_qkv`` with ``qkv_split_shapes``. Megatron marks a projection (``is_qkv``) if a
    shard is a whole number of query groups. Here the global matrix decides, and the config of its attention, which need
    not be the model's (an encoder beside the language model).
    """
    for chunk in model_chunks:
        for name, parameter, path in _named(chunk):
            if not parameter.requires_grad:
                continue
            if "experts" in name and "shared" not in name:
                parameter.expert_tp = True  # type: ignore[attr-defined]
            if not is_qkv_projection(path, parameter):
                continue
            attention = attention_config(chunk, path)
            shapes = get_qkv_split_shapes(attention)
            if _global_shape(parameter, pg_collection)[0] == attention.num_query_groups * sum(shapes):
                parameter.is_qkv = True  # type: ignore[attr-defined]
                parameter.qkv_split_shapes = shapes  # type: ignore[attr-defined]


def mark_sinks(model_chunks: Iterable[nn.Module]) -> None:
    """Mark learnable attention sinks as shards of their heads.

    Megatron does not, and so leaves those of all ranks but the first out of the gradient's norm (MLM 7452, finding 8).
    """
    for chunk in model_chunks:
        for name, sinks in chunk.named_parameters():
            if name.rpartition(".")[2] == "softmax_offset":
                attributes = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}
                vars(sinks).update(attributes)


def is_qkv_projection(path: str, parameter: Tensor) -> bool:
    """Whether a parameter is the weight of a fused QKV projection."""
    return parameter.ndim == 2 and path.rpartition(".")[2] == "linear_qkv"


def attention_config(chunk: Any, path: str) -> Any:
    """The config of the module that has a projection, else the model's."""
    home = chunk.get_submodule(path.rpartition(".")[0])
    return home.config if hasattr(home, "config") else chunk.config


def mark(parameters: Sequence[ModelParameter]) -> None:
    """Mark parameters with name, declared matrices, and form of checkpoints."""
    tag_declared((parameter.name, parameter.tensor) for parameter in parameters)
    for parameter in parameters:
        setattr(parameter.tensor, NAME, parameter.name)
        setattr(parameter.tensor, SAVED_BY_LAYOUT, hasattr(parameter.tensor, "is_torch_fsdp2_param"))


def _named(chunk: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    """Each parameter with its global name, and the path of its module in the chunk."""
    paths: dict[str, str] = {}  # of modules: in the chunk -> in the whole model
    first_expert: dict[str, int] = {}  # path of a module with experts -> the number of the first one here
    for path, module in chunk.named_modules():
        parent, _, last = path.rpartition(".")
        home, _, modules = parent.rpartition(".")
        layer = getattr(module, "layer_number", None)
        experts = getattr(module, "num_local_experts", None)
        group = getattr(module, "ep_group", None)
        if isinstance(experts, int) and group is not None:
            first_expert[path] = group.rank() * experts
        if last.isdecimal() and modules == "layers" and isinstance(layer, int):
            last = str(layer - 1)
        elif last.isdecimal() and modules == "local_experts":
            last = str(int(last) + first_expert.get(home, 0))
        paths[path] = f"{paths[parent]}.{last}" if parent else last
    for name, parameter in chunk.named_parameters():
        path, _, last = name.rpartition(".")
        numbered = re.fullmatch(r"(weight|bias)(\d+)", last)
        if numbered:  # Transformer Engine's, of experts
            kind, number = numbered.groups()
            last = f"{kind}{int(number) + first_expert.get(path.rpartition('.')[0], 0)}"
        yield unwrapped(f"{paths[path]}.{last}" if path else last), parameter, path


def _info(name: str, parameter: Tensor, pg_collection: Any) -> ParameterInfo:
    attributes = {key: value for key, value in vars(parameter).items() if isinstance(value, bool | int | str)}
    return ParameterInfo(name, _global_shape(parameter, pg_collection), attributes, parameter=parameter)


def _global_shape(parameter: Tensor, pg_collection: Any) -> tuple[int, ...]:
    shape = list(parameter.shape)
    prefix = "expt_" if is_expert(parameter) else ""
    if isinstance(parameter, DTensor) and tells_its_chunk(parameter):  # the shape is global already
        return tuple(shape)
    group = getattr(pg_collection, f"{prefix}tp", None)
    if is_sharded(parameter) and group is not None:
        shape[parameter.partition_dim] *= group.size()  # type: ignore[attr-defined]
    return tuple(shape)
