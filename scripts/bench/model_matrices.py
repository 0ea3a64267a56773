"""Matrices of dense transformers by their sizes, as a tensor-parallel rank has them."""

from dataclasses import dataclass

from megatron_eopt.matrices import WHOLE, Split, query_key_value
from megatron_eopt.parallel.layout import Layout, split_layout
from megatron_eopt.parallel.plan_records import Matrix
from megatron_eopt.parallel.rectangles import Shape, cut

Matrices = tuple[Matrix, ...]  # the logical ones of one parameter


@dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer of equal layers, by names of Megatron's flags."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None  # None for as many as heads
    swiglu: bool = False  # whether linear_fc1 has gate and up, fused


MODELS = {
    # Grattafiori et al., The Llama 3 Herd of Models, arXiv 2407.21783, table 3.
    "llama3-8b": Model(
        num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8, swiglu=True
    ),
    "llama3-70b": Model(
        num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64, num_query_groups=8, swiglu=True
    ),
}


def matrices_of(model: Model, tensor: int = 1) -> list[Matrices]:
    """The logical matrices of each parameter of Muon, over tensor-parallel ranks."""
    found: list[Matrices] = []
    for layer in range(model.num_layers):
        name = f"decoder.layers.{layer}"
        found += _attention(f"{name}.self_attention", model, tensor)
        rows = 2 * model.ffn_hidden_size if model.swiglu else model.ffn_hidden_size
        found.append(_cut(f"{name}.mlp.linear_fc1.weight", (rows, model.hidden_size), 0, tensor))
        found.append(_cut(f"{name}.mlp.linear_fc2.weight", (model.hidden_size, model.ffn_hidden_size), 1, tensor))
    return found


def shapes_of(model: Model) -> list[Shape]:
    """Shapes of the logical matrices."""
    return [matrix.shape for parameter in matrices_of(model) for matrix in parameter]


def _attention(name: str, model: Model, ranks: int) -> list[Matrices]:
    """QKV, with rows interleaved by query group, and output projection."""
    hidden = model.hidden_size
    heads = model.num_attention_heads
    groups = model.num_query_groups or heads
    channels = hidden // heads
    queries = heads // groups * channels
    rows = groups * (queries + channels + channels)
    split = query_key_value((queries, channels, channels))
    return [
        _cut(f"{name}.linear_qkv.weight", (rows, hidden), 0, ranks, split),
        _cut(f"{name}.linear_proj.weight", (hidden, hidden), 1, ranks),
    ]


def _cut(name: str, shape: Shape, dim: int, ranks: int, split: Split = WHOLE) -> Matrices:
    """The logical matrices of a parameter that ranks have by rows or columns."""
    layouts = split_layout(Layout(shape, cut(shape, dim, ranks)), split)
    matrices = []
    for part, layout in zip(split.names(shape[0]), layouts, strict=True):
        of_part = f"{name}[{part}]" if part else name
        matrices.append(Matrix(of_part, layout.shape, layout.rectangles, "tp"))
    return tuple(matrices)
