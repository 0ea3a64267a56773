"""Overrides in real runs: what they change, what they leave, and that they come through scheduler and resume."""

import re
from fnmatch import fnmatch
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from megatron_eopt.megatron.assignment import Assignment, MegatronOverrides, refuse_bad_values
from megatron_eopt.routing import OverrideError, Resolved
from tests.megatron.runs import (
    EP2,
    FILES,
    LAUNCHER,
    MOE,
    MUON,
    PP2,
    ROOT,
    SMALL_GPT,
    assert_flags_win,
    assert_same_ranks,
    overriding,
    refused,
    resumed,
    saving,
    start,
    train,
    unchanged,
    wide,
)

STEPS = ["--num-layers", 2, *FILES, "--train-iters", 4]
RUN = [*STEPS, *MUON]
COSINE = ["--lr", "1e-2", "--min-lr", "1e-3", "--lr-decay-style", "cosine", "--lr-decay-iters", 8]
PROJ = "decoder.layers.{}.self_attention.linear_proj.weight"
FC1, FC2 = "decoder.layers.{}.mlp.linear_fc1.weight", "decoder.layers.{}.mlp.linear_fc2.weight"


@pytest.fixture
def overrides(tmp_path):
    return lambda *entries: overriding(tmp_path, *entries)


def groups_with(rank, key):
    return [group for groups in rank["groups"] for group in groups if key in group]


@pytest.mark.parametrize(
    ("ranks", "flags", "select", "settings"),
    [
        (1, [], "layers.0.mlp.linear_fc2.weight", {"exclude": True}),
        (2, PP2, "decoder.layers.1.*", {"lr": 0, "min_lr": 0}),  # on the second stage it is layer 0
        (2, [*MOE, *EP2], "local_experts.3.*", {"exclude": True}),
    ],
    ids=["excluded", "PP2", "EP2"],
)
@pytest.mark.shows("overrides that exclude parameters")
def test_an_override_holds_what_it_selects_of_the_whole_model(tmp_path, overrides, ranks, flags, select, settings):
    ran, _ = train(tmp_path / "run", ranks, *RUN, *flags, *overrides({"select": select, **settings}))
    after = {name: state for rank in ran for name, state in rank["after"].items()}
    assert unchanged(ran) == {name for name in after if fnmatch(name, f"*{select}")} != set()
    if "exclude" in settings:
        assert all(after[name].keys() == {"parameter", "cut"} for name in unchanged(ran))


@pytest.mark.shows("overrides that give parameters another optimizer")
def test_owners_are_those_asked_for_and_resume_as_they_were(tmp_path, overrides):
    flags = overrides(
        {"select": "linear_proj.weight", "optimizer": "adam", "betas": [0.8, 0.9], "eps": 1e-6},
        {"select": "linear_fc2.weight", "optimizer": "adaptive_muon", "momentum": 0.8},
        {"select": "linear_fc1.weight", "num_ns_steps": 3, "scale_mode": "unit_rms_norm", "extra_scale_factor": 0.5},
        {"select": "embedding.word_embeddings.weight", "optimizer": "muon"},
    )
    ((straight,), _), _ = resumed(tmp_path, 1, *RUN, *COSINE, "--bf16", *flags)
    states = {name: found.keys() - {"parameter", "main", "cut", "step"} for name, found in straight["after"].items()}
    assert states[PROJ.format(0)] == {"exp_avg", "exp_avg_sq"}
    assert states[FC2.format(1)] == {"momentum_buffer", "moment2_buffer"}
    assert states[FC1.format(1)] == states["embedding.word_embeddings.weight"] == {"momentum_buffer"}
    assert [group["betas"] for group in groups_with(straight, "eps") if group["eps"] == 1e-6] == [(0.8, 0.9)]
    adaptive = [group for group in groups_with(straight, "moment2_method") if group["moment2_method"] != "none"]
    assert [group["momentum"] for group in adaptive] == [0.8]


def test_other_overrides_at_a_resume_take_effect_and_are_printed(tmp_path, overrides):
    """What they say counts, not the checkpoint; what they do not name goes on as it was."""
    before = overrides({"select": "linear_fc1.weight", "lr_mult": 0.5, "momentum": 0.9})
    train(tmp_path / "first", 1, *RUN, *COSINE, *before, *saving(tmp_path / "checkpoint", 2))
    load = [*RUN, *COSINE, "--load", tmp_path / "checkpoint"]
    (same,), output = train(tmp_path / "same", 1, *load, *before)
    assert "changed since the checkpoint" not in output

    after = overrides(
        {"select": "linear_fc1.weight", "lr_mult": 0.25, "momentum": 0.8},
        {"select": "linear_fc2.weight", "exclude": True},
    )
    (other,), output = train(tmp_path / "other", 1, *load, *after)
    said = " ".join(output.split())
    changed_now = "megatron_eopt: changed since the checkpoint: decoder.layers.{0-1}.mlp.linear_fc1.weight"
    rates = "lr 0.005 -> 0.0025; min_lr 0.0005 -> 0.00025; lr_mult 0.5 -> 0.25; momentum 0.9 -> 0.8"
    assert f"{changed_now} (2 parameters): {rates}" in said
    assert re.search(r"since the checkpoint: \S*linear_fc2.weight \(2 parameters\): optimizer muon -> none", said)
    rates = {group["momentum"]: group["lr"] for group in other["groups"][0]}
    assert rates.keys() == {0.95, 0.8}
    assert rates[0.8] == pytest.approx(rates[0.95] / 4)
    (first,) = {group["lr"] for group in same["groups"][0] if group["momentum"] == 0.95}
    assert rates[0.95] == first  # the schedule went on
    assert unchanged([other]) == {FC2.format(0), FC2.format(1)}

    said = refused(*load, *overrides({"select": "linear_fc1.weight", "optimizer": "adam"}))
    assert "it holds momentum_buffer for decoder.layers.mlp.linear_fc1.weight, and AdamW needs" in said


def test_matrices_have_a_rate_and_a_decay_of_their_own(tmp_path):
    """The ratio of the rates is constant, and groups without decay stay so."""
    own = ["--muon-lr", "4e-2", "--muon-min-lr", "4e-3", "--muon-weight-decay", "0.3"]
    run = [*RUN, *COSINE, "--lr-warmup-iters", 2, *own, "--weight-decay", "0.1"]
    ((straight,), _), _ = resumed(tmp_path, 1, *run)
    load = ["--load", tmp_path / "checkpoint", "--ckpt-step", 2, "--override-opt_param-scheduler"]
    (overriding,), _ = train(tmp_path / "overriding", 1, *run, *load)
    assert_same_ranks([overriding], [straight])
    of_steps = [*straight["groups_of_steps"], straight["groups"]]
    for muon, adam in of_steps[1:]:
        assert {group["lr"] for group in muon} == {4 * group["lr"] for group in adam}
        assert {group["weight_decay"] for group in muon} == {0.3}
        assert {group["wd_mult"]: group["weight_decay"] for group in adam} == {0: 0, 1: 0.1}
    rates = [muon[0]["lr"] for muon, _ in of_steps]
    assert rates[0] < rates[1] < rates[2] > rates[3] > rates[4]


BEFORE = ["--lr", "1e-2", "--min-lr", "1e-3", "--muon-lr", "4e-2", "--muon-min-lr", "4e-3", "--weight-decay", 0.1]
AFTER = ["--lr", "5e-3", "--min-lr", "5e-4", "--muon-lr", "3e-2", "--muon-min-lr", "3e-3", "--weight-decay", 0.2]


@pytest.mark.shows("--override-opt-param-scheduler")
@pytest.mark.parametrize(
    ("flags", "after"),
    [
        pytest.param(["--decoupled-lr", "3e-3"], AFTER, id="own rates of embeddings"),
        # from 0.19 on Megatron finds groups by their rates there, so that only what is no rate of theirs can change
        wide(["--ckpt-format", "torch"], [*BEFORE[:-1], 0.2], id="torch format"),
    ],
)
def test_new_rates_count_where_the_schedule_is_overridden(tmp_path, overrides, flags, after):
    """Megatron 0.20 gives all groups --lr and --min-lr there."""
    own = {"select": "linear_proj.weight", "lr_mult": 0.5, "momentum": 0.8}
    files = overrides({"select": "linear_fc1.weight", "lr": 0, "min_lr": 0}, own)
    ranks = assert_flags_win(tmp_path, *RUN, *files, *flags, before=BEFORE, after=after)
    assert unchanged(ranks) == {FC1.format(0), FC1.format(1)}
    if "--decoupled-lr" in flags:
        # halfway down a cosine: of what has no rate, of the factor (on lr, not on min_lr), and of the rest
        halfway = [0, (0.015 + 0.003) / 2, (0.03 + 0.003) / 2]
        assert sorted({group["lr"] for group in ranks[0]["groups"][0]}) == pytest.approx(halfway)


def test_settings_of_single_optimizers_take_effect(tmp_path, overrides):
    """Settings that are read from the optimizers, and a weight decay that follows Megatron's schedule."""
    flags = overrides(
        {"select": "layers.0.mlp.linear_fc1.weight", "beta2": 0.5},
        {"select": "layers.1.mlp.linear_fc1.weight", "start_wd": 0.4, "end_wd": 0.2},
    )
    decay = ["--weight-decay-incr-style", "linear", "--start-weight-decay", 0, "--end-weight-decay", "0.1"]
    run = [*STEPS, "--optimizer", "adaptive_muon", *COSINE, *decay]
    ((straight,), output), _ = resumed(tmp_path, 1, *run, *flags)
    adaptive = groups_with(straight, "beta2")
    assert sorted(group["beta2"] for group in adaptive) == [0.5, 0.95, 0.95]
    assert [group["weight_decay"] for group in adaptive if "start_wd" not in group] == [pytest.approx(0.1)] * 2
    for groups, expected in ((straight["groups_of_steps"][2], 0.3), (straight["groups"], 0.2)):
        (own,) = (group for of_one in groups for group in of_one if group.get("start_wd") == 0.4)
        assert own["weight_decay"] == pytest.approx(expected)

    assert f"end_wd 0.2 ({tmp_path}/overrides.json:1), start_wd 0.4 (" in " ".join(output.split())
    assert "without effect" not in output


def test_settings_of_users_own_optimizers(tmp_path, overrides):
    """Registered by the user's script: nothing here knows of their settings, and the script nothing of overrides."""
    how = {"program": [*LAUNCHER[:-1], str(ROOT / "tests" / "megatron" / "user_optimizer.py")]}
    run = [*STEPS, "--optimizer", "sign_momentum"]
    own = {"select": "layers.0.mlp.linear_fc1.weight", "decay": 0.5}
    shy = {"select": "layers.1.mlp.linear_fc1.weight", "optimizer": "shy", "decay": 0.4}
    ((straight,), output), _ = resumed(tmp_path, 1, *run, *overrides(own, shy), **how)
    assert straight["losses"][-1] < straight["losses"][0]
    assert sorted({group["decay"] for group in groups_with(straight, "decay")}) == [0.4, 0.5, 0.9]
    assert f"linear_fc1.weight: decay 0.5 ({tmp_path}/overrides.json:1)" in " ".join(output.split())
    said = refused(*run, *overrides(own | {"dcay": 0.5}), **how)
    assert "overrides.json:1: dcay: unknown setting, did you mean 'decay'?" in said
    # what is taken at construction alone, also by one that cannot be asked before it is built
    said = refused(*run, *overrides(shy | {"gentle": False}), **how)
    assert "overrides.json:1: gentle: shy has one gentle for all its parameters, which is set for the run" in said


def test_a_users_state_that_cannot_be_saved_ends_the_first_step(tmp_path):
    how = {"program": [*LAUNCHER[:-1], str(ROOT / "tests" / "megatron" / "user_optimizer.py")]}
    run = [*STEPS, "--optimizer", "counting"]
    said = refused(*run, "--save", tmp_path, "--save-interval", 100, **how)
    assert "counting: Counting keeps 'seen', a tensor of shape ()" in said
    assert "call a count 'step'" in said
    assert not [*tmp_path.iterdir()]
    assert start(1, *SMALL_GPT, *run, **how).returncode == 0  # which saves nothing


def test_a_mistake_ends_the_run_before_it_begins(overrides):
    """Also one that only the rank finds that has the parameter."""
    said = refused(*RUN, *overrides({"select": "*", "optimizer": "mun"}, {"select": "*", "wieght_decay": 1}))
    assert "unknown optimizer 'mun', did you mean 'muon'?" in said
    assert "overrides.json:1: wieght_decay: unknown setting, did you mean 'weight_decay'?" in said
    said = refused(*RUN, *overrides({"select": "linear_c1.weight", "lr": 1}))
    assert "'linear_c1.weight' matches no parameter, did you mean 'linear_fc1.weight'?" in said
    flags = overrides({"select": "layers.1.mlp.linear_fc1.weight", "num_ns_steps": 7})
    said = refused(*RUN, *PP2, *flags, ranks=2)
    assert said.count("quintic has 5 polynomials") == 2  # a line of each rank


@pytest.mark.wide
def test_layers_that_were_alike_are_refused_where_they_differ(tmp_path, overrides):
    train(tmp_path / "first", 1, *RUN, *saving(tmp_path / "checkpoint", 2))
    run = [*RUN, *overrides({"select": FC2.format(1), "exclude": True}), "--load", tmp_path / "checkpoint"]
    assert "it stacks the state of all layers (optimizer.state." in refused(*run)
    ranks, _ = train(tmp_path / "second", 1, *run, "--no-load-optim")
    assert unchanged(ranks) == {FC2.format(1)}


def test_experts_of_one_layer_that_differ_cannot_be_saved(tmp_path, overrides):
    flags = overrides({"select": "local_experts.3.*", "exclude": True})
    done = start(1, *SMALL_GPT, *RUN, *MOE, *flags, "--save", tmp_path / "checkpoint", "--save-interval", 2)
    assert done.returncode != 0
    assert "experts of one layer (decoder.layers.0.mlp.experts.local_experts.*.linear_fc1.weight)" in done.stdout


@pytest.mark.parametrize(
    ("optimizer", "settings", "message"),
    [
        ("adam", {"betas": (0.9, 1.5)}, "f:1: Invalid beta parameter at index 1: 1.5, for w"),
        ("scion", {"end_wd": 0.5}, "f:1: end_wd: scion has no weight decay, for w"),
        ("muon", {"lr": 1e-3}, r"min_lr 0.01 is above lr 0.001 \(lr by f:1\): set both"),
    ],
)
def test_values_that_no_optimizer_would_refuse_are_refused(optimizer, settings, message):
    parameter = SimpleNamespace(name="w", tensor=torch.ones(1))
    assigned = [Assignment(parameter, optimizer, Resolved(settings, dict.fromkeys(settings, "f:1")))]

    def check():
        refuse_bad_values(assigned)
        MegatronOverrides(assigned, OptimizerConfig(optimizer="muon", lr=0.02, min_lr=0.01))

    with pytest.raises(OverrideError, match=message):
        check()
