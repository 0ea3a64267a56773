"""QK-clip in real runs, against what the largest logits of a step say, whatever the attention and the layout."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron_eopt.megatron import qk_clip
from megatron_eopt.megatron.qk_clip import factors_of_rows
from tests.megatron.runs import (
    EXACT,
    EXPERTS,
    FILES,
    LAID_OUT,
    MLA,
    MUON,
    PP2,
    SHARED,
    SMALL_GPT,
    TP2,
    WITHOUT_GQA,
    doing,
    refused,
    resumed,
    train,
    whole,
)

pytestmark = pytest.mark.wide

ALPHA, THRESHOLD = 0.3, 5e-3  # below most of the logits of a model that has not been trained
CLIP = ["--qk-clip", "--qk-clip-alpha", ALPHA, "--qk-clip-threshold", THRESHOLD]
RUN = ["--num-layers", 2, *EXACT, *FILES]
# optimizers that keep something of their weights
KEEPING = {"muon_hyperball": [], "spectron": ["--spectron-rank", 16], "schedule_free_adamw": []}


def largest(output):
    """Name of an attention -> its heads' largest logits in the only step, over the ranks that say them."""
    found = {}
    for said in map(json.loads, re.findall(r"^largest (.*)$", output, re.MULTILINE)):
        logits = torch.tensor(said["logits"])
        found[said["name"]] = torch.maximum(logits, found.get(said["name"], logits))
    return found


def share(logits):
    return torch.tensor([min(1.0, THRESHOLD / logit) if logit > 0 else 1.0 for logit in logits.tolist()])


def of_groups(gate):
    """Factors of the rows of a projection with two groups of two heads of 16 channels."""

    def rows(logits):
        c, one = share(logits.view(2, 2).amax(1)), torch.ones(2)
        parts = [(32, c**ALPHA), *([(32, one)] if gate else []), (16, c ** (1 - ALPHA)), (16, one)]
        return torch.cat([factor[group].expand(n) for group in range(2) for n, factor in parts])

    return rows


def of_heads(*parts):
    """Factors of rows by a power of each head's share."""
    return lambda logits: torch.cat([(c**power).expand(n) for c in share(logits) for n, power in parts])


LATENT = {
    "linear_q_up_proj": of_heads((12, ALPHA), (8, 1)),
    "linear_kv_up_proj": of_heads((12, 1 - ALPHA), (16, 0)),
}


QKV = {"linear_qkv": of_groups(gate=False)}


@pytest.mark.parametrize(
    ("ranks", "model", "flags", "expected"),
    [
        (1, SMALL_GPT, ["--attention-output-gate"], {"linear_qkv": of_groups(gate=True)}),
        (1, SMALL_GPT, ["--add-qkv-bias", "--bf16"], QKV),
        (1, WITHOUT_GQA, [*MLA, "--bf16"], LATENT),
        (2, SMALL_GPT, [*PP2, "--bf16"], QKV),
        (2, SMALL_GPT, EXPERTS, QKV),
        (1, SMALL_GPT, ["--mtp-num-layers", 1], QKV),
    ],
    ids=["gated", "biases", "MLA", "PP2", "EP2", "MTP"],
)
def test_a_step_is_followed_by_the_clip_of_its_logits(tmp_path, ranks, model, flags, expected):
    run = [*RUN, *MUON, *flags, "--train-iters", 1]
    of_ranks, output = train(tmp_path / "clipped", ranks, *run, *CLIP, model=model, **doing("show_logits"))
    clipped, clips, found = whole([rank["after"] for rank in of_ranks]), largest(output), set()
    of_ranks, _ = train(tmp_path / "plain", ranks, *run, *CLIP, "--qk-clip-threshold", 1e6, model=model)
    for name, state in whole([rank["after"] for rank in of_ranks]).items():
        home, _, layer = name.rpartition(".self_attention.")
        rows = expected.get(layer.partition(".")[0])
        factor = torch.ones(()) if rows is None else rows(clips[f"{home}.self_attention"])
        found |= {f"{home}.self_attention"} if (factor < 1).any() else set()
        for key in state.keys() & {"parameter", "main", "momentum_buffer"}:
            own = factor if key != "momentum_buffer" else torch.ones(())
            own = own.view(-1, *[1] * (state[key].ndim - 1)) if own.ndim else own
            rtol, atol = (1e-2, 1e-4) if state[key].dtype == torch.bfloat16 else (1e-5, 1e-7)
            wanted = (state[key].float() * own).to(state[key].dtype)
            torch.testing.assert_close(clipped[name][key], wanted, rtol=rtol, atol=atol)
    assert found == clips.keys()
    assert len(found) == 2 + ("--mtp-num-layers" in flags)


@pytest.mark.parametrize(
    ("optimizer", "ranks", "flags"),
    [(MUON, 4, TP2), *((["--optimizer", name, *own], 2, TP2) for name, own in KEEPING.items())],
    ids=["TP2-DP2", *KEEPING],
)
def test_ranks_clip_as_one(tmp_path, optimizer, ranks, flags):
    run = [*RUN, *optimizer, *CLIP, "--train-iters", 3, "--micro-batch-size", 1]
    (alone,), _ = train(tmp_path / "alone", 1, *run)
    found = whole([rank["after"] for rank in train(tmp_path / "found", ranks, *run, *flags)[0]])
    for name, state in alone["after"].items():
        torch.testing.assert_close(found[name]["parameter"], state["parameter"], rtol=0, atol=1e-4)


def test_a_stopped_run_goes_on_bit_for_bit(tmp_path):
    """Of an optimizer that keeps something of its weights; of Muon: test_resume.py."""
    resumed(tmp_path, 2, *RUN, "--optimizer", "muon_hyperball", *CLIP, *SHARED, "--bf16", "--train-iters", 4)


def test_another_optimizer_keeps_megatrons_own():
    assert qk_clip.clip(lambda model, log_max_only: -1.0)([nn.Linear(3, 3)]) == -1.0


@pytest.mark.parametrize("bias", [None, torch.empty(0)], ids=["no bias", "Transformer Engine's"])
def test_negative_logits_are_small_enough(bias):
    """Also beside a head that is clipped."""
    config = SimpleNamespace(num_attention_heads=3, num_query_groups=3, kv_channels=1)
    linear = SimpleNamespace(weight=nn.Parameter(torch.ones(9, 3)), bias=bias)
    module = SimpleNamespace(config=config, num_query_groups_per_partition=3, linear_qkv=linear)
    (factors,) = factors_of_rows(module, torch.tensor([-5.0, 0.0, 200.0]), 100.0, 0.5).values()
    half = 0.5**0.5
    torch.testing.assert_close(factors.view(3, 3), torch.tensor([[1.0] * 3, [1.0] * 3, [half, half, 1.0]]))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*MUON, "--qk-layernorm"], r"queries or keys are normalized \(--qk-layernorm\)"),
        ([*MUON, *TP2, "--num-query-groups", 1], "1 query groups are cut over 2 ranks"),
        ([*MUON, "--use-torch-fsdp2"], "its weights are shards of an FSDP"),
        ([*MUON, *SHARED, "--add-qkv-bias"], "its biases are cut by bytes, .*--no-use-layer-wise-param-layout"),
        (
            [*MUON, "--qk-clip-threshold", -1],
            "a threshold above 0, got --qk-clip-alpha 0.3 and --qk-clip-threshold -1.0",
        ),
    ],
)
def test_what_could_not_be_clipped_is_refused_at_start(flags, message):
    ranks = 2 if {"--use-torch-fsdp2", *SHARED, TP2[0]} & {*flags} else 1
    said = refused(*RUN, *CLIP, *flags, "--train-iters", 1, ranks=ranks, **LAID_OUT)
    assert re.search(message, said), said[-3000:]
