"""Averages of weights in real Megatron: what they are, evaluated, saved, resumed, moved to other ranks, refused.

Saved in every step, a run leaves the weights from which the average follows by its definition.
"""

from math import prod

import pytest
import torch

from megatron_eopt.checkpoints.states import split_key
from megatron_eopt.optimizers.weight_average import AVERAGE, SCHEDULE
from megatron_eopt.tools.plan.described import planned_run
from tests.megatron.runs import (
    EXPERTS,
    MUON,
    SMALL_GPT,
    TP2,
    assert_same,
    assert_same_ranks,
    losses,
    refused,
    resumed,
    start,
    summary,
    train,
    whole,
)
from tests.megatron.test_schedule_free import EVALUATED, loaded, validation_losses
from tests.optimizers.test_weight_average import by_definition

RUN = ["--num-layers", 2, "--ckpt-format", "torch_dist", "--train-iters", 6]
EMA, TAIL = (["--optimizer-weight-average", rule] for rule in ("ema:0.8", "tail:4"))
SAVED_AS_MODEL = ["--save-weight-average"]
SHARED = ["--use-distributed-optimizer"]
LAID_OUT = {"environment": {"FROM_PROVIDER": "1"}}  # gradient buffers would be, for whole matrices


def folder(path, iteration):
    return path / f"iter_{iteration:07d}"


def weights_and_averages(path, steps):
    """Parameter -> its weights after each step, in fp32, and its average after the last."""
    weights, averages = {}, {}
    for step in range(1, steps + 1):
        stored = loaded(folder(path, step), "")
        of_state = {split_key(key): value for key, value in stored.items()}
        in_bf16 = {name for state, name in of_state if state == "fp32_param"}
        averages = {name: value for (state, name), value in of_state.items() if state == AVERAGE}
        for (state, name), value in of_state.items():
            if name in averages and state == ("fp32_param" if name in in_bf16 else ""):
                weights.setdefault(name, []).append(value)
    assert weights.keys() == averages.keys()
    return {name: (of_steps, averages[name]) for name, of_steps in weights.items()}


@pytest.mark.parametrize(
    ("optimizer", "flags"),
    [
        pytest.param(MUON, TP2, marks=pytest.mark.wide),
        pytest.param(MUON, [*TP2, "--bf16"], id="muon-bf16"),
        pytest.param([*MUON, "--muon-scalar-optimizer", "lion"], [], marks=pytest.mark.wide),
        pytest.param(["--optimizer", "soap"], TP2, marks=pytest.mark.wide),
        pytest.param(["--optimizer", "lion", "--lr", "1e-3", "--min-lr", "1e-3"], ["--bf16"], marks=pytest.mark.wide),
    ],
)
@pytest.mark.parametrize("rule", ["ema:0.8", "tail:4"])
@pytest.mark.shows("--optimizer-weight-average")
def test_the_average_of_every_parameter_is_what_its_definition_says(tmp_path, optimizer, flags, rule):
    """tail:4 ends with the run: the last window of six steps is that of the steps three to six."""
    run = [*RUN, *optimizer, *flags, "--optimizer-weight-average", rule, "--save", tmp_path / "saved"]
    train(tmp_path / "run", 2, *run, "--save-interval", 1)
    found = weights_and_averages(tmp_path / "saved", 6)
    assert {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"} <= found.keys()
    assert any("linear_fc1.weight" in name for name in found)
    for name, (of_steps, average) in found.items():
        assert average.dtype == torch.float32
        expected = by_definition(rule, of_steps if rule.startswith("ema") else of_steps[-4:])
        torch.testing.assert_close(average.double(), expected, rtol=2e-6, atol=1e-6, msg=name)
        assert not torch.equal(average, of_steps[-1]), name


@pytest.mark.wide
@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_evaluation_is_at_the_average_which_may_be_saved_as_the_model_and_training_goes_on(tmp_path, precision):
    run = [*RUN, *MUON, *precision, *TP2]
    saved = ["--save", tmp_path / "checkpoint", "--save-interval", 4]
    without, output = train(tmp_path / "without", 2, *run, *EVALUATED)
    trained_at = validation_losses(output)[1]
    straight, _ = train(tmp_path / "straight", 2, *run, *EMA)
    evaluated, output = train(tmp_path / "evaluated", 2, *run, *EMA, *EVALUATED, *saved, *SAVED_AS_MODEL)
    for other in (straight, evaluated):  # neither the average nor its evaluation changes what is trained
        assert [rank["losses"] for rank in other] == [rank["losses"] for rank in without]
    assert_same_ranks(evaluated, straight)
    at_4 = validation_losses(output)[1]
    assert at_4 != pytest.approx(trained_at, rel=1e-4)

    # whoever knows nothing of averages finds this one in the model
    exported = ["--load", tmp_path / "checkpoint", "--ckpt-step", 4, "--finetune", "--no-load-optim", "--skip-train"]
    _, output = train(tmp_path / "exported", 2, *run, *EVALUATED, *exported, "--optimizer", "lion")
    assert validation_losses(output)[0] == at_4

    resumed, _ = train(tmp_path / "resumed", 2, *run, *EMA, *exported[:4])  # also without the flag
    assert_same_ranks(resumed, straight)
    for one, other in zip(resumed, straight, strict=True):
        assert one["losses"] == other["losses"][-len(one["losses"]) :]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([*MUON, *TP2, *TAIL], id="TP2-tail", marks=pytest.mark.wide),
        pytest.param([*MUON, *EMA, "--bf16"], id="DP2-bf16", marks=pytest.mark.wide),
        pytest.param([*MUON, *TP2, *EMA, "--optimizer-cpu-offload", "--bf16"], id="offload", marks=pytest.mark.wide),
        pytest.param(
            [*MUON, *EMA, "--use-torch-fsdp2", "--micro-batch-size", 1, "--eval-iters", 1],
            id="FSDP2",
            marks=pytest.mark.wide,
        ),
        pytest.param(
            [*MUON, *EMA, "--use-torch-fsdp2", "--micro-batch-size", 1, "--bf16", *SAVED_AS_MODEL, "--eval-iters", 1],
            id="FSDP2-bf16-model",
            marks=pytest.mark.wide,
        ),
        pytest.param([*MUON, *EMA, *SHARED, "--bf16"], id="distributed-bf16"),
        pytest.param([*MUON, *TAIL, *SHARED], id="distributed-fp32", marks=pytest.mark.wide),
        pytest.param([*MUON, *EMA, *SHARED, *EXPERTS, "--bf16"], id="distributed-EP2", marks=pytest.mark.wide),
        pytest.param(
            [*MUON, *EMA, *SHARED, "--ckpt-format", "torch", "--bf16"], id="distributed-torch", marks=pytest.mark.wide
        ),
        pytest.param([*MUON, *EMA, *EXPERTS], id="EP2", marks=pytest.mark.wide),
        pytest.param([*MUON, *TP2, *EMA, "--ckpt-format", "torch"], id="torch", marks=pytest.mark.wide),
        pytest.param(
            [*MUON, *EMA, "--pipeline-model-parallel-size", 2, *SAVED_AS_MODEL], id="PP2", marks=pytest.mark.wide
        ),
    ],
)
def test_a_resumed_run_is_the_straight_one_bit_for_bit(tmp_path, flags):
    (straight, _), _ = resumed(tmp_path, 2, *RUN, *flags)
    kept = whole([rank["after"] for rank in straight])
    assert all(AVERAGE in of_one for of_one in kept.values())


@pytest.mark.parametrize(
    "flags",
    [
        ["--bf16"],
        *(
            pytest.param(flags, marks=pytest.mark.wide)
            for flags in (
                [],
                ["--bf16", "--overlap-grad-reduce", "--overlap-param-gather"],
                ["--overlap-grad-reduce", "--overlap-param-gather"],
            )
        ),
    ],
    ids=" ".join,
)
@pytest.mark.shows("--optimizer-weight-average with --use-distributed-optimizer")
def test_the_distributed_optimizer_evaluates_at_the_average_of_every_parameter(tmp_path, flags):
    """As replicas do that load its checkpoint and make no further step; and training is what it is without."""
    run = [*RUN, *MUON, *EVALUATED, *flags, *SHARED]
    without, output = train(tmp_path / "without", 2, *run, "--no-use-layer-wise-param-layout")
    trained_at = validation_losses(output)[-1]
    saved = ["--save", tmp_path / "saved", "--save-interval", 6]
    shared, output = train(tmp_path / "shared", 2, *run, *EMA, *saved, **LAID_OUT)
    assert "not laid out for whole matrices, as with --no-use-layer-wise-param-layout: optimizer_weight_av" in output
    at_average = validation_losses(output)[-1]
    assert at_average != pytest.approx(trained_at, rel=1e-4)
    for one, other in zip(shared, without, strict=True):
        assert one["losses"] == other["losses"]
        for name, of_one in one["after"].items():
            assert torch.equal(of_one["parameter"], other["after"][name]["parameter"]), name
    here, there = ({name for name, of_one in rank["after"].items() if AVERAGE in of_one} for rank in shared)
    assert here - there
    assert there - here

    replicas = [flag for flag in run if flag not in SHARED and "overlap" not in str(flag)]
    without_step = ["--train-iters", 7, "--iterations-to-skip", 7, "--override-opt-param-scheduler"]
    done = start(2, *SMALL_GPT, *replicas, *EMA, "--load", tmp_path / "saved", *without_step)
    assert done.returncode == 0, done.stdout
    assert validation_losses(done.stdout) == [at_average]


@pytest.mark.wide
def test_experts_are_evaluated_at_the_average_that_a_rank_of_their_own_group_has(tmp_path):
    run = [*RUN, *MUON, *EVALUATED, *EXPERTS, "--bf16", "--micro-batch-size", 1, "--eval-iters", 1]
    ran = {
        name: train(tmp_path / name, 4, *run, *EMA, *flags)
        for name, flags in {"replicas": [], "shared": SHARED}.items()
    }
    replicas, shared = (validation_losses(output) for _, output in ran.values())
    assert shared == pytest.approx(replicas, rel=1e-3)
    _, output = train(tmp_path / "trained", 4, *run)
    assert not any(
        one == pytest.approx(other, rel=0.05) for one, other in zip(shared, validation_losses(output), strict=True)
    )


@pytest.mark.wide
def test_a_rank_without_matrices_saves_how_many_steps_are_in_their_average(tmp_path):
    """The first stage has the embedding alone, and writes for all; the second resume finds what the first has saved."""
    stages = ["--pipeline-model-parallel-size", 2, "--account-for-embedding-in-pipeline-split"]
    run, saved = [*RUN, *MUON, *EMA, "--num-layers", 1, *stages], ["--save", tmp_path / "saved", "--save-interval", 2]
    straight, _ = train(tmp_path / "straight", 2, *run)
    train(tmp_path / "two", 2, *run, *saved, "--exit-interval", 2)
    _, output = train(tmp_path / "four", 2, *run, *saved, "--load", tmp_path / "saved", "--exit-interval", 4)
    assert "begins anew" not in output
    six, _ = train(tmp_path / "six", 2, *run, "--load", tmp_path / "saved")
    assert_same_ranks(six, straight)


@pytest.mark.wide
@pytest.mark.parametrize("saved", [TP2, SHARED], ids=["TP2", "distributed"])
def test_the_average_moves_to_other_ranks_unchanged(tmp_path, saved):
    run = [*RUN, *MUON, *EMA, "--micro-batch-size", 1]
    train(tmp_path / "a", 2, *run, *saved, "--save", tmp_path / "saved", "--save-interval", 4)
    load = ["--load", tmp_path / "saved", "--ckpt-step", 4]
    layouts = {"TP2": (2, TP2), "TP1": (1, []), "shared": (4, SHARED), "FSDP2": (2, ["--use-torch-fsdp2"])}
    ran = {name: train(tmp_path / name, ranks, *run, *flags, *load)[0] for name, (ranks, flags) in layouts.items()}
    started = {name: whole([rank["before"] for rank in ranks]) for name, ranks in ran.items()}
    for name, of_one in started["TP2"].items():
        assert of_one[SCHEDULE].tolist() == [0.8, 0, 4]
        assert not torch.equal(of_one[AVERAGE], of_one["parameter"])
        for layout in ("TP1", "shared", "FSDP2"):
            for key in ("parameter", AVERAGE, SCHEDULE):
                assert torch.equal(started[layout][name][key], of_one[key]), (layout, name, key)


@pytest.mark.wide
def test_one_and_two_tensor_parallel_ranks_have_the_same_average(tmp_path):
    run = [*RUN, *MUON, *TAIL, "--muon-fp32-matmul-prec", "highest"]
    alone, _ = train(tmp_path / "alone", 1, *run)
    both, _ = train(tmp_path / "both", 2, *run, *TP2)
    assert losses(both) == pytest.approx(losses(alone), rel=1e-5)
    one, two = (whole([rank["after"] for rank in ranks]) for ranks in (alone, both))
    for name in one:
        torch.testing.assert_close(two[name][AVERAGE], one[name][AVERAGE], rtol=0, atol=1e-4, msg=name)
        assert torch.equal(two[name][SCHEDULE], one[name][SCHEDULE])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A run's checkpoints of the second step, by the name of the average that it has."""
    path = tmp_path_factory.mktemp("checkpoints")
    run = [*RUN, *MUON, "--train-iters", 3, "--save-interval", 2]
    for name, flags in {"none": [], "ema": EMA, "model": [*EMA, *SAVED_AS_MODEL]}.items():
        train(path / f"run-{name}", 1, *run, *flags, "--save", path / name)
    return path


AT_2 = ["--ckpt-step", 2, "--train-iters", 3]
BEGINS = "begins anew, with the weights after the next step"


@pytest.mark.wide
@pytest.mark.parametrize(
    ("saved", "flags", "message"),
    [
        ("none", EMA, f"loads a state with no average of weights, and this run's is ema:0.8: it {BEGINS}"),
        ("none", [*EMA, *SAVED_AS_MODEL], f"with no average of weights, and this run's is ema:0.8: it {BEGINS}"),
        ("ema", [], "leaves the average of weights in the checkpoint, as this run has none"),
        ("ema", TAIL, f"loads a state with the average ema:0.8 of weights, and this run's is tail:4: it {BEGINS}"),
    ],
    ids=["begun", "begun for the model", "left", "another"],
)
def test_a_checkpoint_of_a_run_with_another_average_is_loaded_and_said_so(tmp_path, checkpoints, saved, flags, message):
    run = [*RUN, *MUON, *flags, "--load", checkpoints / saved, *AT_2]
    (found,), output = train(tmp_path / "run", 1, *run)
    assert message in output
    (other,), _ = train(tmp_path / "other", 1, *RUN, *MUON, "--load", checkpoints / "none", *AT_2)
    for name, of_one in found["after"].items():  # the average is the weights after that step, which are the same
        assert torch.equal(of_one["parameter"], other["after"][name]["parameter"])
        assert not flags or torch.equal(of_one[AVERAGE], of_one["parameter"])
        assert flags or AVERAGE not in of_one


@pytest.mark.wide
def test_a_model_that_is_an_average_is_no_place_to_go_on_from_unasked(tmp_path, checkpoints):
    run = [*RUN, *MUON, "--load", checkpoints / "model", *AT_2]
    said = refused(*run)
    assert (
        "its model is an average of weights (--save-weight-average), and this run, which has none, would go on" in said
    )
    assert "name its --optimizer-weight-average, or pass --no-load-optim to load the weights alone" in said
    (straight,), _ = train(tmp_path / "ema", 1, *RUN, *MUON, *EMA, "--load", checkpoints / "ema", *AT_2)
    (found,), _ = train(tmp_path / "model", 1, *run, *EMA)
    assert_same(found["after"], straight["after"])


@pytest.mark.wide
def test_the_distributed_optimizer_goes_on_from_what_was_trained_where_the_model_is_an_average(tmp_path, checkpoints):
    run = [*RUN, *MUON, *EMA, *SHARED, *AT_2]
    ran = [train(tmp_path / name, 2, *run, "--load", checkpoints / name)[0] for name in ("ema", "model")]
    assert_same_ranks(*ran)
    assert [rank["losses"] for rank in ran[0]] == [rank["losses"] for rank in ran[1]]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*MUON, "--optimizer-weight-average", "ema"], "an average of weights is ema:DECAY with 0 < DECAY < 1"),
        (["--optimizer", "schedule_free_adamw", *EMA], "schedule_free_adamw is an average of weights itself"),
        ([*MUON, *SAVED_AS_MODEL], "add --optimizer-weight-average, or leave --save-weight-average away"),
        ([*MUON, *EMA, *SAVED_AS_MODEL, "--no-save-optim"], "leave --no-save-optim away, and take --ckpt-format"),
        ([*MUON, *EMA, *SAVED_AS_MODEL, *SHARED], "leave --save-weight-average or --use-distributed-optimizer away"),
        (["--optimizer", "adam", *EMA], "would have no effect with --optimizer adam, which"),
    ],
)
def test_what_cannot_have_an_average_is_refused_at_start(flags, message):
    assert message in refused(*RUN, *flags)


def test_the_manifest_and_the_plan_count_the_average():
    flags = list(map(str, [*SMALL_GPT, *RUN, *TP2, *MUON, "--bf16"]))
    without, planned = (planned_run(each, None) for each in (flags, [*flags, *EMA]))
    entries = 0
    for before, family in zip(without.families, planned.families, strict=True):
        assert family.like.state_bytes - before.like.state_bytes == 4 * prod(family.like.shape)
        entries += family.count * prod(family.like.shape)
    (_, before), (_, memory) = without.stages[0], planned.stages[0]
    norms = 5 * 64  # which both tensor-parallel ranks have whole
    assert memory.state - before.state == 4 * ((entries - norms) // 2 + norms)


def test_the_summary_names_the_average():
    done = start(1, *SMALL_GPT, *RUN, *MUON, *TAIL, "--train-iters", 1)
    assert summary(done.stdout).endswith("; weights are averaged by tail:4, and evaluated at it")
