"""Trainable parameters of a Megatron model, with global names, shapes."""

import re
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.from_config import get_qkv_split_shapes
from megatron_eopt.matrices import tag_declared
from megatron_eopt.optimizers.parameters import NAME, SAVED_BY_LAYOUT
from megatron_eopt.parallel.attributes import is_cut_again, is_expert, is_sharded, padding_of
from megatron_eopt.parallel.dtensor import tells_its_chunk
from megatron_eopt.registry import BUILT_AS
from megatron_eopt.routing.selectors import ParameterInfo, unwrapped

_OPTIMIZER = "megatron_eopt_optimizer"  # attribute of a model chunk: a weak reference


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


@dataclass(frozen=True)
class OptimizerParameter:
    """A parameter in a torch optimizer inside Megatron's wrappers."""

    model: Tensor  # the model's
    optimizer: Optimizer
    group: dict[str, Any]
    main: Tensor | None  # in that group: the model's or its fp32 copy; None where the optimizer has shards of a buffer


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


def wrappers(optimizer: Any) -> Iterator[Any]:
    """The links of a chain of Megatron's optimizers, chains included."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer
    for link in chained or ():
        yield from wrappers(link)


def plain_wrappers(optimizer: Any) -> list[Any]:
    """The :func:`wrappers` of a torch optimizer of whole parameters."""
    kinds = ("FP32Optimizer", "Float16OptimizerWithFloat16Params")
    return [x for x in wrappers(optimizer) if type(x).__name__ in kinds and x.optimizer is not None]


def distributed_wrappers(optimizer: Any) -> list[Any]:
    """The :func:`wrappers` of a torch optimizer of shards of buffers."""
    return [x for x in wrappers(optimizer) if hasattr(x, "gbuf_ranges")]


def torch_optimizers(optimizer: Any) -> Iterator[Optimizer]:
    """The torch optimizers inside Megatron's wrappers, in their order."""
    for wrapper in wrappers(optimizer):
        if isinstance(wrapper, Optimizer):
            yield wrapper
        elif getattr(wrapper, "optimizer", None) is not None:
            yield from torch_optimizers(wrapper.optimizer)


def optimizer_parameters(megatron: Any) -> Iterator[OptimizerParameter]:
    """All that Megatron's optimizer updates here, by wrappers and groups."""
    for wrapper in wrappers(megatron):
        inner = getattr(wrapper, "optimizer", None)
        if inner is None:
            continue
        ranges = getattr(wrapper, "model_param_group_index_map", None)
        if ranges is None:
            mains = [(each, g, p) for each in torch_optimizers(inner) for g in each.param_groups for p in g["params"]]
            for model, (optimizer, group, main) in zip(model_parameters(wrapper), mains, strict=True):
                yield OptimizerParameter(model, optimizer, group, main)
        else:
            for model, (number, _) in ranges.items():
                yield OptimizerParameter(model, inner, inner.param_groups[number], None)


def model_parameters(wrapper: Any) -> list[Tensor]:
    """Parameters in the order of a wrapper's torch optimizer."""
    groups = (getattr(wrapper, name, []) for name in ("fp32_from_float16_groups", "float16_groups"))
    mains, models = ([parameter for group in each for parameter in group] for each in groups)
    of_main = {id(main): model for main, model in zip(mains, models, strict=True)}
    parameters = (parameter for group in wrapper.optimizer.param_groups for parameter in group["params"])
    return [of_main.get(id(parameter), parameter) for parameter in parameters]


def shard_of(parameter: Tensor) -> Tensor:
    """What Megatron saves: a DTensor's shard, or the parameter."""
    return getattr(parameter, "_local_tensor", parameter)


def remember(optimizer: Any, model_chunks: Sequence[nn.Module]) -> None:
    """Let :func:`optimizers_of` find Megatron's optimizer; the last built counts."""
    for chunk in model_chunks:
        setattr(chunk, _OPTIMIZER, weakref.ref(optimizer))


def optimizers_of(model_chunks: Sequence[nn.Module]) -> list[Any]:
    """The optimizers that this package has built for these chunks."""
    optimizers = dict.fromkeys(getattr(chunk, _OPTIMIZER)() for chunk in model_chunks if hasattr(chunk, _OPTIMIZER))
    return [optimizer for optimizer in optimizers if optimizer is not None]  # the others are gone


def optimizer_name(optimizer: Optimizer) -> str:
    """The registered name of a torch optimizer, or its kind's."""
    if optimizer in BUILT_AS:
        return BUILT_AS[optimizer]
    kind = type(optimizer).__name__
    for name in ("adam", "sgd", "lion"):  # which Megatron builds by itself, by classes of several packages
        if name in kind.lower():
            return name
    return kind


def _named(chunk: nn.Module) -> Iterator[tuple[str, Tensor, str]]:
    ahead = _ahead(chunk)
    for name, parameter in chunk.named_parameters():
        path, _, last = name.rpartition(".")
        yield _global_name(path, last, ahead), parameter, path


def _ahead(chunk: nn.Module) -> dict[str, int]:
    """Offsets of numbers in names, by path (``*``: any number)."""
    offsets = {}
    for path, module in chunk.named_modules():
        layer = getattr(module, "layer_number", None)
        parent, _, last = path.rpartition(".")
        if isinstance(layer, int) and parent.rpartition(".")[2] == "layers" and last.isdecimal():
            offsets[path] = layer - 1 - int(last)
        experts = getattr(module, "num_local_experts", None)
        group = getattr(module, "ep_group", None)
        if isinstance(experts, int) and group is not None:
            offsets[f"{path}.local_experts.*"] = offsets[f"{path}.linear_fc*.weight*"] = group.rank() * experts
    return offsets


def _global_name(path: str, last: str, ahead: dict[str, int]) -> str:
    words = path.split(".")
    for index, word in enumerate(path.split(".")):
        if word.isdecimal():
            before = ".".join(path.split(".")[:index])
            words[index] = str(int(word) + ahead.get(f"{before}.{word}", ahead.get(f"{before}.*", 0)))
    grouped = re.fullmatch(r"(weight|bias)(\d+)", last)
    if grouped:  # Transformer Engine numbers weights of experts
        module = path.rpartition(".")[0]
        last = f"{grouped[1]}{int(grouped[2]) + ahead.get(f'{module}.linear_fc*.weight*', 0)}"
    return unwrapped(".".join([*words, last] if path else [last]))


def _info(name: str, parameter: Tensor, pg_collection: Any) -> ParameterInfo:
    attributes = {key: value for key, value in vars(parameter).items() if isinstance(value, bool | int | str)}
    return ParameterInfo(name, _global_shape(parameter, pg_collection), attributes, parameter=parameter)


def _global_shape(parameter: Tensor, pg_collection: Any) -> tuple[int, ...]:
    shape = list(parameter.shape)
    prefix = "expt_" if is_expert(parameter) else ""
    group, again = (getattr(pg_collection, prefix + name, None) for name in ("tp", "gtp_remat"))
    if is_cut_again(parameter) and again is not None and again.size() > 1:
        shape[0] = shape[0] * again.size() - padding_of(parameter)
    whole = isinstance(parameter, DTensor) and tells_its_chunk(parameter)  # the shape is global already
    if is_sharded(parameter) and group is not None and not whole:
        shape[parameter.partition_dim] *= group.size()  # type: ignore[attr-defined]
    return tuple(shape)
