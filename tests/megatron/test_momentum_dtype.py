"""Real runs with momenta in bf16: resumed bit for bit, moved to other sizes, converted, and refused."""

import re

import pytest
import torch

from tests.megatron.runs import (
    CLIP,
    FILES,
    MUON,
    TP2,
    manifest_of,
    refused,
    resumed,
    saving,
    train,
    whole,
)

RUN = ["--num-layers", 2, *MUON, "--train-iters", 4, *FILES]
BF16 = ["--optimizer-momentum-dtype", "bf16"]


def momenta(snapshots, key="momentum_buffer"):
    return {name: state[key] for name, state in whole(snapshots).items() if key in state}


def converted(output):
    return re.findall(r"megatron_eopt: the state of the checkpoint is converted: (.*)", output)


def state_bytes(manifest):
    """Of all matrices together."""
    return sum(row.state_bytes for row in manifest_of(manifest).values() if row.optimizer == "muon")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Two tensor-parallel ranks that save after two steps of four, and go on from there: recorded, and printed."""
    folder = tmp_path_factory.mktemp("resumed")
    _, again = resumed(folder, 2, *RUN, *TP2, *BF16, *CLIP, "--bf16")
    return ["--load", folder / "checkpoint", "--ckpt-step", 2], *again


@pytest.mark.shows("--optimizer-momentum-dtype bf16")
def test_a_resumed_run_is_the_straight_one(two_ranks):
    _, ranks, output = two_ranks
    assert not converted(output)
    assert "goes on with other settings" not in output
    assert {m.dtype for m in momenta([rank["after"] for rank in ranks]).values()} == {torch.bfloat16}
    assert {group["momentum_steps"] for rank in ranks for group in rank["groups"][0]} == {4}


@pytest.mark.wide
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_momenta_move_to_another_size_and_to_fp32(two_ranks, tmp_path, dtype):
    load, ranks, _ = two_ranks
    flags = BF16 if dtype == torch.bfloat16 else []
    (rank,), output = train(tmp_path / "run", 1, *RUN, *flags, "--bf16", *load)
    assert converted(output) == ([] if flags else ["momentum_buffer from torch.bfloat16 to torch.float32"])
    expected, found = momenta([rank["before"] for rank in ranks]), momenta([rank["before"]])
    assert found.keys() == expected.keys()
    for name, momentum in found.items():
        assert torch.equal(momentum, expected[name].to(dtype)), name
    assert len(rank["losses"]) == 4  # it went on


@pytest.mark.wide
def test_momenta_in_fp32_are_rounded_once_by_a_load(tmp_path):
    manifest, checkpoint = "--optimizer-manifest-file", tmp_path / "checkpoint"
    first, _ = train(tmp_path / "first", 1, *RUN, manifest, tmp_path / "32", *saving(checkpoint, 2))
    load = ["--load", checkpoint, manifest, tmp_path / "16"]
    (rank,), output = train(tmp_path / "second", 1, *RUN, *BF16, *load)
    assert converted(output) == ["momentum_buffer from torch.float32 to torch.bfloat16"]
    expected = momenta([first[0]["after"]])
    for name, momentum in momenta([rank["before"]]).items():
        assert torch.equal(momentum, expected[name].bfloat16())
    assert 2 * state_bytes(tmp_path / "16") == state_bytes(tmp_path / "32") > 0
    assert rank["groups"][0][0]["momentum_steps"] == 2  # of this kind


def test_megatrons_own_adam_has_no_such_momentum():
    said = refused("--num-layers", 1, "--train-iters", 1, "--optimizer", "adam", *BF16)
    assert "--optimizer-momentum-dtype without effect, with --optimizer adam" in said
