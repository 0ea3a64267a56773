"""Real runs with momenta in bf16 and 8 bits: resumed bit for bit, moved to other sizes, converted, and refused."""

import json
import re

import pytest
import torch

from megatron_eopt.manifest import from_json
from tests.megatron.runs import CLIP, MUON, TP2, WARMUP, refused, resumed, train, whole

RUN = ["--num-layers", 2, *MUON, "--train-iters", 4, "--ckpt-format", "torch_dist"]
BF16, INT8 = (["--optimizer-momentum-dtype", dtype] for dtype in ("bf16", "int8"))
WIDE = ["--hidden-size", 256, "--ffn-hidden-size", 512]  # of which two ranks have whole blocks of 128 columns
CODES, SCALES = "momentum_codes", "momentum_scales"


def momenta(snapshots, key="momentum_buffer"):
    return {name: state[key] for name, state in whole(snapshots).items() if key in state}


def converted(output):
    return re.findall(r"megatron_eopt: the state of the checkpoint is converted: (.*)", output)


def state_bytes(manifest):
    """Of all matrices together."""
    families = from_json(json.loads(manifest.read_text()))
    return sum(each.count * each.like.state_bytes for each in families if each.like.optimizer == "muon")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """Two tensor-parallel ranks that save after two steps of four, and go on from there: recorded, and printed."""
    folder = tmp_path_factory.mktemp("resumed")
    _, again = resumed(folder, 2, *RUN, *TP2, *BF16, *CLIP, *WARMUP, "--bf16")
    return ["--load", folder / "checkpoint", "--ckpt-step", 2], *again


@pytest.mark.shows("--optimizer-momentum-dtype bf16")
def test_a_resumed_run_is_the_straight_one(two_ranks):
    _, ranks, output = two_ranks
    assert not converted(output)
    assert "goes on with other settings" not in output
    assert {m.dtype for m in momenta([rank["after"] for rank in ranks]).values()} == {torch.bfloat16}
    assert {group["momentum_steps"] for rank in ranks for group in rank["groups"][0]} == {4}


@pytest.fixture(scope="module")
def two_ranks_in_8_bits(tmp_path_factory):
    """The same with momenta in 8 bits."""
    folder = tmp_path_factory.mktemp("resumed")
    _, again = resumed(folder, 2, *RUN, *WIDE, *TP2, *INT8, *CLIP, *WARMUP, "--bf16")
    return ["--load", folder / "checkpoint", "--ckpt-step", 2], *again


@pytest.mark.wide
@pytest.mark.shows("--optimizer-momentum-dtype int8")
def test_a_resumed_run_in_8_bits_is_the_straight_one(two_ranks_in_8_bits):
    _, ranks, output = two_ranks_in_8_bits
    assert not converted(output)
    after = [rank["after"] for rank in ranks]
    codes, scales = momenta(after, CODES), momenta(after, SCALES)
    assert codes.keys() == scales.keys() != set()
    assert {x.dtype for x in codes.values()} == {torch.int8}
    assert all(scales[name].shape == (len(x), -(-x.shape[1] // 128)) for name, x in codes.items())
    assert all(x.any() for x in [*codes.values(), *scales.values()])


@pytest.mark.wide
def test_momenta_in_8_bits_move_to_another_size_bit_for_bit(two_ranks_in_8_bits, tmp_path):
    load, ranks, _ = two_ranks_in_8_bits
    manifest = ["--optimizer-manifest-file", tmp_path / "manifest"]
    (rank,), output = train(tmp_path / "run", 1, *RUN, *WIDE, *INT8, "--bf16", *load, *manifest)
    assert not converted(output)
    kept = [x.nbytes for key in (CODES, SCALES) for x in momenta([rank["before"]], key).values()]
    assert state_bytes(tmp_path / "manifest") == sum(kept)
    for key in (CODES, SCALES):
        expected, found = momenta([each["before"] for each in ranks], key), momenta([rank["before"]], key)
        assert found.keys() == expected.keys() != set()
        for name, x in found.items():
            assert torch.equal(x, expected[name]), (name, key)
    assert len(rank["losses"]) == 4


@pytest.mark.wide
def test_codes_are_taken_for_no_momenta_and_momenta_for_no_codes(two_ranks_in_8_bits, tmp_path):
    load, _, _ = two_ranks_in_8_bits
    said = refused(*RUN, *WIDE, "--bf16", *load)
    assert re.search(
        r"it holds fp32_param, momentum_codes, momentum_scales for .*needs fp32_param, momentum_buffer", said
    )
    other = ["--save", tmp_path / "checkpoint", "--save-interval", 2]
    train(tmp_path / "first", 1, *RUN, *other, *BF16, "--exit-interval", 2)
    said = refused(*RUN, *INT8, "--load", tmp_path / "checkpoint")
    assert re.search(r"it holds momentum_buffer for .*needs momentum_codes, momentum_scales", said)
    assert "--no-load-optim" in said


def test_ranks_that_would_share_a_block_refuse_it():
    said = refused("--num-layers", 1, "--train-iters", 1, *MUON, *TP2, *INT8, ranks=2)
    assert "a matrix (64, 64), is cut at column 32, and a momentum in int8 has one scale for every 128 columns" in said


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
    saved, manifest = ["--save", tmp_path / "checkpoint", "--save-interval", 2], "--optimizer-manifest-file"
    first, _ = train(tmp_path / "first", 1, *RUN, *saved, manifest, tmp_path / "32", "--exit-interval", 2)
    load = ["--load", tmp_path / "checkpoint", manifest, tmp_path / "16"]
    (rank,), output = train(tmp_path / "second", 1, *RUN, *BF16, *load)
    assert converted(output) == ["momentum_buffer from torch.float32 to torch.bfloat16"]
    expected = momenta([first[0]["after"]])
    for name, momentum in momenta([rank["before"]]).items():
        assert torch.equal(momentum, expected[name].bfloat16())
    assert 2 * state_bytes(tmp_path / "16") == state_bytes(tmp_path / "32") > 0
    assert rank["groups"][0][0]["momentum_steps"] == 2  # of this kind


@pytest.mark.full
@pytest.mark.parametrize("dtype", [BF16, INT8], ids=["bf16", "int8"])
@pytest.mark.parametrize(
    "layout",
    [[], ["--use-distributed-optimizer"], ["--ckpt-format", "torch"]],
    ids=["replicas", "distributed", "torch"],
)
def test_data_parallel_ranks_resume_bit_for_bit(tmp_path, layout, dtype):
    resumed(tmp_path, 2, *RUN, *dtype, *layout, "--bf16")


def test_megatrons_own_adam_has_no_such_momentum():
    said = refused("--num-layers", 1, "--train-iters", 1, "--optimizer", "adam", *BF16)
    assert "--optimizer-momentum-dtype bf16 is for the momenta of this package's optimizers" in said
