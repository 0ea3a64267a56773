"""--optimizer adaptive_muon in real runs: two ranks train as one."""

import re

import pytest

from tests.megatron.runs import EXACT, MUON, TP2, assert_trains_as, full, train

RUN = ["--num-layers", 1, "--optimizer", "adaptive_muon", *MUON[2:], *EXACT, "--train-iters", 4]


@pytest.mark.parametrize(
    ("flags", "rms"),
    [
        full("", ["0.2"]),
        # 0.2 sqrt(max(rows, cols)) / sqrt(1 - 0.9) for sides of 64 to 192; updates of this size need a smaller rate
        full(
            "--adaptive-muon-no-align-rms --adaptive-muon-beta2 0.9 --adaptive-muon-eps 1e-3 --lr 1e-4 --min-lr 1e-4",
            ["5.06", "8.76"],
        ),
        ("--adaptive-muon-moment2-method normuon", ["0.2"]),
        # 0.2 (1 - 0.95) (1 + 0.95) / sqrt(1 - 0.95)
        ("--adaptive-muon-moment2-method namo", ["0.0872"]),
    ],
)
@pytest.mark.shows("--optimizer adaptive_muon")
def test_two_ranks_train_as_one(tmp_path, flags, rms):
    run = [*RUN, *flags.split()]
    alone, _ = train(tmp_path / "one", 1, *run)
    two, output = train(tmp_path / "two", 2, *run, *TP2)
    assert sorted(set(re.findall(r"^adaptive_muon: .*update RMS ([\d.]+)", output, re.MULTILINE))) == rms
    assert alone[0]["losses"][-1] < alone[0]["losses"][0]
    assert_trains_as(two, alone)
