"""--optimizer adaptive_muon in real runs: two ranks train as one."""

import pytest

from tests.megatron.runs import MUON, TP2, summary, train

RUN = [
    "--num-layers",
    1,
    "--optimizer",
    "adaptive_muon",
    *MUON[2:],
    "--muon-fp32-matmul-prec",
    "highest",
    "--train-iters",
    4,
]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        pytest.param([], "second moment by adamuon, first update RMS 0.2 (", marks=pytest.mark.full),
        # 0.2 sqrt(max(rows, cols)) / sqrt(1 - 0.9) for sides of 64 to 192
        pytest.param(
            ["--adaptive-muon-no-align-rms", "--adaptive-muon-beta2", 0.9, "--adaptive-muon-eps", 1e-3],
            "second moment by adamuon, first update RMS 5.06 to 8.764 (",
            marks=pytest.mark.full,
        ),
        (
            ["--adaptive-muon-moment2-method", "normuon"],
            "second moment by normuon, first update RMS 0.2 (",
        ),
        # 0.2 (1 - 0.95) (1 + 0.95) / sqrt(1 - 0.95)
        (
            ["--adaptive-muon-moment2-method", "namo"],
            "second moment by namo, first update RMS 0.087 (",
        ),
    ],
    ids=["adamuon", "adamuon not aligned", "normuon", "namo"],
)
@pytest.mark.shows("--optimizer adaptive_muon")
def test_two_ranks_train_as_one(tmp_path, flags, said):
    if "--adaptive-muon-no-align-rms" in flags:  # updates of this size need a smaller rate
        flags = [*flags, "--lr", 1e-4, "--min-lr", 1e-4]
    (alone,), output = train(tmp_path / "one", 1, *RUN, *flags)
    assert "TensorParallelAdaptiveMuon owns 4 parameters" in summary(output)
    assert said in summary(output)
    two, output = train(tmp_path / "two", 2, *RUN, *flags, *TP2)
    assert "6 duplicated over 2 ranks (exact), " + said in summary(output)
    assert alone["losses"][-1] < alone["losses"][0]
    for rank in two:
        assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert rank["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-5)
