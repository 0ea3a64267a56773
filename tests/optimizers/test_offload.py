"""State in host memory changes no bit of a step, is on the device for two chunks at a time, and is never waited for.

It moves by as few copies as there are chunks.
"""

import copy
import re
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_eopt import Execution, TensorParallelMuon
from megatron_eopt.step.momenta import offload
from megatron_eopt.step.momenta.offload import Streamed
from megatron_eopt.step.state import on_host
from tests.optimizers.family import build, having
from tests.optimizers.field import drawn

KINDS = {
    **{name: (name, {}) for name in having("offload_fraction") if name != "adaptive_muon"},
    **{each: ("adaptive_muon", {"moment2_method": each}) for each in ("adamuon", "normuon", "namo")},
    # directions are the momenta themselves, and update() needs them
    "namo without look-ahead": ("adaptive_muon", {"moment2_method": "namo", "nesterov": False}),
}
SHAPES = [(24, 16)] * 5 + [(16, 40)] * 4 + [(8, 8)] * 3
STEPS = 4
WORKSPACE = 2**16  # of which a step takes several chunks

kinds = pytest.mark.parametrize("kind", KINDS)
IN_BF16 = "muon in bf16"


def start(kind, params=None, dtype=torch.float32, **settings):
    """An optimizer, and parameters of which one is fused; each kind has rates of its own in two groups."""
    generator = torch.Generator().manual_seed(0)
    if params is None:
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    params[1].fused = True
    name, own = KINDS.get(kind, ("muon", {"momentum_dtype": torch.bfloat16}))
    split = {"split_qkv": True, "is_qkv_fn": lambda p: getattr(p, "fused", False), "qkv_split_shapes": (4, 2, 2)}
    groups = [{"params": params[:7]}, {"params": params[7:], "lr": 0.02}]
    return build(name, groups, **{**split, **own, "workspace": WORKSPACE, **settings}), params


def run(optimizer, params, steps):
    for step in steps:
        for i, p in enumerate(params):
            p.grad = drawn(p.shape, 100 * step + i).to(p.dtype)
        if step == 4:
            params[3].grad[0, 0] = torch.nan  # the step is skipped
        if step == 2:
            params[6].grad = None
        optimizer.step()


def everything(optimizer, params):
    tensors = {(i, "p"): p.detach() for i, p in enumerate(params)}
    return tensors | {(i, key): x for i, p in enumerate(params) for key, x in optimizer.state[p].items()}


def assert_same(one, other):
    one, other = everything(*one), everything(*other)
    assert one.keys() == other.keys()
    assert [key for key in one if not torch.equal(one[key], other[key])] == []


@pytest.mark.parametrize("kind", [*KINDS, IN_BF16])
def test_steps_are_those_with_all_state_on_the_device(kind):
    for dtype, fraction in ((torch.float32, 1.0), (torch.bfloat16, 0.4)):
        plain, other = (start(kind, dtype=dtype, offload_fraction=each) for each in (0.0, fraction))
        for each in (plain, other):
            run(*each, range(STEPS))
        assert_same(other, plain)


@kinds
def test_a_step_copies_what_its_plan_says_and_holds_two_chunks(kind):
    for fraction in (0.4, 1.0):
        optimizer, params = start(kind, offload_fraction=fraction)
        run(optimizer, params, [0])
        alike = [x.nbytes for p in params for x in optimizer.state[p].values() if x.shape == p.shape]
        there = sum(
            x.nbytes for p in params if optimizer.on_host(p) for x in optimizer.state[p].values() if x.shape == p.shape
        )
        streamed, of_chunks = optimizer.streamed, optimizer.engine.offloaded()
        assert streamed.fetched == streamed.stored == sum(of_chunks) == there
        assert fraction * sum(alike) <= there < fraction * sum(alike) + max(alike) * len(alike) / len(params) + 1
        assert streamed.held == max(of_chunks[::2]) + max(of_chunks[1::2]) < sum(alike) / 2
        moved, held = re.search(r"host memory: (\S+) MB .* at most (\S+) MB are there", optimizer.explain()).groups()
        assert [float(moved), float(held)] == pytest.approx([there / 1e6, streamed.held / 1e6], rel=5e-3)
        run(optimizer, params, [2])  # without one of the gradients
        lacking = sum(x.nbytes for x in optimizer.state[params[6]].values() if x.shape == params[6].shape)
        assert streamed.stored == 2 * there - lacking * optimizer.on_host(params[6])


def test_the_share_is_spread_evenly():
    sizes = [3, 1, 4, 1, 5, 9, 2, 6] * 4
    for fraction in (0.0, 0.01, 0.25, 0.5, 0.9, 1.0):
        there = list(on_host(sizes, fraction))
        for end in range(1, len(sizes) + 1):
            own = sum(size for size, taken in zip(sizes[:end], there, strict=False) if taken)
            assert fraction * sum(sizes[:end]) <= own < fraction * sum(sizes[:end]) + max(sizes)
        assert there == list(on_host([*sizes, 100], fraction))[:-1]  # of a parameter that is added nothing changes
    assert not any(on_host(sizes, 0.0))
    assert all(on_host(sizes, 1.0))


@pytest.mark.parametrize(("before", "after"), [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.4, 0.7)])
@pytest.mark.parametrize("kind", ["muon", "adamuon", "mars_muon", "muon_hyperball", IN_BF16])
def test_a_restored_optimizer_goes_on_wherever_its_state_is(kind, before, after):
    straight, stopped = start(kind), start(kind, offload_fraction=before)
    run(*straight, range(STEPS))
    run(*stopped, range(2))
    params = [torch.nn.Parameter(p.detach().clone()) for p in stopped[1]]
    resumed = start(kind, params, offload_fraction=after)
    state = copy.deepcopy(stopped[0].state_dict())
    resumed[0].load_state_dict(state)
    run(*resumed, range(2, STEPS))
    assert_same(resumed, straight)
    loaded = {id(x) for of_one in state["state"].values() for x in of_one.values()}
    own = [x for p in params if resumed[0].on_host(p) for x in resumed[0].state[p].values() if x.shape == p.shape]
    assert not loaded & set(map(id, own))


def test_state_is_made_and_loaded_on_the_host():
    source = start("adamuon")
    run(*source, [0])
    params = [torch.nn.Parameter(p.detach().to("meta")) for p in source[1]]
    optimizer, _ = start("adamuon", params, offload_fraction=0.5)
    optimizer.init_state()
    for loaded in (False, True):
        for p, theirs in zip(params, source[1], strict=True):
            for key, x in optimizer.state[p].items():
                assert x.device.type == ("cpu" if optimizer.on_host(p) else "meta")
                assert not loaded or x.is_meta or torch.equal(x, source[0].state[theirs][key])
        optimizer.load_state_dict(source[0].state_dict())
    assert {optimizer.on_host(p) for p in params} == {True, False}


class Event(SimpleNamespace):
    def synchronize(self):
        self.stream.run(self.position)


class Lane:
    """A stream whose copies are made as late as may be: when somebody waits for them."""

    def __init__(self, device):
        self.waiting, self.done, self.seen, self.freed = [], 0, 0, []

    def wait_event(self, event):
        if event.stream is None:
            self.seen = max(self.seen, event.position)  # of what is computed
        else:
            self.waiting.append(event.synchronize)

    def record_event(self):
        return Event(stream=self, position=self.done + len(self.waiting))

    def run(self, position):
        while self.done < position:
            self.done += 1
            self.waiting.pop(0)()


class Device(TorchFunctionMode):
    """A GPU that computes at once, and says so if a copy would not wait for what was computed with the same memory."""

    def __init__(self):
        super().__init__()
        self.clock, self.lane, self.used, self.copies, self.pinned = 0, None, {}, 0, set()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if self.lane is not None and function is torch.Tensor.copy_:
            for memory in memories(args):
                assert self.used.get(memory, 0) <= self.lane.seen, "a copy that does not wait for the computation"
            self.copies += 1
            self.lane.waiting.append(lambda: args[0].copy_(args[1]))
            return args[0]
        if self.lane is not None:  # views of what is copied
            return function(*args, **(kwargs or {}))
        assert function is not torch.Tensor.to or self.pinned.isdisjoint(memories(args)), "a cast in host memory"
        self.clock += 1
        self.used |= dict.fromkeys(memories(args), self.clock)
        return function(*args, **(kwargs or {}))

    def record_event(self):
        return Event(stream=None, position=self.clock)

    def wait_event(self, event):
        if event.stream is not None:
            event.synchronize()

    @contextmanager
    def copying(self, lane):
        self.lane = lane
        try:
            yield
        finally:
            self.lane = None


def memories(args):
    for each in args:
        if isinstance(each, list | tuple):
            yield from memories(each)
        elif isinstance(each, torch.Tensor):
            yield each.untyped_storage().data_ptr()


@pytest.fixture
def gpu(monkeypatch):
    """Streams of a GPU, whose pinned memory is what was made as such."""
    device = Device()

    def zeros(size, dtype, pin_memory):
        memory = torch.zeros(size, dtype=dtype)
        device.pinned.add(memory.untyped_storage().data_ptr())
        kept.append(memory)  # no other memory is to have its address
        return memory

    kept = []
    empty = lambda size, dtype, device: torch.empty(size, dtype=dtype)  # noqa: E731
    calls = {"Stream": Lane, "Event": Event, "stream": device.copying, "current_stream": lambda _: device}
    names = SimpleNamespace(cuda=SimpleNamespace(**calls), empty=empty, zeros=zeros, uint8=torch.uint8)
    monkeypatch.setattr(offload, "torch", names)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda slot, lane: lane.freed.append(slot))
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: x.untyped_storage().data_ptr() in device.pinned)
    return device


def start_on(gpu, kind, **settings):
    optimizer, params = start(kind, offload_fraction=1.0, **settings)
    optimizer.init_state()
    optimizer._streamed = Streamed(torch.device("cuda"))
    return optimizer, params


@pytest.mark.parametrize("kind", ["muon", "mars_muon", "polargrad", "adamuon", "namo without look-ahead"])
def test_on_streams_nothing_is_read_or_written_too_early(kind, gpu):
    plain, streaming = start(kind), start_on(gpu, kind)
    run(*plain, range(STEPS))
    optimizer, params = streaming
    with gpu:
        run(optimizer, params, range(STEPS))
        assert optimizer.streamed._leaving._stream.waiting  # no step waits for the last to leave
        for lane in (optimizer.streamed._arriving, optimizer.streamed._leaving):
            assert len(lane._stream.freed) == 2 * STEPS
        optimizer.state_dict()
    assert not optimizer.streamed._leaving._stream.waiting
    assert_same(streaming, plain)


@pytest.mark.parametrize(("kind", "back"), [("muon", 1), ("adamuon", 2), (IN_BF16, 1)])
def test_a_chunk_arrives_by_one_copy_and_leaves_by_few(kind, back, gpu):
    optimizer, params = start_on(gpu, kind)
    with gpu:
        run(optimizer, params, [0])
        for resumed in (False, True):
            if resumed:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            gpu.copies = 0
            run(optimizer, params, [0])
            chunks = optimizer.engine._chunks_of(range(len(params)))
            assert gpu.copies == len(chunks) + back * sum(len(chunk.slices) for chunk in chunks)
    assert len(chunks) > 1


@pytest.fixture
def mesh():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


class Own(TensorParallelMuon):
    def orthogonalize(self, p, grad, **settings):
        return grad


def test_what_cannot_be_is_refused_at_construction(mesh):
    def params():
        return [torch.nn.Parameter(torch.ones(4, 4))]

    with pytest.raises(ValueError, match=r"Own has an orthogonalize of its own.*leave offload_fraction at 0"):
        Own(params(), execution=Execution(offload_fraction=0.5))
    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    with pytest.raises(ValueError, match="state of a DTensor cannot be in host memory, got one of shape"):
        TensorParallelMuon([sharded], execution=Execution(offload_fraction=0.5))
    optimizer = TensorParallelMuon(params(), execution=Execution(offload_fraction=0.5))
    with pytest.raises(ValueError, match="state of a DTensor"):
        optimizer.add_param_group({"params": [sharded]})
