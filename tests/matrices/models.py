"""How models store their fused parameters, written down without the package: the reference for splits."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_eopt.matrices import (
    GATE_UP,
    WHOLE,
    Split,
    concatenated,
    experts,
    heads,
    interleaved,
    interleaved_gate_up,
    key_value,
    latent_down,
    per_shard,
    query_key_value,
    transposed,
)


def by_group(count):
    """Groups, each with its rows of every matrix."""
    return lambda matrices: torch.cat([part for group in zip(*(x.chunk(count) for x in matrices)) for part in group])  # noqa: B905


def split_rows(x, shapes):
    """The matrices of a fused one whose groups have so many rows of each, row by row."""
    matrix_of = [matrix for matrix, rows in enumerate(shapes) for _ in range(rows)] * (len(x) // sum(shapes))
    return [x[[row for row, own in enumerate(matrix_of) if own == matrix]] for matrix in range(len(shapes))]


def merge_rows(matrices, shapes):
    """The fused matrix of these."""
    return by_group(len(matrices[0]) // shapes[0])(matrices)


def cut(store, dim=0):
    """A parameter that is the same at every number of ranks, and is cut there."""
    return lambda matrices, ranks: [shard.contiguous() for shard in store(matrices).chunk(ranks, dim)]


def shard_by_shard(matrices, ranks):
    """Each shard has its part of every matrix."""
    return [torch.cat([x.chunk(ranks)[rank] for x in matrices]) for rank in range(ranks)]


def head_by_head(count, *heads_of_group):
    """Groups of heads; the matrices are heads: all of the first part, then all of the next."""

    def store(matrices):
        parts, start = [], 0
        for number in heads_of_group:
            parts.append(matrices[start : start + count * number])
            start += count * number
        return torch.cat(
            [
                head
                for group in range(count)
                for part, number in zip(parts, heads_of_group, strict=True)
                for head in part[group * number : (group + 1) * number]
            ]
        )

    return store


def fused_down(matrices, ranks):
    q, kv, rope = matrices
    return shard_by_shard([q, torch.cat([kv, rope])], ranks)


def stacked(store, each):
    """Experts behind one another in a leading dimension, each of so many matrices."""

    def stored(matrices, ranks):
        of_experts = [store(matrices[i : i + each], ranks) for i in range(0, len(matrices), each)]
        return [torch.stack([shards[rank] for shards in of_experts]) for rank in range(ranks)]

    return stored


def turned(store):
    """Parameters (in, out)."""
    return lambda matrices, ranks: [shard.mT.contiguous() for shard in store(matrices, ranks)]


@dataclass(frozen=True)
class Kind:
    """A kind of parameter.

    Attributes:
        split: what is declared of it.
        matrices: names and rows of its logical matrices.
        store: the shards of all ranks, from the matrices.
        dim: the dimension of the matrix that is cut.
    """

    split: Split
    matrices: dict[str, int]
    store: Callable
    dim: int = 0

    def whole(self, cols, seed=0):
        """Random logical matrices."""
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(rows, cols, generator=generator) for rows in self.matrices.values()]

    def rows(self):
        """Rows of the global parameter, or of each of a stack."""
        return sum(self.matrices.values()) // (self.split.stacked or 1)

    @property
    def partition_dim(self):
        """The dimension of the parameter that is cut."""
        dim = 1 - self.dim if self.split.transposed else self.dim
        return dim + (self.split.stacked is not None)


def numbered(name, count, rows):
    return {f"{name} {i}": rows for i in range(count)}


def kinds(unit=1):
    """All kinds, which up to 8 ranks can cut; sizes grow with ``unit``. Query groups are 3, so they are cut too."""
    u, n = 8 * unit, 3
    gate_up = {"gate": u, "up": u}
    of_two_experts = {f"expert {i} {name}": rows for i in range(2) for name, rows in gate_up.items()}
    return {
        "whole": Kind(WHOLE, {"": u}, cut(torch.cat)),
        "linear_qkv": Kind(query_key_value((2 * u, u, u)), {"q": 2 * n * u, "k": n * u, "v": n * u}, cut(by_group(n))),
        "gated qkv": Kind(
            query_key_value((2 * u, 2 * u, u, u)),
            {"q": 2 * n * u, "gate": 2 * n * u, "k": n * u, "v": n * u},
            cut(by_group(n)),
        ),
        "one query group": Kind(query_key_value((6 * u, u, u)), {"q": 6 * u, "k": u, "v": u}, cut(torch.cat)),
        "qkv per head": Kind(
            query_key_value((2 * u, u, u), per_head=True),
            numbered("q", 2 * n, u) | numbered("k", n, u) | numbered("v", n, u),
            cut(head_by_head(n, 2, 1, 1)),
        ),
        "gated qkv per head": Kind(  # heads of q are as long as those of k, of the gate as those of v
            query_key_value((2 * u, 4 * u, u, 2 * u), per_head=True),
            numbered("q", 2 * n, u) | numbered("gate", 2 * n, 2 * u) | numbered("k", n, u) | numbered("v", n, 2 * u),
            cut(head_by_head(n, 2, 2, 1, 1)),
        ),
        "linear_q per head": Kind(heads("q", u), numbered("q", n, u), cut(torch.cat)),
        "linear_kv": Kind(key_value(u, u), {"k": n * u, "v": n * u}, cut(by_group(n))),
        "mla kv_up": Kind(key_value(2 * u, u), {"k": 2 * n * u, "v": n * u}, cut(by_group(n))),
        "mla kv_up per head": Kind(
            key_value(2 * u, u, per_head=True),
            numbered("k", n, 2 * u) | numbered("v", n, u),
            cut(head_by_head(n, 1, 1)),
        ),
        "mla q_up": Kind(interleaved(q=2 * u, rope=u), {"q": 2 * n * u, "rope": n * u}, cut(by_group(n))),
        "mla kv_down": Kind(concatenated(kv=3 * u, k_rope=2 * u), {"kv": 3 * u, "k_rope": 2 * u}, cut(torch.cat)),
        "mla qkv_down": Kind(
            latent_down(2 * u, 3 * u - 1, u + 1), {"q": 2 * u, "kv": 3 * u - 1, "k_rope": u + 1}, fused_down
        ),
        "linear_fc1": Kind(GATE_UP, gate_up, shard_by_shard),
        "linear_fc1 by turns": Kind(interleaved_gate_up(unit), gate_up, cut(by_group(8))),
        "experts fc1": Kind(
            experts(2, GATE_UP),
            of_two_experts,
            stacked(shard_by_shard, 2),
        ),
        "experts (in, out)": Kind(
            transposed(experts(2, concatenated(gate=u, up=u))), of_two_experts, turned(stacked(cut(torch.cat), 2))
        ),
        "experts by turns (in, out)": Kind(
            transposed(experts(2, interleaved_gate_up(1))), of_two_experts, turned(stacked(cut(by_group(u)), 2))
        ),
        "experts fc2": Kind(experts(3), numbered("expert", 3, u), stacked(cut(torch.cat, 1), 1), dim=1),
        "mamba in_proj": Kind(
            per_shard(z=2 * u, x=2 * u, B=u, C=u, dt=8),
            {"z": 2 * u, "x": 2 * u, "B": u, "C": u, "dt": 8},
            shard_by_shard,
        ),
    }
