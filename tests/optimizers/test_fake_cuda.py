"""Every optimizer on CUDA tensors without numbers: from step 2 on nothing is read back or copied from the host.

What waits for a GPU is so found without one. Torch has no events, streams and pinned memory without a GPU: the counts
of skipped steps, which are copied on the way, are tested in test_gradients.py.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron_eopt import Execution, Muon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.parallel import agreement, engine
from megatron_eopt.settings.execution import gathered
from megatron_eopt.step.nonfinite import NonFinite
from tests.optimizers.family import RECORDS

RANKS, STEPS = 8, 4
SHAPES = [(64, 32), (64, 32), (32, 64), (48, 48)]
VARIANTS = {
    **{name: (name, {}) for name in OPTIMIZERS},
    "adamuon": ("adaptive_muon", {"moment2_method": "adamuon"}),
    "namo": ("adaptive_muon", {"moment2_method": "namo"}),
    "bases in each step": ("soap", {"precondition_frequency": 1}),
    "sorted bases in each step": ("soap", {"precondition_frequency": 1, "sort_bases": "after"}),
    "bf16 momenta": ("muon", {"momentum_dtype": torch.bfloat16}),
    "fp32": ("muon", {"fp32_matmul_prec": "highest"}),
    "TF32": ("muon", {"fp32_matmul_prec": "high"}),
}
MODES = [("muon", {"tp_mode": mode}) for mode in ("duplicated", "distributed", "gram", "owner", "auto", "blockwise")]
SENDING = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "reduce", "broadcast")


class HostWaits(TorchDispatchMode):
    """Notes what reads a value of a CUDA tensor, which is 1 here, and what copies from the host to one or back."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name == "_local_scalar_dense" and tensors[0].device.type == "cuda":
            self.found.append(name)
            dtype = tensors[0].dtype
            return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        result = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in [*tensors, *tree_leaves(result)] if isinstance(x, torch.Tensor) and x.ndim}
        if name in ("_to_copy", "copy_", "_foreach_copy_") and devices == {"cpu", "cuda"}:
            self.found.append(name)
        if name in ("nonzero", "masked_select", "unique", "_unique2", "equal"):
            self.found.append(name)
        return result


@pytest.fixture
def world():
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def waits_of_steps(name, monkeypatch, group=None, **settings):
    """What each step waits for, in one process or as a rank of a tensor-parallel group."""
    monkeypatch.setattr(NonFinite, "_report", lambda self, *args: None)
    row = OPTIMIZERS[name]
    if row.takes("symmetric_products"):
        settings["symmetric_products"] = "torch"  # nothing can be timed here
    if group is not None:
        settings["pg_collection"] = SimpleNamespace(tp=group, expt_tp=None)
    found = []
    with ExitStack() as modes:
        modes.enter_context(FakeTensorMode())
        params = []
        for rows, cols in SHAPES:
            p = torch.nn.Parameter(torch.empty(rows // (RANKS if group else 1), cols, device="cuda"))
            p.tensor_model_parallel, p.partition_dim = group is not None, 0
            params.append(p)
        if row.owns == "all":
            params.append(torch.nn.Parameter(torch.empty(7, device="cuda")))
        settings = {"lr": 0.01, **RECORDS[name].settings, **settings}
        optimizer = row.cls(params, **gathered(row.cls, settings))
        for _ in range(STEPS):
            for p in params:
                p.grad = torch.empty_like(p)
            with HostWaits() as waits:
                optimizer.step()
            found.append(waits.found)
    return found


@pytest.mark.parametrize("variant", VARIANTS)
def test_nothing_waits_for_the_host_from_the_second_step_on(variant, monkeypatch):
    name, settings = VARIANTS[variant]
    _, *later = waits_of_steps(name, monkeypatch, **settings)
    assert later == [[]] * (STEPS - 1)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "settings"), [*((each, {}) for each in OPTIMIZERS), *MODES], ids=str)
def test_ranks_wait_for_no_host_and_send_what_lies_together(name, settings, monkeypatch, world):
    """NCCL takes contiguous tensors alone; gloo takes more."""
    sent = []

    def sending(collective):
        send = getattr(dist, collective)

        def checked(*args, **kwargs):
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            sent.append((collective, [(x.is_contiguous(), x.device.type) for x in tensors]))
            return send(*args, **kwargs)

        return checked

    for collective in SENDING:
        monkeypatch.setattr(dist, collective, sending(collective))
    monkeypatch.setattr(agreement, "check_same", lambda *args: None)  # hashes of real ranks
    monkeypatch.setattr(engine, "check_same", lambda *args: None)
    _, *later = waits_of_steps(name, monkeypatch, world, **settings)
    assert later == [[]] * (STEPS - 1)
    # what is agreed at a start may be on the host, which a group of NCCL alone gets on its device
    kinds = {(collective, kind) for collective, of_tensors in sent for kind in of_tensors}
    assert kinds
    assert {kind for _, kind in kinds} <= {(True, "cuda"), (True, "cpu")}, kinds
    assert {collective for collective, (_, device) in kinds if device == "cpu"} <= {"all_reduce"}


@pytest.mark.parametrize(("settings", "warns"), [({}, True), ({"fp32_matmul_prec": "highest"}, False)])
def test_products_in_fp32_that_nobody_asked_for_are_told(settings, warns, caplog):
    for device in ("cuda", "cpu"):
        caplog.clear()
        with FakeTensorMode():
            Muon([torch.nn.Parameter(torch.empty(8, 8, device=device))], [], **settings)
        assert ("fp32_matmul_prec='medium'" in caplog.text) == (warns and device == "cuda")


def test_waits_are_found():
    with FakeTensorMode():
        x = torch.empty(3, device="cuda")
        for wait in (lambda: x[0].item(), lambda: bool(x.any()), lambda: x.cpu(), lambda: torch.ones(3).to(x.device)):
            with HostWaits() as waits:
                wait()
            assert len(waits.found) == 1


def test_a_rate_on_a_gpu_is_not_read_for_adamw(monkeypatch):
    monkeypatch.setattr(NonFinite, "_report", lambda self, *args: None)
    with FakeTensorMode():
        params = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in [(8, 8), (7,)]]
        optimizer = Muon(
            params[:1],
            params[1:],
            adam_fused=True,
            fp32_matmul_prec="highest",
            execution=Execution(symmetric_products="torch"),
        )
        optimizer.adamw.step = lambda: None  # which torch cannot make of a tensor without numbers
        for _ in range(3):
            optimizer.param_groups[0]["lr"] = torch.empty((), device="cuda")
            for p in params:
                p.grad = torch.empty_like(p)
            with HostWaits() as waits:
                optimizer.step()
        assert waits.found == []
