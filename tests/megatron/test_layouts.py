"""Real runs in other layouts and of other models than those of the parity tests."""

import pytest

from tests.megatron.runs import MUON, TP2, resumed, start, summary, train

pytestmark = pytest.mark.wide

RUN = ["--num-layers", 2, *MUON, "--muon-fp32-matmul-prec", "highest", "--train-iters", 4]


@pytest.mark.parametrize(
    ("model", "matrices", "schemes"),
    [
        # more ranks than query groups: a shard ends inside a group; k and v are cut along their short side
        (["--num-query-groups", 1], 12, "8 distributed and 4 owner"),
        (["--attention-output-gate"], 14, "10 distributed and 4 owner"),
    ],
    ids=["one query group", "gated attention"],
)
@pytest.mark.shows("--optimizer muon", "tensor, pipeline (also interleaved) and data parallelism")
def test_two_ranks_train_as_one(tmp_path, model, matrices, schemes):
    (alone,), _ = train(tmp_path / "one", 1, *RUN, *model)
    for tp_mode in ("duplicated", "distributed", "auto"):
        ranks, output = train(tmp_path / tp_mode, 2, *RUN, *model, *TP2, "--muon-tp-mode", tp_mode)
        assert f"{matrices} matrices" in summary(output)
        expected = {"duplicated": f"{matrices} duplicated", "distributed": schemes, "auto": ""}[tp_mode]
        assert f"{expected} over 2 ranks (exact)" in summary(output)
        for rank in ranks:
            assert rank["losses"] == pytest.approx(alone["losses"], rel=1e-5)
            assert rank["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-5)


def test_an_optimizer_of_the_users_own(tmp_path):
    program = ["-m", "megatron_eopt.run", "--cpu", "tests/megatron/user_optimizer.py"]
    run = ["--num-layers", 2, "--optimizer", "sign_momentum", "--train-iters", 4]
    ((straight,), output), _ = resumed(tmp_path, 1, *run, program=program)
    assert "SignMomentum owns 8 parameters" in summary(output)
    assert straight["losses"][-1] < straight["losses"][0]


def test_a_loop_of_the_users_own():
    done = start(1, program=["tests/megatron/own_loop.py"])
    assert done.returncode == 0, done.stdout[-4000:]
    assert "TensorParallelMuon owns 9 parameters" in done.stdout
    assert done.stdout.count("the gradient is zero everywhere in the first step, of aside: no forward") == 1
