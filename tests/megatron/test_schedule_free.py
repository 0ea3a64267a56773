"""Schedule-Free AdamW in real Megatron: trained at one point, evaluated and saved at the average of another's path."""

import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.megatron.runs import SMALL_GPT, TP2, assert_same_ranks, start, train

RUN = ["--num-layers", 2, "--optimizer", "schedule_free_adamw", "--lr", "1e-2", "--ckpt-format", "torch_dist"]
EVALUATED = ["--eval-iters", 2, "--eval-interval", 2]


def validation_losses(output):
    return [float(loss) for loss in re.findall(r"validation loss at .*lm loss value: (\S+)", output)]


def loaded(folder, ending):
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensors = {key: each for key, each in stored.items() if key.endswith(ending) and hasattr(each, "size")}
    state = {key: torch.empty(each.size, dtype=each.properties.dtype) for key, each in tensors.items()}
    dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return state


@pytest.mark.parametrize("precision", [[], pytest.param(["--bf16"], marks=pytest.mark.wide)], ids=["fp32", "bf16"])
@pytest.mark.shows("--optimizer schedule_free_adamw")
def test_evaluation_and_checkpoints_are_at_the_average_and_training_goes_on(tmp_path, precision):
    run = [*RUN, *precision, "--schedule-free-adamw-warmup-steps", 5]  # also a resume goes on within them
    saved = ["--save", tmp_path / "checkpoint", "--save-interval", 4]
    straight, _ = train(tmp_path / "straight", 2, *run, *TP2, "--train-iters", 6)
    evaluated, output = train(tmp_path / "evaluated", 2, *run, *TP2, *EVALUATED, *saved, "--train-iters", 6)
    assert [rank["losses"] for rank in evaluated] == [rank["losses"] for rank in straight]
    assert_same_ranks(evaluated, straight)
    at_4 = validation_losses(output)[1]

    # whoever knows nothing of Schedule-Free finds the average in the model
    exported = ["--load", tmp_path / "checkpoint", "--ckpt-step", 4, "--finetune", "--no-load-optim", "--skip-train"]
    flags = [*run, *TP2, *EVALUATED, *exported, "--train-iters", 6, "--optimizer", "lion"]
    _, output = train(tmp_path / "exported", 2, *flags)
    assert validation_losses(output)[0] == at_4
    training = sum(straight[0]["losses"][-2:]) / 2
    assert at_4 != pytest.approx(training, rel=1e-4)

    resumed, _ = train(tmp_path / "resumed", 2, *run, *TP2, *exported[:4], "--train-iters", 6)
    assert_same_ranks(resumed, straight)
    for one, other in zip(resumed, straight, strict=True):
        assert one["losses"] == other["losses"][-len(one["losses"]) :]


@pytest.mark.full
@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_what_an_asynchronous_save_writes_is_of_one_step(tmp_path, precision):
    """Training goes on, and evaluates, while the worker writes what the parameters and their average were."""
    run = [*RUN, *precision, *TP2, "--train-iters", 6]
    asynchronous = ["--async-save", "--async-strategy", "mcore", "--use-persistent-ckpt-worker"]
    saved = ["--save", tmp_path / "checkpoint", "--save-interval", 2]
    straight, _ = train(tmp_path / "straight", 2, *run)
    train(tmp_path / "saved", 2, *run, *EVALUATED, *asynchronous, *saved)
    resumed, _ = train(tmp_path / "resumed", 2, *run, "--load", tmp_path / "checkpoint", "--ckpt-step", 2)
    assert_same_ranks(resumed, straight)


def test_what_is_saved_is_the_average_by_its_definition(tmp_path):
    saved = ["--save", tmp_path / "checkpoint", "--save-interval", 3]
    train(tmp_path / "run", 2, *RUN, *TP2, *saved, "--train-iters", 3)
    state = loaded(tmp_path / "checkpoint" / "iter_0000003", "linear_proj.weight")
    name = next(key for key in state if not key.startswith("optimizer"))
    x, y, z = (state[key] for key in (name, f"optimizer.state.y.{name}", f"optimizer.state.z.{name}"))
    torch.testing.assert_close(0.9 * x + 0.1 * z, y, rtol=1e-6, atol=1e-7)
    assert not torch.equal(x, y)


def test_a_schedule_of_the_rate_is_warned_of():
    done = start(1, *SMALL_GPT, *RUN, "--lr-decay-style", "cosine", "--min-lr", "1e-3", "--train-iters", 3)
    assert done.returncode == 0
    assert "needs no schedule of the learning rate, and that of group 0 went from 0.01 to" in done.stdout
