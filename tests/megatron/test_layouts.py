"""Real runs in other layouts and of other models than those of the parity tests."""

import pytest

from tests.megatron.runs import MUON, assert_same, start, summary, train

pytestmark = pytest.mark.wide

RUN = ["--num-layers", 2, *MUON, "--muon-fp32-matmul-prec", "highest", "--train-iters", 4]
TP2 = ["--tensor-model-parallel-size", 2]


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


def test_data_parallel_ranks_train_as_one(tmp_path):
    (alone,), _ = train(tmp_path / "one", 1, *RUN)
    first, second = train(tmp_path / "two", 2, *RUN)[0]
    assert first["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-5)
    # each rank takes one of the two micro-batches of a step
    both = [loss for pair in zip(first["losses"], second["losses"], strict=True) for loss in pair]
    assert both == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.shows("--use-distributed-optimizer with --bf16")
def test_the_distributed_optimizer_shares_matrices_out_and_trains_the_same(tmp_path):
    run = [*RUN, "--bf16"]
    plain, _ = train(tmp_path / "plain", 2, *run)
    shared, output = train(tmp_path / "shared", 2, *run, "--use-distributed-optimizer")
    assert "TensorParallelMuon owns 8 parameters" not in summary(output)  # rank 0 has a part of the eight
    for one, other in zip(plain, shared, strict=True):
        assert other["losses"] == pytest.approx(one["losses"], rel=1e-3)


@pytest.mark.shows("expert parallelism")
def test_experts_are_matrices_of_their_own(tmp_path):
    experts = ["--num-experts", 4, "--expert-model-parallel-size", 2, "--moe-token-dispatcher-type", "alltoall"]
    ranks, output = train(tmp_path / "run", 2, *RUN, *experts)
    # in each of two layers q, k, v, proj and the router, and fc1 and fc2 of this rank's two experts
    assert "owns 14 parameters" in summary(output)
    assert "18 matrices" in summary(output)
    for rank in ranks:
        assert rank["losses"][-1] < rank["losses"][0]
        kept = [name for name, state in rank["after"].items() if "momentum_buffer" in state and "experts" in name]
        assert len(kept) == 8


@pytest.mark.shows("tensor, pipeline (also interleaved) and data parallelism")
def test_pipeline_stages_own_their_layers(tmp_path):
    ranks, output = train(tmp_path / "run", 2, *RUN, "--pipeline-model-parallel-size", 2)
    assert "owns 4 parameters" in summary(output)
    assert ranks[0]["grad_norms"] == ranks[1]["grad_norms"]
    assert ranks[1]["losses"][-1] < ranks[1]["losses"][0]


def test_an_optimizer_of_the_users_own(tmp_path):
    program = ["-m", "megatron_eopt.run", "--cpu", "tests/megatron/user_optimizer.py"]
    run = ["--num-layers", 2, "--optimizer", "sign_momentum", "--train-iters", 4]
    (straight,), output = train(tmp_path / "straight", 1, *run, program=program)
    assert "SignMomentum owns 8 parameters" in summary(output)
    assert straight["losses"][-1] < straight["losses"][0]
    saved = ["--save", tmp_path / "checkpoint", "--save-interval", 2, "--exit-interval", 2]
    train(tmp_path / "first", 1, *run, *saved, program=program)
    (resumed,), _ = train(tmp_path / "second", 1, *run, "--load", tmp_path / "checkpoint", program=program)
    assert_same(resumed["after"], straight["after"])


def test_a_loop_of_the_users_own():
    done = start(1, program=["tests/megatron/own_loop.py"])
    assert done.returncode == 0, done.stdout[-4000:]
    assert "TensorParallelMuon owns 9 parameters" in done.stdout
    assert done.stdout.count("the gradient is zero everywhere in the first step, of aside: no forward") == 1
