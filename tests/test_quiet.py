"""Figures of time are refused where others take the machine."""

import pytest
import quiet


@pytest.fixture
def machine(monkeypatch):
    """A machine whose load and clock are set."""
    now = {"load": 0.1, "seconds": 0.0}
    monkeypatch.setattr(quiet.os, "getloadavg", lambda: (now["load"], 0.0, 0.0))
    monkeypatch.setattr(quiet.time, "monotonic", lambda: now["seconds"])
    return now


def test_others_are_refused_before_and_after(machine):
    machine["load"] = 3.0
    with pytest.raises(SystemExit, match=r"a load of 3\.00 before .* at most 0\.50 .*--any-load"):
        quiet.Load(own=2)
    machine["load"] = 0.1
    load = quiet.Load(own=2)
    machine.update(load=4.0, seconds=600.0)
    with pytest.raises(SystemExit, match=r"a load of 2\.00 while it was measured"):
        load.check()


def test_own_processes_are_none(machine):
    load = quiet.Load(own=2)
    machine.update(load=2.2, seconds=600.0)
    load.check()
    assert load.words == "load of others 0.10 before, 0.20 at most"


def test_any_load_is_said(machine):
    machine["load"] = 3.0
    load = quiet.Load(own=1, anyway=True)
    load.check()
    assert load.words.endswith("taken with --any-load")


def test_rounds_are_told_with_least_and_most():
    assert quiet.spread([3.0, 1.0, 2.0], ".1f") == "2.0 (1.0-3.0)"
