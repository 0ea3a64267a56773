"""Schedule-Free AdamW in real Megatron: trained at one point, evaluated and saved at the average of another's path."""

import re

import pytest

from tests.megatron.runs import FILES, SMALL_GPT, TP2, assert_same_ranks, start, train, wide

RUN = ["--num-layers", 2, "--optimizer", "schedule_free_adamw", "--lr", "1e-2", *FILES]
EVALUATED = ["--eval-iters", 2, "--eval-interval", 2]


def validation_losses(output):
    return [float(loss) for loss in re.findall(r"validation loss at .*lm loss value: (\S+)", output)]


@pytest.mark.parametrize("precision", [[], wide(["--bf16"])], ids=["fp32", "bf16"])
@pytest.mark.shows("--optimizer schedule_free_adamw")
def test_evaluation_and_checkpoints_are_at_the_average(tmp_path, precision):
    run = [*RUN, *precision, *TP2, "--train-iters", 6]
    run += ["--schedule-free-adamw-warmup-steps", 5]  # also a resume goes on within them
    saved = ["--save", tmp_path / "checkpoint", "--save-interval", 4]
    straight, _ = train(tmp_path / "straight", 2, *run)
    evaluated, output = train(tmp_path / "evaluated", 2, *run, *EVALUATED, *saved)
    assert [rank["losses"] for rank in evaluated] == [rank["losses"] for rank in straight]
    assert_same_ranks(evaluated, straight)
    at_4 = validation_losses(output)[1]

    # whoever knows nothing of Schedule-Free finds the average in the model
    exported = ["--load", tmp_path / "checkpoint", "--ckpt-step", 4, "--finetune", "--no-load-optim", "--skip-train"]
    _, output = train(tmp_path / "exported", 2, *run, *EVALUATED, *exported, "--optimizer", "lion")
    assert validation_losses(output)[0] == at_4
    training = sum(straight[0]["losses"][-2:]) / 2
    assert at_4 != pytest.approx(training, rel=1e-4)

    resumed, _ = train(tmp_path / "resumed", 2, *run, *exported[:4])
    assert_same_ranks(resumed, straight)
    for one, other in zip(resumed, straight, strict=True):
        assert one["losses"] == other["losses"][-len(one["losses"]) :]


def test_a_schedule_of_the_rate_is_warned_of():
    done = start(1, *SMALL_GPT, *RUN, "--lr-decay-style", "cosine", "--min-lr", "1e-3", "--train-iters", 3)
    assert done.returncode == 0
    assert "needs no schedule of the learning rate, and that of group 0 went from 0.01 to" in done.stdout
