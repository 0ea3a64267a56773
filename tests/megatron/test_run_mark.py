"""Two runs that save to one folder: which is refused, which is warned of, and what stops nobody."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_eopt.megatron.checkpoints import run_mark
from megatron_eopt.megatron.checkpoints.run_mark import FILE, RunMark, process
from tests.megatron.runs import MUON, SMALL_GPT, start

ELSEWHERE = ("another-boot", "pid:[1]", "7", "99")
REFUSED = "another run saves to"


@pytest.fixture(autouse=True, scope="module")
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def other():
    """A process of this machine that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        yield child
        child.kill()


def mark(folder, name, at="at noon"):
    (folder / FILE).write_text(f"{' '.join(name)} process {name[2]} on node7, {at}")


def begin(folder, load=None):
    return RunMark(SimpleNamespace(save=str(folder), load=load and str(load)))


def marked(folder):
    """The process that the mark in a folder is of."""
    return tuple((folder / FILE).read_text().split()[:4])


def test_the_first_run_of_a_folder_says_nothing_and_writes_its_mark_again(tmp_path, capsys):
    folder = tmp_path / "new" / "checkpoint"
    run = begin(folder)
    for _ in range(2):
        (folder / FILE).unlink()
        run.write()
        assert marked(folder) == process(os.getpid())
    begin(folder)  # of the same process
    assert capsys.readouterr().out == ""
    assert [path.name for path in folder.iterdir()] == [FILE]


def test_beside_a_live_process_of_this_machine_a_run_is_refused_at_start(tmp_path, other):
    mark(tmp_path, process(other.pid))
    before = (tmp_path / FILE).read_text()
    with pytest.raises(ValueError, match=rf"{REFUSED} {tmp_path}: process {other.pid} on node7, at noon.*delete"):
        begin(tmp_path)
    assert (tmp_path / FILE).read_text() == before


def test_of_two_that_begin_at_once_the_second_is_refused_before_it_saves(tmp_path, other):
    run = begin(tmp_path)
    mark(tmp_path, process(other.pid))
    with pytest.raises(ValueError, match=REFUSED):
        run.write()
    assert marked(tmp_path) == process(other.pid)


@pytest.mark.parametrize("how", ["zombie", "gone", "another with the same number"])
def test_a_process_that_ended_stops_nobody(tmp_path, other, capsys, how):
    name = process(other.pid)
    mark(tmp_path, (*name[:3], "1") if "same number" in how else name)  # which started with the machine
    if "same number" not in how:
        other.kill()
        while Path(f"/proc/{other.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)
    if how == "gone":
        other.wait()
    begin(tmp_path)
    assert capsys.readouterr().out == ""
    assert marked(tmp_path) == process(os.getpid())


@pytest.mark.parametrize("differs", [0, 1], ids=["machine", "container"])
def test_of_a_process_elsewhere_a_run_is_warned_and_goes_on(tmp_path, other, capsys, differs):
    name = list(process(other.pid))
    name[differs] = ELSEWHERE[differs]
    mark(tmp_path, name)
    run = begin(tmp_path)
    said = capsys.readouterr().out
    assert f"warning: another run saved to {tmp_path}: process {other.pid} on node7, at noon." in said
    run.write()
    assert capsys.readouterr().out == ""
    assert marked(tmp_path) == process(os.getpid())


def test_of_two_machines_the_run_that_saves_again_refuses_the_other(tmp_path, capsys):
    mark(tmp_path, ELSEWHERE)
    later = begin(tmp_path)
    for _ in range(2):  # an old mark that is put back, as by a copy of the folder, refuses nobody
        mark(tmp_path, ELSEWHERE)
        later.write()
        assert marked(tmp_path) == process(os.getpid())
    mark(tmp_path, ELSEWHERE, at="at one")
    with pytest.raises(ValueError, match=rf"{REFUSED} {tmp_path}: process 7 on node7, at one\."):
        later.write()
    assert marked(tmp_path) == ELSEWHERE
    earlier = begin(tmp_path / "other")
    mark(tmp_path / "other", ELSEWHERE)
    capsys.readouterr()
    earlier.write()
    assert "warning: another run saved to" in capsys.readouterr().out
    assert marked(tmp_path / "other") == process(os.getpid())


def test_a_mark_that_was_cut_off_refuses_nobody(tmp_path, other):
    name = " ".join(process(other.pid))
    for damaged in [*(name[:length] for length in range(len(name))), "\0 \0 ../../x \n \n", "a b . d e"]:
        (tmp_path / FILE).write_text(damaged)
        begin(tmp_path)
        assert marked(tmp_path) == process(os.getpid())


def test_where_nothing_can_be_written_the_run_goes_on_and_says_so(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").write_text("")
    begin(tmp_path / "file" / "checkpoint").write()
    assert "would not be noticed: [Errno" in capsys.readouterr().out
    mark(tmp_path, ELSEWHERE)  # of somebody else, who lets nobody write there

    def denied(path, text):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "write_text", denied)
    run = begin(tmp_path)
    for _ in range(3):
        run.write()


def test_ranks_that_were_numbered_anew_are_one_run(tmp_path, other, monkeypatch):
    """The first rank of before, which wrote the mark, is now another one."""
    mark(tmp_path, process(other.pid))
    monkeypatch.setattr(run_mark, "distinct", lambda own: [own, process(other.pid)])
    begin(tmp_path)
    assert marked(tmp_path) == process(os.getpid())


@pytest.mark.parametrize(
    ("tracker", "load", "warned"),
    [("30", None, True), ("30", "elsewhere", True), ("30", "link", False), ("", None, False)],
)
def test_a_run_that_begins_anew_among_checkpoints_is_warned(tmp_path, capsys, tracker, load, warned):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    (folder / "latest_checkpointed_iteration.txt").write_text(tracker)
    run = begin(folder, load and tmp_path / load)
    said = f"warning: {folder} has checkpoints (the latest: 30), and this run does not load them"
    assert (said in capsys.readouterr().out) == warned
    run.write()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("args", [None, SimpleNamespace(save=None), SimpleNamespace(save="msc://bucket/checkpoint")])
def test_without_a_folder_there_is_no_mark(tmp_path, monkeypatch, args):
    monkeypatch.chdir(tmp_path)
    RunMark(args).write()
    assert not list(tmp_path.iterdir())


RUN = [*SMALL_GPT, "--num-layers", 2, *MUON, "--ckpt-format", "torch_dist", "--train-iters", 100_000]


@pytest.mark.wide
def test_two_runs_at_once_and_a_restart_of_the_one_that_was_killed(tmp_path):
    folder = tmp_path / "checkpoint"
    save, tracker = ["--save", folder, "--save-interval", 10], folder / "latest_checkpointed_iteration.txt"
    first = threading.Thread(target=start, args=(1, *RUN, *save), kwargs={"forked": False})
    first.start()
    while not tracker.exists():
        assert first.is_alive()
        time.sleep(0.1)
    second = start(2, *RUN, *save, "--tensor-model-parallel-size", 2)
    owner = int(marked(folder)[2])
    refused = f"ValueError: {REFUSED} {folder}: process {owner} on "
    assert (second.returncode, second.stdout.count(refused)) == (1, 2), second.stdout[-3000:]
    assert first.is_alive()
    assert os.getpgid(owner) == owner
    os.killpg(owner, signal.SIGKILL)  # and what it has started
    first.join()
    assert marked(folder)[2] == str(owner)
    restarted = start(1, *RUN, *save, "--load", folder, "--exit-interval", 10)
    assert restarted.returncode == 0, restarted.stdout[-3000:]
    assert "successfully loaded checkpoint" in restarted.stdout
    assert not [line for line in restarted.stdout.splitlines() if "another run" in line or "does not load" in line]
    assert not (folder / FILE).exists()
    again = start(1, *RUN, *save, "--exit-interval", 10)
    assert f"warning: {folder} has checkpoints (the latest: " in again.stdout
