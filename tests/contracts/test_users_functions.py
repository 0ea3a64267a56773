"""Subclasses of Muon that set or override what orthogonalizes, and what of a constructor is fixed.

Scripts as users write them of Megatron's TensorParallelMuon and of emerging-optimizers' Muon; values are compared with
theirs.
"""

import copy
import itertools
import pickle
from types import SimpleNamespace

import emerging_optimizers.orthogonalized_optimizers as theirs
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from megatron_eopt import Execution, TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.optimizers import MarsMuon, MuonHyperball, PolarGrad, Scion
from tests.contracts import made
from tests.contracts.made import SHAPES, assert_near, polar, run
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import marked, sharded
from tests.plain.made import values

SAME = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "fp32_matmul_prec": "highest"}


CUTS = [0, 1, None]  # along which dimension two ranks share a parameter


def parameters(shapes=SHAPES):
    return made.parameters(shapes, dtype=torch.float32)


def cut(tensors, rank):
    """This rank's shards, or all where there is one rank."""
    pairs = zip(tensors, CUTS, strict=True)
    return [x if rank is None or dim is None else x.chunk(2, dim)[rank] for x, dim in pairs]


def steps(opt, params, numbers=range(3), rank=None):
    per_step = made.gradients(dtype=torch.float32)
    with torch.compiler.set_stance("force_eager"):
        run(opt, params, [cut(per_step[number], rank) for number in numbers])
    return values(params)


def rms_scale(rows, cols):
    return 0.2 * max(rows, cols) ** 0.5


def after(cls, count=3, then=None, **settings):
    """Parameters after steps of theirs or ours; ``then`` changes the optimizer before those after the first."""
    params = parameters()
    opt = cls(params, **{**SAME, **settings})
    steps(opt, params, range(1))
    if then is not None:
        then(opt)
    return steps(opt, params, range(1, count))


class TheirsPolar(theirs.Muon):
    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        self.scaled_orthogonalize_fn = lambda grad: rms_scale(*grad.shape) * polar(grad)


class Set(TensorParallelMuon):
    def __init__(self, params, **settings):
        self.orthogonalize_fn = polar
        super().__init__(params, **settings)
        self.scale_factor_fn = rms_scale


class Overrides(TensorParallelMuon):
    def orthogonalize_fn(self, matrix):
        return polar(matrix)

    def scale_factor_fn(self, rows, cols):
        return 0.2 * super().scale_factor_fn(rows, cols)


class SetMegatrons(TensorParallelMuon):
    def __init__(self, params, **settings):
        super().__init__(params, **settings)

        def scaled_orthogonalize_fn(grad, tp_group, partition_dim=None):
            assert (tp_group, partition_dim) == (None, None)
            return rms_scale(*grad.shape) * polar(grad)

        self.scaled_orthogonalize_fn = scaled_orthogonalize_fn


class OverridesMegatrons(TensorParallelMuon):
    def scaled_orthogonalize_fn(self, grad, tp_group, partition_dim):
        return rms_scale(*grad.shape) * polar(grad)


@pytest.mark.parametrize("cls", [Set, Overrides, SetMegatrons, OverridesMegatrons])
def test_a_subclass_with_its_own_function_steps_as_with_theirs(cls):
    assert_near(after(cls), after(TheirsPolar), 1e-5)


class Doubled(TensorParallelMuon):
    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        inner = self.scaled_orthogonalize_fn
        self.scaled_orthogonalize_fn = lambda *args, **kwargs: 2 * inner(*args, **kwargs)


def test_what_wraps_the_function_there_wraps_it_here():
    class Super(TensorParallelMuon):
        def scaled_orthogonalize_fn(self, grad, tp_group=None, partition_dim=None):
            return 2 * super().scaled_orthogonalize_fn(grad, tp_group, partition_dim)

    settings = {"num_ns_steps": 10, "scale_mode": "unit_rms_norm"}
    expected = after(theirs.Muon, **settings, extra_scale_factor=0.6)
    for cls in (Doubled, Super):
        assert_near(after(cls, **settings, extra_scale_factor=0.3), expected, 1e-4)


@pytest.mark.parametrize("key", ["scaled_orthogonalize_fn", "orthogonalize_fn", "scale_factor_fn"])
def test_functions_that_are_set_between_steps_count_at_once(key):
    def their_change(opt):
        inner = opt.scaled_orthogonalize_fn
        opt.scaled_orthogonalize_fn = {
            "scaled_orthogonalize_fn": torch.sign,
            "orthogonalize_fn": lambda x: max(x.shape) ** 0.5 * polar(x),
            "scale_factor_fn": lambda x: inner(x) / max(x.shape) ** 0.5 * x.shape[0],
        }[key]

    own = {"scaled_orthogonalize_fn": torch.sign, "orthogonalize_fn": polar, "scale_factor_fn": lambda m, n: m}[key]
    ours = after(TensorParallelMuon, then=lambda opt: setattr(opt, key, own))
    assert_near(ours, after(theirs.Muon, then=their_change), 1e-4)


def test_each_matrix_of_a_fused_projection_comes_by_itself():
    (p,) = parameters([(12, 5)])
    p.is_qkv = True
    seen = []
    split = {"split_qkv": True, "is_qkv_fn": lambda p: True, "qkv_split_shapes": (4, 1, 1)}
    opt = TensorParallelMuon([p], **{**SAME, "weight_decay": 0.0}, **split)
    opt.orthogonalize_fn = lambda x: seen.append(x.clone()) or polar(x)
    opt.scale_factor_fn = lambda rows, cols: 100 * rows + cols
    before = p.detach().clone()
    run(opt, [p], made.gradients([(12, 5)], 1, dtype=torch.float32))
    update = (0.19 * p.grad).view(2, 6, 5)
    parts = [x.reshape(-1, 5) for x in update.split([4, 1, 1], 1)]
    torch.testing.assert_close(seen, parts)
    scaled = [(100 * len(x) + 5) * polar(x) for x in parts]
    whole = torch.cat([x.view(2, -1, 5) for x in scaled], 1).view(12, 5)
    torch.testing.assert_close(p.detach(), before - 0.05 * whole)


def recorded(opt, function=polar):
    """The shapes of the matrices that an optimizer will give to a function."""
    seen = []
    opt.orthogonalize_fn = lambda x: seen.append(tuple(x.shape)) or function(x)
    return seen


RELATIVES = [
    (PolarGrad, {}),
    (MarsMuon, {}),
    (Scion, {"radius": 2.0}),
    (MuonHyperball, {}),
    *((TensorParallelAdaptiveMuon, {"moment2_method": method}) for method in ("adamuon", "normuon", "namo")),
]


@pytest.mark.parametrize(("cls", "settings"), RELATIVES)
def test_relatives_take_the_function_too(cls, settings):
    """By another way the same factor: Newton-Schulz of the relative itself, and of a function in its place."""
    given = {"lr": 0.05, "fp32_matmul_prec": "highest", **settings}
    expected, params = parameters(), parameters()
    steps(cls(expected, **given), expected)
    opt = cls(params, **given)
    seen = recorded(opt, opt.orthogonalize_fn)
    steps(opt, params)
    assert seen == 3 * SHAPES
    assert_near(params, expected, 1e-5)


@pytest.mark.parametrize("method", ["adamuon", "normuon", "namo"])
def test_adaptive_muon_scales_by_the_users_factor(method):
    expected = after(TensorParallelAdaptiveMuon, 1, extra_scale_factor=3.0, moment2_method=method)
    params = parameters()
    opt = TensorParallelAdaptiveMuon(params, **SAME, moment2_method=method)
    inner = opt.scale_factor_fn
    opt.scale_factor_fn = lambda rows, cols: 3 * inner(rows, cols)
    steps(opt, params, range(1))
    assert_near(params, expected, 1e-5)
    assert opt.predicted_rms(8, 12) is None


def refused(opt, error, message):
    """The next step is refused by a message, and leaves the parameters."""
    params = opt.param_groups[0]["params"]
    before = values(params)
    with pytest.raises(error, match=message):
        steps(opt, params, range(1))
    assert_near(params, before, 0)


REFUSED = [  # a class, its settings, a function that is set, and what is said of it
    (TensorParallelAdaptiveMuon, {}, {"scaled_orthogonalize_fn": torch.sign}, "which makes scaled updates; .*_fn"),
    (TensorParallelAdaptiveMuon, {}, {"orthogonalize": lambda p, x: x}, "which makes scaled updates; .*_fn"),
    (PolarGrad, {}, {"scale_factor_fn": rms_scale}, "scale_factor_fn has no effect here: the size of an update is"),
    (
        TensorParallelMuon,
        {"execution": Execution(offload_fraction=0.5)},
        {"orthogonalize_fn": polar},
        "leave offload_fraction at 0",
    ),
]


@pytest.mark.parametrize(("cls", "settings", "function", "message"), REFUSED)
def test_a_function_that_cannot_serve_is_refused_before_a_step(cls, settings, function, message):
    opt = cls(parameters(), **settings)
    vars(opt).update(function)
    refused(opt, (TypeError, ValueError), message)


# What a constructor was given.


def test_a_setting_that_a_function_replaces_is_refused():
    for later in (False, True):
        setting = {"num_ns_steps": 10}
        opt = TensorParallelMuon([{"params": parameters(), **({} if later else setting)}], **SAME)
        opt.orthogonalize_fn = polar
        opt.param_groups[0].update(setting)
        refused(opt, ValueError, "num_ns_steps has no effect here, got 10: orthogonalize_fn of your own")


def test_copies_and_pickles_keep_the_functions():
    opt = Set(parameters(), **SAME)
    expected = after(Set, 1)
    for each in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        assert_near(steps(each, each.param_groups[0]["params"], range(1)), expected, 0)


# On two ranks.


def shards(rank):
    """This rank's shards of the parameters, as Megatron marks them, and its groups."""
    pairs = zip(cut(parameters(), rank), CUTS, strict=True)
    of_one = {"tensor_model_parallel": False, "partition_dim": -1}
    params = [marked(p.detach().clone(), **(of_one if dim is None else sharded(dim))) for p, dim in pairs]
    groups = SimpleNamespace(tp=dist.group.WORLD, expt_tp=dist.group.WORLD, gtp_remat=None, expt_gtp_remat=None)
    return params, groups


def _own_functions(rank, _):
    found = {}
    for mode in ("duplicated", "auto", "blockwise"):
        params, groups = shards(rank)
        opt = Set(params, **SAME, pg_collection=groups, tp_mode=mode)
        seen = recorded(opt)
        found[mode] = steps(opt, params, range(2), rank), seen
    params, groups = shards(rank)
    found["wrapped"] = steps(Doubled(params, **SAME, pg_collection=groups), params, range(2), rank), []
    # a DTensor of which a rank has no row
    row = torch.nn.Parameter(distribute_tensor(torch.ones(1, 4), init_device_mesh("cpu", (2,)), [Shard(0)]))
    opt = Set([row], **SAME)
    seen = recorded(opt)
    row.grad = torch.ones_like(row)
    opt.step()
    found["row"] = row.detach().full_tensor(), seen
    return found


def together(results, key):
    found = [of_rank[key][0] for of_rank in results]
    return [a if dim is None else torch.cat([a, b], dim) for a, b, dim in zip(*found, CUTS, strict=True)]


def test_on_two_ranks_a_function_gets_whole_matrices():
    results = run_ranks(_own_functions, 2)
    expected = after(TheirsPolar, 2)
    for mode in ("duplicated", "auto"):
        assert_near(together(results, mode), expected, 1e-5)
        assert all(of_rank[mode][1] == 2 * SHAPES for of_rank in results)
    # shards by themselves, as Megatron gives them in that mode
    assert all(of_rank["blockwise"][1] == 2 * [(3, 4), (12, 2), (3, 5)] for of_rank in results)
    assert_near(together(results, "wrapped"), after(Doubled, 2), 1e-5)
    for whole, seen in (of_rank["row"] for of_rank in results):
        assert seen == [(1, 4)]
        torch.testing.assert_close(whole, torch.full((1, 4), 0.995 - 0.05 * 0.4 * 0.5))


def _megatrons(rank, _):
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon as Megatrons

    found = []
    for cls, mode in itertools.product((Megatrons, TensorParallelMuon), ("duplicated", "blockwise")):
        seen, (params, groups) = [], shards(rank)
        opt = cls(params, **SAME, pg_collection=groups, tp_mode=mode)

        def own(grad, tp_group, partition_dim=None, seen=seen):
            seen.append((tuple(grad.shape), tp_group is dist.group.WORLD, partition_dim))
            if partition_dim is None:
                return rms_scale(*grad.shape) * polar(grad)
            parts = [torch.empty_like(grad) for _ in range(tp_group.size())]
            dist.all_gather(parts, grad.contiguous(), tp_group)
            whole = torch.cat(parts, partition_dim)
            return rms_scale(*whole.shape) * polar(whole).chunk(2, partition_dim)[rank]

        opt.scaled_orthogonalize_fn = own
        found.append((steps(opt, params, range(2), rank), seen))
    return found


def test_a_function_of_megatrons_signature():
    results = run_ranks(_megatrons, 2)
    for of_rank in results:
        for there, here in zip(of_rank[:2], of_rank[2:], strict=True):
            assert here[1] == there[1]
            assert_near(here[0], there[0], 1e-5)
    assert results[0][2][1][:3] == [((3, 4), True, 0), ((12, 2), True, 1), ((3, 5), True, None)]
    assert_near(together(results, 2), after(TheirsPolar, 2), 1e-5)
