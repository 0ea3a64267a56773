"""--optimizer adaptive_muon in real runs: two ranks train as one."""

import pytest

from tests.megatron.runs import EXACT, MUON, TP2, assert_trains_as, full, summary, train

RUN = ["--num-layers", 1, "--optimizer", "adaptive_muon", *MUON[2:], *EXACT, "--train-iters", 4]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        full("", "second moment by adamuon, first update RMS 0.2 ("),
        # 0.2 sqrt(max(rows, cols)) / sqrt(1 - 0.9) for sides of 64 to 192; updates of this size need a smaller rate
        full(
            "--adaptive-muon-no-align-rms --adaptive-muon-beta2 0.9 --adaptive-muon-eps 1e-3 --lr 1e-4 --min-lr 1e-4",
            "second moment by adamuon, first update RMS 5.06 to 8.764 (",
        ),
        ("--adaptive-muon-moment2-method normuon", "second moment by normuon, first update RMS 0.2 ("),
        # 0.2 (1 - 0.95) (1 + 0.95) / sqrt(1 - 0.95)
        ("--adaptive-muon-moment2-method namo", "second moment by namo, first update RMS 0.087 ("),
    ],
)
@pytest.mark.shows("--optimizer adaptive_muon")
def test_two_ranks_train_as_one(tmp_path, flags, said):
    run = [*RUN, *flags.split()]
    alone, output = train(tmp_path / "one", 1, *run)
    assert "TensorParallelAdaptiveMuon owns 4 parameters" in summary(output)
    assert said in summary(output)
    two, output = train(tmp_path / "two", 2, *run, *TP2)
    assert "6 duplicated over 2 ranks (exact), " + said in summary(output)
    assert alone[0]["losses"][-1] < alone[0]["losses"][0]
    assert_trains_as(two, alone)
