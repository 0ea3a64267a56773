"""AdaMuon, NorMuon and NAMO on one rank, against their formulas written out."""

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from emerging_optimizers.orthogonalized_optimizers.adaptive_muon import AdaptiveMuon
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from megatron_eopt import TensorParallelAdaptiveMuon, TensorParallelMuon, registry
from megatron_eopt.matrices import merge_rows, split_rows
from megatron_eopt.optimizers.graphs import GraphedUpdate
from megatron_eopt.orthogonalize import muon_scale_factor, newton_schulz
from tests.distributed.ranks import run_ranks
from tests.optimizers.test_muon import is_qkv, matrix
from tests.test_registry import config, model

METHODS = ("adamuon", "normuon", "namo")
VARIANTS = [("adamuon", True), ("adamuon", False), ("normuon", True), ("namo", True)]
SHAPES = {"tall": (12, 7), "wide": (7, 12), "square": (8, 8)}


def gradient(p, seed):
    return torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.dtype)


def optimizer(params, method, **settings):
    defaults = {"lr": 0.1, "fp32_matmul_prec": "highest"}
    return TensorParallelAdaptiveMuon(params, moment2_method=method, **{**defaults, **settings})


def run(p, opt, seeds):
    for seed in seeds:
        p.grad = gradient(p, seed)
        opt.step()


def reference(p, gradients, method, align, lr=0.1, b=0.95, nesterov=True, wd=0.01, b2=0.95, eps=1e-8, l2=False):
    """The three algorithms for one matrix, in fp64."""
    p, m, v = p.detach().double().clone(), 0.0, 0.0
    short = 1 if p.size(0) >= p.size(1) else 0
    for g in gradients:
        g = g.double() + (wd * p if l2 else 0)
        p = p if l2 else p * (1 - lr * wd)
        m = b * m + (1 - b) * g
        u = (1 - b) * g + b * m if nesterov else m
        o = newton_schulz(u)
        if method == "adamuon":
            v = b2 * v + (1 - b2) * o**2
            update = o / (v.sqrt() + eps)
        elif method == "normuon":
            v = b2 * v + (1 - b2) * (o**2).mean(short, keepdim=True)
            update = o / v.clamp(min=eps).sqrt()
        else:
            v = b2 * v + (1 - b2) * (g**2).sum()
            update = o * u.norm() / (v.sqrt() + eps)
        if method == "normuon" or (method == "adamuon" and align):
            update = update * o.norm() / update.norm()
        p = p - lr * muon_scale_factor(*p.shape) * update
    return p, v


def assert_close(actual, expected, factor=1.0):
    assert (actual.double() - expected).abs().max() <= factor * 1e-5 * expected.abs().max()


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("method", "align"), VARIANTS)
def test_steps_follow_the_formula(method, align, shape, nesterov):
    p = matrix(*shape)
    settings = {"b": 0.8, "nesterov": nesterov, "wd": 0.3, "b2": 0.9, "eps": 1e-4}
    expected, v = reference(p, [gradient(p, seed) for seed in range(1, 6)], method, align, **settings)
    opt = optimizer(
        [p], method, momentum=0.8, nesterov=nesterov, weight_decay=0.3, beta2=0.9, eps=1e-4, align_rms=align
    )
    run(p, opt, range(1, 6))
    assert_close(p.detach(), expected)
    assert list(opt.state[p]) == ["momentum_buffer", "moment2_buffer"]
    moment = opt.state[p]["moment2_buffer"]
    assert moment.dtype == torch.float32
    assert moment.shape == {"adamuon": shape, "normuon": (max(shape),), "namo": ()}[method]
    torch.testing.assert_close(moment.double(), v.reshape(moment.shape), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("method", ["adamuon", "normuon"])
def test_l2_decay_enters_what_is_orthogonalized(method):
    p = matrix(12, 7)
    expected, _ = reference(p, [gradient(p, seed) for seed in (1, 2, 3)], method, True, wd=0.5, l2=True)
    run(p, optimizer([p], method, weight_decay=0.5, use_decoupled_weight_decay=False), (1, 2, 3))
    assert_close(p.detach(), expected)


# The three methods of emerging-optimizers 0.3.0 follow the same rules; its adamuon is not aligned. It keeps statistics
# in the dtype of the parameter, and of a fused parameter as a whole. The shapes are nearly square, so that both take
# the standard form of Newton-Schulz: adamuon makes the rounding of small entries as large as that of others.
@pytest.mark.parametrize("eps", [1e-8, 1e-2])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(9, 8), (8, 9), (8, 8)])
@pytest.mark.parametrize("method", METHODS)
def test_steps_are_those_of_emerging_optimizers(method, shape, nesterov, eps):
    p, q = matrix(*shape), matrix(*shape)
    same = {"nesterov": nesterov, "beta2": 0.95, "eps": eps, "fp32_matmul_prec": "highest", "moment2_method": method}
    ours = TensorParallelAdaptiveMuon([p], 0.1, align_rms=False, **same)
    theirs = AdaptiveMuon([q], 0.1, 0.95, 0.01, **same)
    run(p, ours, range(5))
    run(q, theirs, range(5))
    assert_close(p.detach(), q.detach().double())
    moment, wanted = ours.state[p]["moment2_buffer"], theirs.state[q]["moment2_buffer"]
    torch.testing.assert_close(moment, wanted.view(moment.shape), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(("method", "align"), VARIANTS)
def test_the_parts_of_a_fused_projection_are_matrices_of_their_own(method, align):
    shapes = (4, 2, 1)
    p = matrix(21, 5, is_qkv=True)
    parts = [torch.nn.Parameter(part.clone()) for part in split_rows(p.detach(), shapes)]
    fused = optimizer([p], method, align_rms=align, split_qkv=True, is_qkv_fn=is_qkv, qkv_split_shapes=shapes)
    alone = optimizer(parts, method, align_rms=align)
    for seed in range(1, 5):
        p.grad = gradient(p, seed)
        for part, g in zip(parts, split_rows(p.grad, shapes), strict=True):
            part.grad = g.clone()
        fused.step()
        alone.step()
    assert_close(p.detach(), merge_rows([part.detach() for part in parts], shapes).double())
    kept, each = fused.state[p], [alone.state[part]["moment2_buffer"] for part in parts]
    if method == "adamuon":
        assert list(kept) == ["momentum_buffer", "moment2_buffer"]
        torch.testing.assert_close(kept["moment2_buffer"], merge_rows(each, shapes), rtol=1e-4, atol=1e-6)
        return
    assert list(kept) == ["momentum_buffer", "moment2_buffer_0", "moment2_buffer_1", "moment2_buffer_2"]
    for index, wanted in enumerate(each):
        torch.testing.assert_close(kept[f"moment2_buffer_{index}"], wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scale_mode", ["spectral", "shape_scaling"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("method", "align"), VARIANTS)
def test_the_first_update_has_the_predicted_size(method, align, nesterov, scale_mode):
    p = matrix(60, 24)
    accurate = {"coefficient_type": "polar_express", "num_ns_steps": 8}
    sizes = {"scale_mode": scale_mode, "extra_scale_factor": 0.2, "momentum": 0.9, "nesterov": nesterov}
    opt = optimizer([p], method, lr=1.0, weight_decay=0, align_rms=align, beta2=0.96, **sizes, **accurate)
    before = p.detach().clone()
    run(p, opt, [1])
    rms = (p.detach() - before).square().mean().sqrt().item()
    assert rms == pytest.approx(opt.predicted_rms(60, 24), rel=2e-3)
    muon = 0.2 if scale_mode == "spectral" else 0.2 * (60 / 24) ** 0.5 / 60**0.5
    scale = muon * 60**0.5
    first = {
        "normuon": muon,
        "namo": muon * 0.1 * (1.9 if nesterov else 1) / 0.2,
        "adamuon": muon if align else 5 * scale,
    }
    assert opt.predicted_rms(60, 24) == pytest.approx(first[method])


@pytest.mark.parametrize(("method", "align"), VARIANTS)
def test_a_zero_gradient_is_a_zero_update(method, align):
    p = matrix()
    opt = optimizer([p], method, align_rms=align, weight_decay=0)
    before = p.detach().clone()
    for _ in range(2):
        p.grad = torch.zeros_like(p)
        opt.step()
    assert torch.equal(p, before)
    assert not opt.state[p]["moment2_buffer"].any()
    run(p, opt, [1])
    assert not torch.equal(p, before)
    assert p.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_a_gradient_that_is_not_accepted_leaves_the_second_moment_as_it_is(method):
    p, q = matrix(), matrix(seed=1)
    opt = optimizer([p, q], method)
    for seed in (1, 2):
        p.grad, q.grad = gradient(p, seed), gradient(q, seed)
        opt.step()
    kept = {key: value.clone() for key, value in opt.state[p].items()}
    before = p.detach().clone(), q.detach().clone(), opt.state[q]["moment2_buffer"].clone()
    for bad in (torch.nan, torch.inf):
        p.grad, q.grad = gradient(p, 3), gradient(q, 3)
        p.grad[1, 2] = bad
        opt.step()
    assert torch.equal(p, before[0])
    for key, value in kept.items():
        assert torch.equal(opt.state[p][key], value), key
    assert not torch.equal(q, before[1])
    assert not torch.equal(opt.state[q]["moment2_buffer"], before[2])
    p.grad = None
    opt.step()
    assert torch.equal(opt.state[p]["moment2_buffer"], kept["moment2_buffer"])


def test_a_norm_whose_square_is_beyond_fp32_does_not_stop_namo_for_ever():
    p = matrix()
    opt = optimizer([p], "namo", beta2=0.5, momentum=0.0)
    p.grad = gradient(p, 1) * 1e20
    opt.step()
    assert opt.state[p]["moment2_buffer"].isfinite()
    for _ in range(300):
        run(p, opt, [2])
    assert opt.state[p]["moment2_buffer"] == pytest.approx(gradient(p, 2).square().sum().item(), rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moment2_method": "adamoun"}, "unknown moment2_method 'adamoun': expected one of adamuon, normuon, namo"),
        ({"beta2": 1.0}, r"TensorParallelAdaptiveMuon: beta2 must lie in \[0, 1\), got 1.0"),
        ({"beta2": -0.1}, r"beta2 must lie in \[0, 1\), got -0.1"),
        ({"eps": -1e-8}, "eps must be above 0, since adamuon divides by it, got -1e-08"),
        ({"eps": 0.0, "moment2_method": "normuon"}, "eps must be above 0, since normuon divides by it, got 0.0"),
        (
            {"moment2_method": "namo", "use_decoupled_weight_decay": False},
            "L2 decay would add to: take use_decoupled_weight_decay=True, or weight_decay=0 instead of 0.01",
        ),
        ({"momentum": 1.0}, r"momentum must lie in \[0, 1\)"),
    ],
)
def test_wrong_settings_are_refused_at_construction(settings, message):
    with pytest.raises(ValueError, match=message):
        TensorParallelAdaptiveMuon([matrix()], **settings)


@pytest.mark.parametrize(
    ("group", "message"),
    [({"beta2": 2.0}, "beta2 must lie in"), ({"eps": 0.0}, "eps must be above 0"), ({"weight_decay": 0.1}, "L2 decay")],
)
def test_a_groups_own_settings_are_checked_and_used(group, message):
    settings = {"use_decoupled_weight_decay": False, "weight_decay": 0}
    with pytest.raises(ValueError, match=message):
        optimizer([{"params": [matrix()], **group}], "namo", **settings)
    p, q = matrix(), matrix()
    opt = optimizer([{"params": [p]}, {"params": [q], "beta2": 0.5}], "adamuon", momentum=0.0, align_rms=False)
    p.grad, q.grad = gradient(p, 1), gradient(q, 1)
    opt.step()
    torch.testing.assert_close(opt.state[q]["moment2_buffer"], 10 * opt.state[p]["moment2_buffer"])


def test_a_subclass_with_an_orthogonalize_of_its_own_is_refused():
    class Own(TensorParallelAdaptiveMuon):
        def orthogonalize(self, p, grad, **group_settings):
            return grad

    with pytest.raises(TypeError, match=r"Own has an orthogonalize of its own.*all matrices together"):
        Own([matrix()])


@pytest.mark.parametrize(("method", "align"), VARIANTS)
def test_a_restored_optimizer_goes_on_bit_for_bit_and_keeps_fp32_statistics(method, align):
    def start(p):
        settings = {"align_rms": align, "split_qkv": True, "is_qkv_fn": is_qkv, "qkv_split_shapes": (2, 1, 1)}
        return optimizer([p], method, lr=0.02, **settings)

    def bf16(values):
        p = torch.nn.Parameter(values.detach().bfloat16().clone())
        p.is_qkv = True
        return p

    straight, stopped = bf16(matrix(8, 6)), bf16(matrix(8, 6))
    whole, first = start(straight), start(stopped)
    run(straight, whole, range(1, 7))
    run(stopped, first, range(1, 4))
    resumed = bf16(stopped)
    second = start(resumed)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for key, value in first.state[stopped].items():
        assert second.state[resumed][key].dtype == value.dtype
        assert torch.equal(second.state[resumed][key], value), key
        assert (value.dtype == torch.float32) == key.startswith("moment2_buffer")
    run(resumed, second, range(4, 7))
    assert torch.equal(resumed, straight)
    init = start(bf16(matrix(8, 6)))
    init.init_state()
    (template,) = init.state.values()
    assert {k: v.shape for k, v in template.items()} == {k: v.shape for k, v in whole.state[straight].items()}
    other = optimizer([resumed], "namo" if method != "namo" else "normuon")
    with pytest.raises(ValueError, match=r"moment2_buffer.* (of another|expected)"):
        other.load_state_dict(first.state_dict())


@pytest.mark.parametrize("method", METHODS)
def test_a_captured_step_keeps_the_second_moment_it_was_captured_with(method):
    plain, captured = ([torch.nn.Parameter(m.detach().clone()) for m in (matrix(), matrix(5, 7, 1))] for _ in range(2))
    one, other = optimizer(plain, method), optimizer(captured, method)
    other.cuda_graphs = True
    other._graphed = GraphedUpdate(other._update, lambda run: run)
    for step in range(4):
        for parameters, opt in ((plain, one), (captured, other)):
            for p in parameters:
                p.grad = gradient(p, step)
            opt.step()
    for p, q in zip(plain, captured, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(one.state[p]["moment2_buffer"], other.state[q]["moment2_buffer"])


def test_a_config_gives_the_settings_of_muon_and_its_own():
    settings = {"adaptive_muon_moment2_method": "normuon", "adaptive_muon_beta2": 0.7, "adaptive_muon_eps": 1e-3}
    p = matrix()
    made, init_state = registry.create_emerging_optimizer(
        config(decoupled_weight_decay=True, **settings), [{"params": [p]}], "adaptive_muon", model(), None
    )
    assert type(made) is TensorParallelAdaptiveMuon
    assert (made.moment2_method, made.align_rms, made.scale_mode) == ("normuon", True, "unit_rms_norm")
    assert {key: made.param_groups[0][key] for key in ("momentum", "beta2", "eps")} == {
        "momentum": 0.8,
        "beta2": 0.7,
        "eps": 1e-3,
    }
    assert made.settings() | {"moment2_method": "normuon", "align_rms": True} == made.settings()
    init_state(made)
    assert list(made.state[p]) == ["momentum_buffer", "moment2_buffer"]
    assert registry._adaptive_muon_config_to_kwargs is registry.adaptive_muon_config_to_kwargs


def test_one_matrix_alone_is_its_orthogonal_factor():
    p = matrix()
    update = gradient(p, 1)
    scale = muon_scale_factor(*p.shape)
    muon = TensorParallelMuon([matrix()], fp32_matmul_prec="highest")
    torch.testing.assert_close(
        scale * optimizer([p], "namo").orthogonalize(p, update),
        muon.orthogonalize(muon.param_groups[0]["params"][0], update),
    )


def dtensors(rank, world_size):
    """Steps on sharded parameters."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))
    logging.disable()
    results = {}
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("replicated", Replicate())):
        for method, align in VARIANTS:
            p = torch.nn.Parameter(distribute_tensor(matrix(10, 7).detach(), mesh, [placement], src_data_rank=None))
            opt = optimizer([p], method, align_rms=align)
            for seed in range(1, 4):
                p.grad = distribute_tensor(gradient(matrix(10, 7), seed), mesh, [placement], src_data_rank=None)
                opt.step()
            moment = opt.state[p]["moment2_buffer"]
            assert type(moment) is (torch.Tensor if method == "namo" else type(p.data))
            whole = moment if method == "namo" else moment.full_tensor()
            results[name, method, align] = p.full_tensor().detach(), whole
    return results


def test_dtensors_take_the_steps_of_one_rank():
    for results in run_ranks(dtensors, 2):
        assert len(results) == 12
        for (_, method, align), (actual, moment) in results.items():
            p = matrix(10, 7)
            opt = optimizer([p], method, align_rms=align)
            run(p, opt, range(1, 4))
            assert_close(actual, p.detach().double())
            torch.testing.assert_close(moment, opt.state[p]["moment2_buffer"], rtol=1e-4, atol=1e-7)


def blockwise(rank, world_size):
    messages = []
    for groups in (None, type("Groups", (), {"tp": dist.group.WORLD, "expt_tp": None})):
        for method in METHODS:
            p = matrix(tensor_model_parallel=True, partition_dim=0)
            try:
                opt = optimizer([p], method, tp_mode="blockwise", pg_collection=groups)
            except ValueError as error:
                messages.append((method, str(error)))
            else:
                run(p, opt, [1, 2])
                messages.append((method, p.detach()))
    return messages


def test_blockwise_takes_adamuon_alone():
    p = matrix()
    run(p, optimizer([p], "adamuon"), [1, 2])
    for messages in run_ranks(blockwise, 2):
        for method, found in messages:
            if method == "adamuon":  # each shard by itself
                assert torch.equal(found, p.detach())
            else:
                assert f"statistics of {method} would be those of shards" in found
                assert "take an exact tp_mode (auto, duplicated, ...), or adamuon" in found
