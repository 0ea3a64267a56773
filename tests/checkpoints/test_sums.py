"""Checksums of whole tensors: what moved shows, and nothing turns the comparison off without a word."""

import io

import pytest
import torch

from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.checkpoints.sums import CHECKSUMS, saved_sums
from megatron_eopt.cli import main
from tests.checkpoints import made

MOMENTUM, FIRST = "optimizer.state.momentum_buffer.mlp.fc1", "optimizer.state.exp_avg.norm"


def saved(folder, change=None, dtype=torch.float32):
    """A checkpoint with checksums; its folder."""
    values = made.tensors(dtype=dtype)
    state = made.common(bf16=dtype == torch.bfloat16)
    state["optimizer"][0]["megatron_eopt"] = made.block(checksums=True)
    state[CHECKSUMS] = made.sums(values)
    if change is not None:
        change(state)
    return made.save(folder / "iter_0000005", values, state)


def verify(capsys, *arguments):
    status = main(["verify-checkpoint", *map(str, arguments)])
    return status, capsys.readouterr().out


def error_of(capsys, *arguments):
    """The only error of a checkpoint."""
    status, out = verify(capsys, *arguments)
    (error,) = lines(out, "error")
    assert status == 1
    return error


def lines(out, kind):
    return [line for line in out.splitlines() if line.startswith(f"{kind}:")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_saved_is_what_is_there(capsys, tmp_path, dtype):
    folder = saved(tmp_path, dtype=dtype)
    status, out = verify(capsys, folder)
    assert (status, lines(out, "error")) == (0, [])
    tensors = 7 if dtype == torch.float32 else 10
    assert f"{tensors} tensors compared with what was saved" in out


@pytest.mark.parametrize(
    ("one", "other"),
    [("mlp.fc1", "mlp.fc2"), (FIRST, "optimizer.state.exp_avg_sq.norm"), (MOMENTUM, "mlp.fc1")],
)
def test_exchanged_tensors(capsys, tmp_path, one, other):
    """Each archive is whole, and of the right shape and type."""
    folder = saved(tmp_path)
    offsets = [(0,) if key.endswith("norm") else (0, 0, 0) for key in (one, other)]
    made.exchange(folder, (one, offsets[0]), (other, offsets[1]))
    error = error_of(capsys, folder)
    assert all(word in error for word in (one, other, "not what was saved"))
    assert verify(capsys, folder, "--no-data")[0] == 0


def test_other_values_with_the_checksum_that_belongs_to_them(capsys, tmp_path):
    folder = saved(tmp_path)
    old = torch.load(io_of(folder, MOMENTUM))
    made.overwrite(folder, MOMENTUM, old, old.flip(0), fix_checksum=True)
    assert f"{MOMENTUM} is not what was saved" in error_of(capsys, folder)


def io_of(folder, key):
    file, start, length = made.archive_of(folder, key)
    return io.BytesIO(file.read_bytes()[start : start + length])


MALFORMED = [
    "a text",
    {"norm": (5, "8")},
    {"norm": (5, 9)},  # entries, of which it has 8
    {"norm": None},
]


@pytest.mark.parametrize("written", MALFORMED, ids=str)
def test_damaged_checksums(capsys, tmp_path, written):
    with pytest.raises(CheckpointError, match="checksums of its tensors are damaged"):
        saved_sums(written, None, {"norm": 8})
    folder = saved(tmp_path)
    made.change_common(folder, lambda common: common.update({CHECKSUMS: written}))
    for flags in ([], ["--no-data"]):
        assert "checksums of its tensors are damaged" in error_of(capsys, folder, *flags)


@pytest.mark.parametrize("said", ["saved", "not saved", "nothing"])
def test_a_checkpoint_without_checksums(capsys, tmp_path, said):
    """Optimizers of this package say whether their run saved any; Adam's and those of --no-checksums never had them."""

    def without(state):
        del state[CHECKSUMS]
        state["optimizer"][0]["megatron_eopt"]["checksums"] = said == "saved"
        if said == "nothing":
            del state["optimizer"][0]["megatron_eopt"]

    folder = saved(tmp_path, without)
    if said == "saved":
        assert "are gone" in error_of(capsys, folder)
    else:
        status, out = verify(capsys, folder)
        assert status == 0
        assert "no checksums of tensors, so exchanged data would not show" in out


def test_a_tensor_and_a_checksum_without_the_other(capsys, tmp_path):
    folder = saved(tmp_path, lambda state: state[CHECKSUMS].pop(MOMENTUM))
    status, out = verify(capsys, folder)
    (warning,) = [line for line in lines(out, "warning") if "has no checksum" in line]
    assert (status, MOMENTUM in warning) == (0, True)
    folder = saved(tmp_path / "other", lambda state: state[CHECKSUMS].update(gone=(5, 8)))
    assert "gone is not in it" in error_of(capsys, folder)


def test_a_damaged_archive_is_told_once(capsys, tmp_path):
    folder = saved(tmp_path)
    old = torch.load(io_of(folder, MOMENTUM))
    made.overwrite(folder, MOMENTUM, old, old + 1)
    assert "is damaged" in error_of(capsys, folder)


def test_a_tensor_that_is_stored_in_another_order(capsys, tmp_path):
    """What counts is what a load reads."""
    values = {"norm": torch.arange(6.0).view(2, 3)}
    state = made.common()
    state[CHECKSUMS] = made.sums(values)
    folder = made.save(tmp_path / "iter_0000005", {"norm": values["norm"].t().contiguous().t()}, state)
    status, out = verify(capsys, folder)
    assert (status, out.splitlines()[-1]) == (0, "OK")
