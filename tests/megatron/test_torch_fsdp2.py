"""Real runs with ``--use-torch-fsdp2``: ranks that hold shards train as one, and a stopped run goes on as it was."""

import re

import pytest
import torch

from tests.megatron.runs import (
    ADAPTIVE,
    EXACT,
    FILES,
    MUON,
    TP2,
    assert_close_in_bf16,
    assert_trains_as,
    full,
    overriding,
    refused,
    resumed,
    train,
    whole,
    wide,
)

ONE_EACH = ["--num-layers", 2, "--micro-batch-size", 1, *EXACT, *FILES]  # the four of a step are for four ranks
FSDP = ["--use-torch-fsdp2"]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, []),
        # a shard ends inside a query group, and k and v lie on some of the ranks
        wide(4, [*TP2, "--num-query-groups", 1, "--muon-split", "all"]),
        wide(4, ["--muon-tp-mode", "distributed"]),
        wide(4, [*TP2, "--muon-tp-mode", "gram"]),
        wide(3, ["--global-batch-size", 6]),  # shards are not equal
    ],
)
@pytest.mark.shows("--use-torch-fsdp2")
def test_ranks_with_shards_train_as_one(tmp_path, ranks, flags):
    run = [*ONE_EACH, *MUON, "--train-iters", 5, *flags]
    (alone,), _ = train(tmp_path / "alone", 1, *run, "--tensor-model-parallel-size", 1)
    sharded, _ = train(tmp_path / "sharded", ranks, *run, *FSDP)
    assert_trains_as(sharded, [alone])  # by norms they are clipped
    expected, found = whole([alone["after"]]), whole([rank["after"] for rank in sharded])
    for name, of_one in expected.items():  # Adam's updates are of one size, however small a gradient is
        atol = 1e-5 if "momentum_buffer" in of_one else 1e-4
        torch.testing.assert_close(found[name]["parameter"], of_one["parameter"], rtol=0, atol=atol, msg=name)
    assert max(rank["state_bytes"] for rank in sharded) <= alone["state_bytes"] / ranks * 1.05


@pytest.mark.wide
def test_in_bf16_muon_goes_the_way_it_goes_on_one_rank(tmp_path):
    run = [*ONE_EACH, *MUON, "--bf16", "--train-iters", 5]
    expected, _ = train(tmp_path / "one", 1, *run)
    found, _ = train(tmp_path / "run", 4, *run, *TP2, *FSDP)
    assert_close_in_bf16(found, expected)


@pytest.mark.parametrize(
    "flags",
    [
        wide(MUON),
        wide([*MUON, "--optimizer-momentum-dtype", "bf16", "--bf16"]),
        wide([*ADAPTIVE, "normuon", "--num-query-groups", 1]),
        full(["--optimizer", "schedule_free_adamw", "--eval-iters", 1, "--bf16"]),
    ],
)
@pytest.mark.shows("--use-torch-fsdp2")
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, flags):
    overrides = overriding(tmp_path, {"select": "decoder.layers.1.mlp.linear_fc2.weight", "optimizer": "adam"})
    _, (_, output) = resumed(tmp_path, 2, *ONE_EACH, *flags, *FSDP, "--train-iters", 4, *overrides)
    assert "changed since the checkpoint" not in output


@pytest.mark.wide
@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        (3, ["--global-batch-size", 6], "has shards that Megatron-Core cannot save"),
        (2, ["--num-experts", 4, "--moe-token-dispatcher-type", "alltoall"], "experts.* has shards that Megatron-Core"),
    ],
    ids=["uneven", "experts"],
)
def test_what_megatron_could_not_save_is_refused_at_start(tmp_path, ranks, flags, message):
    run = [*ONE_EACH, *MUON, *FSDP, *flags, "--train-iters", 1, "--save", tmp_path, "--save-interval", 1]
    assert re.search(message, refused(*run, ranks=ranks))
