"""The fused parameters of Megatron's modules, and the logical matrices that each way to split makes of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from megatron_eopt.family import SplitName
from megatron_eopt.matrices import (
    ATTRIBUTE,
    GATE_UP,
    WHOLE,
    Split,
    concatenated,
    declared_split,
    heads,
    interleaved_gate_up,
    key_value,
    latent_down,
    per_shard,
    query_key_value,
)
from megatron_eopt.megatron.parameters import Described
from megatron_eopt.registry import get_qkv_split_shapes

_BY_SETTING = "logical_matrices_by_setting"

type Kind = Callable[[Any, str], "Fused | None"]


@dataclass(frozen=True)
class Fused:
    """What a fused parameter is made of.

    Attributes:
        what: in words.
        matrices: those that are geometrically right.
        per_head: with each head by itself, where there are heads.
        known: whether Megatron orthogonalizes it in a way that somebody chose; if not, the user has to say how.
    """

    what: str
    matrices: Split
    per_head: Split | None = None
    known: bool = True

    def split(self, name: SplitName) -> Split | None:
        """What a way to split makes of it; None for what Megatron does."""
        if name == "none":
            return WHOLE
        if name == "per_head":
            return self.per_head or self.matrices
        return self.matrices if name == "all" else None


def fused(described: Described) -> Fused | None:
    """What a parameter is made of; None for one that is a single matrix."""
    parameter = described.parameter
    if parameter.ndim not in (2, 3):
        return None
    owner = _parent(described)
    name = described.path.rpartition(".")[2]
    config = getattr(owner, "config", None)
    return _KINDS[name](owner, described.info.name) if name in _KINDS and config is not None else None


def split_of(described: Described, name: SplitName) -> Split | None:
    """The split to put on a parameter: what its attribute declares, else what ``name`` makes of it.

    Returns:
        None where nothing has to be put on it.

    Raises:
        ValueError: if nobody has said how a fused parameter is to be orthogonalized.
    """
    if is_declared(described):
        return declared_split(described.parameter)
    found = fused(described)
    if found is None:
        return None
    split = found.split(name)
    if split is None and not found.known:
        raise ValueError(
            f"{described.info.name} is fused of {found.what}, and nothing says how it is to be orthogonalized: declare "
            f"that as these (--muon-split all, or an override with split: all) or as one matrix (split: none), or "
            f"give it to Adam (optimizer: adam)"
        )
    return split


def is_declared(described: Described) -> bool:
    """Whether its user declared the matrices of a parameter, and not an earlier :func:`tag`."""
    return declared_split(described.parameter) is not None and not hasattr(described.parameter, _BY_SETTING)


def tag(splits: Iterable[tuple[Described, Split | None]]) -> None:
    """Put the splits on the parameters, as the attribute that the optimizers read; what an earlier call put is gone."""
    for described, split in splits:
        if is_declared(described):
            continue
        for name, value in ((ATTRIBUTE, split), (_BY_SETTING, True)):
            if split is not None:
                setattr(described.parameter, name, value)
            elif hasattr(described.parameter, name):
                delattr(described.parameter, name)


def _parent(described: Described) -> Any:
    """The module that has the linear layer, whose config says how it is fused."""
    return described.chunk.get_submodule(described.path.rpartition(".")[0])


def _query_key_value(owner: Any, name: str) -> Fused:
    shapes = get_qkv_split_shapes(owner.config)
    parts = "queries, gate, keys and values" if len(shapes) == 4 else "queries, keys and values"
    return Fused(f"the {parts} of a query group", query_key_value(shapes), query_key_value(shapes, per_head=True))


def _cross_query(owner: Any, name: str) -> Fused:
    return Fused("the queries of all heads", WHOLE, heads("q", owner.config.kv_channels))


def _cross_key_value(owner: Any, name: str) -> Fused:
    channels = owner.config.kv_channels
    return Fused("the keys and values of all heads", key_value(channels, channels), key_value(channels, channels, True))


def _latent_query(owner: Any, name: str) -> Fused:
    rows = owner.config.qk_head_dim + owner.config.qk_pos_emb_head_dim
    return Fused("the queries of all heads", WHOLE, heads("q", rows))


def _latent_key_value(owner: Any, name: str) -> Fused:
    k, v = owner.config.qk_head_dim, owner.config.v_head_dim
    return Fused("the keys and values of all heads", key_value(k, v), key_value(k, v, per_head=True))


def _latent_down(owner: Any, name: str) -> Fused:
    config = owner.config
    return Fused(
        "the latent keys and values, and the keys with positions",
        concatenated(kv=config.kv_lora_rank, k_rope=config.qk_pos_emb_head_dim),
    )


def _latent_down_fused(owner: Any, name: str) -> Fused:
    config = owner.config
    return Fused(
        "the latent queries, the latent keys and values, and the keys with positions",
        latent_down(config.q_lora_rank, config.kv_lora_rank, config.qk_pos_emb_head_dim),
    )


def _gate_up(owner: Any, name: str) -> Fused | None:
    config = owner.config
    if not config.gated_linear_unit:
        return None
    setting = "moe_shared_expert_glu_interleave_size" if "shared_experts" in name else "moe_mlp_glu_interleave_size"
    by_turns = getattr(config, setting, None) if "experts" in name else None
    return Fused("gate and up", GATE_UP if by_turns is None else interleaved_gate_up(by_turns))


def _state_space(owner: Any, name: str) -> Fused:
    if all(hasattr(owner, each) for each in ("d_inner", "ngroups", "d_state", "nheads")):
        between = owner.ngroups * owner.d_state
        split = per_shard(z=owner.d_inner, x=owner.d_inner, B=between, C=between, dt=owner.nheads)
        return Fused("z, x, B, C and dt of a state-space layer", split, known=False)
    rows = _linear_attention(owner)
    if not rows:
        return Fused("parts that this package does not know", WHOLE, known=False)
    return Fused(f"{', '.join(rows)} of linear attention", per_shard(**rows), known=False)


def _linear_attention(owner: Any) -> dict[str, int]:
    """Rows of each part over all ranks; none for a module that does not say them."""
    if hasattr(owner, "in_proj_split_names"):  # from 0.19 on
        sizes = zip(owner.in_proj_split_names, owner.in_proj_split_sections, strict=True)
        return {part: size * owner.tp_size for part, size in sizes}
    if all(hasattr(owner, each) for each in ("qk_dim", "v_dim", "num_value_heads")):
        qk, v, heads_of_v = owner.qk_dim, owner.v_dim, owner.num_value_heads
        return {"query": qk, "key": qk, "value": v, "z": v, "beta": heads_of_v, "alpha": heads_of_v}
    return {}


_KINDS: dict[str, Kind] = {
    "linear_qkv": _query_key_value,
    "linear_q": _cross_query,
    "linear_kv": _cross_key_value,
    "linear_q_proj": _latent_query,
    "linear_q_up_proj": _latent_query,
    "linear_kv_up_proj": _latent_key_value,
    "linear_kv_down_proj": _latent_down,
    "linear_qkv_down_proj": _latent_down_fused,
    "linear_fc1": _gate_up,
    "in_proj": _state_space,
}
