"""Saves that are cut off, and checkpoints that are damaged: the run goes on, or says why it does not."""

import hashlib
import io
import re
import shutil
import signal

import pytest
import torch

from megatron_eopt.checkpoints.contents import newest
from megatron_eopt.cli import main
from tests.checkpoints import made
from tests.checkpoints.payloads import Call
from tests.megatron.runs import ADAPTIVE, FAULTY, FILES, MUON, SHARED, SMALL_GPT, TP2, assert_same, full, start

pytestmark = pytest.mark.wide

RUN = ["--num-layers", 2, *FILES, "--train-iters", 6]
NORMUON = [*ADAPTIVE, "normuon"]
EVERY_TWO = ["--save-interval", 2, "--save"]
ASYNC = ["--async-save", "--async-strategy", "mcore", "--use-persistent-ckpt-worker"]
TRACKER = "latest_checkpointed_iteration.txt"
MOMENTUM = "optimizer.state.momentum_buffer.decoder.layers.mlp.linear_fc2.weight"


def begun(folder, *arguments, fault=""):
    """Train the small GPT on one rank, in the subfolder ``directory``; the exit status and the output."""
    (folder / "directory").mkdir(parents=True)
    how = {"program": FAULTY, "record": folder, "directory": folder / "directory", "environment": {"FAULT": fault}}
    done = start(1, *SMALL_GPT, *RUN, *arguments, timeout=120, **how)
    return done.returncode, done.stdout


def completed(folder, *arguments, fault=""):
    """What a run recorded that ends as it should."""
    status, output = begun(folder, *arguments, fault=fault)
    assert status == 0, output[-4000:]
    return torch.load(folder / "0.pt"), output


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """Checkpoints of iterations 2, 4 and 6, and what their run recorded."""
    folder = tmp_path_factory.mktemp("straight")
    return folder / "checkpoint", completed(folder / "run", *MUON, *EVERY_TWO, folder / "checkpoint")[0]


@pytest.fixture
def checkpoint(straight, tmp_path):
    """A copy with those of iterations 2 and 4, to be damaged."""
    folder = shutil.copytree(straight[0], tmp_path / "checkpoint", ignore=shutil.ignore_patterns("iter_0000006"))
    (folder / TRACKER).write_text("4")
    return folder


def verify(capsys, folder):
    status = main(["verify-checkpoint", str(folder)])
    out, err = capsys.readouterr()
    return status, out + err


def assert_ends_as(resumed, straight, steps):
    assert len(resumed["grad_norms"]) == steps
    assert_same(resumed["after"], straight["after"])
    for figure in ("losses", "grad_norms"):
        assert resumed[figure] == straight[figure][-len(resumed[figure]) :]


def assert_goes_on(tmp_path, folder, straight, capsys, steps=4):
    """A run that loads what is in a folder ends as the straight one, and leaves nothing of a save that was cut off."""
    resumed, _ = completed(tmp_path / "resumed", *MUON, "--load", folder, *EVERY_TWO, folder)
    assert_ends_as(resumed, straight[1], steps)
    assert files(folder).keys() == files(straight[0]).keys()
    for iteration in (2, 4, 6):
        status, report = verify(capsys, folder / f"iter_000000{iteration}")
        assert (status, "warning" in report) == (0, False), report


def files(folder):
    """Every file below a folder, with a hash of its bytes."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        full("begins", "the save did not finish"),
        ("data", "the save did not finish"),
        full("layout", "the save did not finish"),
        full("complete", "OK"),
    ],
)
def test_killed_while_saving(tmp_path, straight, capsys, fault, said):
    folder = tmp_path / "checkpoint"
    status, output = begun(tmp_path / "killed", *MUON, *EVERY_TWO, folder, fault=fault)
    assert status == -signal.SIGKILL, output[-3000:]
    assert (folder / TRACKER).read_text() == "2"
    status, report = verify(capsys, folder)
    assert (status, report.splitlines()[-1]) == (0, "OK")
    assert said in verify(capsys, folder / "iter_0000004")[1]
    assert_goes_on(tmp_path, folder, straight, capsys)


def test_killed_while_the_tracker_is_written(tmp_path, straight, capsys):
    """Opening has emptied it: Megatron alone ends with status 0 and without a step on every attempt to resume."""
    folder = tmp_path / "checkpoint"
    assert begun(tmp_path / "killed", *MUON, *EVERY_TWO, folder, fault="tracker")[0] == -signal.SIGKILL
    assert (folder / TRACKER).read_text() == ""
    status, report = verify(capsys, folder)
    assert status == 2
    assert "says '', and no such checkpoint is there" in report
    assert_refused(*begun(tmp_path / "refused", *MUON, "--load", folder), ["says ''", "write the number of another"])
    (folder / TRACKER).write_text("4")
    assert_goes_on(tmp_path, folder, straight, capsys, steps=2)


@pytest.mark.parametrize("flags", [[], ["--ckpt-assume-constant-structure"]], ids=["", "constant structure"])
@pytest.mark.shows("--async-save")
def test_an_asynchronous_save_has_the_state_of_its_iteration(tmp_path, capsys, flags):
    """Though the writer does not finish before two more steps have been made.

    The save of iteration 4 is the second: with a constant structure, it holds the plans of the first.
    """
    folder, flags = tmp_path / "checkpoint", [*NORMUON, *ASYNC, *flags]
    run, output = completed(tmp_path / "run", *flags, *EVERY_TWO, folder, fault="late")
    assert "scheduled an async checkpoint save at iteration       4" in output
    assert verify(capsys, folder / "iter_0000004")[0] == 0
    again = ["--load", folder, "--ckpt-step", 4, *EVERY_TWO, tmp_path / "again"]
    resumed, _ = completed(tmp_path / "resumed", *flags, *again)
    assert_ends_as(resumed, run, 2)


def test_a_full_disk_leaves_what_was_saved_before(tmp_path, straight, capsys):
    folder = tmp_path / "checkpoint"
    status, output = begun(tmp_path / "full", *MUON, *EVERY_TWO, folder, fault="full")
    assert status == 1, output[-4000:]
    assert verify(capsys, folder)[0] == 0
    assert_goes_on(tmp_path, folder, straight, capsys)


def missing(folder):
    (newest(folder) / "__0_0.distcp").unlink()


def flipped(folder):
    """One bit of a momentum."""
    file, start, length = made.archive_of(newest(folder), MOMENTUM)
    raw = bytearray(file.read_bytes())
    archive = bytes(raw[start : start + length])
    data = torch.load(io.BytesIO(archive)).numpy().tobytes()
    raw[start + archive.index(data) + len(data) // 2] ^= 4
    file.write_bytes(raw)


def tracker_of_another(folder):
    (folder / TRACKER).write_text("9")


def common_with(change):
    def damage(folder):
        made.change_common(newest(folder), change)

    return damage


def code(folder):
    """A program that writes into a folder."""
    return Call(exec, (f"open({str(folder / 'mark')!r}, 'w')",))


def code_in_the_layout(folder):
    made.change_layout(newest(folder), lambda metadata: setattr(metadata, "planner_data", code(folder)))


def code_in_an_object(folder, key="rng_state"):
    """In the place of what a rank saved."""
    made.put_object(newest(folder), key, [code(folder)])


# Other ways to put code into a file: tests/checkpoints/test_gate.py. Other data in a tensor's place: test_sums.py.
DAMAGES = {
    "missing": (missing, ["__0_0.distcp", "No such file", "megatron-eopt verify-checkpoint"]),
    "flipped": (flipped, [MOMENTUM, "are not what was saved", "load another checkpoint"]),
    "checksums are gone": (
        common_with(lambda common: common.pop("megatron_eopt_checksums")),
        ["checksums of its tensors are gone", "--no-checksums"],
    ),
    "tracker of another": (
        tracker_of_another,
        [TRACKER, "says '9', and no such checkpoint is there"],
    ),
    "code in the layout": (
        code_in_the_layout,
        ["GLOBAL builtins.exec", "--trust-checkpoint-globals"],
    ),
    "code in an object": (
        code_in_an_object,
        ["GLOBAL exec", "--trust-checkpoint-globals"],
    ),
}


def assert_refused(status, output, words):
    assert status == 1, output[-4000:]
    error = output.partition("Traceback (most recent call last)")[2]
    assert all(word in error for word in words), error
    assert not re.search(r"iteration +\d+/", output)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_refused(tmp_path, checkpoint, damage):
    make, words = DAMAGES[damage]
    make(checkpoint)
    before = files(checkpoint)
    status, output = begun(tmp_path / "resumed", *MUON, "--load", checkpoint, *EVERY_TWO, checkpoint)
    assert_refused(status, output, words)
    assert files(checkpoint) == before


@pytest.mark.parametrize("damage", ["missing", "code in the layout"])
def test_two_ranks_refuse_together(checkpoint, damage):
    make, words = DAMAGES[damage]
    make(checkpoint)
    done = start(2, *SMALL_GPT, *RUN, *MUON, *TP2, "--load", checkpoint, timeout=120)
    assert_refused(done.returncode, done.stdout, words)


def test_code_is_refused_before_arguments_are_read(tmp_path, checkpoint):
    """Which comes before there is a process group."""
    code_in_an_object(checkpoint, "common_state")
    status, output = begun(tmp_path / "resumed", *MUON, "--load", checkpoint, "--use-checkpoint-args")
    assert_refused(status, output, ["GLOBAL exec", "--trust-checkpoint-globals"])
    assert "load_args_from_checkpoint" in output
    assert not (checkpoint / "mark").exists()


def test_a_save_writes_nothing_elsewhere(tmp_path):
    folder = tmp_path / "checkpoint"
    completed(tmp_path / "run", *NORMUON, "--bf16", *SHARED, *EVERY_TWO, folder, "--exit-interval", 2)
    written = sorted(files(folder))
    assert written == [f"iter_0000002/{name}" for name in (".metadata", "__0_0.distcp", "metadata.json")] + [TRACKER]
    assert not list((tmp_path / "run" / "directory").iterdir())  # where it ran
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "run"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["0.pt", "directory"]
