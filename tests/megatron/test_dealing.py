"""Real runs under the distributed optimizer, whose data-parallel ranks are dealt whole parameters by operations."""

import re

import pytest

from tests.megatron.runs import (
    EXACT,
    EXPERTS,
    FILES,
    MUON,
    OVERLAP,
    SMALL_GPT,
    TP2,
    assert_same,
    assert_same_ranks,
    assert_trains_as,
    losses,
    resumed,
    saving,
    train,
    whole,
)

FP32 = ["--num-layers", 3, *MUON, *EXACT]
RUN = [*FP32, "--bf16"]
DEALT = ["--use-distributed-optimizer", "--no-use-layer-wise-param-layout"]  # in whose layout nobody deals so
SHARED = [*RUN, *DEALT]


def hands(ranks):
    """The matrices that each rank has the momentum of."""
    return [{name for name, state in rank["after"].items() if "momentum_buffer" in state} for rank in ranks]


def deal(output):
    """Parameters, ranks, and operations of the busiest, also if dealt by size, as rank 0 prints them."""
    return [
        (int(found[1]), int(found[2]), float(found[3]), float(found[4]))
        for found in re.finditer(
            r"megatron_eopt: (\d+) parameters dealt to (\d+) data-parallel ranks by operations: the busiest has "
            r"(\S+) T a step; dealt by size (\S+) T",
            output,
        )
    ]


@pytest.mark.wide
def test_a_checkpoint_of_megatrons_deal_goes_on_under_another(tmp_path):
    run, checkpoint = [*SHARED, "--train-iters", 4], tmp_path / "checkpoint"
    by_size, output = train(tmp_path / "by_size", 2, *run, "--no-balanced-deal", *saving(checkpoint, 2))
    assert not deal(output)
    by_operations, output = train(tmp_path / "by_operations", 2, *run, "--load", checkpoint)
    ((parameters, ranks, busiest, busiest_by_size),) = deal(output)
    assert (parameters, ranks) == (21, 2)
    assert busiest < 0.9 * busiest_by_size
    assert hands(by_operations) != hands(by_size)
    assert set.union(*hands(by_operations)) == set.union(*hands(by_size))
    assert not set.intersection(*hands(by_operations))
    assert_same(whole([rank["before"] for rank in by_operations]), whole([rank["after"] for rank in by_size]))


@pytest.mark.shows("--use-distributed-optimizer in fp32")
def test_two_ranks_train_in_fp32_as_one_and_resume(tmp_path):
    run = [*FP32, "--train-iters", 5, "--clip-grad", 0.5, *FILES]
    alone, _ = train(tmp_path / "one", 1, *run)
    (two, output), _ = resumed(tmp_path, 2, *run, *DEALT)
    assert len(deal(output)) == 1
    assert not set.intersection(*hands(two))
    assert_trains_as(two, alone)


@pytest.mark.wide
@pytest.mark.shows("--use-distributed-optimizer with --bf16", "--overlap-param-gather")
def test_four_ranks_train_as_one_and_resume(tmp_path):
    run = ["--train-iters", 4, "--global-batch-size", 8, *FILES]
    alone, _ = train(tmp_path / "one", 1, *RUN, *run)
    (straight, output), _ = resumed(tmp_path, 4, *SHARED, *run, *TP2, *OVERLAP)
    assert [found[1] for found in deal(output)] == [2]
    assert_trains_as(straight, alone, rel=1e-2)  # of bf16


@pytest.mark.wide
@pytest.mark.shows("--use-distributed-optimizer with biases in experts")
def test_experts_are_dealt_to_data_parallel_ranks_of_their_own(tmp_path):
    model = [flag for flag in SMALL_GPT if flag != "--disable-bias-linear"]
    run = [*EXPERTS, "--train-iters", 4, "--global-batch-size", 8, *FILES]
    plain, _ = train(tmp_path / "plain", 4, *RUN, *run, model=model)
    (shared, output), _ = resumed(tmp_path, 4, *SHARED, *run, model=model)
    assert [found[1] for found in deal(output)] == [4, 2]
    assert any("experts" in name and "bias" in name for name in shared[0]["after"])
    assert losses(shared) == pytest.approx(losses(plain), rel=1e-3)


@pytest.mark.wide
@pytest.mark.shows("--optimizer dist_muon with --bf16")
def test_dist_muon_is_muon_with_the_distributed_optimizer(tmp_path):
    run = [*OVERLAP, "--train-iters", 4, *FILES]
    expected, _ = train(tmp_path / "muon", 2, *SHARED, *run)
    (found, _), _ = resumed(tmp_path, 2, *RUN, DEALT[1], "--optimizer", "dist_muon", *run)
    assert_same_ranks(found, expected)


@pytest.mark.wide
def test_files_of_single_ranks_are_read_again(tmp_path):
    """With marks on main parameters."""
    shared = [*RUN, "--muon-split", "all", "--optimizer-momentum-dtype", "bf16", *DEALT]
    (_, output), _ = resumed(tmp_path, 2, *shared, "--ckpt-format", "torch", "--train-iters", 4)
    assert not deal(output)


@pytest.mark.wide
def test_data_parallel_ranks_share_shards_where_nothing_is_dealt(tmp_path):
    run = [*FP32, *TP2, "--global-batch-size", 8, "--train-iters", 4, "--muon-tp-mode", "owner", *FILES]
    plain, _ = train(tmp_path / "plain", 4, *run)
    (shared, _), _ = resumed(tmp_path, 4, *run, "--muon-share-over-dp")
    assert losses(shared) == pytest.approx(losses(plain), rel=1e-5)
