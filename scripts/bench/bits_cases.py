"""What ``bits.py`` records: every optimizer in its forms, the parameters of a rank, and the gradients of each step."""

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import megatron_eopt as eopt
from megatron_eopt.family import CLASSES
from megatron_eopt.optimizers.heavy_ball_muon import HeavyBallMuon
from megatron_eopt.settings.execution import gathered
from megatron_eopt.settings.of_class import settings_of

RANKS = {"one process": 1, "TP=2": 2, "TP=4": 4, "DP=2": 2, "FSDP2": 2}
SHARDED, ALONE, UNCUT_OR_TP = ("TP=2", "TP=4", "FSDP2"), ("one process",), ("one process", "TP=2", "TP=4", "DP=2")
# shape, the dimension that tensor parallelism cuts, and further attributes
SHAPES: dict[str, tuple[tuple[int, ...], int | None, dict[str, Any]]] = {
    "tall": ((24, 16), 0, {}),
    "wide": ((16, 40), 1, {}),
    "qkv": ((32, 12), 0, {"qkv_split_shapes": [8, 4, 4]}),
    "odd": ((33, 12), None, {}),
    "tall_too": ((24, 16), 0, {}),
    "A": ((40, 4), 0, {}),
    "B": ((23, 4), None, {}),
    "vector": ((17,), None, {}),
}
MATRICES = ("tall", "wide", "qkv", "odd", "tall_too")
VARIANTS = [(dtype, precision) for dtype in (torch.float32, torch.bfloat16) for precision in ("highest", "medium")]


@dataclass(frozen=True)
class Case:
    """An optimizer with its settings."""

    cls: str
    settings: dict[str, Any] = field(default_factory=dict)
    layouts: tuple[str, ...] = tuple(RANKS)
    names: tuple[str, ...] = MATRICES  # of its parameters
    second: dict[str, Any] = field(default_factory=dict)  # settings of the second group
    late: bool = False  # a parameter gets its first gradient in the fifth step


ADAPTIVE, MUON, ALL = "TensorParallelAdaptiveMuon", "TensorParallelMuon", (*MATRICES, "vector")
FUNCTIONS = {"orthogonalize_fn": torch.sign, "scale_factor_fn": lambda rows, cols: 0.2}
NO_DEFAULTS = {"split_qkv": False, "use_nesterov": True, "weight_decay": 0.1, "use_decoupled_weight_decay": True}
OWN_OF_GROUP = {"momentum": 0.8, "weight_decay": 0.2, "nesterov": False}
TWO_CHUNKS = {"workspace": 2**13}
CASES = {
    "muon": Case(MUON),
    **{f"muon {m}": Case(MUON, {"tp_mode": m}, SHARDED) for m in ("duplicated", "owner", "gram", "distributed")},
    "muon blockwise": Case(MUON, {"tp_mode": "blockwise"}, ("TP=2",)),
    "muon whole qkv": Case(MUON, {"split_qkv": False}),
    "muon groups": Case(MUON, second=OWN_OF_GROUP),
    "muon chunks": Case(MUON, TWO_CHUNKS),
    "muon bf16 momentum": Case(MUON, {"momentum_dtype": torch.bfloat16, **TWO_CHUNKS}),
    # no shard of these columns has a whole block of 128
    "muon offload": Case(MUON, {"offload_fraction": 0.5, **TWO_CHUNKS}, UNCUT_OR_TP),
    "muon late": Case(MUON, {"nesterov": False}, late=True),
    "muon coefficients": Case(
        MUON, {"coefficient_type": "polar_express", "num_ns_steps": 7, "scale_mode": "shape_scaling"}
    ),
    **{
        f"muon {m} decay": Case(MUON, {"weight_decay": 0.1, "weight_decay_method": m})
        for m in ("l2", "independent", "palm")
    },
    **{f"adaptive {m}": Case(ADAPTIVE, {"moment2_method": m}) for m in ("adamuon", "normuon", "namo")},
    "adaptive chunks": Case(ADAPTIVE, {"moment2_method": "normuon", **TWO_CHUNKS}, late=True),
    "adaptive not aligned": Case(ADAPTIVE, {"align_rms": False, "offload_fraction": 0.5}, UNCUT_OR_TP),
    "spectron": Case("Spectron", {"rank": 3}),
    "spectron pairs": Case("Spectron", {"rank": 3}, names=(*MATRICES, "A", "B"), late=True),
    "soap previous": Case("SOAP", {"precondition_frequency": 2}, names=ALL),
    "soap current": Case("SOAP", {"basis_of": "current", "basis_method": "eigh", "max_dim": 30}, names=ALL),
    "soap kl": Case(
        "SOAP", {"use_kl_shampoo": True, "precondition_frequency": 3, "nesterov": True}, names=ALL, late=True
    ),
    "shampoo": Case("Shampoo", {"weight_decay": 0.1}),
    "shampoo eigh": Case("Shampoo", {"basis_method": "eigh", "precondition_frequency": 2, "weight_norm": "hold"}),
    "kl_shampoo": Case("KLShampoo", {"weight_decay": 0.1}, late=True),
    "lion": Case("Lion", {"weight_decay": 0.1}, names=ALL, late=True),
    "lion l2": Case("Lion", {"weight_decay": 0.1, "weight_decay_method": "l2"}, names=ALL),
    "signum": Case("Signum", {"weight_decay": 0.1}, names=ALL),
    "schedule_free": Case("ScheduleFreeAdamW", {"warmup_steps": 2, "weight_decay": 0.1}, names=ALL, late=True),
    "schedule_free schedulefree": Case("ScheduleFreeAdamW", {"variant": "schedulefree", "r": 1.0}, names=ALL),
    "ademamix": Case("AdEMAMix", {"alpha_warmup": 3, "beta3_warmup": 5, "weight_decay": 0.1}, names=ALL, late=True),
    "psgd_kron": Case("PSGDKron", {"precondition_frequency": 2, "max_dim": 30}, late=True),
    "scion": Case("Scion"),
    "scion unconstrained": Case("Scion", {"constrained": False, **TWO_CHUNKS}),
    "polargrad": Case("PolarGrad"),
    "polargrad chunks": Case("PolarGrad", {"nesterov": True, **TWO_CHUNKS}, late=True),
    "hyperball": Case("MuonHyperball"),
    "hyperball chunks": Case("MuonHyperball", TWO_CHUNKS, late=True),
    "mars": Case("MarsMuon"),
    "mars chunks": Case("MarsMuon", {"gamma": 0.5, **TWO_CHUNKS}, late=True),
    "dion": Case("Dion", {"weight_decay": 0.1}),
    "dion late": Case("Dion", {"rank_fraction": 0.5}, late=True),
    "with_adamw": Case("Muon", {"weight_decay": 0.1}, names=ALL, second={"ns_steps": 3}),
    "distributed_muon": Case("DistributedMuon", {"collective_state_dict": True}, ("one process", "DP=2")),
    "users functions": Case("OrthogonalizedOptimizer", {**FUNCTIONS, **NO_DEFAULTS}, ALONE),
    "users orthogonalize": Case("Own", {"momentum_dtype": torch.bfloat16}),
}
_KNOWN = {case.cls for case in CASES.values()}
CASES |= {name: Case(name) for name in CLASSES if name not in _KNOWN}


class Own(eopt.TensorParallelMuon):
    """A user's own."""

    def orthogonalize(self, p: Tensor, grad: Tensor, **group_settings: Any) -> Tensor:
        """Half of Muon's."""
        return 0.5 * super().orthogonalize(p, grad, **group_settings)


def build(
    case: Case, parameters: dict[str, nn.Parameter], precision: str, beta: float, groups: Any, layout: str
) -> Any:
    """The optimizer of a case, with two groups."""
    cls: Any = Own if case.cls == "Own" else getattr(eopt, case.cls)
    written = HeavyBallMuon if case.cls == "Muon" else cls  # Muon's **muon_settings are those
    takes = set(settings_of(written))
    if "execution" in takes:
        takes |= {"data_parallel_group"}
    usual: dict[str, Any] = {
        **{"momentum": beta, "momentum_beta": beta, "betas": (beta, 0.98), "fp32_matmul_prec": precision},
        **{"split_qkv": True, "is_qkv_fn": lambda p: hasattr(p, "qkv_split_shapes"), "qkv_split_shapes": (1, 1, 1)},
        **{
            "tp_mode": "auto",
            "pg_collection": None if layout == "FSDP2" else groups,
            "share_over_dp": layout == "DP=2",
        },
        **({"data_parallel_group": dist.group.WORLD} if layout == "DP=2" else {}),
    }
    settings = {name: value for name, value in usual.items() if name in takes} | {"lr": 0.02} | case.settings
    matrices = [p for name, p in parameters.items() if name in MATRICES]
    rest = [p for name, p in parameters.items() if name not in MATRICES]
    second = matrices[3:] if "A" in parameters or case.cls == "Muon" else [*matrices[3:], *rest]
    both = [{"params": matrices[:3]}, {"params": second, "lr": 0.03, **case.second}]
    if "A" in parameters:
        both.append(eopt.factor_pairs([rest]))
    settings = gathered(HeavyBallMuon if case.cls == "Muon" else cls, settings)
    return cls(both, rest, **settings) if case.cls == "Muon" else cls(both, **settings)


def make_parameters(names: tuple[str, ...], dtype: torch.dtype, layout: str) -> dict[str, nn.Parameter]:
    """The parameters of this rank."""
    model = nn.Module()
    for index, name in enumerate(names):
        weight = draw(name, index).to(dtype)
        model.register_parameter(name, nn.Parameter(cut(weight, name, layout)))
    if layout == "FSDP2":
        fully_shard(model, mesh=init_device_mesh("cpu", (RANKS[layout],)))
    for name, p in model.named_parameters():
        _, dim, attributes = SHAPES[name]
        of_shard = {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": 1}
        for key, value in (attributes | (of_shard if layout in ("TP=2", "TP=4") and dim is not None else {})).items():
            setattr(p, key, value)
    return dict(model.named_parameters())


def draw(name: str, seed: int) -> Tensor:
    """Random numbers in the shape of a parameter."""
    return torch.randn(SHAPES[name][0], generator=torch.Generator().manual_seed(seed))


def cut(x: Tensor, name: str, layout: str) -> Tensor:
    """This rank's shard under tensor parallelism."""
    dim = SHAPES[name][1]
    if dim is None or layout not in ("TP=2", "TP=4"):
        return x
    return x.chunk(RANKS[layout], dim)[dist.get_rank()].contiguous()


def set_gradients(parameters: dict[str, nn.Parameter], step: int, layout: str, late: bool) -> None:
    """Those of a step: some are missing, and one is not finite."""
    for index, (name, p) in enumerate(parameters.items()):
        gradient = draw(name, 1000 + 100 * step + index)
        if step == 5 and name == "tall":
            gradient[3, 2] = torch.inf
        is_missing = step == 7 or (step == 3 and name == "wide") or (late and step < 4 and name in ("odd", "A"))
        gradient = cut(gradient, name, layout).to(p.dtype)
        if isinstance(p, DTensor):
            gradient = distribute_tensor(gradient, p.device_mesh, [Shard(0)], src_data_rank=None)
        p.grad = None if is_missing else gradient


def join(rank: int, layout: str, folder: Path) -> SimpleNamespace | None:
    """Let this rank join those of its layout, and give the process groups that Megatron would."""
    if layout == "one process":
        return None
    ranks, store = RANKS[layout], dist.FileStore(str(folder / f"{layout} store"), RANKS[layout])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    alone, world = [dist.new_group([each]) for each in range(ranks)][rank], dist.group.WORLD
    tp = world if layout.startswith("TP") else alone
    return SimpleNamespace(tp=tp, expt_tp=tp, dp_cp=world if layout == "DP=2" else alone)
