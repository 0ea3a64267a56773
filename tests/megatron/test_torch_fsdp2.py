"""Real runs with ``--use-torch-fsdp2``: ranks that hold shards train as one, and a stopped run goes on as it was."""

import json
import re

import pytest
import torch

from tests.megatron.runs import (
    ADAPTIVE,
    MUON,
    TP2,
    WARMUP,
    assert_close_in_bf16,
    losses,
    refused,
    resumed,
    summary,
    train,
    whole,
)

EXACT = ["--muon-fp32-matmul-prec", "highest", "--ckpt-format", "torch_dist"]
ONE_EACH = ["--num-layers", 2, "--micro-batch-size", 1, *EXACT]  # the four of a step are enough for four ranks
FSDP = ["--use-torch-fsdp2"]


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        (2, []),
        pytest.param(4, TP2, marks=pytest.mark.wide),
        # a shard ends inside a query group, and k and v lie on some of the ranks
        pytest.param(4, ["--num-query-groups", 1], marks=pytest.mark.wide),
        pytest.param(4, [*TP2, "--num-query-groups", 1, "--muon-split", "all"], marks=pytest.mark.wide),
        pytest.param(4, ["--muon-tp-mode", "distributed"], marks=pytest.mark.wide),
        pytest.param(4, [*TP2, "--muon-tp-mode", "gram"], marks=pytest.mark.wide),
        pytest.param(3, ["--global-batch-size", 6], marks=pytest.mark.wide),  # shards are not equal
    ],
)
@pytest.mark.shows("--use-torch-fsdp2")
def test_ranks_with_shards_train_as_one(tmp_path, ranks, flags):
    run = [*ONE_EACH, *MUON, "--train-iters", 5, *flags]
    (alone,), _ = train(tmp_path / "alone", 1, *run, *(["--tensor-model-parallel-size", 1] if TP2[0] in flags else []))
    sharded, output = train(tmp_path / "sharded", ranks, *run, *FSDP)
    assert "(exact)" in summary(output)
    assert losses(sharded) == pytest.approx(alone["losses"], rel=1e-5)
    for rank in sharded:  # which are clipped
        assert rank["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-5)
    expected, found = whole([alone["after"]]), whole([rank["after"] for rank in sharded])
    for name, of_one in expected.items():  # Adam's updates are of one size, however small a gradient is
        atol = 1e-5 if "momentum_buffer" in of_one else 1e-4
        torch.testing.assert_close(found[name]["parameter"], of_one["parameter"], rtol=0, atol=atol, msg=name)
    # vectors of 64 entries are cut too, but for what tensor parallelism leaves whole
    assert sum(rank["state_bytes"] for rank in sharded) <= alone["state_bytes"] * 1.01 * (1 if ranks < 4 else 1.02)
    assert max(rank["state_bytes"] for rank in sharded) <= alone["state_bytes"] / ranks * 1.05


@pytest.mark.parametrize(
    ("ranks", "flags"),
    [
        pytest.param(2, [], marks=pytest.mark.wide),
        pytest.param(4, TP2, marks=pytest.mark.wide),
        pytest.param(4, [], marks=pytest.mark.full),
    ],
)
def test_in_bf16_muon_goes_the_way_it_goes_on_one_rank(tmp_path, ranks, flags):
    run = [*ONE_EACH, *MUON, "--bf16", "--train-iters", 5]
    expected, _ = train(tmp_path / "one", 1, *run)
    found, _ = train(tmp_path / "run", ranks, *run, *flags, *FSDP)
    assert_close_in_bf16(found, expected)


@pytest.mark.parametrize(
    ("optimizer", "layout"),
    [
        pytest.param([*MUON, *WARMUP], ["--bf16"], marks=pytest.mark.wide),
        pytest.param([*MUON, *WARMUP], [], marks=pytest.mark.wide),
        pytest.param([*MUON, "--optimizer-momentum-dtype", "bf16"], ["--bf16"], marks=pytest.mark.wide),
        pytest.param([*ADAPTIVE, "normuon", *WARMUP], ["--num-query-groups", 1], marks=pytest.mark.wide),
        pytest.param(["--optimizer", "schedule_free_adamw", "--eval-iters", 1], ["--bf16"], marks=pytest.mark.full),
        pytest.param(["--optimizer", "schedule_free_adamw", "--eval-iters", 1], [], marks=pytest.mark.full),
        pytest.param([*MUON, "--ckpt-fully-parallel-load"], [], marks=pytest.mark.full),
    ],
)
@pytest.mark.shows("--use-torch-fsdp2")
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, optimizer, layout):
    overrides = tmp_path / "overrides.json"
    overrides.write_text(json.dumps([{"select": "decoder.layers.1.mlp.linear_fc2.weight", "optimizer": "adam"}]))
    run = [*ONE_EACH, *optimizer, *layout, *FSDP, "--train-iters", 4, "--optimizer-overrides", overrides]
    _, (_, output) = resumed(tmp_path, 2, *run)
    assert "changed since the checkpoint" not in output


@pytest.mark.wide
@pytest.mark.parametrize(
    ("ranks", "flags", "message"),
    [
        (3, ["--global-batch-size", 6], "has shards that Megatron-Core cannot save"),
        (2, ["--num-experts", 4, "--moe-token-dispatcher-type", "alltoall"], "experts.* has shards that Megatron-Core"),
        (2, ["--ckpt-format", "torch_dcp"], "take --ckpt-format torch_dist"),
    ],
    ids=["uneven", "experts", "torch_dcp"],
)
def test_what_megatron_could_not_save_is_refused_at_start(tmp_path, ranks, flags, message):
    run = [*ONE_EACH, *MUON, *FSDP, *flags, "--train-iters", 1, "--save", tmp_path, "--save-interval", 1]
    assert re.search(message, refused(*run, ranks=ranks))
