"""The gate: what Megatron and torch write comes through it as it was, and nothing else does anything."""

import argparse
import collections
import contextlib
import datetime
import io
import pathlib
import pickle
import posix
import random
import signal
import sys
import types

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StoragePrefix
from torch.distributed.checkpoint.planner import SavePlan

from megatron_eopt.checkpoints import harmless
from megatron_eopt.checkpoints.contents import CheckpointError, forget_metadata, read_contents
from megatron_eopt.checkpoints.faults import check_pickles
from megatron_eopt.checkpoints.gate import ForeignNameError, Load
from megatron_eopt.cli import main
from megatron_eopt.megatron.checkpoints import gated
from tests.checkpoints import limits, made
from tests.checkpoints.made import common, save, tensors
from tests.checkpoints.payloads import (
    Call,
    archive,
    array_of,
    byte_tensor,
    called,
    legacy,
    named,
    number,
    payloads,
    raw,
    register_extension,
    text,
    with_pickle,
)

EXTRA = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"
CASES = payloads("/tmp/megatron_eopt_mark")


def loaded(data, **how):
    """What the gate makes of a pickle, or of what ``torch.save`` wrote; and foreign names in it."""
    load = Load(**how)
    saved = data[:2] == b"PK" or b"protocol_version" in data[:60]
    return (load.load_saved(io.BytesIO(data)) if saved else load.load_bytes(data)), load.foreign


def attributes_of_classes():
    """Of those of which pickles make instances; but for what Python keeps there when it pickles."""
    found = {kind: dict(vars(kind)) for kind in harmless.NAMES.values() if isinstance(kind, type)}
    for attributes in found.values():
        attributes.pop("__slotnames__", None)
    return found


def attempt(data):
    """Load it in every way, and then as Transformer Engine does; prints what was done that no data does."""
    register_extension()
    before = attributes_of_classes()
    passed = 0
    with limits.deeds() as done:
        for real in (False, True):
            with contextlib.suppress(Exception):
                passed += not loaded(data, real=real)[1]
        for value in (byte_tensor(data), io.BytesIO(data)):
            try:
                again = Load(real=True).load_extra_state(value)
            except Exception:
                continue
            if isinstance(again, io.BytesIO):
                torch.load(again, weights_only=False)
            else:
                pickle.loads(again.numpy().tobytes())
    print("passes" if passed == 2 else "refused", done)
    return 0 if before == attributes_of_classes() else 1


HARMLESS = {  # which load as data
    *("an npz", "a far place in the memo", "a deep list", "a number of many digits", "a large number for a key"),
    *("a tensor of one entry", "a tensor of many dimensions", "an archive behind a pickle"),
    "_load_from_bytes for missing values",  # which the list has
}


@pytest.mark.parametrize("name", CASES)
def test_what_would_do_harm_does_nothing(name):
    """Each is refused, or loads as data, in little memory and time, and the process goes on."""
    status, said = limits.run(lambda: attempt(CASES[name]))
    assert status == 0, said
    assert said == ("passes []\n" if name in HARMLESS else "refused []\n")


def equal(one, other):
    if type(one) is not type(other):
        return False
    match one:
        case torch.Tensor():
            described = [(x.dtype, x.shape, x.stride(), x.requires_grad) for x in (one, other)]
            bits = [x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (one, other) if x.numel()]
            return described[0] == described[1] and torch.equal(bits[0], bits[-1]) if bits else True
        case numpy.ndarray():
            return one.dtype == other.dtype and numpy.array_equal(one, other)
        case torch.Generator():
            return torch.equal(one.get_state(), other.get_state())
        case io.BytesIO():
            return one.getvalue() == other.getvalue()
        case dict():
            return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
        case list() | tuple():
            return len(one) == len(other) and all(map(equal, one, other))
    return one == other


with_attribute = torch.arange(3)
with_attribute.sequence_parallel = True
WRITTEN = {
    "plain": {"a": [1, -1, 2**40, 2**80, 1.5, True, None, "text", "\ud800"], (1, "b"): {1, 2}, 3: frozenset("ab")},
    "bytes": [b"", b"\0\xff", bytearray(b""), bytearray(b"a"), io.BytesIO(b"abc"), "x" * 70_000, b"y" * 70_000],
    "arguments": argparse.Namespace(lr=0.1, dtype=torch.bfloat16, inner=types.SimpleNamespace(a=1)),
    "values": [signal.SIGTERM, pathlib.Path("a/b"), datetime.timedelta(1, 2, 3), complex(1, -2), torch.Size([1, 2])],
    "dicts": [collections.OrderedDict(a=1), collections.defaultdict(list, a=[1]), collections.defaultdict(int)],
    "tensors": [
        torch.randn(2, 3),
        torch.randn(4, 6)[1:, ::2],
        torch.randn(2, 3).T,
        torch.tensor(1.0, dtype=torch.bfloat16),
        torch.tensor([1, 2], dtype=torch.uint16),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.empty(0, 3),
        torch.ones(2, requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
        with_attribute,
    ],
    "numpy": [
        numpy.arange(5, dtype=numpy.uint32),
        numpy.ones((2, 3), order="F"),
        numpy.float64(3),
        numpy.random.get_state(),
    ],
    "generators": [random.getstate(), torch.Generator().manual_seed(3), torch.get_rng_state()],
    "devices": [torch.device("cpu"), torch.device("cuda", 1)],
    # as an asynchronous writer keeps them where the structure is constant
    "plans": [SavePlan([], storage_data=_StoragePrefix("__0_"))],
}
WRITERS = {
    "archive": archive,
    "before archives": legacy,
    **{f"protocol {number}": lambda value, number=number: pickle.dumps(value, number) for number in (2, 3, 4, 5)},
}


NOT_WRITTEN = [("protocol 5", "bytes"), ("protocol 5", "numpy"), ("before archives", "generators")]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("kind", WRITTEN)
def test_what_is_written_comes_through_as_it_was(kind, writer):
    if (writer, kind) in NOT_WRITTEN:
        pytest.skip("neither torch nor Megatron writes or reads these so")
    data = WRITERS[writer](WRITTEN[kind])
    for real in (False, True):
        value, foreign = loaded(data, real=real)
        assert not foreign
        if real or kind != "generators":  # for the command, the GPU of a generator may not be there
            assert equal(value, WRITTEN[kind])


def test_what_is_shared_stays_shared():
    whole = torch.randn(4, 6)
    shared = [whole, whole[1:], {"same": whole}]
    one, part, inner = loaded(archive(shared), real=True)[0]
    assert inner["same"] is one
    one[1, 0] = 7
    assert part[0, 0] == 7


@pytest.mark.parametrize("data", [pickle.dumps(numpy.arange(3, dtype=">i4")), array_of(numpy.dtype("i4"), b"a" * 8, 3)])
def test_an_array_whose_numbers_are_swapped_or_too_few(data):
    with pytest.raises((pickle.UnpicklingError, ValueError)):
        loaded(data)


PIECES = [
    *(named(*name) for name, value in harmless.NAMES.items()),
    *(named(*each) for each in [("posix", "mkdir"), ("builtins", "exec"), ("builtins", "getattr"), ("os", "system")]),
    *(b"N", b"\x88", b"K\1", b"K\0", number(2**40), text("a"), text("latin1"), text("cpu"), text("__class__"), b"C\1a"),
    *(b")", b"]", b"}", b"\x8f", b"(", b"(", b"t", b"\x85", b"\x86", b"\x87", b"R", b"R", b"R", b"\x81", b"\x81"),
    *(b"b", b"b", b"s", b"a", b"u", b"e", b"\x90", b"\x91", b"\x94", b"q\0", b"q\1", b"h\0", b"h\1", b"Q"),
    *(called("argparse", "Namespace"), called("io", "BytesIO"), called("torch", "device", text("cpu"))),
    called("numpy", "dtype", text("u4"), b"\x89", b"\x88"),
    b"}(" + text("a") + b"K\1u",
    b"(NNNtb",
    *(bytes([code]) for code in range(256)),
]


def assert_nothing_is_done(data):
    with limits.deeds() as done:
        for real in (False, True):
            load = Load(real=real)
            with contextlib.suppress(Exception):  # but none that ends a process
                load.load_bytes(data)
    assert done == []
    assert attributes_of_classes() == BEFORE


BEFORE = attributes_of_classes()


@settings(max_examples=500, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40))
def test_no_program_does_anything(pieces):
    assert_nothing_is_done(raw(*pieces))


GOOD = [
    *(pickle.dumps(value, protocol) for value in WRITTEN.values() for protocol in (2, 4)),
    *(value for value in CASES.values() if len(value) < 20_000 and b"megatron.core" not in value),  # which is imported
]


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_no_change_of_a_pickle_does_anything(data):
    changed = bytearray(data.draw(st.sampled_from(GOOD)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed)))
        new = data.draw(st.sampled_from(PIECES) | st.binary(max_size=3))
        changed[at : at + data.draw(st.integers(0, 3))] = new
    assert_nothing_is_done(bytes(changed))


def test_flipped_bits_of_metadata(tmp_path, capsys):
    """Each is another checkpoint or none, and the command says which."""
    folder = save(tmp_path / "checkpoint", tensors())
    sound = (folder / ".metadata").read_bytes()
    main(["verify-checkpoint", "--no-data", str(folder)])  # which imports modules
    flips = random.Random(0)
    for _ in range(250):
        changed = bytearray(sound)
        changed[flips.randrange(len(sound))] ^= 1 << flips.randrange(8)
        (folder / ".metadata").write_bytes(changed)
        forget_metadata()
        with limits.deeds() as done:
            assert main(["verify-checkpoint", "--no-data", str(folder)]) in (0, 1, 2)
        assert done == []
    assert "Traceback" not in capsys.readouterr().err


# Where code may be in a checkpoint.


def with_code(folder, place, code):
    """A checkpoint that has an object in one place."""
    state, more = common(), {}
    if place == "arguments":
        state["args"].data = code
    elif place == "object of a rank":
        more["rerun_state_machine_state/shard_1_2"] = {"state": code}
    elif place == "extra state, as a file":
        more[EXTRA] = [io.BytesIO(archive(code))]
    elif place == "extra state, as bytes":
        more[EXTRA] = [byte_tensor(pickle.dumps(code))]
    elif place == "tensor in an extra state":
        inner = Call(torch.storage._load_from_bytes, (archive(code),))
        more[EXTRA] = [byte_tensor(pickle.dumps({"scale": inner}))]
    elif place == "extra state, as a tensor":
        more[EXTRA] = byte_tensor(pickle.dumps(code))
    save(folder, {**tensors(), **more}, state)
    if place == "metadata":
        made.change_layout(folder, lambda metadata: setattr(metadata, "planner_data", code))
    elif place == "common.pt":
        torch.save({**state, "more": code}, folder / "common.pt")
    elif place == "metadata of a rank":
        (folder / "__0.metadata").write_bytes(pickle.dumps(code))
    elif place == "another package's":
        (folder / "modelopt_state").mkdir()
        torch.save(code, folder / "modelopt_state" / "common.pt")
    return folder


PLACES = {
    "metadata": ".metadata",
    "arguments": "common_state/shard_0_1",
    "common.pt": "common.pt",
    "object of a rank": "rerun_state_machine_state/shard_1_2 in __0_0.distcp",
    "extra state, as a file": f"{EXTRA} in __0_0.distcp",
    "extra state, as bytes": f"{EXTRA} in __0_0.distcp",
    "tensor in an extra state": f"{EXTRA} in __0_0.distcp",
    "extra state, as a tensor": f"{EXTRA} in __0_0.distcp",
    "metadata of a rank": "__0.metadata",
    "another package's": "modelopt_state/common.pt",
}


@pytest.mark.parametrize("place", PLACES)
def test_code_is_an_error_and_is_not_run(tmp_path, capsys, place):
    mark = tmp_path / "mark"
    folder = with_code(tmp_path / "checkpoint", place, Call(exec, (f"open({str(mark)!r}, 'w')",)))
    status = main(["verify-checkpoint", "--no-data", str(folder)])
    out, _ = capsys.readouterr()
    assert (status, mark.exists()) == (1, False)
    assert f"error:      {PLACES[place]} names builtins.exec, which a load would call" in out
    status = main(["verify-checkpoint", "--no-data", "--trust-globals", "a.b,builtins.exec", str(folder)])
    assert (status, mark.exists()) == (0, False)


def test_code_without_which_nothing_can_be_read_is_named(tmp_path, capsys):
    folder = save(tmp_path / "checkpoint")
    (folder / ".metadata").write_bytes(pickle.dumps(Call(posix.mkdir, (str(tmp_path / "mark"),))))
    assert main(["verify-checkpoint", str(folder)]) == 2
    assert "and it names posix.mkdir" in capsys.readouterr().err
    assert not (tmp_path / "mark").exists()


def test_one_problem_for_what_is_in_many_places(tmp_path):
    more = {f"rng_state/shard_{rank}_8": {"a": Call(posix.mkdir, ("x",))} for rank in range(8)}
    contents = read_contents(save(tmp_path / "checkpoint", {**tensors(), **more}))
    (problem,) = check_pickles(contents)
    assert "and 7 more names posix.mkdir" in problem.what
    assert "--trust-checkpoint-globals" in problem.advice
    assert list(check_pickles(contents, {"all"})) == []


# A run of ours, in this process.


@pytest.fixture
def run(monkeypatch):
    """Loads of torch are those of a run with Muon, whose flags are what this returns."""
    args = argparse.Namespace(optimizer="muon")
    monkeypatch.setattr(gated.releases, "training_args", lambda: args)
    for cls, name, make in (
        (dcp.FileSystemReader, "read_metadata", gated.gated_metadata),
        (dcp.DefaultLoadPlanner, "load_bytes", gated.gated_object),
    ):
        monkeypatch.setattr(cls, name, make(getattr(cls, name)))
    return args


def resumed(folder, key="rng_state/shard_0_1"):
    state = {key: None}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state[key]


def test_a_run_loads_what_was_saved(tmp_path, run):
    value = [*WRITTEN["tensors"][:4], WRITTEN["arguments"]]
    folder = save(tmp_path / "checkpoint", {**tensors(), "objects/shard_0_1": value})
    assert equal(resumed(folder, "objects/shard_0_1"), value)


@pytest.mark.parametrize("place", ["metadata", "object of a rank"])
def test_a_run_refuses_without_any_look_before(tmp_path, run, place):
    """What was put there after the look, as well."""
    mark = tmp_path / "mark"
    folder = with_code(tmp_path / "checkpoint", place, Call(posix.mkdir, (str(mark),)))
    with pytest.raises((CheckpointError, AssertionError, dcp.api.CheckpointException)) as error:
        resumed(folder, "rerun_state_machine_state/shard_1_2")
    assert "names posix.mkdir, which a load would call" in str(error.value)
    assert not mark.exists()
    run.trust_checkpoint_globals = "posix.mkdir"
    resumed(folder, "rerun_state_machine_state/shard_1_2" if place != "metadata" else "rng_state/shard_0_1")
    assert mark.exists()


@pytest.mark.parametrize("flags", [{"optimizer": "adam"}, {"trust_checkpoint_globals": "all"}])
def test_other_runs_load_as_torch_does(tmp_path, run, flags):
    mark = tmp_path / "mark"
    folder = with_code(tmp_path / "checkpoint", "object of a rank", Call(posix.mkdir, (str(mark),)))
    vars(run).update(flags)
    resumed(folder, "rerun_state_machine_state/shard_1_2")
    assert mark.exists()


def test_an_archive_that_torch_reads_otherwise(tmp_path, run):
    """In its own reader, the name in the Unicode field does not count."""
    code = pickle.dumps(Call(posix.mkdir, (str(tmp_path / "mark"),)), 2)
    folder = save(tmp_path / "checkpoint", {**tensors(), "objects/shard_0_1": {"a": 1}})
    made.put_archive(folder, "objects", with_pickle(code, hidden=True))
    assert main(["verify-checkpoint", "--no-data", str(folder)]) == 1
    with pytest.raises(dcp.api.CheckpointException, match=r"objects/shard_0_1 names posix\.mkdir"):
        resumed(folder, "objects/shard_0_1")
    assert not (tmp_path / "mark").exists()


@pytest.fixture
def recipe(monkeypatch):
    """A class of Transformer Engine, which is not installed here."""
    module = types.ModuleType("transformer_engine.common.recipe")
    cls = type("DelayedScaling", (), {"__module__": module.__name__, "__eq__": lambda x, y: vars(x) == vars(y)})
    module.DelayedScaling = cls
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made = cls()
    made.margin = 3
    return made


def test_what_transformer_engine_keeps(run, recipe, monkeypatch):
    """Its modules get what they saved; and where it is not installed, nothing that could be unpickled."""
    state = {"recipe": recipe, "scale_fwd": torch.ones(3), "amax_history_fwd": torch.zeros(4, 3)}
    as_bytes, as_file = byte_tensor(pickle.dumps(state)), io.BytesIO(archive(state))
    nothing = torch.empty(0, dtype=torch.uint8)
    for value in (as_bytes, as_file, nothing):
        load = Load()
        load.load_extra_state([value])
        assert not load.foreign
    model = {"a._extra_state": as_bytes, "b._extra_state": as_file, "c._extra_state": nothing, "d.weight": as_bytes}
    loaded_state = {"model": dict(model)}
    gated.gate_extra_states(loaded_state)
    found = loaded_state["model"]
    assert equal(pickle.loads(found["a._extra_state"].numpy().tobytes()), state)
    assert equal(torch.load(found["b._extra_state"], weights_only=False), state)
    assert found["c._extra_state"] is nothing
    assert found["d.weight"] is as_bytes
    monkeypatch.delitem(sys.modules, "transformer_engine.common.recipe")
    found = dict(model)
    gated.gate_extra_states(found)
    assert found["a._extra_state"].numel() == found["b._extra_state"].numel() == 0


@pytest.mark.parametrize(
    "make", [lambda x: byte_tensor(pickle.dumps(x)), lambda x: io.BytesIO(archive(x)), pickle.dumps]
)
def test_code_in_the_bytes_of_an_extra_state(tmp_path, run, make):
    state = {"model": {"a._extra_state": make(Call(posix.mkdir, (str(tmp_path / "mark"),)))}}
    with pytest.raises(CheckpointError, match=r"a\._extra_state names posix\.mkdir, which a load would call"):
        gated.gate_extra_states(state)
    with pytest.raises(CheckpointError, match=r"a\._extra_state cannot be loaded"):
        gated.gate_extra_states({"a._extra_state": byte_tensor(b"no pickle")})


class Kept(list):
    """A class of a user's, in the arguments."""


def test_classes_that_the_user_trusts(run):
    value = Kept([1, 2])
    value.a = 3
    path = f"{Kept.__module__}.Kept"
    found, _ = loaded(archive({"x": value}), real=True, trusted={path: Kept})
    assert (type(found["x"]), list(found["x"]), found["x"].a) == (Kept, [1, 2], 3)
    with pytest.raises(ForeignNameError, match=r"Kept"):
        loaded(archive({"x": value}), real=True)
    before = torch.serialization.get_safe_globals()
    torch.serialization.add_safe_globals([Kept])
    try:
        assert gated.trusted_by(run)[path] is Kept
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(before)
