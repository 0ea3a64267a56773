"""The fused parameters of real models: what is declared of each, and short ways to declare others.

======================================  ==================================================================
parameter                               declaration
======================================  ==================================================================
linear_qkv                              :func:`query_key_value`, also per head
linear_q, linear_q_up_proj (MLA)        :data:`WHOLE`, or :func:`heads`
linear_kv (cross attention)             :func:`key_value`, also per head
linear_kv_up_proj (MLA)                 :func:`key_value`, whose k is what each head has without RoPE
linear_kv_down_proj (MLA)               ``concatenated(kv=kv_lora_rank, k_rope=qk_pos_emb_head_dim)``
linear_qkv_down_proj (MLA, fused)       :func:`latent_down`
linear_fc1 of SwiGLU, GEGLU             :data:`GATE_UP`, or :func:`interleaved_gate_up`
experts in one 3-D parameter            :func:`experts`, of any of these
in_proj of Mamba, of GatedDeltaNet      ``per_shard(z=..., x=..., B=..., C=..., dt=...)``, rows over all shards
======================================  ==================================================================
"""

from collections.abc import Sequence
from dataclasses import replace

from megatron_eopt.matrices.split import Part, Split

WHOLE = Split()
"""A parameter that is one matrix."""

GATE_UP = Split((Part("gate"), Part("up")), "per_shard")
"""Gate and up of a gated MLP: each tensor-parallel shard is its part of the one, then of the other (a stride of 2)."""

_GROUP_PARTS = {3: ("q", "k", "v"), 4: ("q", "gate", "k", "v")}


def interleaved(**rows: int) -> Split:
    """Groups (or heads) behind one another, each with so many rows of every named matrix."""
    return Split(tuple(Part(name, size) for name, size in rows.items()))


def per_shard(**rows: int | None) -> Split:
    """Named matrices of so many rows over all shards, of which each shard has equal parts behind one another.

    None stands for an equal share of the rows that the others leave.
    """
    return Split(tuple(Part(name, size) for name, size in rows.items()), "per_shard")


def concatenated(**rows: int | None) -> Split:
    """Named matrices of so many rows behind one another, wherever the parameter is cut; None as in per_shard."""
    return Split(tuple(Part(name, size) for name, size in rows.items()), "concatenated")


def heads(name: str, rows: int) -> Split:
    """Every ``rows`` rows are a matrix: the heads of a projection that is nothing else."""
    return Split((Part(name, rows, each=rows),))


def query_key_value(shapes: Sequence[int], per_head: bool = False) -> Split:
    """A fused query, key and value projection, interleaved by query group.

    Args:
        shapes: rows of q, k and v, or of q, gate, k and v, in one group.
        per_head: each head is a matrix. A group has one head of k and of v; those of q are as long as that of k, those
            of the gate as that of v.
    """
    names = _GROUP_PARTS.get(len(shapes)) or tuple(f"part {i}" for i in range(len(shapes)))
    if not per_head:
        return Split(tuple(map(Part, names, shapes)))
    if len(shapes) not in _GROUP_PARTS:
        raise ValueError(f"a group has q, k and v or q, gate, k and v, got {len(shapes)} parts: {list(shapes)}")
    head = {"q": shapes[-2], "gate": shapes[-1], "k": shapes[-2], "v": shapes[-1]}
    return Split(tuple(Part(name, rows, head[name]) for name, rows in zip(names, shapes, strict=True)))


def key_value(k: int, v: int, per_head: bool = False) -> Split:
    """Keys and values of every head behind one another, with so many rows each."""
    return Split((Part("k", k, k if per_head else None), Part("v", v, v if per_head else None)))


def latent_down(q: int, kv: int, k_rope: int) -> Split:
    """The fused down projection of MLA: a shard has its part of the latent query, then of the rest as a whole."""
    return Split(
        (Part("q", q), Part("kv and k_rope", kv + k_rope, inside=(("kv", kv), ("k_rope", k_rope)))), "per_shard"
    )


def interleaved_gate_up(rows: int) -> Split:
    """Gate and up by turns, so many rows of each (Megatron's ``moe_mlp_glu_interleave_size``)."""
    return interleaved(gate=rows, up=rows)


def experts(count: int, split: Split = WHOLE) -> Split:
    """A stack of matrices, (count x rows x cols), each of which is split further."""
    return replace(split, stacked=count)
