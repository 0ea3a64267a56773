"""What is done on CUDA devices alone, executed with stand-ins for torch.cuda and on tensors without numbers."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_eopt.orthogonalize.products import Products
from megatron_eopt.parallel.watched import Watched
from tests.optimizers.test_program import Names

CUDA = torch.device("cuda:1")


def test_phases_of_a_step_are_timed_by_events_of_the_stream(monkeypatch):
    """Each belongs to the device of the parameters, which need not be the current one; nothing waits in the step."""
    clock, log = iter(range(0, 1000, 10)), []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            self.at = next(clock)
            log.append(stream)

        def elapsed_time(self, end):  # in milliseconds
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(f"waited for {device}"))
    watched = Watched(CUDA)
    with watched.phase("update"), watched.phase("exchange"), watched.phase("orthogonalize"):
        pass
    with watched.phase("update"):
        pass
    assert log == ["the stream of cuda:1"] * 8
    # update 0 to 10, exchange to 20, the iteration to 30, exchange to 40, update to 50; nothing to 60; update to 70
    assert watched.seconds() == pytest.approx({"exchange": 0.02, "orthogonalize": 0.01, "update": 0.03})
    assert log[8:] == ["waited for cuda:1"]


def test_what_tensor_cores_round_is_made_symmetric():
    with FakeTensorMode():
        for dtype, last in ((torch.float16, "aten.add.out"), (torch.float32, "aten.add.out"), (torch.bfloat16, "mm")):
            x = torch.empty(3, 5, 8, dtype=dtype, device="cuda")
            c, out = torch.empty(2, 3, 5, 5, dtype=dtype, device="cuda").unbind()
            for multiply in (
                lambda: Products().gram(x, out=out),  # noqa: B023
                lambda: Products().addmm(c, c, c, beta=1.0, alpha=0.5, out=out),  # noqa: B023
            ):
                with Names() as names:
                    assert multiply() is out
                views = ("prim.", "aten.empty", "aten.new_empty", "aten.transpose")
                launched = [name for name in names.found if not name.startswith(views)]
                assert len(launched) == 1 + (last != "mm")
                assert "bmm" in launched[0]
                assert last in launched[-1]
