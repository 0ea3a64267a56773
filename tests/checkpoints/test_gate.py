"""The gate: what Megatron and torch write comes through it as it was, and nothing else does anything."""

import argparse
import contextlib
import io
import os
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
from megatron.core.safe_globals import SAFE_GLOBALS, SafeUnpickler
from megatron.core.transformer.enums import AttnBackend
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.device_mesh import DeviceMesh

from megatron_eopt.checkpoints import gate
from megatron_eopt.checkpoints.contents import CheckpointError, load_metadata, read_contents
from megatron_eopt.checkpoints.faults import check_extra_states, check_pickles
from megatron_eopt.cli import main
from megatron_eopt.megatron.checkpoints.integrity import gated_metadata
from tests.checkpoints import limits, made
from tests.checkpoints.made import common, save, tensors
from tests.checkpoints.payloads import (
    Call,
    archive,
    byte_tensor,
    called,
    named,
    number,
    payloads,
    raw,
    register_extension,
    text,
    with_pickle,
)

EXTRA = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"
MARK = pathlib.Path("/tmp/megatron_eopt_mark")
CASES = payloads(MARK)
NAMES = sorted({*gate._OF_METADATA, *(path for _, path in gate._allowed())})


def ways(data):
    """Ways to load data of a checkpoint: as ``.metadata``, an object and an extra state."""
    saved = data[:2] == b"PK" or b"protocol_version" in data[:60]
    yield lambda: gate.load_pickle(data)
    yield lambda: gate.load_saved(io.BytesIO(data if saved else with_pickle(data)))
    yield lambda: check_extra_states({"_extra_state": byte_tensor(data)})


def state_of_the_process():
    """What a pickle could change beside what it makes: classes of the lists, and members of enums."""
    kinds = {*gate._OF_METADATA.values(), *(value for value, _ in gate._allowed())}
    shared = [kind for kind in kinds if isinstance(kind, type)]
    shared += [member for kind in (metadata._MEM_FORMAT_ENCODING, WriteItemType, AttnBackend) for member in kind]
    found = {each: dict(vars(each)) for each in shared}
    for attributes in found.values():
        attributes.pop("__slotnames__", None)  # which Python keeps there when it pickles
    return found


def unexpected(done):
    """Deeds but those of the gate itself, and codecs of Python, which torch's reader looks up."""
    return [deed for deed in done if "encodings" not in deed[1] and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in deed[1]]


def attempt(names):
    """Load each in every way, and an extra state as Transformer Engine does; prints what was done."""
    register_extension()
    before = state_of_the_process()
    for name in names:
        print(name)
        with limits.deeds() as done:
            for load in ways(CASES[name]):
                with contextlib.suppress(Exception):
                    load()
            with contextlib.suppress(Exception):
                check_extra_states({"_extra_state": byte_tensor(CASES[name])})
                pickle.loads(CASES[name])
        assert unexpected(done) == []
        assert before == state_of_the_process()
    return 0


DEADLY = ["a deep tuple for a key"]  # of which Python takes a hash, in any load


@pytest.mark.parametrize("names", [sorted(CASES.keys() - DEADLY), DEADLY], ids=len)
def test_what_would_do_harm_does_nothing(names):
    status, said = limits.run(lambda: attempt(names))
    assert not MARK.exists()
    assert status == 0 or names == DEADLY, said


def equal(one, other):
    match other:
        case torch.Tensor():
            return type(one) is type(other) and one.dtype == other.dtype and torch.equal(one, other)
        case numpy.ndarray():
            return one.dtype.kind == other.dtype.kind and numpy.array_equal(one, other)
        case torch.Generator():
            return torch.equal(one.get_state(), other.get_state())
        case dict():
            return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
        case list() | tuple():
            return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


WRITTEN = {
    "plain": {"a": [1, -1, 2**40, 2**80, 1.5, True, None, "text"], (1, "b"): {1, 2}, 3: [b"\0\xff", bytearray(b"a")]},
    "arguments": argparse.Namespace(lr=0.1, dtype=torch.bfloat16, inner=types.SimpleNamespace(a=1)),
    "values": [signal.SIGTERM, pathlib.Path("a/b"), complex(1, -2), torch.Size([1, 2]), AttnBackend.flash],
    "tensors": [torch.randn(4, 6)[1:, ::2], torch.ones(3).to(torch.float8_e4m3fn), torch.nn.Parameter(torch.ones(2))],
    "numpy": [numpy.arange(5, dtype=numpy.uint32), numpy.ones((2, 3), order="F"), numpy.arange(3, dtype=">i4")],
    "numbers of numpy": [numpy.float64(1.5), numpy.float32(2), numpy.int64(-3), numpy.bool_(True), numpy.complex64(1j)],
    "generators": [
        random.getstate(),
        numpy.random.get_state(),
        torch.get_rng_state(),
        torch.Generator().manual_seed(3),
    ],
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_is_written_comes_through_as_it_was(kind):
    found = gate.load_saved(io.BytesIO(archive(WRITTEN[kind])))
    assert equal(found, WRITTEN[kind])
    numpy.random.RandomState().set_state(found[1]) if kind == "generators" else None
    assert b"megatron_eopt" not in pickle.dumps(found)  # when it is saved again


def test_metadata_come_through_as_they_were(tmp_path):
    folder = save(tmp_path / "checkpoint")
    original = pickle.loads((folder / ".metadata").read_bytes())
    original.all_local_plans = [WriteItemType.BYTE_IO]  # as a writer keeps plans where the structure is constant
    (folder / ".metadata").write_bytes(pickle.dumps(original))
    found = load_metadata(folder / ".metadata")
    found.storage_meta = original.storage_meta  # nobody reads it
    assert found == original
    assert b"megatron_eopt" not in pickle.dumps(found)
    properties = found.state_dict_metadata["norm"].properties
    assert type(properties) is metadata.TensorProperties


def test_what_megatron_calls_safe_has_a_name_here():
    """But for the dtype that torch compares; and numpy's names in extra states, which no module writes."""
    safe = {f"{each.__module__}.{each.__qualname__}" for each in SAFE_GLOBALS} - {"numpy.dtypes.UInt32DType"}
    assert safe <= {path for _, path in gate._allowed()}
    of_extra_states = {module for module, _ in SafeUnpickler._SAFE_CLASSES} - {"builtins", "numpy", "torch.storage"}
    named_here = {path.rpartition(".")[0] for path in gate._OF_METADATA}
    assert of_extra_states - {"numpy._core.multiarray", "megatron.core.safe_globals"} <= named_here


# Names that others gave to torch: Megatron some thirty, torch DeviceMesh.


def test_no_state_for_a_member_of_an_enum():
    """Which Megatron had registered: the member of the process would be another."""
    torch.serialization.add_safe_globals([AttnBackend])
    member = called("megatron.core.transformer.enums", "AttnBackend", b"K\1")
    state = b"}" + text("_value_") + b"K\5s"
    kind = named("megatron.core.transformer.enums", "AttnBackend")
    by_torch = called("torch._tensor", "_rebuild_from_type_v2", kind, kind, b"(K\1t", state)
    encoding = called("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", b"K\0")
    before = state_of_the_process()
    for data in (raw(member, state, b"b"), raw(by_torch), raw(encoding, state, b"b"), raw(kind, b"N", state, b"\x86b")):
        for load in ways(data):
            with contextlib.suppress(Exception):
                load()
    assert state_of_the_process() == before
    assert gate.load_saved(io.BytesIO(archive(AttnBackend.flash))) is AttnBackend.flash


def test_what_torch_registered_is_not_called(tmp_path, monkeypatch):
    """DeviceMesh makes process groups, and one rank alone would wait in it for the others."""
    torch.serialization.add_safe_globals([DeviceMesh])
    made_on = []
    monkeypatch.setattr(DeviceMesh, "__init__", lambda self, *given: made_on.append(given))
    data = raw(called("torch.distributed.device_mesh", "DeviceMesh", text("cpu"), b"](K\0K\1e"))
    torch.load(io.BytesIO(with_pickle(data)), weights_only=True)
    assert made_on
    made_on.clear()
    for load in ways(data):
        with pytest.raises(pickle.UnpicklingError, match=r"DeviceMesh|DTensors"):
            load()
    with gate.reading(), pytest.raises(pickle.UnpicklingError, match=r"DeviceMesh|DTensors"):
        torch.load(io.BytesIO(with_pickle(data)), weights_only=False)
    assert not made_on
    assert DeviceMesh in torch.serialization.get_safe_globals()


@pytest.mark.parametrize("code", [b"R", b"\x81"], ids=["REDUCE", "NEWOBJ"])
def test_no_bytes_are_taken_for_objects(code):
    """An array over a buffer, whose bytes would be pointers."""
    data = called("_codecs", "encode", text("A" * 16), text("latin1"))
    made = raw(named("numpy", "ndarray"), b"(", b"K\2\x85", text("O"), data, b"t", code)
    assert gate.load_saved(io.BytesIO(with_pickle(made))).size == 0


PIECES = [
    *(named(*path.rsplit(".", 1)) for path in (*NAMES, "posix.mkdir", "builtins.exec", "builtins.getattr")),
    *(number(2**40), text("a"), text("cpu"), text("__class__")),
    *([b"R"] * 3 + [b"\x81"] * 2 + [b"b"] * 2),  # what calls, more often than other operations
    *(called("argparse", "Namespace"), called("_io", "BytesIO"), called("torch", "device", text("cpu"))),
    called("numpy", "dtype", text("u4"), b"\x89", b"\x88"),
    *(bytes([code]) for code in range(256) if bytes([code]) not in b"rpj"),  # places of the memo take memory
]
BEFORE = state_of_the_process()


@pytest.mark.filterwarnings("ignore::UserWarning")
@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=40))
def test_no_program_does_anything(pieces):
    with limits.deeds() as done:
        for load in ways(raw(*pieces)):
            with contextlib.suppress(Exception):  # but none that ends a process
                load()
    assert unexpected(done) == []
    assert state_of_the_process() == BEFORE


# Where code may be in a checkpoint.


def marking(tmp_path, place):
    """A file, and a checkpoint that has code in one place which makes it."""
    mark = tmp_path / "mark"
    return mark, with_code(tmp_path / "checkpoint", place, Call(exec, (f"open({str(mark)!r}, 'w')",)))


def with_code(folder, place, code):
    """A checkpoint that has an object in one place."""
    state, more = common(), {}
    if place == "arguments":
        state["args"].data = code
    elif place == "object of a rank":
        more["rerun_state_machine_state/shard_1_2"] = {"state": code}
    elif place == "extra state, in a list":
        more[EXTRA] = [byte_tensor(pickle.dumps(code))]
    save(folder, {**tensors(), **more}, state)
    if place == "metadata":
        made.change_layout(folder, lambda metadata: setattr(metadata, "planner_data", code))
    elif place == "common.pt":
        torch.save({**state, "more": code}, folder / "common.pt")
    return folder


PLACES = {  # exit status of verify-checkpoint: 2 where nothing can be read without
    "metadata": (2, ".metadata names builtins.exec"),
    "arguments": (2, "the common state (arguments, iteration, parameter groups) names exec"),
    "common.pt": (2, "the common state (arguments, iteration, parameter groups) names exec"),
    "object of a rank": (1, "rerun_state_machine_state/shard_1_2 in __0_0.distcp names exec"),
    "extra state, in a list": (1, f"{EXTRA} in __0_0.distcp names builtins.exec"),
}


@pytest.mark.parametrize("place", PLACES)
def test_code_is_an_error_and_is_not_run(tmp_path, capsys, place):
    mark, folder = marking(tmp_path, place)
    status, words = PLACES[place]
    assert main(["verify-checkpoint", "--no-data", str(folder)]) == status
    said = "".join(capsys.readouterr())
    assert f"{words}, which a load would call" in said
    assert not mark.exists()
    name = said.partition("--trust-checkpoint-globals ")[2].split()[0].strip(".")
    assert main(["verify-checkpoint", "--no-data", "--trust-checkpoint-globals", name, str(folder)]) == 0
    assert mark.exists()


def test_one_problem_for_what_is_in_many_places(tmp_path):
    more = {f"rng_state/shard_{rank}_8": {"a": Call(posix.mkdir, ("x",))} for rank in range(8)}
    contents = read_contents(save(tmp_path / "checkpoint", {**tensors(), **more}))
    (problem,) = check_pickles(contents)
    assert "and 7 more names posix.mkdir" in problem.what


# A run of ours, in this process.


@pytest.fixture
def redirected(monkeypatch):
    read = dcp.FileSystemReader.read_metadata
    monkeypatch.setattr(dcp.FileSystemReader, "read_metadata", gated_metadata(read))


def resumed(folder, key="rng_state/shard_0_1"):
    state = {key: None}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state[key]


@pytest.mark.parametrize("place", ["metadata", "object of a rank"])
def test_a_run_refuses_where_it_reads(tmp_path, redirected, place):
    """Outside of the scope, torch loads as ever."""
    mark, folder = marking(tmp_path, place)
    key = "rerun_state_machine_state/shard_1_2" if place != "metadata" else "rng_state/shard_0_1"
    with gate.reading(), pytest.raises((CheckpointError, AssertionError, dcp.api.CheckpointException)) as error:
        resumed(folder, key)
    assert "exec" in str(error.value)
    assert not mark.exists()
    with gate.reading("builtins.exec"):
        resumed(folder, key)
    assert mark.exists()
    mark.unlink()
    resumed(folder, key)
    assert mark.exists()
    assert os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD") is None


@pytest.mark.parametrize("forced", ["TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"])
def test_what_the_environment_says_of_loads_is_put_aside(tmp_path, redirected, monkeypatch, forced):
    monkeypatch.setenv(forced, "1")
    sound = save(tmp_path / "sound")
    harmful = with_code(tmp_path / "harmful", "object of a rank", Call(posix.mkdir, (str(tmp_path / "mark"),)))
    with gate.reading():
        assert resumed(sound) == {"seed": 1}
        with pytest.raises(dcp.api.CheckpointException, match="mkdir"):
            resumed(harmful, "rerun_state_machine_state/shard_1_2")
    assert not (tmp_path / "mark").exists()
    assert {name: os.environ[name] for name in os.environ if "WEIGHTS_ONLY" in name} == {forced: "1"}


@pytest.fixture
def recipe(monkeypatch):
    """A class of Transformer Engine, which is not installed here."""
    module = types.ModuleType("transformer_engine.common.recipe")
    cls = type("DelayedScaling", (), {"__module__": module.__name__})
    module.DelayedScaling = cls
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    made = cls()
    made.margin = 3
    return made


def test_what_transformer_engine_keeps(recipe, tmp_path):
    state = {"recipe": recipe, "scale_fwd": torch.ones(3), "amax_history_fwd": torch.zeros(4, 3)}
    code = byte_tensor(pickle.dumps({**state, "more": Call(posix.mkdir, (str(tmp_path / "mark"),))}))
    sound = {"a._extra_state": byte_tensor(pickle.dumps(state)), "b._extra_state": torch.empty(0, dtype=torch.uint8)}
    check_extra_states({"model": sound, "c.weight": code})
    for harmful in (code, byte_tensor(b"no pickle")):
        with pytest.raises(pickle.UnpicklingError):
            check_extra_states({"model": {"a._extra_state": harmful}})


class Kept:
    """A class of a user's, in the arguments."""


def test_classes_that_the_user_trusts():
    value = Kept()
    value.a = 3
    with pytest.raises(pickle.UnpicklingError, match="Kept"):
        gate.load_saved(io.BytesIO(archive({"x": value})))
    with gate.reading(f"{Kept.__module__}.Kept"):
        found = gate.load_saved(io.BytesIO(archive({"x": value})))
    assert (type(found["x"]), found["x"].a) == (Kept, 3)
