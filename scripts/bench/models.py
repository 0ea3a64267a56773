"""The shapes and the optimizers that every script here times and counts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.nn import Parameter

from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.matrices import WHOLE, Split, experts, query_key_value
from megatron_eopt.parallel.layout import Layout, split_layout
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import Shape, cut

# Label -> the name of the row, and what its constructor is told.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "muon": ("muon", {}),
    **{method: ("adaptive_muon", {"moment2_method": method}) for method in ("adamuon", "normuon", "namo")},
    **{name: (name, {}) for name in OPTIMIZERS if name not in ("muon", "adaptive_muon")},
    "spectron": ("spectron", {"rank": 16}),
    "soap": ("soap", {"precondition_frequency": 1}),
}

# The parameters of whole steps; one with three dimensions is a stack of experts.
SETS: dict[str, Sequence[tuple[int, ...]]] = {
    "124M": [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12,
    "1.3B": [(6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192)] * 24,
    "8B/8": [*[(4096, 4096), (1024, 4096)] * 2, *[(14336, 4096)] * 2, (4096, 14336)] * 4,  # four of 32 layers
    "small": [(512, 512)] * 400 + [(512, 2048)] * 200,
    "experts": [(128, 768, 2048)] * 6,
}


def declared(p: Parameter) -> Parameter:
    """A parameter that says so where it is a stack of experts."""
    if p.ndim == 3:
        p.logical_matrices = experts(len(p))  # type: ignore[attr-defined]
    return p


# Those of one orthogonalization. On the CPU layers of Llama-3 8B and Qwen3-30B-A3B at an eighth of their width.
NEWTON_SCHULZ: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": {
        "square": (1024, 1024),
        "Llama-3 8B gate, up, down / 8": (1792, 512),
        "Llama-3 8B k, v / 8": (128, 512),
        "aspect 7": (3584, 512),
        "Qwen3-30B-A3B q / 8": (512, 256),
        "64 experts": (64, 128, 64),
        "128 experts": (128, 96, 256),
    },
    "cuda": {
        "Llama-3 8B gate, up, down": (14336, 4096),
        "aspect 3.5": (7168, 2048),
        **{f"{n} experts": (n, 768, 2048) for n in (8, 64, 128, 384)},
        "Llama-3 70B gate, up, down": (28672, 8192),
        "square": (4096, 4096),
        "Llama-3 8B k, v": (1024, 4096),
        "aspect 7": (28672, 4096),
        "Qwen3-30B-A3B q": (4096, 2048),
    },
}

# Parameters of steps of one process on a CPU.
ALONE: dict[str, Sequence[tuple[int, int]]] = {
    "16 matrices": [(1536, 512), (512, 512), (2048, 512), (512, 2048)] * 4,
    "28 shards": [(256, 512), (64, 512), (64, 512), (512, 256), (896, 512), (896, 512), (512, 896)] * 4,  # of TP=2
    "120 small": [(256, 128), (128, 128), (256, 128), (128, 256)] * 30,
    "12 square": [(256, 256), (512, 256), (512, 512)] * 4,
}

# Parameters that tensor parallelism cuts: rows, columns, and the dimension that is cut.
Sharded = list[tuple[int, int, int]]
FOUR_LAYERS: Sharded = [
    (512, 512, 0),  # q
    (128, 512, 0),  # k
    (128, 512, 0),  # v
    (512, 512, 1),
    (1792, 512, 0),  # gate
    (1792, 512, 0),  # up
    (512, 1792, 1),
] * 4
LAYER_OF_70B: Sharded = [(10240, 8192, 0), (8192, 8192, 1), (57344, 8192, 0), (8192, 28672, 1)]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer of equal layers, by names of Megatron's flags."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int


# Grattafiori et al., The Llama 3 Herd of Models, arXiv 2407.21783, table 3. Gate and up are fused.
LLAMAS = {
    "llama3-8b": Model(
        num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8
    ),
    "llama3-70b": Model(
        num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64, num_query_groups=8
    ),
}


def matrices_of(model: Model, ranks: int = 1) -> list[tuple[Matrix, ...]]:
    """The logical matrices of each parameter of Muon, over tensor-parallel ranks."""
    hidden, ffn, groups = model.hidden_size, model.ffn_hidden_size, model.num_query_groups
    channels = hidden // model.num_attention_heads
    queries = model.num_attention_heads // groups * channels
    split = query_key_value((queries, channels, channels))
    found = []
    for layer in range(model.num_layers):
        name = f"decoder.layers.{layer}"
        attention, mlp = f"{name}.self_attention", f"{name}.mlp"
        found += [
            _cut(f"{attention}.linear_qkv.weight", (groups * (queries + 2 * channels), hidden), 0, ranks, split),
            _cut(f"{attention}.linear_proj.weight", (hidden, hidden), 1, ranks),
            _cut(f"{mlp}.linear_fc1.weight", (2 * ffn, hidden), 0, ranks),
            _cut(f"{mlp}.linear_fc2.weight", (hidden, ffn), 1, ranks),
        ]
    return found


def _cut(name: str, shape: Shape, dim: int, ranks: int, split: Split = WHOLE) -> tuple[Matrix, ...]:
    """The logical matrices of a parameter that ranks have by rows or columns."""
    layouts = split_layout(Layout(shape, cut(shape, dim, ranks)), split)
    matrices = []
    for part, layout in zip(split.names(shape[0]), layouts, strict=True):
        of_part = f"{name}[{part}]" if part else name
        matrices.append(Matrix(of_part, layout.shape, layout.rectangles, "tp"))
    return tuple(matrices)
