"""One table of programs, and one of layouts over ranks: what is the same of every optimizer is tested by both."""

import copy
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.matrices import GATE_UP, concatenated, experts, heads, interleaved_gate_up, transposed
from megatron_eopt.parallel.collectives import counters
from megatron_eopt.settings.execution import gathered
from tests.distributed.shards import OF_SHARDS, counted, cut, grid, groups_of, marked, sharded, whole
from tests.optimizers.family import IN_FP32, OWNED, RECORDS, STACKS, SUMS
from tests.optimizers.field import assert_close, drawn

STEPS = 4
BAD = {"tall along rows": torch.nan, "fused": 1e20}
"""What one entry of a gradient on one rank is in the third step: the parameter stays as it is on all."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """An optimizer, and what there is to know of its steps on several ranks."""

    name: str
    settings: dict
    first: dict  # settings of the first group alone
    modes: tuple  # of those that have modes
    tolerance: float
    calls: dict
    without: tuple  # layouts, and cases, that it refuses
    dtype: torch.dtype = torch.float64

    @property
    def cls(self):
        return OPTIMIZERS[self.name].cls

    def takes(self, setting):
        return OPTIMIZERS[self.name].takes(setting)

    def build(self, groups, **settings):
        """The optimizer; settings that it does not have are left out."""
        settings = {
            "lr": 0.05,
            "split_qkv": True,
            "is_qkv_fn": lambda p: hasattr(p, "qkv_split_shapes"),
            "fp32_matmul_prec": "highest",
            **RECORDS[self.name].settings,
            **self.settings,
            **settings,
        }
        taken = {key: value for key, value in settings.items() if self.takes(key)}
        return self.cls(groups, **gathered(self.cls, taken))


OF_ALL = {"momentum": 0.8}
OF_FIRST = {"momentum": 0.5, "num_ns_steps": 8, "coefficient_type": "polar_express"}


def program(name, more=None, **settings):
    """What the record of an optimizer says, but for ``more``, and with further settings."""
    record, takes = RECORDS[name], OPTIMIZERS[name].takes
    of_record = {
        "settings": {key: x for key, x in OF_ALL.items() if takes(key)} | record.over_ranks | settings,
        "first": {key: x for key, x in OF_FIRST.items() if takes(key)} | record.first_group,
        "modes": record.modes,
        "tolerance": record.tolerance,
        "calls": record.calls,
        "without": record.refuses,
    }
    return Program(name=name, **{**of_record, **(more or {})})


HOLD = {"weight_norm": "hold", "weight_decay": 0.0}
MEASURED = {"calls": SUMS}  # norms of whole matrices
HELD = {"calls": {**OWNED, "all_reduce": 1 + 3}}
ONE_MODE = {"modes": ("owner",)}
FP32 = {"dtype": torch.float32, "tolerance": 3e-5}
# Every optimizer by its record, and with settings by which it does other work.
PROGRAMS = {
    **{name: program(name) for name in OPTIMIZERS},
    "muon in fp32": program("muon", {**FP32, "modes": ("auto", "distributed", "gram")}),
    # what is exchanged in bf16 is rounded to it at any rate: the same bits
    "muon in bf16": program(
        "muon", {**FP32, "modes": ("duplicated", "owner"), "tolerance": 0}, fp32_matmul_prec="medium"
    ),
    "muon with bf16 momenta": program(
        "muon", {**FP32, **ONE_MODE, "without": ("of another dtype",)}, momentum_dtype=torch.bfloat16
    ),
    "hold": program("muon", {**MEASURED, **ONE_MODE}, **HOLD),
    "brake, cautious": program(
        "muon", {**MEASURED, **ONE_MODE}, weight_norm="brake", brake_outward=0.1, cautious_weight_decay=True
    ),
    "match, cautious": program("muon", {**MEASURED, **ONE_MODE}, relative_update="match", cautious_weight_decay=True),
    "match, brake": program(
        "muon", {**MEASURED, **ONE_MODE}, relative_update="match", update_ratio=0.3, weight_norm="brake"
    ),
    "bounded": program("muon", {**MEASURED, **ONE_MODE}, max_update_rms=0.05),
    "hold, normuon": program(
        "muon",
        {"tolerance": IN_FP32, "calls": {"all_reduce": 4}, "without": ("both", *STACKS), **ONE_MODE},
        **HOLD,
        moment2_method="normuon",
    ),
    "adamuon": program("adaptive_muon", {"without": ()}, moment2_method="adamuon"),
    # what is rounded otherwise where Gram matrices are summed, adamuon makes as much of in small entries
    "adamuon in fp32": program(
        "adaptive_muon",
        {"without": (), "modes": ("owner", "gram"), "dtype": torch.float32, "tolerance": 6e-5},
        moment2_method="adamuon",
    ),
    "adamuon not aligned": program(
        "adaptive_muon", {"without": (), "calls": {}}, moment2_method="adamuon", align_rms=False
    ),
    "namo": program("adaptive_muon", {"without": ()}, moment2_method="namo"),
    "soap by eigh": program("soap", basis_method="eigh"),
    "kl-soap, hold": program("soap", HELD, use_kl_shampoo=True, weight_norm="hold"),
    "kl-soap, current": program("soap", use_kl_shampoo=True, basis_of="current", maximize=True, sort_bases="after"),
    "soap-muon": program("soap", {"without": ("long sides",)}, orthogonalize=True, nesterov=True, eps=1.0),
    "shampoo by eigh, hold": program(
        "shampoo", HELD, precondition_frequency=2, basis_method="eigh", weight_norm="hold"
    ),
    "kl-shampoo by eigh": program("kl_shampoo", precondition_frequency=2, basis_method="eigh", maximize=False),
    "psgd, noise": program("psgd_kron", precondition_frequency=2, maximize=True, damping_noise_scale=0.3),
}

# Rows and columns that 2, 3 and 4 ranks divide. Each gradient spans the sides that have a factor, of at most `max_dim`:
# what is not spanned has the basis that rounding makes.
CASES = {
    "tall along rows": ((48, 24), sharded(0)),
    "tall along columns": ((48, 24), sharded(1)),
    "wide along rows": ((24, 48), sharded(0)),
    "wide along columns": ((24, 48), sharded(1)),
    "square": ((24, 24), {"partition_dim": 1}),
    "long sides": ((48, 36), sharded(0)),
    "few rows": ((12, 30), sharded(0)),
    "fused": ((6 * 16, 24), sharded(0, qkv_split_shapes=[8, 4, 4])),
    "fused along columns": ((6 * 16, 24), sharded(1, qkv_split_shapes=[8, 4, 4])),
    "with a gate": ((4 * 24, 16), sharded(0, qkv_split_shapes=[8, 8, 4, 4])),
    "one query group": ((48, 30), sharded(0, qkv_split_shapes=[24, 12, 12])),  # some ranks have nothing of q, or of k
    "gate and up": ((48, 24), sharded(0, logical_matrices=GATE_UP)),
    "stacked experts": ((2, 24, 24), sharded(1, logical_matrices=experts(2))),
    "expert": ((24, 48), {"partition_dim": 1, "expert_tp": True}),
    "tall expert": ((48, 24), {"partition_dim": 1, "expert_tp": True}),
    "replicated": ((24, 30), {}),
    # as large as the shards of larger ones, by two ranks
    "replicated with a partition_dim": ((24, 24), {"partition_dim": 0, "tensor_model_parallel": False}),
    "zero": ((48, 24), sharded(0)),
    "of another dtype": ((48, 24), sharded(0)),
}


class TensorParallel:
    """Each shard is a parameter whose attributes say so."""

    cases = CASES

    def __init__(self, ranks):
        self.ranks = ranks

    def cases_of(self, program):
        return {name: case for name, case in self.cases.items() if name not in program.without}

    def settings(self, rank):
        return {"pg_collection": groups_of(self.ranks)}

    def attributes(self, attributes):
        return attributes if self.ranks > 1 else {k: v for k, v in attributes.items() if k not in OF_SHARDS}

    def part(self, x, attributes, rank):
        return cut(x, attributes, rank, self.ranks)

    def shown(self, x, attributes, rank):
        """What there is to compare of a rank's tensor."""
        return x.detach().clone()

    def of_rank(self, x, attributes, rank):
        """The same, of the tensor of one rank."""
        return self.shown(self.part(x, attributes, rank), attributes, rank)


class Copies(TensorParallel):
    """Whole parameters, whose work data-parallel ranks share out."""

    def settings(self, rank):
        groups = SimpleNamespace(tp=None, expt_tp=None, dp_cp=dist.group.WORLD, expt_dp=dist.group.WORLD)
        return {"data_parallel_group": dist.group.WORLD, "share_over_dp": True, "pg_collection": groups}


class Grid(TensorParallel):
    """Two copies of shards, whose work data-parallel ranks share out, too."""

    def settings(self, rank):
        tp, dp = grid(rank)
        both = dist.group.WORLD
        groups = SimpleNamespace(tp=tp, expt_tp=tp, dp_cp=dp, expt_dp=dp, tp_dp_cp=both)
        return {"pg_collection": groups, "data_parallel_group": dp, "share_over_dp": True}

    def part(self, x, attributes, rank):
        return super().part(x, attributes, rank % 2)


OF_DTENSORS = {
    "tall along rows": ((30, 8), {}),
    "uneven": ((13, 13), {}),
    "wide": ((7, 30), {}),
    "one row": ((1, 30), {}),
    "fused": ((32, 30), {"qkv_split_shapes": [4, 2, 2]}),
    "gate over up": ((18, 30), {"logical_matrices": GATE_UP}),
    "heads": ((12, 30), {"logical_matrices": heads("q", 4)}),
    "(in, out)": ((30, 9), {"logical_matrices": transposed()}),
}


@cache
def mesh_of(sizes):
    """The mesh of all ranks of these sizes: each has process groups, and these have threads."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])


class DTensors(TensorParallel):
    """Parameters on a mesh."""

    cases = OF_DTENSORS

    def __init__(self, sizes, *placements):
        super().__init__(1)
        self.sizes, self.placements = sizes, placements

    def settings(self, rank):
        return {}

    def part(self, x, attributes, rank):
        return distribute_tensor(x, mesh_of(self.sizes), self.placements, src_data_rank=None)

    def shown(self, x, attributes, rank):
        return whole(x)

    def of_rank(self, x, attributes, rank):
        return x


OF_STACKS = {
    "experts": ((3, 20, 12), {"logical_matrices": experts(3)}),
    "gate and up of experts": ((5, 16, 12), {"logical_matrices": experts(5, concatenated(gate=None, up=None))}),
    "gate and up by turns (in, out)": (
        (3, 12, 16),
        {"logical_matrices": transposed(experts(3, interleaved_gate_up(1)))},
    ),
    "uneven": ((13, 13), {}),
    "like an expert": ((20, 12), {}),
}


class Stacks(DTensors):
    """Stacks on a mesh, of whose matrices ranks have as many as torch gives them, beside other parameters."""

    cases = OF_STACKS


ONE = TensorParallel(1)
LAYOUTS = {
    2: {
        "TP=2": TensorParallel(2),
        "copies": Copies(1),
        "rows": DTensors((2,), Shard(0)),
        "columns": DTensors((2,), Shard(1)),
        "stacks": Stacks((2,), Shard(0)),
    },
    4: {
        "TP=4": TensorParallel(4),
        "grid": Grid(2),
        "rows over four": DTensors((4,), Shard(0)),
        "stacks over four": Stacks((4,), Shard(0)),
        "stacks of hsdp": Stacks((2, 2), Replicate(), Shard(0)),
        "stacks over both": Stacks((2, 2), Shard(0), Shard(0)),
        "replicated": DTensors((4,), Replicate()),
        "hsdp": DTensors((2, 2), Replicate(), Shard(0)),
        "both": DTensors((2, 2), Shard(0), Shard(1)),
        "rows over TP": DTensors((2, 2), _StridedShard(0, split_factor=2), Shard(0)),
    },
}


def whole_tensor(program, name, shape, seed):
    """A parameter or gradient of a case."""
    x = drawn(shape, seed, program.dtype)
    other = torch.float32 if program.dtype == torch.float64 else torch.float64
    return x.to(other) if name == "of another dtype" else x


def set_gradients(program, layout, rank, parameters, step):
    for index, (name, p) in enumerate(parameters.items()):
        shape, attributes = layout.cases[name]
        # MARS-Muon clips by norms of matrices: some, none, and some whose shards have norms below 1
        size = (1.0, 1e-4, 1.2 / torch.Size(shape).numel() ** 0.5)[index % 3] * (name != "zero")
        gradient = whole_tensor(program, name, shape, 1000 * (1 + step) + index) * size
        if step == 2 and name in BAD:
            gradient.view(-1)[0] = BAD[name]
        p.grad = layout.part(gradient, attributes, rank)


def trained(program, layout=ONE, rank=0, steps=range(STEPS), start=None, **settings):
    """Some steps of all cases: the optimizer, its parameters by name, and what the last step exchanged."""
    parameters = {}
    for index, (name, (shape, attributes)) in enumerate(layout.cases_of(program).items()):
        x = layout.part(whole_tensor(program, name, shape, index), attributes, rank)
        parameters[name] = marked(x, **layout.attributes(attributes))
    several = list(parameters.items())
    some = min(3, len(several) // 2)
    groups = [{"params": several[:some], **program.first}, {"params": several[some:], "lr": 0.02}]
    optimizer = program.build(groups, **{**layout.settings(rank), **settings})
    if start is not None:
        state, values = start
        optimizer.load_state_dict(copy.deepcopy(state))
        for name, value in values.items():
            parameters[name].data.copy_(value)
    for step in steps:
        set_gradients(program, layout, rank, parameters, step)
        counters.reset()
        optimizer.step()
    return optimizer, parameters, counted()


def on_one_rank(program, kind):
    """The same steps of the cases of a kind of layout on one rank."""
    alone = TensorParallel(1)
    alone.cases = kind.cases
    return trained(program, alone)


@dataclass
class Found:
    """A tensor on a rank, and which part it is of that of one rank; None: cut as its parameter."""

    x: torch.Tensor
    part: tuple | None = None


def found(optimizer, parameters, layout, rank):
    """Parameters, by the key "", and their state, by case and key."""
    results = {}
    for name, p in parameters.items():
        _, attributes = layout.cases[name]
        layouts = optimizer.matrix_layouts(p)
        described = {each.key: each for each in optimizer.state_tensors(p)}
        results[name] = {"": Found(layout.shown(p, attributes, rank))}
        for key, x in optimizer.state[p].items():
            dims = described[key].dims
            part = None
            if dims is not None and not isinstance(x, DTensor):
                r = layouts[described[key].matrix].rectangle
                sides = {"rows": slice(r.top, r.bottom), "columns": slice(r.left, r.right)}
                elsewhere = described[key].is_elsewhere(layouts)
                part = tuple(slice(0) if elsewhere else sides.get(dim, slice(None)) for dim in dims)
            results[name][key] = Found(x.clone() if part is not None else layout.shown(x, attributes, rank), part)
    return results


def assert_as_one(program, layout, results, of_one, what=""):
    """What ranks found is their part of what one rank has, and the same bits where these parts are the same."""
    optimizer, parameters, _ = of_one
    for name, p in parameters.items():
        _, attributes = layout.cases[name]
        tolerance = program.tolerance if name != "of another dtype" else 3e-5
        for key, of_whole in {"": p.detach(), **optimizer.state[p]}.items():
            seen = []
            for rank, of_rank in enumerate(results):
                assert of_rank[name].keys() == {"", *optimizer.state[p]}
                x, part = of_rank[name][key].x, of_rank[name][key].part
                expected = layout.of_rank(of_whole, attributes, rank) if part is None else of_whole[part]
                assert_close(x, expected, tolerance, (what, rank, name, key))
                assert all(torch.equal(x, y) for y, other in seen if torch.equal(expected, other)), (what, name, key)
                seen.append((x, expected))
