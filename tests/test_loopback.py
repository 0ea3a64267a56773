"""No run that we start listens where another machine could reach it: torch's store has no password."""

import ipaddress
import os
import re
import subprocess
import sys

import pytest

from tests.distributed.ranks import run_ranks
from tests.megatron.listening import listeners
from tests.megatron.runs import LAUNCHER, ROOT, start

PROGRAM = ROOT / "tests" / "megatron" / "listening.py"


def assert_on_loopback(printed, ranks=2):
    found = re.findall(r"listens on (.*)", printed)
    assert len(found) == ranks, printed[-3000:]
    for of_rank in found:
        addresses = [ipaddress.ip_address(each) for each in of_rank.split()]
        assert len(addresses) >= 2  # gloo's, and that of the store
        assert all(each.is_loopback for each in addresses), of_rank


def test_the_launcher_of_the_demo_and_the_examples():
    command = [sys.executable, ROOT / "examples/loopback.py", "--nproc-per-node=2", PROGRAM, "gloo", str(os.getpid())]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    assert_on_loopback(done.stdout)


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=pytest.mark.wide)])
def test_runs_of_megatron(forked):
    done = start(2, "nccl", os.getpid(), program=[*LAUNCHER[:-1], str(PROGRAM)], forked=forked)
    assert_on_loopback(done.stdout)


def of_rank(rank, ranks):
    return listeners(os.getpid())


def test_ranks_of_plain_torch():
    for found in run_ranks(of_rank, 2):
        assert not {"::", "0.0.0.0"} & set(found)


def test_several_nodes_are_refused():
    command = [sys.executable, ROOT / "examples/loopback.py", "--nnodes", "2", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "on one machine" in done.stderr
