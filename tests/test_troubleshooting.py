"""The messages that pages quote: each is raised or printed here, as a user would see it.

A page has them in the fence after ``<!-- message: NAME -->``, with ``...`` for what differs from run to run.
"""

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace

import megatron.core.optimizer
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megatron_eopt import OptimizerConfig, TensorParallelMuon, build_optimizer
from megatron_eopt.checkpoints.contents import read_contents
from megatron_eopt.megatron.assignment import Assignment
from megatron_eopt.megatron.checkpoints.refusals import mismatch, of_another, stacks_layers
from megatron_eopt.megatron.consensus import log_rank0, refuse_different
from megatron_eopt.megatron.first_step import check_steps, warn_of_unused
from megatron_eopt.megatron.given import warnings_of
from megatron_eopt.megatron.qk_clip import refuse_unclipped
from megatron_eopt.megatron.support.facts import Run
from megatron_eopt.megatron.support.rules import refuse_unsupported
from megatron_eopt.parallel.agreement import differences
from megatron_eopt.routing import ParameterInfo, Resolved, entries_from_dict, families, problems, resolve, warnings
from megatron_eopt.tools import cpu
from tests.routing.manifests import muons, row

DOCS = Path(__file__).parents[1] / "docs"
QUOTED = re.compile(r"<!-- message: (.+?) -->\n\n```\n(.*?)```", flags=re.DOTALL)
MESSAGES = {
    f"{page.stem}: {name}": (name, said)
    for page in DOCS.rglob("*.md")
    for name, said in QUOTED.findall(page.read_text())
}
WEIGHT = "decoder.layers.mlp.linear_fc1.weight"
FIRST = "decoder.layers.0.mlp.linear_fc1.weight"
MUON_WROTE = [{"optimizer": "TensorParallelMuon", "groups": [{"names": {WEIGHT: [0, 1]}}]}]


def state(*keys):
    return {f"optimizer.state.{key}.{WEIGHT}" for key in keys}


def run(**fields):
    settings = megatron.core.optimizer.OptimizerConfig(optimizer="muon", lr=1e-3)
    vars(settings).update(fields)
    return Run("muon", "0.19.2", settings, args=SimpleNamespace(ckpt_format="torch_dist"))


def overrides(**settings):
    parameters = [ParameterInfo(FIRST, (256, 64))]
    return resolve(entries_from_dict(settings), parameters, optimizer="muon")[FIRST]


def steps_without_finite_gradients(count):
    weight = torch.nn.Parameter(torch.ones(6, 4))
    optimizer = TensorParallelMuon([(FIRST, weight)])
    for _ in range(count):
        weight.grad = torch.full_like(weight, torch.nan)
        optimizer.step()


def update_that_is_not_finite():
    weight = torch.nn.Parameter(torch.ones(6, 4))
    optimizer = TensorParallelMuon([(FIRST, weight)])
    optimizer.orthogonalize_fn = lambda x: x / 0
    weight.grad = torch.ones_like(weight)
    optimizer.step()


def by_ctrl_c(*arguments):
    raise KeyboardInterrupt


def interrupted():
    weight = torch.nn.Parameter(torch.ones(6, 4))
    optimizer = TensorParallelMuon([weight])
    optimizer._run = by_ctrl_c
    weight.grad = torch.ones_like(weight)
    with contextlib.suppress(KeyboardInterrupt):
        optimizer.step()
    optimizer.step()


def parsed_before_activation():
    args = SimpleNamespace(optimizer="muon", muon_tp_mode="blockwise")
    for warning in warnings_of(args, args):
        log_rank0(f"warning: {warning}")


def started_differently(monkeypatch):
    lines = differences({"--muon-momentum": 0.95}, {"--muon-momentum": 0.5})
    monkeypatch.setattr("megatron_eopt.megatron.consensus.compare", lambda settings, group: lines)
    refuse_different({})


def first_step(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    weights = [torch.nn.Parameter(torch.ones(6, 4)) for _ in range(13)]
    inner = TensorParallelMuon(weights)
    optimizer = SimpleNamespace(optimizer=inner, step=lambda: (inner.step(), True)[1:])
    for weight in weights[1:]:
        weight.grad = torch.ones_like(weight)
    check_steps(optimizer, 13)
    optimizer.step()


def unused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr("megatron_eopt.megatron.first_step.distinct", lambda here: [here])
    parameter = SimpleNamespace(name="aside.weight", tensor=torch.nn.Parameter(torch.ones(6, 4)))
    warn_of_unused([Assignment(parameter, "muon", Resolved({}, {}))])


def built_before_fully_shard():
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 6))
    optimizer = TensorParallelMuon([model[0].weight, model[1].weight])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        model(torch.ones(3, 6)).sum().backward()
        for _ in range(2):
            optimizer.step()
    finally:
        dist.destroy_process_group()


def on_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    cpu.install()


def without_recorded_logits():
    attention = torch.nn.Module()
    attention.core_attention, attention.config = torch.nn.Identity(), SimpleNamespace()
    refuse_unclipped([torch.nn.ModuleDict({"self_attention": attention})], 1)


def unfinished(tmp_path):
    (tmp_path / "__0_0.distcp").write_text("")
    read_contents(tmp_path)


def size_of_updates():
    return warnings(families([muons(FIRST, (256, 64), rms=1.0, lr=3e-4)]), "spectral")[0]


SAID = {
    "late": parsed_before_activation,
    "settings": started_differently,
    "unknown name": lambda: build_optimizer(torch.nn.Linear(4, 4), OptimizerConfig(name="moun")),
    "refused": lambda: refuse_unsupported(run(bf16=True, loss_scale=1024.0, optimizer_cuda_graph=True)),
    "a GPU is there": on_a_gpu,
    "no matrices": lambda: problems(families([row(f"norms.{i}", (64,)) for i in range(15)]), "muon", True)[0],
    "first step": first_step,
    "unused": unused,
    "no gradients": built_before_fully_shard,
    "size": size_of_updates,
    "upside down": lambda: overrides(**{"linear_fc1.weight": {"lr": 1e-3}}).learning_rates(1e-2, 1e-2),
    "override": lambda: overrides(**{"*.mlp.linear_c1.weight": {"lr": 1e-3}}),
    "skipped": lambda: steps_without_finite_gradients(1),
    "updates": update_that_is_not_finite,
    "interrupted": interrupted,
    "five in a row": lambda: steps_without_finite_gradients(5),
    "qk-clip": without_recorded_logits,
    "adams": lambda: mismatch("TensorParallelMuon", state("momentum_buffer"), state("exp_avg", "exp_avg_sq")),
    "another optimizer": lambda: of_another("Scion", state("momentum_buffer"), MUON_WROTE),
    "back to adam": lambda: of_another(None, state("momentum_buffer"), MUON_WROTE),
    "precision": lambda: mismatch(
        "TensorParallelMuon", state("momentum_buffer", "fp32_param"), state("momentum_buffer")
    ),
    "stacked": lambda: stacks_layers(state("momentum_buffer")),
    "unfinished": unfinished,
}
"""Name of a message -> what raises it, prints it, logs it or returns it."""


def is_said(quoted, said):
    """Whether a text has a quoted message, in which ``...`` stands for anything."""
    words = (re.escape(" ".join(part.split())) for part in quoted.split("..."))
    return re.search(r".*?".join(words), " ".join(said.split())) is not None


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_said(message, monkeypatch, tmp_path, caplog, capsys):
    name, quoted = MESSAGES[message]
    say_it = SAID[name]
    given = {"monkeypatch": monkeypatch, "tmp_path": tmp_path}
    try:
        said = say_it(*(given[each] for each in say_it.__code__.co_varnames[: say_it.__code__.co_argcount]))
    except (ValueError, RuntimeError) as error:
        said = str(error)
    assert is_said(quoted, f"{said} {capsys.readouterr().out} {caplog.text}")


def test_what_raises_messages_is_quoted():
    assert {name for name, _ in MESSAGES.values()} == SAID.keys()


def test_another_message_is_told_apart():
    assert is_said("a ... c\n", "xx a  b\nc")
    assert not is_said("a ... d", "a b c")
    assert not is_said("a.c", "abc")


def test_every_fence_without_a_language_is_a_message_or_an_output():
    page = (DOCS / "troubleshooting.md").read_text()
    fences = re.findall(r"^([^\n]*)\n\n```(\w*)\n.*?^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert len(fences) == page.count("\n```") / 2
    assert all(before.startswith(("<!-- message: ", "<!-- output")) for before, language in fences if not language)
