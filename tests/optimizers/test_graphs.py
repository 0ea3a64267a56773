"""A captured step. Without a GPU the capture is a function that is called again: it shows what would be replayed."""

from contextlib import contextmanager

import pytest
import torch

import megatron_eopt
from megatron_eopt import Execution, TensorParallelMuon
from megatron_eopt.step.momenta.cuda_graph import capture_cuda
from tests.optimizers.field import gradient, matrix
from tests.optimizers.on_gpu import captured

CUDA = torch.cuda.is_available()


def pair(device):
    """The same optimizer twice, and once with its step captured."""
    parameters = [[torch.nn.Parameter(m.detach().to(device)) for m in (matrix(), matrix(5, 7, 1))] for _ in range(2)]
    plain, other = (
        TensorParallelMuon([{"params": p[:1]}, {"params": p[1:], "weight_decay": 0.3}], lr=0.1) for p in parameters
    )
    return parameters, plain, captured(other, *([capture_cuda] if CUDA else []))


def set_gradients(parameters, seed):
    for p in parameters:
        p.grad = gradient(p.detach().cpu(), seed).to(p.device)


def test_a_captured_step_is_the_step_while_rates_change():
    (plain_p, captured_p), plain, graphed = pair("cuda" if CUDA else "cpu")
    for step in range(5):
        for parameters, opt in ((plain_p, plain), (captured_p, graphed)):
            set_gradients(parameters, step)
            for group in opt.param_groups:
                group["lr"] = 0.1 / (step + 1)
                group["weight_decay"] = 0.1 * step
            opt.step()
        for p, q in zip(plain_p, captured_p, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("moving", "captures"), [((), 1), ((1,), 1), ((4,), 2)])
def test_gradients_are_copied_once_they_have_moved(moving, captures):
    device = "cuda" if CUDA else "cpu"
    (plain_p, captured_p), plain, graphed = pair(device)
    runs = []

    def capture(run):
        runs.append(run)
        return capture_cuda(run) if CUDA else run

    captured(graphed, capture)
    kept = []  # memory of gradients, which is not given to the next ones
    for step in range(8):
        set_gradients(plain_p, step)
        for p, q in zip(plain_p, captured_p, strict=True):
            kept.append(q.grad)
            moves = step == 0 or step in moving
            q.grad = p.grad.clone() if moves else q.grad.copy_(p.grad)
        plain.step()
        graphed.step()
    assert len(runs) == captures
    for p, q in zip(plain_p, captured_p, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


class Cuda:
    """What torch.cuda is asked for by a capture, in order; the replay is asked for, too."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(torch.cuda, "device", lambda device: self.during("device", str(device)))
        monkeypatch.setattr(torch.cuda, "graph", lambda graph, **how: self.during("graph", how))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)

    def replay(self):
        self.calls.append("replay")

    @contextmanager
    def during(self, what, how):
        self.calls.append((what, how))
        yield
        self.calls.append(f"end of {what}")


def test_a_capture_does_not_mind_other_threads(monkeypatch):
    """A thread that pins memory for a data loader breaks a capture that looks at all threads, torch's default."""
    cuda = Cuda(monkeypatch)
    capture_cuda(lambda: cuda.calls.append("run"), torch.device("cuda:1"))()
    opening = [("device", "cuda:1"), ("graph", {"capture_error_mode": "thread_local"})]
    assert cuda.calls == [*opening, "run", "end of graph", "end of device", "replay"]


def stepped(monkeypatch):
    """CUDA without a device, and an optimizer that has captured its step there."""
    cuda = Cuda(monkeypatch)
    (_, parameters), _, graphed = pair("cpu")
    captured(graphed, None)
    set_gradients(parameters, 0)
    for _ in range(3):  # two before it compile kernels
        graphed.step()
    return cuda, graphed


@pytest.mark.skipif(CUDA, reason="there is a CUDA device")
def test_a_step_is_captured_on_the_device_of_its_parameters(monkeypatch):
    cuda, _ = stepped(monkeypatch)
    assert cuda.calls[0] == ("device", "cpu")
    assert cuda.calls[-1] == "replay"


def test_what_was_captured_may_not_change():
    (_, parameters), _, graphed = pair("cuda" if CUDA else "cpu")
    set_gradients(parameters, 0)
    graphed.step()
    graphed.param_groups[0]["momentum"] = 0.5
    with pytest.raises(RuntimeError, match="only learning rate and weight decay may change"):
        graphed.step()


@pytest.mark.skipif(CUDA, reason="there is a CUDA device")
def test_a_step_is_captured_anew_after_a_new_plan(monkeypatch):
    """What was captured reads tables of the old one, whose memory is given back."""
    cuda, graphed = stepped(monkeypatch)
    graphed.param_groups[0]["num_ns_steps"] = 3
    graphed.prepare()
    graphed.param_groups[0]["num_ns_steps"] = 5
    for _ in range(3):
        graphed.step()
    assert cuda.calls.count("end of graph") == 2


@pytest.mark.skipif(CUDA, reason="there is a CUDA device")
def test_without_a_cuda_device_it_is_refused():
    with pytest.raises(ValueError, match=r"cuda_graphs cannot work .* not on a CUDA device, got one on cpu"):
        TensorParallelMuon([matrix()], execution=Execution(cuda_graphs=True))


def test_a_step_without_any_gradient_changes_nothing():
    p = matrix()
    before = p.detach().clone()
    captured(TensorParallelMuon([p])).step()
    assert torch.equal(before, p)


def test_a_watched_step_has_figures_and_changes_no_bit():
    device = "cuda" if CUDA else "cpu"
    seen = []
    (of_one, of_other), one, other = pair(device)
    captured(one, *([capture_cuda] if CUDA else []))
    megatron_eopt.watch(other, lambda step, metrics: seen.append(metrics["muon"]["update_rms"]), 4)
    for step in range(6):
        for parameters, optimizer in ((of_one, one), (of_other, other)):
            set_gradients(parameters, step)
            optimizer.step()
    assert seen
    assert all(seen)
    assert all(torch.equal(p, q) for p, q in zip(of_one, of_other, strict=True))
