"""Which logical matrices the parameters of Megatron's modules hold."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_eopt import matrices
from megatron_eopt.family import SplitName
from megatron_eopt.matrices import ATTRIBUTE, GATE_UP, WHOLE, Split, declared_split, is_transposed
from megatron_eopt.megatron.assignment import Assignment
from megatron_eopt.megatron.model_parameters import ModelParameter, attention_config, is_qkv_projection
from megatron_eopt.parallel.attributes import is_sharded
from megatron_eopt.registry import class_named, get_qkv_split_shapes
from megatron_eopt.routing import OverrideError

_BY_SETTING = "logical_matrices_by_setting"


@dataclass(frozen=True)
class Fused:
    """What a fused parameter is made of."""

    what: str  # in words
    matrices: Split  # those that are geometrically right
    per_head: Split | None = None  # with each head by itself, where there are heads
    gated: bool = False  # whether it is gate and up, which Megatron splits by muon_split_glu, where it has that
    known: bool = True  # whether Megatron orthogonalizes it in a way that somebody chose; if not, the user has to say


@dataclass(frozen=True)
class Matrices:
    """Attributes to put on a parameter for matrix optimizers."""

    parameter: ModelParameter
    split: Split | None  # its logical matrices; None where the optimizer decides


def logical_matrices(assigned: Iterable[Assignment], config: Any) -> list[Matrices]:
    """Logical matrices of all parameters that have a matrix optimizer."""
    of_run: SplitName = getattr(config, "muon_split", "default")
    splits_qkv = getattr(config, "muon_split_qkv", False)
    splits_glu = getattr(config, "muon_split_glu", False)
    tags = []
    for each in assigned:
        if not each.has_matrix_optimizer:
            continue
        if splits_qkv:
            _refuse_unmarked(each.parameter)
        split = split_of(each, of_run, splits_qkv, splits_glu)
        tags.append(Matrices(each.parameter, split))
    return tags


def tag(tags: Iterable[Matrices]) -> None:
    """Put on parameters what optimizers read, instead of earlier tags."""
    for each in tags:
        tensor = each.parameter.tensor
        if not is_declared(each.parameter):
            _put(tensor, ATTRIBUTE, each.split)
            _put(tensor, _BY_SETTING, None if each.split is None else True)


def _put(tensor: Tensor, name: str, value: object) -> None:
    """Set an attribute, or remove it for None."""
    if value is not None:
        setattr(tensor, name, value)
    elif hasattr(tensor, name):
        delattr(tensor, name)


def warnings_of_shared_keys(parameters: Iterable[ModelParameter], ranks: int, sequence_parallel: bool) -> list[str]:
    """A warning of latent attention with incomplete gradients of shared keys."""
    down = [p for p in parameters if p.path.endswith((".linear_kv_down_proj", ".linear_qkv_down_proj"))]
    if ranks == 1 or not down or not (is_sharded(down[0].tensor) or not sequence_parallel):
        return []
    return [
        f"the gradient of {down[0].name} is incomplete, whatever the optimizer: Megatron sums that of the keys' "
        f"positions over the heads of one tensor-parallel rank of {ranks} alone. Set --tensor-model-parallel-size 1, "
        f"or take Transformer Engine's layers with --sequence-parallel"
    ]


def is_declared(parameter: ModelParameter) -> bool:
    """Whether its user declared a parameter's matrices, not :func:`tag`."""
    return declared_split(parameter.tensor) is not None and not hasattr(parameter.tensor, _BY_SETTING)


def split_of(
    assigned: Assignment, of_run: SplitName, splits_qkv: bool = True, splits_glu: bool = False
) -> Split | None:
    """The declared split of a parameter, else that of its setting.

    ``splits_qkv`` and ``splits_glu`` are Megatron's settings of QKV, and of gate and up, for ``default``.
    """
    own = assigned.settings.get("split")
    parameter = assigned.parameter
    name: SplitName = own or of_run
    if is_declared(parameter):
        if own is not None:
            raise OverrideError(
                f"{parameter.name}: split {own} by {assigned.resolved.sources['split']} would have no effect, since "
                f"its matrices are declared: remove one of the two"
            )
        if is_transposed(parameter.tensor):
            raise ValueError(f"{parameter.name} is declared as transposed, but Megatron's weights are (out, in)")
        return declared_split(parameter.tensor)
    made_of = fused(parameter)
    if made_of is None:
        return None
    if assigned.optimizer is not None and class_named(assigned.optimizer).row_order_matters:
        if name == "none" and made_of.matrices.order == "per_shard":
            raise OverrideError(
                f"{parameter.name} holds {made_of.what} in an order that follows the tensor-parallel ranks, and what "
                f"{assigned.optimizer} keeps of its rows would be of no other size: let it be split (split: all), or "
                f"give it to another optimizer"
            )
        if name == "default":
            stays_whole = is_qkv_projection(parameter.path, parameter.tensor) and not splits_qkv
            name = "none" if stays_whole else "all"
    if name == "default" and made_of.gated and splits_glu:
        name = "all"
    split = {"none": WHOLE, "per_head": made_of.per_head or made_of.matrices, "all": made_of.matrices}.get(name)
    if split is None and not made_of.known:  # "default", and Megatron has none
        raise ValueError(
            f"{parameter.name} is fused of {made_of.what}, and nothing says how it is to be orthogonalized: declare "
            f"that as these (--muon-split all, or an override with split: all) or as one matrix (split: none), or "
            f"give it to Adam (optimizer: adam)"
        )
    return split


def _refuse_unmarked(parameter: ModelParameter) -> None:
    """Refuse QKV projections with other rows than their config says."""
    if not is_qkv_projection(parameter.path, parameter.tensor) or getattr(parameter.tensor, "is_qkv", False):
        return
    config = attention_config(parameter.chunk, parameter.path)
    rows = parameter.info.shape[0]
    shapes = get_qkv_split_shapes(config)
    raise ValueError(
        f"{parameter.name} has {rows} rows over all ranks, but {config.num_query_groups} query groups of {shapes} "
        f"rows make {config.num_query_groups * sum(shapes)}: turn QKV splitting off with --muon-no-split-qkv"
    )


def in_shards(parameter: ModelParameter) -> Split | None:
    """The matrices of which every tensor-parallel shard has rows; None where none are so."""
    made_of = fused(parameter)
    if made_of is None or made_of.matrices.order != "per_shard":
        return None
    return made_of.matrices


def fused(parameter: ModelParameter) -> Fused | None:
    """What a parameter is fused of; None for one matrix."""
    home, _, layer = parameter.path.rpartition(".")
    module = parameter.chunk.get_submodule(home)
    config = getattr(module, "config", None)
    name = parameter.name
    if parameter.tensor.ndim not in (2, 3) or config is None:
        return None
    queries = "the queries of all heads"
    keys = "the keys and values of all heads"
    match layer:
        case "linear_qkv":
            shapes = get_qkv_split_shapes(config)
            listed = "queries, gate, keys and values" if len(shapes) == 4 else "queries, keys and values"
            what = f"the {listed} of a query group"
            return Fused(what, matrices.query_key_value(shapes), matrices.query_key_value(shapes, per_head=True))
        case "linear_q":  # of cross attention
            return Fused(queries, WHOLE, matrices.heads("q", config.kv_channels))
        case "linear_q_proj" | "linear_q_up_proj":  # of latent attention
            return Fused(queries, WHOLE, matrices.heads("q", config.qk_head_dim + config.qk_pos_emb_head_dim))
        case "linear_kv":  # of cross attention
            sizes = (config.kv_channels, config.kv_channels)
            return Fused(keys, matrices.key_value(*sizes), matrices.key_value(*sizes, per_head=True))
        case "linear_kv_up_proj":  # of latent attention
            sizes = (config.qk_head_dim, config.v_head_dim)
            return Fused(keys, matrices.key_value(*sizes), matrices.key_value(*sizes, per_head=True))
        case "linear_kv_down_proj":
            split = matrices.concatenated(kv=config.kv_lora_rank, k_rope=config.qk_pos_emb_head_dim)
            return Fused("the latent keys and values, and the keys with positions", split)
        case "linear_qkv_down_proj":
            split = matrices.latent_down(config.q_lora_rank, config.kv_lora_rank, config.qk_pos_emb_head_dim)
            return Fused("the latent queries, the latent keys and values, and the keys with positions", split)
        case "linear_fc1" if config.gated_linear_unit:
            of_expert = "moe_shared_expert" if "shared_experts" in name else "moe_mlp"
            interleaved = getattr(config, f"{of_expert}_glu_interleave_size", None) if "experts" in name else None
            split = GATE_UP if interleaved is None else matrices.interleaved_gate_up(interleaved)
            return Fused("gate and up", split, gated=True)
        case "mapping_proj" if hasattr(config, "mhc_num_residual_streams"):
            streams = config.mhc_num_residual_streams
            split = matrices.concatenated(pre=streams, post=streams, res=streams**2)
            return Fused("the pre, post and residual mappings of hyper-connections", split)
        case "in_proj" if hasattr(module, "num_householder"):
            split = matrices.per_shard(**_delta_product_rows(module))
            return Fused("z, V, K, Q, b and a of a gated delta product", split, known=False)
        case "in_proj" if all(hasattr(module, each) for each in ("d_inner", "ngroups", "d_state", "nheads")):
            between = module.ngroups * module.d_state
            split = matrices.per_shard(z=module.d_inner, x=module.d_inner, B=between, C=between, dt=module.nheads)
            return Fused("z, x, B, C and dt of a state-space layer", split, known=False)
        case "in_proj":
            rows = _linear_attention_rows(module)
            what = f"{', '.join(rows)} of linear attention" if rows else "matrices that this package does not know"
            return Fused(what, matrices.per_shard(**rows) if rows else WHOLE, known=False)
    return None


def _linear_attention_rows(module: Any) -> dict[str, int]:
    """Global rows of matrices in linear attention's ``in_proj``, if any."""
    if not hasattr(module, "in_proj_split_names"):
        return {}
    sizes = zip(module.in_proj_split_names, module.in_proj_split_sections, strict=True)
    return {name: size * module.tp_size for name, size in sizes}


def _delta_product_rows(module: Any) -> dict[str, int]:
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
