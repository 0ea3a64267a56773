"""Matrices of a transformer by its sizes, as the ranks of a run have them."""

from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import NamedTuple

from model_sizes import Model, Parallel

from megatron_eopt.matrices import GATE_UP, WHOLE, Split, query_key_value
from megatron_eopt.parallel.cost import Work
from megatron_eopt.parallel.deal import Deal, Item, deal, to_and_fro
from megatron_eopt.parallel.layout import Layout, split_layout
from megatron_eopt.parallel.rates import DEFAULT_RATES, Rates
from megatron_eopt.parallel.records import Matrix, TpMode
from megatron_eopt.parallel.rectangles import Shape, cut

Matrices = tuple[Matrix, ...]  # the logical ones of one parameter
_HEADS = "--num-attention-heads over --tensor-model-parallel-size"
_EXPERTS = (
    "ranks of a stage (--tensor-model-parallel-size times --data-parallel-size) over those of the experts "
    "(--expert-tensor-parallel-size times --expert-model-parallel-size)"
)


class Stage(NamedTuple):
    """What the ranks of a pipeline stage do, without embeddings and output layer.

    Of several stages, times are the longest of any, and entries those of the one with the most memory.
    """

    matrices: list[Matrix]  # logical ones of the busiest rank
    deals: list[Deal]
    seconds: float  # of the busiest rank's step
    mean: float  # seconds of all, if the work of a stage were shared evenly
    held: int  # entries of a rank's parameters
    kept: int  # most entries whose state a rank keeps
    gathered: int  # entries that a rank receives when data-parallel ranks share their parameters

    @property
    def memory(self) -> tuple[int, int, int]:
        """Bytes of bf16 parameters, fp32 gradients, and of a momentum and a copy of the parameters in fp32."""
        return 2 * self.held, 4 * self.held, 8 * self.kept


def dealt_matrices(
    model: Model, parallel: Parallel, work: Work, mode: TpMode = "auto", rates: Rates = DEFAULT_RATES
) -> Stage:
    """The busiest long stage.

    Embeddings and the output layer are not Muon's. With several data-parallel ranks there is a deal of dense parameters
    and one of experts. Sizes that do not divide over the ranks are a ``ValueError``.
    """
    length = -(-model.num_layers // parallel.pipeline)
    starts: dict[int, int] = {}  # of one stage for each number of dense layers in it
    for first in range(0, model.num_layers, length):
        first = min(first, model.num_layers - length)
        starts.setdefault(max(0, model.first_dense_layers - first), first)
    stages = []
    for first in starts.values():
        dense, experts = _parameters(model, parallel, range(first, first + length))
        stage = _dealt(dense, parallel.data, work, mode, rates)
        if experts:
            ranks = _divided(parallel.tensor * parallel.data, parallel.expert_tensor * parallel.expert, _EXPERTS)
            of_experts = _dealt(experts, ranks, work, mode, rates)
            stage = Stage(*map(add, stage, of_experts))  # one rank may be the busiest with both
        stages.append(stage)
    slowest = max(stages, key=lambda stage: stage.seconds)
    fullest = max(stages, key=lambda stage: sum(stage.memory))
    return slowest._replace(
        mean=max(stage.mean for stage in stages),
        held=fullest.held,
        kept=fullest.kept,
        gathered=max(stage.gathered for stage in stages),
    )


def _dealt(parameters: Sequence[Matrices], data: int, work: Work, mode: TpMode, rates: Rates) -> Stage:
    items = []
    for parameter in parameters:
        matrices = tuple(replace(matrix, itemsize=work.itemsize) for matrix in parameter)
        items.append(Item(matrices, sum(matrix.rectangles[0].numel for matrix in matrices)))
    found = deal(items, to_and_fro([item.entries for item in items], data), data, work, mode, rates)
    busiest = found.seconds.index(max(found.seconds))
    of_busiest: list[Matrix] = []
    kept = [0] * data
    for item, rank in zip(items, found.ranks, strict=True):
        kept[rank] += item.entries
        if rank == busiest:
            of_busiest += item.matrices
    held = sum(kept)
    return Stage(
        matrices=of_busiest,
        deals=[found] if data > 1 else [],
        seconds=max(found.seconds),
        mean=sum(found.seconds) / data,
        held=held,
        kept=max(kept),
        gathered=held * (data - 1) // data,
    )


def _parameters(model: Model, parallel: Parallel, layers: Sequence[int]) -> tuple[list[Matrices], list[Matrices]]:
    """Dense parameters of layers, and those of a rank's experts."""
    dense: list[Matrices] = []
    experts: list[Matrices] = []
    for layer in layers:
        name = f"decoder.layers.{layer}"
        if model.kv_lora_rank is None:
            dense += _attention(f"{name}.self_attention", model, parallel.tensor)
        else:
            dense += _latent_attention(f"{name}.self_attention", model, parallel.tensor)
        if model.num_experts is None or layer < model.first_dense_layers:
            dense += _mlp(f"{name}.mlp", model, model.ffn_hidden_size, parallel.tensor)
            continue
        dense.append(_shared(f"{name}.mlp.router.weight", (model.num_experts, model.hidden_size), 0, 1))
        shared = model.moe_shared_expert_intermediate_size
        if shared is not None:
            dense += _mlp(f"{name}.mlp.shared_experts", model, shared, parallel.tensor)
        columns = model.moe_ffn_hidden_size or model.ffn_hidden_size
        here = _divided(model.num_experts, parallel.expert, "--num-experts over --expert-model-parallel-size")
        for expert in range(here):
            at = f"{name}.mlp.experts.local_experts.{expert}"
            experts += _mlp(at, model, columns, parallel.expert_tensor, "expt_tp")
    return dense, experts


def _attention(name: str, model: Model, ranks: int) -> list[Matrices]:
    """QKV, with rows interleaved by query group, and output projection."""
    hidden = model.hidden_size
    heads = model.num_attention_heads
    groups = model.num_query_groups or heads
    _divided(heads, ranks, _HEADS)
    channels = model.kv_channels or _divided(hidden, heads, "--hidden-size over --num-attention-heads")
    queries = _divided(heads, groups, "--num-attention-heads over --num-query-groups") * channels
    rows = groups * (queries + channels + channels)
    split = query_key_value((queries, channels, channels))
    return [
        _shared(f"{name}.linear_qkv.weight", (rows, hidden), 0, ranks, split=split),
        _shared(f"{name}.linear_proj.weight", (hidden, heads * channels), 1, ranks),
    ]


def _latent_attention(name: str, model: Model, ranks: int) -> list[Matrices]:
    """Projections down to the ranks of latents, which are not cut, and up."""
    hidden = model.hidden_size
    heads = model.num_attention_heads
    latent = model.kv_lora_rank or 0
    _divided(heads, ranks, _HEADS)
    queries = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    keys_and_values = heads * (model.qk_head_dim + model.v_head_dim)
    found = [
        _shared(f"{name}.linear_kv_down_proj.weight", (latent + model.qk_pos_emb_head_dim, hidden), 0, 1),
        _shared(f"{name}.linear_kv_up_proj.weight", (keys_and_values, latent), 0, ranks),
        _shared(f"{name}.linear_proj.weight", (hidden, heads * model.v_head_dim), 1, ranks),
    ]
    if model.q_lora_rank is None:
        found.append(_shared(f"{name}.linear_q_proj.weight", (queries, hidden), 0, ranks))
    else:
        found.append(_shared(f"{name}.linear_q_down_proj.weight", (model.q_lora_rank, hidden), 0, 1))
        found.append(_shared(f"{name}.linear_q_up_proj.weight", (queries, model.q_lora_rank), 0, ranks))
    return found


def _mlp(name: str, model: Model, columns: int, ranks: int, group: str = "tp") -> list[Matrices]:
    hidden = model.hidden_size
    rows = 2 * columns if model.swiglu else columns
    split = GATE_UP if model.swiglu and model.split_gate_up else WHOLE
    return [
        _shared(f"{name}.linear_fc1.weight", (rows, hidden), 0, ranks, group, split),
        _shared(f"{name}.linear_fc2.weight", (hidden, columns), 1, ranks, group),
    ]


def _shared(name: str, shape: Shape, dim: int, ranks: int, group: str = "tp", split: Split = WHOLE) -> Matrices:
    """The logical matrices of a parameter that ranks share by rows or columns."""
    layouts = split_layout(Layout(shape, cut(shape, dim, ranks)), split)
    matrices = []
    for part, layout in zip(split.names(shape[0]), layouts, strict=True):
        of_part = f"{name}[{part}]" if part else name
        matrices.append(Matrix(of_part, layout.shape, layout.rectangles, group))
    return tuple(matrices)


def _divided(size: int, by: int, what: str) -> int:
    if size % by:
        raise ValueError(f"{what}: {size} is no multiple of {by}, so take another of these sizes")
    return size // by
