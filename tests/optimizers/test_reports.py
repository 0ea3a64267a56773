"""What Muon tells of its matrices and of a step's updates, group by group."""

from dataclasses import replace

import torch

from megatron_eopt import TensorParallelMuon
from megatron_eopt.optimizers.reports import show_updates
from megatron_eopt.settings.groups import by_parameter


class Shown:
    """Keeps what a step shows."""

    def updates(self, shown, scales, predicted):
        self.shapes, self.scales, self.predicted = [tuple(x.shape) for x in shown], scales, predicted


def two_groups():
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 4), (4, 16))]
    groups = [{"params": params[:1]}, {"params": params[1:], "extra_scale_factor": 0.5, "num_ns_steps": 10}]
    return TensorParallelMuon(groups), params


def test_matrices_are_described_with_the_scale_of_their_group():
    optimizer, params = two_groups()
    described = optimizer.described_matrices()
    assert [(m.shape, m.scale) for p in params for m in described[p]] == [((8, 4), 8**0.5), ((4, 16), 0.5 * 16**0.5)]


def test_matrices_are_described_with_the_scheme_of_their_own_bucket():
    optimizer, params = two_groups()
    engine = optimizer.prepare()
    schemes = {0: "local", 1: "gram_split"}
    buckets = tuple(replace(bucket, scheme=schemes[bucket.matrices[0]]) for bucket in engine.plan.buckets)
    engine.plan = replace(engine.plan, buckets=buckets)
    described = optimizer.described_matrices()
    assert [m.scheme for p in params for m in described[p]] == ["local", "gram split"]


def test_updates_are_shown_with_what_was_predicted_of_their_group():
    optimizer, params = two_groups()
    engine, shown = optimizer.prepare(), Shown()
    groups = [optimizer.group_of(p) for p in params]
    show_updates(shown, engine, groups, optimizer.predicted_rms, (0, 1), [p.detach() for p in params], [2.0, 3.0])
    assert (shown.shapes, shown.scales) == ([(8, 4), (4, 16)], [2.0, 3.0])
    assert shown.predicted == [
        optimizer.predicted_rms(*p.shape, group) for p, group in zip(params, groups, strict=True)
    ]
    assert shown.predicted[0] != shown.predicted[1]


def test_updates_that_another_rank_shows_are_left_out(monkeypatch):
    optimizer, params = two_groups()
    engine, shown = optimizer.prepare(), Shown()
    monkeypatch.setattr(engine, "counts", lambda i: i == 1)
    groups = [optimizer.group_of(p) for p in params]
    show_updates(shown, engine, groups, optimizer.predicted_rms, (0, 1), [p.detach() for p in params], [2.0, 3.0])
    assert (shown.shapes, shown.scales, len(shown.predicted)) == ([(4, 16)], [3.0], 1)


def test_ranks_compare_what_a_group_says_and_not_what_the_optimizer_says():
    p, q = (torch.nn.Parameter(torch.zeros(2, 2)) for _ in range(2))
    groups = [{"params": [p], "lr": 0.5, "tag": "x"}, {"params": [q]}]
    found = by_parameter(groups, ["lr", "tag"], {"lr": 0.1, "split_qkv": False, "coefficients": [1]}, {"tag"})
    assert found == {p: {"lr": 0.5, "split_qkv": False}, q: {"lr": 0.1, "split_qkv": False}}
