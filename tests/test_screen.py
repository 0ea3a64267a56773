"""How far long work has come is said on a terminal alone."""

import io

import pytest

from megatron_eopt import screen


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_said_on_a_terminal_alone(monkeypatch, terminal):
    clock = iter(range(0, 1000, 10))
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(screen.time, "monotonic", lambda: float(next(clock)))
    monkeypatch.setattr(screen.sys, "stderr", stream)
    assert list(screen.progress("abc", [1.0, 1.0, 2.0], "work")) == ["a", "b", "c"]
    said = stream.getvalue()
    if terminal:
        assert "work: 25% done, 30 s left" in said
        assert "work: 50% done, 20 s left" in said
        assert said.endswith("\r\x1b[K")
    else:
        assert said == ""


def test_short_work_says_nothing(monkeypatch):
    stream = Terminal()
    monkeypatch.setattr(screen.sys, "stderr", stream)
    assert list(screen.progress("ab", [1.0, 1.0], "work")) == ["a", "b"]
    assert stream.getvalue() == ""
