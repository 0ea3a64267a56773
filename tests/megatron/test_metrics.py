"""Real runs leave figures of their optimizers: in TensorBoard's files and in the log."""

import re
from unittest import mock

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_eopt.megatron import metrics_log
from tests.megatron.runs import EXACT, FILES, MUON, SHARED, TP2, assert_same_ranks, train, wide
from tests.megatron.test_megatron_fsdp import fsdp
from tests.test_metrics import DOCUMENTED

RUN = ["--num-layers", 2, *MUON, *EXACT, *FILES, "--train-iters", 6]


def curves(folder):
    """Tag -> (step, value), ascending: those of all files of TensorBoard in a folder."""
    found = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = EventAccumulator(str(file), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, {}).update({event.step: event.value for event in events.Scalars(tag)})
    return {tag: sorted(values.items()) for tag, values in found.items()}


def written(folder, ranks, *flags):
    """The curves that a run has left, and its output."""
    _, output = train(folder / "run", ranks, *RUN, "--tensorboard-dir", folder / "figures", *flags)
    return curves(folder / "figures"), output


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    return written(folder, 1, "--log-interval", 2)


def test_the_curves_are_those_of_the_run(alone):
    found, output = alone
    own = {tag: points for tag, points in found.items() if tag.startswith(("muon/", "adam/"))}
    assert {tag.partition("/")[2] for tag in own if tag.startswith("muon/")} == DOCUMENTED
    assert {tag: [step for step, _ in points] for tag, points in own.items()} == {tag: [2, 4, 6] for tag in own}
    for step in (2, 4, 6):
        norms = [dict(own[f"{name}/grad_norm"])[step] for name in ("muon", "adam")]
        assert sum(x * x for x in norms) ** 0.5 == pytest.approx(dict(found["grad-norm"])[step], rel=1e-4)
    # 0.2, but for what the iteration leaves of singular values: between 0.7 and 1.2 of it
    assert all(0.14 < rms < 0.24 for _, rms in own["muon/update_rms"])
    assert all(0.5 < rms < 1.1 for _, rms in own["adam/update_rms"])
    assert all(0 < residual < 1 for _, residual in own["muon/residual"])
    assert all(rate == pytest.approx(1e-2) for name in ("muon", "adam") for _, rate in own[f"{name}/learning_rate"])
    line = r"^megatron_eopt: iteration +(\d+) \| muon: learning rate 0\.01, grad norm .*\| adam: "
    assert re.findall(line, output, re.MULTILINE) == ["2", "4", "6"]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, TP2),
        wide(2, SHARED),
        wide(2, fsdp("optim_grads")),
        wide(4, [*TP2, "--use-torch-fsdp2"]),
    ],
)
def test_figures_are_those_of_one_rank(alone, tmp_path, ranks, flags):
    expected, _ = alone
    found, _ = written(tmp_path, ranks, "--log-interval", 2, "--micro-batch-size", 1, *flags)
    tags = {tag for tag in expected if tag.startswith(("muon/", "adam/", "layers/"))}
    assert "layers/update_ratio of linear_fc2" in tags
    if flags == SHARED:  # each rank looks at a matrix of its own
        tags.remove("muon/residual")
    for tag in tags:
        assert dict(found[tag]) == pytest.approx(dict(expected[tag]), rel=2e-3), tag


def test_an_interval_of_ones_own_and_none(tmp_path):
    measured, _ = train(tmp_path / "measured", 1, *RUN, "--optimizer-metrics-interval", 3)
    saved = ["--save", tmp_path / "checkpoint", "--save-interval", 2]
    plain, output = train(tmp_path / "plain", 1, *RUN, "--optimizer-metrics-interval", 0, *saved)
    assert "megatron_eopt: iteration" not in output
    assert_same_ranks(measured, plain)
    resumed, output = train(tmp_path / "resumed", 1, *RUN, "--load", tmp_path / "checkpoint", "--ckpt-step", 2)
    assert re.findall(r"^megatron_eopt: iteration +(\d+)", output, re.MULTILINE) == ["3", "4", "5", "6"]
    assert "its second lm loss is the mean of two steps" in output
    assert_same_ranks(resumed, plain)


def test_what_weights_and_biases_gets(monkeypatch):
    wandb = mock.Mock()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(metrics_log, "training_writers", lambda: (None, wandb))
    figures = {"learning_rate": 0.1, "skipped": 0}
    metrics_log.report({"muon": figures}, 7)
    wandb.log.assert_called_once_with({f"muon/{key}": value for key, value in figures.items()}, 7)
