"""``megatron-eopt verify-checkpoint`` on what real Megatron saved: whole, and damaged in every way that disks know."""

import re

import pytest

from megatron_eopt.cli import main
from tests.megatron.runs import FILES, MUON, TP2, train


@pytest.fixture(scope="module", params=[(1, []), (2, ["--bf16", *TP2])], ids=["fp32", "bf16"])
def saved(request, tmp_path_factory):
    folder, (ranks, flags) = tmp_path_factory.mktemp("saved"), request.param
    save = ["--save", folder / "checkpoint", "--save-interval", 1]
    train(folder / "run", ranks, "--num-layers", 2, *MUON, "--train-iters", 2, *FILES, *flags, *save)
    return folder / "checkpoint", flags


def verify(capsys, *arguments):
    status = main(["verify-checkpoint", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def test_who_owned_what(saved, capsys):
    """The table that the run printed."""
    folder = saved[0]
    status, out, _ = verify(capsys, folder, "--manifest")
    assert re.search(r"^muon: lr .* \(matrix\)$", out, re.MULTILINE)
    lines = [line.split() for line in out.splitlines()]
    assert ["2", "128x64", "decoder.layers.*.self_attention.linear_qkv.weight"] in lines
    assert ["muon", "8", "61,440", "12", "0.246"] in lines
    assert any(line[:1] == ["adam"] for line in lines)
    assert status == 0


def test_a_whole_one(saved, capsys):
    folder, flags = saved
    status, out, _ = verify(capsys, folder)
    assert status == 0, out
    assert "iteration   2\n" in out
    assert "optimizer   TensorParallelMuon" in out
    assert ("TP 2" in out) == bool(flags)
    assert out.splitlines()[-1] == "OK"
