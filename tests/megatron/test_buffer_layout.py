"""Gradient buffers laid out for whole matrices: what is kept there, and which runs do without the layout."""

import re
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt.megatron.checkpoints.adam_state import let_adam_be_saved
from tests.megatron.runs import (
    EXPERTS,
    FILES,
    LAID_OUT,
    MUON,
    OVERLAP,
    SHARED,
    SMALL_GPT,
    overriding,
    refused,
    resumed,
    saving,
    train,
)
from tests.megatron.test_command_line import activated as activated  # fixtures
from tests.megatron.test_command_line import parse as parse
from tests.megatron.test_resume import SCHEDULE

LAYERS = ["--num-layers", 2, *SCHEDULE, *FILES, *SHARED]
RUN = [*LAYERS, *MUON]
BF16 = ["--bf16"]


def is_laid_out(ranks):
    """Whether the moments of what is no matrix are flat, as of ranges of a buffer, on one rank or the other."""
    states = [rank["after"]["embedding.word_embeddings.weight"] for rank in ranks]
    return {state["exp_avg"].ndim for state in states if "exp_avg" in state} == {1}


@pytest.mark.wide
@pytest.mark.parametrize(
    "flags",
    [
        [*MUON, *OVERLAP],
        [*MUON, *BF16, "--dist-ckpt-optim-fully-reshardable"],
        ["--optimizer", "soap", *BF16],
        [*MUON, *BF16, *EXPERTS, "--optimizer-momentum-dtype", "bf16"],
    ],
    ids=["fp32", "fully reshardable", "soap", "experts"],
)
def test_a_resumed_run_is_the_straight_one(tmp_path, flags):
    (straight, _), _ = resumed(tmp_path, 2, *LAYERS, *flags, "--train-iters", 6, at=3, **LAID_OUT)
    assert is_laid_out(straight)
    counts = {state["step"].item() for rank in straight for state in rank["after"].values() if "step" in state}
    assert counts == {6}


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([*BF16, "--optimizer", "dist_muon"], None),
        ([*BF16, *EXPERTS], None),
        ([*BF16, "--ckpt-format", "torch"], None),  # which neither saves nor loads
        (["--optimizer", "lion"], "'lion' has parameters that are no matrices"),
        (["--optimizer", "scion", "--muon-scalar-optimizer", "lion"], "of which lion keeps none"),
        ([*EXPERTS, "--with-biases"], "a bias is expert-parallel and no matrix"),
        (
            [*BF16, "--ckpt-format", "torch", "--save", "a folder", "--save-interval", 1],
            "ckpt_format 'torch' has no file",
        ),
        ("- {select: linear_proj.weight, optimizer: adam}", "overrides give parameters another optimizer"),
        ("- {select: linear_proj.weight, lr_mult: 0.5}", None),
        ("no overrides", None),
    ],
    ids=str,
)
def test_the_layout_stays_where_no_rule_refuses_it(parse, monkeypatch, tmp_path, capsys, flags, why):
    from megatron.training import arguments

    if isinstance(flags, str):
        (tmp_path / "overrides.yaml").write_text(flags)
        flags = ["--optimizer-overrides", str(tmp_path / "overrides.yaml")]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9))
    model = [flag for flag in SMALL_GPT if flag != "--disable-bias-linear" or "--with-biases" not in flags]
    run = [*model, "--num-layers", 1, "--train-iters", 1, *SHARED, *MUON, *flags]
    args = parse(*(str(flag) for flag in run if flag != "--with-biases"))
    args.rank, args.world_size = 0, 2
    arguments.validate_args(args)
    assert args.use_layer_wise_distributed_optimizer
    assert args.use_layer_wise_param_layout == (why is None)
    said = re.findall("^megatron_eopt: gradient buffers are not laid out .*", capsys.readouterr().out, re.MULTILINE)
    assert [why in line and "--no-use-layer-wise-param-layout" in line for line in said] == [True] * (why is not None)


@pytest.mark.wide
def test_overrides_of_optimizers_run_without_the_layout(tmp_path):
    proj = "decoder.layers.{}.self_attention.linear_proj.weight"
    overrides = [{"select": proj.format(0), "optimizer": "adam"}, {"select": proj.format(1), "exclude": True}]
    run = [*RUN, *BF16, "--train-iters", 4, *overriding(tmp_path, *overrides)]
    (straight, output), _ = resumed(tmp_path, 2, *run, **LAID_OUT)
    assert "gradient buffers are not laid out for whole matrices" in output
    assert not is_laid_out(straight)
    of_adam, excluded = ({key for rank in straight for key in rank["after"][proj.format(i)]} for i in (0, 1))
    assert "exp_avg" in of_adam
    assert excluded == {"parameter", "cut"}


@pytest.mark.wide
def test_a_checkpoint_with_the_layout_is_refused_without_it(tmp_path):
    run, load = [*RUN, *BF16, "--train-iters", 3], ["--load", tmp_path / "checkpoint"]
    train(tmp_path / "run", 2, *run, *saving(tmp_path / "checkpoint", 2), **LAID_OUT)
    said = refused(*run, *load, "--no-use-layer-wise-param-layout", ranks=2, **LAID_OUT)
    assert re.search("AdamW needs .* in flat buffers of the distributed optimizer. Resume with --use-distrib", said)


class Buffers:
    """As much of Megatron's distributed optimizer as its Adam is saved and loaded through."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def load_state_dict(self, state_dict):
        """Loads one count for all, then what is no count into the tensors that are there."""
        state, groups = state_dict["state"], state_dict["param_groups"]
        for group in groups:
            group["step"] = 7.0
        step = torch.tensor(7.0)
        self.optimizer.load_state_dict({"state": {i: state[i] | {"step": step} for i in state}, "param_groups": groups})
        for values in self.optimizer.state.values():
            for value in values.values():
                value.copy_(torch.full_like(value, 2))


def test_adam_begins_with_the_state_of_its_first_step():
    mine, its_own = ([torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))] for _ in range(2))
    begun, adam = torch.optim.AdamW(mine), torch.optim.AdamW(its_own)
    let_adam_be_saved(Buffers(begun))
    assert {state["step"].item() for state in begun.state_dict()["state"].values()} == {0}
    for parameter in (*mine, *its_own):
        parameter.grad = torch.arange(1.0, len(parameter) + 1)
    begun.step()
    adam.step()
    for one, other in zip(mine, its_own, strict=True):
        assert torch.equal(one, other)
        assert all(torch.equal(value, adam.state[other][key]) for key, value in begun.state[one].items())


def test_a_rank_without_any_range_has_a_count_to_save():
    adam = torch.optim.AdamW([{"params": []}])
    let_adam_be_saved(Buffers(adam))
    assert [state["step"].item() for state in adam.state_dict()["state"].values()] == [0]
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    let_adam_be_saved(buffers := Buffers(other))
    assert not other.state
    assert vars(buffers) == {"optimizer": other}
