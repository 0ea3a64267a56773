"""TensorParallelMuon, as those call it who know the original: positions, names, overrides, copies of parameters."""

import pytest
import torch

from megatron_eopt import TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.matrices import Split
from tests.contracts.made import (
    BETA,
    DECAY,
    LR,
    MUON,
    assert_near,
    gradients,
    iterated,
    parameters,
    reference,
    run,
    spectral,
)
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import groups_of, shard


def test_all_arguments_by_position():
    params, steps = parameters(), gradients()
    args = (LR, BETA, False, DECAY, False, False, None, None, "highest", "polar_express", 8, "spectral", 0.5, None)
    opt = TensorParallelMuon(params, *args, "duplicated")
    expected = reference(
        params, steps, lambda *_: (False, "l2"), lambda u, _: 0.5 * spectral(*u.shape) * iterated(u, 8, "polar_express")
    )
    run(opt, params, steps)
    assert_near(params, expected)


def test_namo_refuses_decay_in_the_gradient():
    with pytest.raises(ValueError, match=r"namo compares the norms .* which L2 decay would add to"):
        MUON.made(parameters(), TensorParallelAdaptiveMuon, moment2_method="namo", weight_decay_method="l2")


def test_the_positional_order_of_emerging_optimizers_is_refused():
    with pytest.raises(TypeError, match="TensorParallelMuon: nesterov must be True or False"):
        TensorParallelMuon(parameters(), 0.02, 0.95, 0.1)


def with_attributes_of(p, x):
    vars(x).update(vars(p))
    return x


def test_orthogonalize_takes_any_tensor_for_the_parameter():
    params = parameters([(12, 4), (6, 10), (2, 6, 4)], dtype=torch.bfloat16)
    params[0].is_qkv = True
    params[2].logical_matrices = Split(stacked=2)
    split = {"split_qkv": True, "is_qkv_fn": lambda p: hasattr(p, "is_qkv"), "qkv_split_shapes": (2, 1, 1)}
    groups = [{"params": params[:2], "num_ns_steps": 10}, {"params": params[2:]}]
    opt = MUON.made(groups, nesterov=False, weight_decay=0.0, momentum=0.0, **split)
    for p, g in zip(params, gradients([p.shape for p in params], 1)[0], strict=True):
        update, own = g.float(), {"num_ns_steps": 10} if p.ndim == 2 else {}
        direct = opt.orthogonalize(p, update)
        wide = opt.orthogonalize(with_attributes_of(p, p.detach().float()), update, **own)
        clone = opt.orthogonalize(with_attributes_of(p, p.detach().clone()), update, **own)
        torch.testing.assert_close(wide, direct, rtol=1e-5, atol=1e-5)
        assert torch.equal(clone, wide)


@pytest.mark.parametrize("known", [True, False])
def test_settings_that_orthogonalize_is_given_count(known):
    (p, *_), (g, *_) = parameters(), gradients(steps=1)[0]
    opt = MUON.made([{"params": [p], "num_ns_steps": 10, "extra_scale_factor": 0.5}])
    x = p if known else p.detach().clone()
    expected = spectral(6, 4) * iterated(g, 10 if known else 5) * (0.5 if known else 1.0)
    torch.testing.assert_close(opt.orthogonalize(x, g), expected)
    own = {"num_ns_steps": 8, "coefficient_type": "polar_express", "scale_mode": "unit_rms_norm"}
    expected = (6 / 4) ** 0.5 * iterated(g, 8, "polar_express") * (0.5 if known else 1.0)
    torch.testing.assert_close(opt.orthogonalize(x, g, lr=1.0, **own), expected)
    with pytest.raises(ValueError, match="at least 1 and at most 100, got 0"):
        opt.orthogonalize(x, g, num_ns_steps=0)
    with pytest.raises(ValueError, match=r"grad must have the shape of p, \(6, 4\), got \(4, 6\)"):
        opt.orthogonalize(x, g.mT)
    # and change nothing for the parameters
    torch.testing.assert_close(opt.orthogonalize(p, g), 0.5 * spectral(6, 4) * iterated(g, 10))


def _on_two_ranks(rank, _):
    (whole, *_), (g, *_) = parameters(), gradients(steps=1)[0]
    p = shard(whole.detach().chunk(2)[rank].clone())
    opt = MUON.made([p], pg_collection=groups_of())
    copied = with_attributes_of(p, p.detach().clone())
    update = g.chunk(2)[rank].contiguous()
    return (
        opt.orthogonalize(p, update),
        opt.orthogonalize(copied, update),
        opt.orthogonalize(copied, update, num_ns_steps=10),
    )


def test_a_copy_of_a_shard_lies_as_the_shard_does():
    (g, *_) = gradients(steps=1)[0]
    results = run_ranks(_on_two_ranks, 2)
    for index, steps in enumerate([5, 5, 10]):
        found = torch.cat([of_rank[index] for of_rank in results])
        torch.testing.assert_close(found, spectral(6, 4) * iterated(g, steps))
