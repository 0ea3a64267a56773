"""Averages of weights in real Megatron: what they are, evaluated, saved, resumed, moved to other ranks, refused.

Saved in every step, a run leaves the weights from which the average follows by its definition.
"""

from math import prod

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron_eopt.checkpoints.states import split_key
from megatron_eopt.optimizers.weight_average import AVERAGE, SCHEDULE
from megatron_eopt.tools.plan.described import planned_run
from tests.megatron.runs import (
    EXPERTS,
    FILES,
    LAID_OUT,
    MUON,
    OVERLAP,
    PP2,
    SHARED,
    SMALL_GPT,
    TP2,
    assert_same_ranks,
    refused,
    resumed,
    saving,
    train,
    whole,
    wide,
)
from tests.megatron.test_schedule_free import EVALUATED, validation_losses
from tests.optimizers.test_weight_average import by_definition

RUN = ["--num-layers", 2, *FILES, "--train-iters", 6]
EMA, TAIL = (["--optimizer-weight-average", rule] for rule in ("ema:0.8", "tail:4"))
AS_MODEL = ["--save-weight-average"]
BF16 = ["--bf16"]
FSDP2 = ["--use-torch-fsdp2", "--micro-batch-size", 1]


def loaded(folder):
    """All tensors of a checkpoint."""
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(each.size, dtype=each.properties.dtype)
        for key, each in stored.items()
        if hasattr(each, "size")
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


def weights_and_averages(path, steps):
    """Parameter -> its weights after each step, in fp32, and its average after the last."""
    weights, averages = {}, {}
    for step in range(1, steps + 1):
        of_state = {split_key(key): value for key, value in loaded(path / f"iter_{step:07d}").items()}
        in_bf16 = {name for state, name in of_state if state == "fp32_param"}
        averages = {name: value for (state, name), value in of_state.items() if state == AVERAGE}
        for (state, name), value in of_state.items():
            if name in averages and state == ("fp32_param" if name in in_bf16 else ""):
                weights.setdefault(name, []).append(value)
    assert weights.keys() == averages.keys()
    return {name: (of_steps, averages[name]) for name, of_steps in weights.items()}


@pytest.mark.parametrize(
    ("rule", "flags"),
    [
        ("ema:0.8", [*MUON, *TP2, *BF16]),
        ("tail:4", [*MUON, *TP2, *BF16]),
        wide("tail:4", [*MUON, "--muon-scalar-optimizer", "lion"]),
        wide("ema:0.8", ["--optimizer", "soap", *TP2]),
        wide("tail:4", ["--optimizer", "lion", "--lr", "1e-3", "--min-lr", "1e-3", *BF16]),
    ],
)
@pytest.mark.shows("--optimizer-weight-average")
def test_the_average_of_every_parameter_is_what_its_definition_says(tmp_path, rule, flags):
    """tail:4 ends with the run: the last window of six steps is that of the steps three to six."""
    saved = ["--save", tmp_path / "saved", "--save-interval", 1]
    train(tmp_path / "run", 2, *RUN, *flags, "--optimizer-weight-average", rule, *saved)
    found = weights_and_averages(tmp_path / "saved", 6)
    assert {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"} <= found.keys()
    assert any("linear_fc1.weight" in name for name in found)
    for name, (of_steps, average) in found.items():
        assert average.dtype == torch.float32
        expected = by_definition(rule, of_steps if rule.startswith("ema") else of_steps[-4:])
        torch.testing.assert_close(average.double(), expected, rtol=2e-6, atol=1e-6, msg=name)
        assert not torch.equal(average, of_steps[-1]), name


@pytest.mark.wide
def test_evaluation_is_at_the_average_which_may_be_saved_as_the_model_and_training_goes_on(tmp_path):
    run = [*RUN, *MUON, *BF16, *TP2]
    saved = ["--save", tmp_path / "checkpoint", "--save-interval", 4]
    without, output = train(tmp_path / "without", 2, *run, *EVALUATED)
    trained_at = validation_losses(output)[1]
    evaluated, output = train(tmp_path / "evaluated", 2, *run, *EMA, *EVALUATED, *saved, *AS_MODEL)
    # neither the average nor its evaluation changes what is trained
    assert [rank["losses"] for rank in evaluated] == [rank["losses"] for rank in without]
    at_4 = validation_losses(output)[1]
    assert at_4 != pytest.approx(trained_at, rel=1e-4)

    # whoever knows nothing of averages finds this one in the model
    exported = ["--load", tmp_path / "checkpoint", "--ckpt-step", 4, "--finetune", "--no-load-optim", "--skip-train"]
    _, output = train(tmp_path / "exported", 2, *RUN, *BF16, *TP2, *EVALUATED, *exported, "--optimizer", "lion")
    assert validation_losses(output)[0] == at_4

    resumed, _ = train(tmp_path / "resumed", 2, *run, *EMA, *exported[:4])  # also without the flag
    assert_same_ranks(resumed, evaluated)
    for one, other in zip(resumed, evaluated, strict=True):
        assert one["losses"] == other["losses"][-len(one["losses"]) :]


@pytest.mark.parametrize(
    "flags",
    [
        [*EMA, *SHARED, *BF16],
        wide([*TAIL, *SHARED]),
        wide([*EMA, *SHARED, *EXPERTS, *BF16]),
        wide([*EMA, *SHARED, "--ckpt-format", "torch", *BF16]),
        wide([*TAIL, *TP2]),
        wide([*EMA, *TP2, "--ckpt-format", "torch"]),
        wide([*EMA, *TP2, "--optimizer-cpu-offload", *BF16]),
        wide([*EMA, *FSDP2, *BF16, *AS_MODEL, "--eval-iters", 1]),
        wide([*EMA, *PP2, *AS_MODEL]),
    ],
    ids=lambda flags: " ".join(map(str, flags[1:])),
)
def test_a_resumed_run_is_the_straight_one_bit_for_bit(tmp_path, flags):
    (straight, _), _ = resumed(tmp_path, 2, *RUN, *MUON, *flags)
    assert all(AVERAGE in of_one for of_one in whole([rank["after"] for rank in straight]).values())


@pytest.mark.parametrize("flags", [BF16, wide(OVERLAP)], ids=" ".join)
@pytest.mark.shows("--optimizer-weight-average with --use-distributed-optimizer")
def test_the_distributed_optimizer_evaluates_at_the_average_of_every_parameter(tmp_path, flags):
    """As replicas do that load its checkpoint and make no further step; and training is what it is without."""
    run = [*RUN, *MUON, *EVALUATED, *flags, *SHARED]
    without, output = train(tmp_path / "without", 2, *run, "--no-use-layer-wise-param-layout")
    trained_at = validation_losses(output)[-1]
    shared, output = train(tmp_path / "shared", 2, *run, *EMA, *saving(tmp_path / "saved", 6), **LAID_OUT)
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

    replicas = [flag for flag in run if flag not in (*SHARED, *OVERLAP)]
    without_step = ["--train-iters", 7, "--iterations-to-skip", 7, "--override-opt_param-scheduler"]
    _, output = train(tmp_path / "replicas", 2, *replicas, *EMA, "--load", tmp_path / "saved", *without_step)
    assert validation_losses(output) == [at_average]


@pytest.mark.wide
def test_experts_are_evaluated_at_the_average_that_a_rank_of_their_own_group_has(tmp_path):
    run = [*RUN, *MUON, *EVALUATED, *EXPERTS, *BF16, "--micro-batch-size", 1, "--eval-iters", 1]
    ran = [train(tmp_path / str(len(flags)), 4, *run, *flags) for flags in ([], EMA, [*EMA, *SHARED])]
    trained, replicas, shared = (validation_losses(output) for _, output in ran)
    assert shared == pytest.approx(replicas, rel=1e-3)
    assert all(one != pytest.approx(other, rel=0.05) for one, other in zip(shared, trained, strict=True))


@pytest.mark.wide
def test_a_rank_without_matrices_saves_how_many_steps_are_in_their_average(tmp_path):
    """The first stage has the embedding alone, and writes for all; the second resume finds what the first has saved."""
    run = [*RUN, *MUON, *EMA, "--num-layers", 1, *PP2, "--account-for-embedding-in-pipeline-split"]
    load = ["--load", tmp_path / "saved"]
    straight, _ = train(tmp_path / "straight", 2, *run)
    train(tmp_path / "two", 2, *run, *saving(tmp_path / "saved", 2))
    _, output = train(tmp_path / "four", 2, *run, *load, *saving(tmp_path / "saved", 4))
    assert "begins anew" not in output
    six, _ = train(tmp_path / "six", 2, *run, *load)
    assert_same_ranks(six, straight)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("saved", "layouts"),
    [(TP2, [(1, []), (4, SHARED), (2, FSDP2)]), (SHARED, [(2, TP2)])],
    ids=["TP2", "distributed"],
)
def test_the_average_moves_to_other_ranks_unchanged(tmp_path, saved, layouts):
    run = [*RUN, *MUON, *EMA, "--micro-batch-size", 1]
    ran, _ = train(tmp_path / "saved", 2, *run, *saved, *saving(tmp_path / "checkpoint", 4))
    expected = whole([rank["after"] for rank in ran])
    for number, (ranks, flags) in enumerate(layouts):
        ran, _ = train(tmp_path / str(number), ranks, *run, *flags, "--load", tmp_path / "checkpoint")
        for name, found in whole([rank["before"] for rank in ran]).items():
            assert found[SCHEDULE].tolist() == [0.8, 0, 4]
            assert not torch.equal(found[AVERAGE], found["parameter"])
            for key in ("parameter", AVERAGE):
                assert torch.equal(found[key], expected[name][key]), (flags, name, key)


AT_2 = ["--ckpt-step", 2, "--train-iters", 3]
BEGINS = "begins anew, with the weights after the next step"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A run's checkpoints of the second step, by the name of the average that it has."""
    path = tmp_path_factory.mktemp("checkpoints")
    for name, flags in {"none": [], "ema": EMA, "model": [*EMA, *AS_MODEL]}.items():
        train(path / f"run-{name}", 1, *RUN, *MUON, *flags, "--train-iters", 3, *saving(path / name, 2))
    return path


@pytest.fixture(scope="module")
def without(checkpoints):
    """What a run without any average has after the third step."""
    return train(checkpoints / "without", 1, *RUN, *MUON, "--load", checkpoints / "none", *AT_2)[0][0]["after"]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("saved", "flags", "message"),
    [
        ("none", EMA, f"loads a state with no average of weights, and this run's is ema:0.8: it {BEGINS}"),
        ("none", [*EMA, *AS_MODEL], f"with no average of weights, and this run's is ema:0.8: it {BEGINS}"),
        ("ema", [], "leaves the average of weights in the checkpoint, as this run has none"),
        ("ema", TAIL, f"loads a state with the average ema:0.8 of weights, and this run's is tail:4: it {BEGINS}"),
    ],
    ids=["begun", "begun for the model", "left", "another"],
)
def test_a_checkpoint_of_a_run_with_another_average_is_loaded_and_said_so(
    tmp_path, checkpoints, without, saved, flags, message
):
    (found,), output = train(tmp_path / "run", 1, *RUN, *MUON, *flags, "--load", checkpoints / saved, *AT_2)
    assert message in output
    for name, of_one in found["after"].items():  # the average is the weights after that step, which are the same
        assert torch.equal(of_one["parameter"], without[name]["parameter"])
        assert not flags or torch.equal(of_one[AVERAGE], of_one["parameter"])
        assert flags or AVERAGE not in of_one


@pytest.mark.wide
@pytest.mark.parametrize("flags", [[], SHARED], ids=["replicas", "distributed"])
def test_where_the_model_is_an_average_a_run_goes_on_from_what_was_trained(tmp_path, checkpoints, flags):
    run = [*RUN, *MUON, *EMA, *flags, *AT_2]
    ran = [train(tmp_path / name, 2, *run, "--load", checkpoints / name)[0] for name in ("ema", "model")]
    assert_same_ranks(*ran)
    assert [rank["losses"] for rank in ran[0]] == [rank["losses"] for rank in ran[1]]


@pytest.mark.wide
def test_what_cannot_have_an_average_is_refused_at_start(checkpoints):
    assert "its model is an average of weights (--save-weight-average), and this run, which has none, would go" in (
        refused(*RUN, *MUON, "--load", checkpoints / "model", *AT_2)
    )
    said = refused(*RUN, *MUON, "--optimizer-weight-average", "ema")
    assert "an average of weights is ema:DECAY with 0 < DECAY < 1" in said
    assert "without effect, with --optimizer adam: leave out" in refused(*RUN, "--optimizer", "adam", *EMA)


def test_the_manifest_and_the_plan_count_the_average():
    flags = list(map(str, [*SMALL_GPT, *RUN, *TP2, *MUON, *BF16]))
    without, planned = (planned_run(each, None) for each in (flags, [*flags, *EMA]))
    entries = 0
    for before, family in zip(without.families, planned.families, strict=True):
        assert family.like.state_bytes - before.like.state_bytes == 4 * prod(family.like.shape)
        entries += family.count * prod(family.like.shape)
    (_, before), (_, memory) = without.stages[0], planned.stages[0]
    norms = 5 * 64  # which both tensor-parallel ranks have whole
    assert memory.state - before.state == 4 * ((entries - norms) // 2 + norms)
