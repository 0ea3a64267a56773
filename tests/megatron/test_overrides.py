"""Overrides in real runs: what they change, what they leave, and that they come through scheduler and resume."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt import EmergingOptimizerEntry
from megatron_eopt.megatron.assignment import Assignment, refuse_bad_values
from megatron_eopt.registry import EMERGING_OPTIMIZERS
from megatron_eopt.routing import OverrideError, Resolved
from tests.megatron.runs import (
    MUON,
    SMALL_GPT,
    assert_flags_win,
    assert_same_ranks,
    refused,
    resumed,
    start,
    train,
)

RUN = ["--num-layers", 2, "--ckpt-format", "torch_dist", "--train-iters", 4, *MUON]
ADAPTIVE = ["--optimizer", "adaptive_muon", "--muon-momentum", "0.95", "--muon-extra-scale-factor", "0.2"]
COSINE = ["--lr", "1e-2", "--min-lr", "1e-3", "--lr-decay-style", "cosine", "--lr-decay-iters", 8]
QKV = "decoder.layers.{}.self_attention.linear_qkv.weight"
PROJ = "decoder.layers.{}.self_attention.linear_proj.weight"
FC1, FC2 = "decoder.layers.{}.mlp.linear_fc1.weight", "decoder.layers.{}.mlp.linear_fc2.weight"


@pytest.fixture
def overrides(tmp_path):
    """Writes entries to a file, and returns the flags that name it."""

    def write(*entries):
        file = tmp_path / "overrides.json"
        file.write_text(json.dumps(list(entries)))
        return ["--optimizer-overrides", file]

    return write


def changed(rank):
    """Names of the parameters that training has changed."""
    pairs = ((name, rank["before"][name]["parameter"], rank["after"][name]["parameter"]) for name in rank["after"])
    return {name for name, before, after in pairs if not torch.equal(before, after)}


def test_a_rate_of_zero_holds_one_parameter_and_no_other(tmp_path, overrides):
    (rank,), _ = train(
        tmp_path / "run", 1, *RUN, *overrides({"select": "layers.1.mlp.linear_fc1.weight", "lr": 0, "min_lr": 0})
    )
    assert rank["after"].keys() - changed(rank) == {FC1.format(1)}


def test_flags_without_effect_are_named_beside_overrides(tmp_path, overrides):
    """One that an optimizer reads, which an override makes run, has an effect."""
    flags = overrides({"select": "linear_fc1.weight", "optimizer": "soap"})
    unread = ["--soap-shampoo-beta", 0.2, "--lion-beta1", 0.8, "--train-iters", 1]
    _, output = train(tmp_path / "run", 1, *RUN, *flags, *unread)
    said = [line for line in output.splitlines() if "without effect" in line]
    assert len(said) == 1
    assert said[0].startswith("megatron_eopt: warning: --lion-beta1 without effect, with --optimizer muon")


def test_names_are_those_of_the_whole_model_on_every_stage(tmp_path, overrides):
    """On the second of two stages, layer 1 is layer 0 of the stage."""
    flags = overrides({"select": "decoder.layers.1.*", "lr": 0, "min_lr": 0})
    ranks, _ = train(tmp_path / "run", 2, *RUN, "--pipeline-model-parallel-size", 2, *flags)
    held = {name for rank in ranks for name in rank["after"].keys() - changed(rank)}
    assert held == {name for rank in ranks for name in rank["after"] if name.startswith("decoder.layers.1.")}
    assert held


def test_numbers_of_experts_are_those_of_the_whole_model(tmp_path, overrides):
    moe = ["--num-experts", 4, "--moe-router-topk", 2, "--moe-ffn-hidden-size", 48]
    flags = overrides({"select": "local_experts.3.*", "lr": 0, "min_lr": 0})
    ranks, _ = train(tmp_path / "run", 2, *RUN, *moe, "--expert-model-parallel-size", 2, *flags)
    held = {name for rank in ranks for name in rank["after"].keys() - changed(rank)}
    assert held == {name for rank in ranks for name in rank["after"] if ".local_experts.3." in name}
    assert len(held) == 4


@pytest.mark.shows("overrides that exclude parameters")
def test_an_excluded_parameter_keeps_its_value_and_has_no_state(tmp_path, overrides):
    flags = overrides({"select": "layers.0.mlp.linear_fc2.weight", "exclude": True})
    (rank,), _ = train(tmp_path / "run", 1, *RUN, *flags)
    assert rank["after"].keys() - changed(rank) == {FC2.format(0)}
    assert rank["after"][FC2.format(0)].keys() == {"parameter", "cut"}


@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
@pytest.mark.shows("overrides that give parameters another optimizer")
def test_owners_are_those_asked_for_and_resume_as_they_were(tmp_path, overrides, precision):
    flags = overrides(
        {"select": "linear_proj.weight", "optimizer": "adam", "betas": [0.8, 0.9], "eps": 1e-6},
        {"select": "linear_fc2.weight", "optimizer": "adaptive_muon", "momentum": 0.8},
        {"select": "linear_fc1.weight", "num_ns_steps": 3, "scale_mode": "unit_rms_norm", "extra_scale_factor": 0.5},
        {"select": "embedding.word_embeddings.weight", "optimizer": "muon"},
    )
    ((straight,), _), _ = resumed(tmp_path, 1, *RUN, *COSINE, *precision, *flags)
    states = {
        name: {key for key in found if key not in ("parameter", "main", "cut", "step")}
        for name, found in straight["after"].items()
    }
    assert states[PROJ.format(0)] == {"exp_avg", "exp_avg_sq"}
    assert states[FC2.format(1)] == {"momentum_buffer", "moment2_buffer"}
    assert states[FC1.format(1)] == states["embedding.word_embeddings.weight"] == {"momentum_buffer"}
    groups = [group for groups in straight["groups"] for group in groups]
    assert [group["betas"] for group in groups if group.get("eps") == 1e-6] == [(0.8, 0.9)]
    assert [group["momentum"] for group in groups if group.get("momentum") == 0.8] == [0.8]


def test_other_overrides_at_a_resume_take_effect_and_are_printed(tmp_path, overrides):
    """What they say counts, not the checkpoint; what they do not name goes on as it was."""
    before = overrides({"select": "linear_fc1.weight", "lr_mult": 0.5, "momentum": 0.9})
    save = ["--exit-interval", 2, "--save-interval", 2, "--save", tmp_path / "checkpoint"]
    train(tmp_path / "first", 1, *RUN, *COSINE, *before, *save)
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
    assert torch.equal(other["before"][FC2.format(1)]["parameter"], other["after"][FC2.format(1)]["parameter"])

    adam = overrides({"select": "linear_fc1.weight", "optimizer": "adam"})
    said = refused(*load, *adam)
    assert "it holds momentum_buffer for decoder.layers.mlp.linear_fc1.weight, and AdamW needs" in said


def test_matrices_have_a_rate_and_a_decay_of_their_own_through_scheduler_and_resume(tmp_path):
    """The ratio of the rates is constant, and groups without decay stay so."""
    own = ["--muon-lr", "4e-2", "--muon-min-lr", "4e-3", "--muon-weight-decay", "0.3"]
    run = [*RUN, *COSINE, *own, "--weight-decay", "0.1"]
    (straight,), _ = train(tmp_path / "straight", 1, *run)
    save = ["--exit-interval", 2, "--save-interval", 2, "--save", tmp_path / "checkpoint"]
    (half,), _ = train(tmp_path / "first", 1, *run, *save)
    (loaded,), _ = train(tmp_path / "second", 1, *run, "--load", tmp_path / "checkpoint")
    (overriding,), _ = train(
        tmp_path / "third", 1, *run, "--load", tmp_path / "checkpoint", "--override-opt_param-scheduler"
    )
    for rank in (half, straight, loaded, overriding):
        muon, adam = rank["groups"]
        assert {group["lr"] for group in muon} == {4 * group["lr"] for group in adam}
        assert {group["weight_decay"] for group in muon} == {0.3}
        assert {group["weight_decay"] for group in adam} == {0.0, 0.1}
    assert half["groups"][0][0]["lr"] > straight["groups"][0][0]["lr"]
    assert_same_ranks([loaded, overriding], [straight, straight])


@pytest.mark.shows("--override-opt-param-scheduler")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--decoupled-lr", "3e-3"], id="own rates of embeddings"),
        pytest.param(["--bf16", "--use-mup", "--mup-base-hidden-size", 32], id="muP in bf16", marks=pytest.mark.wide),
    ],
)
def test_new_rates_of_every_family_count_at_a_resume_that_is_to_override_the_schedule(tmp_path, overrides, flags):
    """Megatron 0.20 gives all groups --lr and --min-lr there."""
    own = {"select": "linear_proj.weight", "lr_mult": 0.5, "momentum": 0.8}
    files = overrides({"select": "linear_fc1.weight", "lr": 0, "min_lr": 0}, own)
    before = ["--lr", "1e-2", "--min-lr", "1e-3", "--muon-lr", "4e-2", "--muon-min-lr", "4e-3", "--weight-decay", 0.1]
    after = ["--lr", "5e-3", "--min-lr", "5e-4", "--muon-lr", "3e-2", "--muon-min-lr", "3e-3", "--weight-decay", 0.2]
    (rank,), _ = assert_flags_win(tmp_path, *RUN, *files, *flags, before=before, after=after)
    assert rank["after"].keys() - changed(rank) == {FC1.format(0), FC1.format(1)}
    if "--use-mup" not in flags:
        # halfway down a cosine: of what has no rate, of the factor (on lr, not on min_lr), and of the rest
        halfway = [0, (0.015 + 0.003) / 2, (0.03 + 0.003) / 2]
        assert sorted({group["lr"] for group in rank["groups"][0]}) == pytest.approx(halfway)


@pytest.mark.wide
def test_new_rates_count_in_files_of_the_torch_format(tmp_path, overrides):
    """From 0.19 on Megatron finds groups by their rates there, so that only what is no rate of theirs can change."""
    files = overrides({"select": "linear_fc1.weight", "lr": 0, "min_lr": 0})
    rates = ["--lr", "1e-2", "--min-lr", "1e-3", "--muon-lr", "4e-2", "--muon-min-lr", "4e-3"]
    run = [*RUN, "--ckpt-format", "torch", *rates, *files]
    (rank,), _ = assert_flags_win(tmp_path, *run, before=[], after=["--weight-decay", 0.2])
    assert rank["after"].keys() - changed(rank) == {FC1.format(0), FC1.format(1)}


def test_settings_of_single_optimizers_take_effect_and_resume_as_they_were(tmp_path, overrides):
    """Settings that are read from the optimizers, and a weight decay that follows Megatron's schedule."""
    flags = overrides(
        {"select": "layers.0.mlp.linear_fc1.weight", "beta2": 0.5},
        {"select": "layers.1.mlp.linear_fc1.weight", "start_wd": 0.4, "end_wd": 0.2},
        {"select": "linear_fc2.weight", "optimizer": "soap"},
        {"select": "layers.1.mlp.linear_fc2.weight", "shampoo_beta": 0.5, "use_kl_shampoo": False},
    )
    decay = ["--weight-decay-incr-style", "linear", "--start-weight-decay", 0, "--end-weight-decay", "0.1"]
    run = [*RUN, *ADAPTIVE, *COSINE, *decay]
    ((straight,), said), _ = resumed(tmp_path, 1, *run, *flags)
    (half,), _ = train(tmp_path / "half", 1, *run, *flags, "--exit-interval", 2)

    adaptive, soap = (
        [group for groups in straight["groups"] for group in groups if key in group]
        for key in ("beta2", "shampoo_beta")
    )
    assert sorted(group["beta2"] for group in adaptive) == [0.5, 0.95, 0.95]
    assert sorted(group["shampoo_beta"] for group in soap) == [0.5, 0.95]
    decays = {group["start_wd"]: group["weight_decay"] for group in adaptive if "start_wd" in group}
    assert decays == {0.4: pytest.approx(0.2)}
    halfway = [group["weight_decay"] for groups in half["groups"] for group in groups if group.get("start_wd") == 0.4]
    assert halfway == [pytest.approx(0.3)]
    assert [group["weight_decay"] for group in adaptive if "start_wd" not in group] == [pytest.approx(0.1)] * 2

    said = " ".join(said.split())
    file = "overrides.json:1"
    assert f"decoder.layers.0.mlp.linear_fc1.weight: beta2 0.5 ({tmp_path}/{file})" in said
    assert f"end_wd 0.2 ({tmp_path}/{file}), start_wd 0.4 ({tmp_path}/{file})" in said
    assert f"shampoo_beta 0.5 ({tmp_path}/{file}), use_kl_shampoo False ({tmp_path}/{file})" in said

    once = [*RUN[: -len(MUON)], *ADAPTIVE, "--train-iters", 1]
    (own,), _ = train(
        tmp_path / "own", 1, *once, *overrides({"select": "layers.0.mlp.linear_fc1.weight", "beta2": 0.5})
    )
    (plain,), _ = train(tmp_path / "plain", 1, *once)
    for number, ratio in ((0, 10), (1, 1)):
        name = FC1.format(number)
        # after one step it is (1 - beta2) O^2
        expected = ratio * plain["after"][name]["moment2_buffer"]
        torch.testing.assert_close(own["after"][name]["moment2_buffer"], expected, rtol=1e-5, atol=0)


def test_a_setting_of_a_users_own_optimizer(tmp_path, overrides):
    """Registered by the user's script: nothing here knows what ``decay`` is, and the script nothing of overrides."""
    program = ["-m", "megatron_eopt.run", "--cpu", "tests/megatron/user_optimizer.py"]
    run = [*RUN[: -len(MUON)], "--optimizer", "sign_momentum"]
    own = {"select": "layers.0.mlp.linear_fc1.weight", "decay": 0.5}
    (rank,), said = train(tmp_path / "run", 1, *run, *overrides(own), program=program)
    decays = [group["decay"] for groups in rank["groups"] for group in groups if "decay" in group]
    assert sorted(decays) == [0.5, *[0.9] * (len(decays) - 1)]
    assert f"linear_fc1.weight: decay 0.5 ({tmp_path}/overrides.json:1)" in " ".join(said.split())
    said = refused(*run, *overrides({"select": "*", "dcay": 0.5}), program=program)
    assert "overrides.json:1: dcay: unknown setting, did you mean 'decay'?" in said


def test_what_an_optimizer_takes_at_construction_alone_is_no_setting_of_a_parameter(tmp_path, overrides):
    """Also of one that cannot be asked before it is built."""
    program = ["-m", "megatron_eopt.run", "--cpu", "tests/megatron/user_optimizer.py"]
    run = [*RUN[: -len(MUON)], "--optimizer", "shy"]
    matrix = "layers.0.mlp.linear_fc1.weight"
    train(tmp_path / "run", 1, *run, *overrides({"select": matrix, "decay": 0.5}), program=program)
    said = refused(*run, *overrides({"select": matrix, "gentle": False}), program=program)
    assert "overrides.json:1: gentle: shy has one gentle for all its parameters, which is set for the run" in said


def test_settings_do_not_depend_on_tensor_parallelism(tmp_path, overrides):
    flags = overrides(
        {"select": "shape:tall", "lr_mult": 0.5},
        {"select": "linear_fc1.weight", "num_ns_steps": 4, "split": "all"},
        {"select": "linear_qkv.weight", "split": "per_head"},
        {"select": "linear_proj.weight", "split": "none", "optimizer": "adaptive_muon"},
    )
    run = [*RUN, "--muon-fp32-matmul-prec", "highest", *flags]
    (one,), _ = train(tmp_path / "one", 1, *run)
    two, _ = train(tmp_path / "two", 2, *run, "--tensor-model-parallel-size", 2)
    assert [[group["lr"] for group in groups] for groups in two[0]["groups"]] == [
        [group["lr"] for group in groups] for groups in one["groups"]
    ]
    torch.testing.assert_close(torch.tensor(two[0]["losses"]), torch.tensor(one["losses"]), rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (
            [
                {"select": "*", "optimizer": "mun"},
                {"select": "*", "wieght_decay": 1},
            ],
            r"unknown optimizer 'mun', did you mean 'muon'\?\n"
            r".*overrides.json:1: wieght_decay: unknown setting, did you mean 'weight_decay'\?",
        ),
        (
            [{"select": "linear_c1.weight", "lr": 1}],
            r"overrides.json:1: select: 'linear_c1.weight' matches no parameter, did you mean 'linear_fc1.weight'\?",
        ),
        (
            [{"select": "linear_fc1.weight", "optimizer": "adam", "betas": [0.9, 1.5]}],
            r"overrides.json:1: betas: Invalid beta parameter at index 1: 1.5, for decod",
        ),
        (
            [{"select": "linear_fc1.weight", "optimizer": "adaptive_muon", "beta2": 1.5}],
            r"overrides.json:1: beta2: TensorParallelAdaptiveMuon: beta2 must lie in \[0, 1\), got 1.5, for decod",
        ),
        (
            [{"select": "linear_fc1.weight", "start_wd": 0.5}],
            r"overrides.json:1: start_wd: the weight decay of decoder.layers.0.mlp.linear_fc1.weight would go from 0.5 "
            r"to 0.01, and --weight-decay-incr-style is constant: pass linear",
        ),
        (
            [{"select": "linear_fc1.weight", "optimizer": "scion", "end_wd": 0.5}],
            r"overrides.json:1: end_wd: scion has no weight decay, got 0.5 for decoder.layers.0.mlp.linear_fc1.weight",
        ),
    ],
)
def test_a_mistake_ends_the_run_before_it_begins(overrides, entries, message):
    assert re.search(message, said := refused(*RUN, *overrides(*entries))), said[-3000:]


def test_mistakes_of_one_stage_end_all(overrides):
    """Those that only the rank finds that has the parameter, named with it."""
    flags = overrides(
        {"select": "layers.1.mlp.linear_fc1.weight", "num_ns_steps": 7},
        {"select": "layers.1.*.linear_proj.weight", "lr": 1e-3},
    )
    said = refused(*RUN, "--pipeline-model-parallel-size", 2, *flags, ranks=2)
    assert said.count("OverrideError: ") == 2
    assert "overrides.json:1: num_ns_steps: " in said
    assert "quintic has 5 polynomials" in said
    assert ", for decoder.layers.1.mlp.linear_fc1.weight" in said
    said = refused(*RUN, *overrides({"select": "layers.1.*.linear_proj.weight", "lr": 1e-3}))
    assert "linear_proj.weight: min_lr 0.01 is above lr 0.001" in said
    assert "what no override sets is --lr 0.01 and --min-lr 0.01" in said


@pytest.mark.wide
def test_a_checkpoint_whose_layers_were_alike_is_refused_where_they_differ(tmp_path, overrides):
    save = ["--exit-interval", 2, "--save-interval", 2, "--save", tmp_path / "checkpoint"]
    train(tmp_path / "first", 1, *RUN, *save)
    flags = overrides({"select": "layers.1.mlp.linear_fc2.weight", "exclude": True})
    said = refused(*RUN, *flags, "--load", tmp_path / "checkpoint")
    assert "it stacks the state of all layers (optimizer.state." in said
    (rank,), _ = train(tmp_path / "second", 1, *RUN, *flags, "--load", tmp_path / "checkpoint", "--no-load-optim")
    assert FC2.format(1) not in changed(rank)


def test_experts_of_one_layer_that_differ_cannot_be_saved(tmp_path, overrides):
    moe = ["--num-experts", 4, "--moe-router-topk", 2, "--moe-ffn-hidden-size", 48]
    flags = overrides({"select": "local_experts.3.*", "exclude": True})
    run = [*SMALL_GPT, *RUN, *moe, *flags]
    done = start(1, *run, "--save", tmp_path / "checkpoint", "--save-interval", 2)
    assert done.returncode != 0
    assert "experts of one layer (decoder.layers.0.mlp.experts.local_experts.*.linear_fc1.weight)" in done.stdout
    assert start(1, *run).returncode == 0


class Together(torch.optim.Optimizer):
    """One with two settings of which one is nothing without the other."""

    def __init__(self, params, lr, kind="plain", power=0.0):
        super().__init__(params, {"lr": lr, "kind": kind, "power": power})

    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        if (group := self.param_groups[-1])["power"] and group["kind"] == "plain":
            raise ValueError(f"power {group['power']} has no effect where kind is plain")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "fancy", "power": 2.0}, None),
        ({"kind": "fancy"}, None),
        ({"power": 2.0}, "f:1: power: power 2.0 has no effect where kind is plain, for w"),
    ],
)
def test_an_optimizer_checks_the_settings_of_a_parameter_together(monkeypatch, settings, message):
    entry = EmergingOptimizerEntry(Together, config_to_kwargs=lambda config, chunks, groups: {"lr": config.lr})
    monkeypatch.setitem(EMERGING_OPTIMIZERS, "together", entry)
    parameter = SimpleNamespace(name="w")
    assigned = Assignment(parameter, "together", Resolved(settings, dict.fromkeys(settings, "f:1")))
    config = SimpleNamespace(lr=0.1, weight_decay=0.0)
    if message is None:
        refuse_bad_values([assigned], config, [], None)
        return
    with pytest.raises(OverrideError) as error:
        refuse_bad_values([assigned], config, [], None)
    assert str(error.value) == message
