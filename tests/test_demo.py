"""What the demo is made of: its data, the losses that it reads, and its verdict on the resumed run."""

import sys

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from tests.megatron.runs import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import demo
import stdlib_dataset


def line(iteration, loss):
    """As Megatron 0.19.2 prints it, behind another rank's output."""
    return (
        f"[Rank 0] done iteration {iteration:8d}/     200 | consumed samples: 16 | lm loss: {loss} | grad norm: 7 |\n"
    )


def test_the_bytes_of_each_file_come_back(tmp_path):
    texts = [bytes(range(256)) * 3, b"", "naïve\n".encode()]
    files = [tmp_path / f"{i}.py" for i in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_bytes(text)
    tokens = stdlib_dataset.write_dataset(files, tmp_path / "new folder" / "data")
    dataset = IndexedDataset(str(tmp_path / "new folder" / "data"))
    assert [document.astype(np.uint8).tobytes() for document in dataset] == [texts[0], texts[2]]
    assert tokens == len(texts[0]) + len(texts[2])


def test_losses_are_read_without_the_mean_of_two():
    lines = [line(1, "5.533341E+00"), line(2, "5.244781E+00"), "training ...\n", line(3, "4.356644E+00")]
    assert demo.read_losses(lines, 1, 3) == {1: 5.533341, 3: 4.356644}
    with pytest.raises(ValueError, match=r"for 1 of the iterations 1 to 3: \[2\]"):
        demo.read_losses([lines[0], lines[-1]], 1, 3)


@pytest.mark.parametrize(("loss", "goes_on"), [(2.0, True), (2.0 * (1 + 2 * demo.TOLERANCE), False)])
def test_a_resumed_run_that_is_another_one_is_told(capsys, loss, goes_on):
    straight = dict.fromkeys(range(1, demo.STEPS + 1), 2.0)
    resumed = {step: 2.0 for step in straight if step > demo.RESUMED_FROM} | {150: loss}
    assert demo.report_resume(straight, resumed) is goes_on
    assert ("THE RESUMED RUN IS ANOTHER ONE" in capsys.readouterr().out) is not goes_on


def test_a_command_that_fails_shows_the_end_of_its_log(tmp_path):
    failing = [sys.executable, "-c", "print('the cause'); raise SystemExit(3)"]
    with pytest.raises(SystemExit, match=r"(?s)the cause.*exit code 3.*data\.log"):
        list(demo.execute(failing, tmp_path / "data.log"))
