"""How far updates of this package and of its peers on several ranks are from those of one rank: for ``peers.py``."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon as MegatronsAdaptiveMuon
from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon as MegatronsMuon
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

from megatron_eopt import TensorParallelAdaptiveMuon, TensorParallelMuon

COLUMNS = ("this package", "Megatron", "torch", "dion")
Figures = dict[str, dict[str, float]]  # row -> contestant -> figure

STEPS, LR = 3, 0.1
SHAPES = ((96, 36), (36, 96), (48, 48))
GROUP = (8, 4, 4)  # rows of query, key and value


@dataclass(frozen=True)
class Case:
    """A weight and how ranks cut it: along a dimension.

    ``split`` has the rows of query, key and value in a group of a fused projection.
    """

    shape: tuple[int, int]
    dim: int = 0
    split: tuple[int, ...] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def attributes(self) -> dict[str, Any]:
        """What Megatron sets on a shard."""
        return {"tensor_model_parallel": True, "partition_dim": self.dim}

    def drawn(self) -> list[Tensor]:
        """The weight and a gradient for each step."""
        generator = torch.Generator().manual_seed(sum(self.shape))
        return [torch.randn(self.shape, generator=generator) for _ in range(STEPS + 1)]

    def shard(self, x: Tensor, rank: int, ranks: int) -> Tensor:
        """What a rank holds."""
        return x.chunk(ranks, self.dim)[rank].contiguous()


CUT = [Case(shape, dim) for shape in SHAPES for dim in (0, 1)]
WHOLE, RESUMED = "Muon's matrices", "stopped and resumed"
CASES = {
    WHOLE: CUT,
    "fused QKV": [Case((64, 48), split=GROUP)],
    "fused QKV, one group": [Case((48, 40), split=(32, 8, 8))],
    **{
        name: [Case(case.shape, case.dim, settings={"moment2_method": name.lower()}) for case in CUT]
        for name in ("AdaMuon", "NorMuon")
    },
    RESUMED: CUT,
}
MODES = ("duplicated", "distributed", "blockwise")  # Megatron's; the last one is its default


def ours(mode: str) -> str:
    """The contestant that is this package in a mode which is not its default."""
    return f"{COLUMNS[0]}, {mode}"


def dions() -> Any:
    """The package dion; None where it is not installed."""
    return import_module("dion") if find_spec("dion") else None


def trained(build: Callable[[Parameter], Any], case: Case, place: Callable[[Tensor], Tensor], stops: bool) -> Tensor:
    """The weight after the steps; where a run stops, each step but the first is another optimizer's, from its state."""
    start, *gradients = map(place, case.drawn())
    p = Parameter(start.clone())
    optimizer = build(p)
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()
        if stops:
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = build(p)
            optimizer.load_state_dict(state)
    return p.detach()


def of_megatron(cls: Any, tp_mode: str, case: Case, groups: Any, p: Parameter) -> Any:
    """An optimizer with Megatron's arguments, ours or theirs, in fp32 products."""
    optimizer = cls(
        [p],
        lr=LR,
        momentum=0.95,
        weight_decay=0.0,
        split_qkv=case.split is not None,
        # Megatron's factory splits where the rows of a shard are whole groups, and says nothing where they are not.
        is_qkv_fn=lambda p: cls is TensorParallelMuon or len(p) % sum(case.split or (1,)) == 0,
        qkv_split_shapes=case.split,
        fp32_matmul_prec="highest",
        pg_collection=groups,
        tp_mode=tp_mode,
        **case.settings,
    )
    if cls is MegatronsAdaptiveMuon:  # which 0.19.2 leaves out, so that its first step is an error
        optimizer.scale_mode, optimizer.extra_scale_factor = "spectral", 1.0
    return optimizer


def of_torch(cls: Any, case: Case, mesh: Any, p: Parameter) -> Any:
    """An optimizer of torch or of dion, in the bf16 products that they have."""
    if cls is torch.optim.Muon:
        return cls([p], lr=LR, momentum=0.95, weight_decay=0.0)
    rows = {} if case.split is None else {"split_sizes": tuple(n * len(p) // sum(case.split) for n in case.split)}
    return cls([{"params": [p], **rows}], lr=LR, mu=0.95, weight_decay=0.0, nesterov=True, distributed_mesh=mesh)


def whole(x: Tensor) -> Tensor:
    """All entries, of a DTensor too."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def distance(found: Tensor, expected: Tensor, start: Tensor) -> float:
    """Between two weights, in units of the way from the start."""
    return float((found - expected).norm() / (expected - start).norm())


def beside_one(rank: int, ranks: int) -> Figures:
    """How far updates on these ranks are from those of one rank: the largest of a row's cases."""
    torch.compiler.set_stance("force_eager")  # dion compiles for every shape
    everyone = dist.group.WORLD
    by_tensor: Any = SimpleNamespace(tp=everyone, expt_tp=everyone, gtp_remat=None, expt_gtp_remat=None)
    mesh = init_device_mesh("cpu", (ranks,))

    def of_shards(cls: Any, tp_mode: str, case: Case, stops: bool) -> float:
        def place(x: Tensor) -> Tensor:
            return case.shard(x, rank, ranks)

        def build(p: Parameter) -> Any:
            for name, value in case.attributes.items():
                setattr(p, name, value)
            return of_megatron(cls, tp_mode, case, by_tensor, p)

        found, start = trained(build, case, place, stops), case.drawn()[0]
        if stops:
            return distance(found, trained(build, case, place, False), place(start))
        expected = trained(partial(of_megatron, cls, tp_mode, case, None), case, torch.clone, False)
        parts = [torch.empty_like(found) for _ in range(ranks)]
        dist.all_gather(parts, found)
        return distance(torch.cat(parts, case.dim)[: len(start)], expected, start)

    def of_dtensors(cls: Any, case: Case, stops: bool) -> float:
        def place(x: Tensor) -> Tensor:
            return distribute_tensor(x, mesh, [Shard(case.dim)])

        found = trained(partial(of_torch, cls, case, mesh), case, place, stops)
        if stops:
            expected = trained(partial(of_torch, cls, case, mesh), case, place, False)
        else:
            expected = trained(partial(of_torch, cls, case, None), case, torch.clone, False)
        return distance(whole(found), whole(expected), case.drawn()[0])

    figures: Figures = {}
    dion = dions()
    for name, cases in CASES.items():
        adaptive, stops = name.endswith("Muon"), name == RESUMED
        own = TensorParallelAdaptiveMuon if adaptive else TensorParallelMuon
        theirs = MegatronsAdaptiveMuon if adaptive else MegatronsMuon
        modes = MODES if name == WHOLE else MODES[:1]
        ways: dict[str, Callable[..., float]] = {COLUMNS[0]: partial(of_shards, own, "auto")}
        ways |= {mode: partial(of_shards, theirs, mode) for mode in modes}
        ways |= {ours(mode): partial(of_shards, own, mode) for mode in modes[1:]}
        if name in (WHOLE, RESUMED):
            ways["torch"] = partial(of_dtensors, torch.optim.Muon)
        found = {way: max(measure(case, stops) for case in cases) for way, measure in ways.items()}
        if dion and (some := of_dion(name, cases)):
            measure = partial(of_dtensors, dion.NorMuon if adaptive else dion.Muon)
            found["dion"] = max(measure(case, stops) for case in some)
        figures[name] = found
    return figures


def of_dion(name: str, cases: list[Case]) -> list[Case]:
    """What dion has of a row's cases: no AdaMuon, NorMuon of matrices cut along rows."""
    return [case for case in cases if name not in ("AdaMuon", "NorMuon") or (name == "NorMuon" and case.dim == 0)]
