"""Declarations of the logical matrices of parameters.

docs/logical-matrices.md lists which of Megatron's parameters needs which declaration.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase

import torch.distributed as dist
from torch import Tensor

from megatron_eopt.matrices.split import WHOLE, Order, Part, Split

logger = logging.getLogger(__name__)

GATE_UP = Split((Part("gate"), Part("up")), "per_shard")
"""Gate and up of a gated MLP: each shard has its part of gate, then of up (a stride of 2)."""


def interleaved(**rows: int) -> Split:
    """Consecutive groups (or heads) with these rows of every matrix."""
    return _in_order("interleaved", rows)


def per_shard(**rows: int | None) -> Split:
    """Matrices of which every shard has an equal part.

    Rows are over all shards; None is an equal share of the rows that the others leave.
    """
    return _in_order("per_shard", rows)


def concatenated(**rows: int | None) -> Split:
    """Matrices one behind another; rows as in :func:`per_shard`."""
    return _in_order("concatenated", rows)


def _in_order(order: Order, rows: Mapping[str, int | None]) -> Split:
    return Split(tuple(Part(name, size) for name, size in rows.items()), order)


def heads(name: str, rows: int) -> Split:
    """A projection whose heads, of ``rows`` rows, are matrices."""
    return Split((Part(name, rows, each=rows),))


def query_key_value(shapes: Sequence[int], per_head: bool = False) -> Split:
    """Fused query, key and value (``linear_qkv``), interleaved by query group.

    Args:
        shapes: rows of q, k and v, or of q, gate, k and v, in one group.
        per_head: each head is a matrix. A group has one head of k and one of v; heads of q have the rows of k's, heads
            of the gate those of v's.
    """
    *_, k, v = shapes
    heads = {"q": k, "k": k, "v": v} if len(shapes) == 3 else {"q": k, "gate": v, "k": k, "v": v}
    parts = zip(heads, shapes, heads.values(), strict=True)
    return Split(tuple(Part(name, rows, each=head if per_head else None) for name, rows, head in parts))


def key_value(k: int, v: int, per_head: bool = False) -> Split:
    """Keys, then values of each head: ``linear_kv``, MLA's ``kv_up_proj``."""
    if per_head:
        return Split((Part("k", k, each=k), Part("v", v, each=v)))
    return interleaved(k=k, v=v)


def latent_down(q: int, kv: int, k_rope: int) -> Split:
    """MLA's fused down projection; kv and k_rope are not cut."""
    rest = Part("kv and k_rope", kv + k_rope, inside=(("kv", kv), ("k_rope", k_rope)))
    return Split((Part("q", q), rest), "per_shard")


def interleaved_gate_up(rows: int) -> Split:
    """Gate and up in turns of ``rows`` rows (Megatron's ``moe_mlp_glu_interleave_size``)."""
    return interleaved(gate=rows, up=rows)


def experts(count: int, split: Split = WHOLE) -> Split:
    """A stack of matrices (count x rows x cols), each split."""
    return replace(split, stacked=count)


def transposed(split: Split = WHOLE) -> Split:
    """An (in, out) parameter, such as GPT-2's ``Conv1D``, or stack."""
    return replace(split, transposed=True)


def flattened(split: Split = WHOLE) -> Split:
    """A filter (out, in, height, width), read as (out x the rest).

    That of a transposed convolution is (in, out, height, width): ``transposed(flattened())``.
    """
    return replace(split, flattened=True)


ATTRIBUTE = "logical_matrices"  # of a parameter: its Split
_by_name: dict[str, Split] = {}


def declare(pattern: str, split: Split) -> None:
    """Declare the logical matrices of all parameters whose name matches.

    For example ``declare("*.mixer.in_proj.weight", per_shard(z=2048, x=2048, B=128, C=128, dt=32))``. It takes effect
    when :func:`tag_declared` is called with such a name.

    Args:
        pattern: a glob (fnmatch, case-sensitive) on the whole name.
        split: the logical matrices.
    """
    _by_name[pattern] = split


def undeclare(pattern: str) -> None:
    """Remove a declaration, if there is one."""
    _by_name.pop(pattern, None)


def tag_declared(named_parameters: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Set the attribute of declared parameters that have none.

    Returns their names. Raises ``ValueError``, and tags none, if two patterns that match one name differ.
    """
    untagged: dict[str, tuple[Tensor, Split]] = {}
    for name, parameter in named_parameters:
        patterns = [pattern for pattern in _by_name if fnmatchcase(name, pattern)]
        splits = {_by_name[pattern] for pattern in patterns}
        if len(splits) > 1:
            raise ValueError(f"{name} is declared twice, differently: by {' and by '.join(map(repr, patterns))}")
        if splits and getattr(parameter, ATTRIBUTE, None) is None:
            untagged[name] = parameter, splits.pop()
    for parameter, split in untagged.values():
        setattr(parameter, ATTRIBUTE, split)
    return list(untagged)


def warn_of_unmatched(names: Sequence[str]) -> None:
    """Warn on the first rank of patterns without a match."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    for pattern in _by_name:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = ", ".join(map(repr, get_close_matches(pattern, names, cutoff=0.0)))
            logger.warning(
                f"{pattern!r} is declared, but matches no trainable parameter: the nearest names are {near}; a pattern "
                f"fits the whole name, and undeclare() takes it back"
            )


def declared_split(parameter: Tensor) -> Split | None:
    """A parameter's attribute, None without."""
    return getattr(parameter, ATTRIBUTE, None)


def is_transposed(parameter: Tensor) -> bool:
    """Whether a parameter is declared as transposed."""
    split = declared_split(parameter)
    return split is not None and split.transposed


def is_flattened(parameter: Tensor) -> bool:
    """Whether a parameter is read as its first dimension times the rest: of more than two, and no stack."""
    split = declared_split(parameter)
    return parameter.ndim > 2 and (split is None or split.stacked is None)


def split_of(
    parameter: Tensor,
    is_qkv_fn: Callable[[Tensor], bool] | None = None,
    qkv_split_shapes: Sequence[int] | None = None,
    lengths: Sequence[int] = (3, 4),
) -> Split | None:
    """The logical matrices of a parameter, by attribute or ``is_qkv_fn``.

    None if neither says that it is fused. ``is_qkv_fn`` tells fused query, key and value projections (None: they are
    not split), ``qkv_split_shapes`` serve those without that attribute. Raises ``ValueError`` for missing or wrong
    shapes.
    """
    declared = declared_split(parameter)
    if declared is not None or is_qkv_fn is None or not is_qkv_fn(parameter):
        return declared
    shapes = getattr(parameter, "qkv_split_shapes", None)
    if shapes is None:
        shapes = qkv_split_shapes
    return query_key_value(check_split_shapes(shapes, lengths))


def check_split_shapes(shapes: Sequence[int] | None, lengths: Sequence[int] = (3, 4)) -> tuple[int, ...]:
    """Rows of q, (gate,) k and v in a group."""
    found = () if shapes is None else tuple(shapes)
    if len(found) in lengths and all(type(rows) is int and rows > 0 for rows in found):
        return found
    wanted = " or ".join(map(str, lengths))
    got = None if shapes is None else list(shapes)
    raise ValueError(f"split_qkv needs qkv_split_shapes: {wanted} positive integers, got {got}")
