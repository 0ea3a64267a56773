"""Code in a checkpoint, wherever it may be: it is named, and not run. What Megatron and torch write has none."""

import codecs
import io
import pickle
import posix
import sys
import types
from dataclasses import dataclass

import numpy
import pytest
import torch

from megatron_eopt.checkpoints.contents import read_contents
from megatron_eopt.checkpoints.pickles import faults
from megatron_eopt.checkpoints.problems import check_pickles
from megatron_eopt.cli import main
from tests.checkpoints.made import common, save, tensors

EXTRA = "decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"


@dataclass
class Call:
    """Pickles itself as a call of any function."""

    function: object
    arguments: tuple

    def __reduce__(self):
        return self.function, self.arguments


def archive(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def byte_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def metadata_with(folder, value):
    """Put a value into a checkpoint's ``.metadata``."""
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = value
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


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
    elif place == "extra state, without a header":
        more[EXTRA] = [byte_tensor(pickle.dumps(code, protocol=0))]
    elif place == "tensor in an extra state":
        inner = Call(torch.storage._load_from_bytes, (archive(code),))
        more[EXTRA] = [byte_tensor(pickle.dumps({"scale": inner}))]
    elif place == "extra state, as a tensor":
        more[EXTRA] = byte_tensor(pickle.dumps(code))
    save(folder, {**tensors(), **more}, state)
    if place == "metadata":
        metadata_with(folder, code)
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
    "extra state, without a header": f"{EXTRA} in __0_0.distcp",
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


@pytest.mark.parametrize("place", ["metadata", "arguments"])
def test_code_without_which_nothing_can_be_read_is_named(tmp_path, capsys, place):
    folder = with_code(tmp_path / "checkpoint", place, Call(posix.mkdir, (str(tmp_path / "mark"),)))
    if place == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Call(posix.mkdir, (str(tmp_path / "mark"),))))
    assert main(["verify-checkpoint", str(folder)]) == 2
    assert "and it names posix.mkdir" in capsys.readouterr().err
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Call(bytearray, (Call(codecs.encode, ("pbqr", "rot13")),)), "calls _codecs.encode with more than constants"),
        ([io.BytesIO(b"no pickle")], "no pickle"),
        (byte_tensor(b"\0" * 8 + pickle.dumps(1))[8:].clone()[::1], None),
        (byte_tensor(b"\0" * 8 + pickle.dumps(1))[8:], "part of a tensor's bytes"),
        (byte_tensor(pickle.dumps(1)).repeat_interleave(2)[::2], "part of a tensor's bytes"),
        (Call(torch.ByteStorage, ([0, 1],)), "makes bytes of one"),
        (torch.ones(3), "torch.FloatStorage"),
        (numpy.frombuffer(pickle.dumps(1), dtype=numpy.uint8), "numpy"),
    ],
)
def test_bytes_of_extra_states_that_are_not_in_sight(value, reason):
    found = faults(io.BytesIO(archive(value)), extra_state=True)
    assert any(reason in fault for fault in found) if reason else not found


def assembled(*operations):
    return b"\x80\x04" + b"".join(operations) + b"."


def text(value):
    return b"\x8c" + bytes([len(value)]) + value.encode()


SYSTEM = [text("posix"), text("system")]


@pytest.mark.parametrize(
    ("pickled", "words"),
    [
        (assembled(*SYSTEM, b"\x93"), "names posix.system"),
        (assembled(SYSTEM[0], b"q\0", SYSTEM[1], b"q\1", b"00", b"h\0h\1", b"\x93"), "names posix.system"),
        (assembled(b"cposix\nsystem\n"), "names posix.system"),
        (assembled(b"(", text("ls"), b"iposix\nsystem\n"), "names posix.system"),
        (assembled(b"(cposix\nsystem\n", text("ls"), b"o"), "names posix.system"),
        (assembled(text("torch"), text("hub.load"), b"\x93"), "names torch.hub.load"),
        (assembled(text("megatron.core.enums"), text("enum.sys"), b"\x93"), "names megatron.core.enums.enum.sys"),
        (assembled(text("posix"), b"cbuiltins\nstr\n(", text("system"), b"tR", b"\x93"), "computes a name"),
        (assembled(b"\x82\1"), "registered elsewhere"),
        (assembled(b"cargparse\nNamespace\n", b"}", text("a"), b"K\1s", b"b"), "changes what is no container"),
        (
            assembled(b"cargparse\nNamespace\n)R}", text("__setstate__"), b"ctorch.storage\n_load_from_bytes\n", b"sb"),
            "takes a function for a value",
        ),
        (assembled(b"cbuiltins\nbytearray\nJ", (10**9).to_bytes(4, "little"), b"\x85R"), "more than constants"),
        (assembled(b")", b"\x85" * 200), "tuples in tuples"),
        (assembled(b"cbuiltins\nlist\n)R)\x81"), "computes what it calls"),
        (assembled(b"\x96\1" + bytes(7) + b"a", b"K\1a"), "changes what is no container"),
        (assembled(b"Nr\xff\xff\xff\x7f"), "numbers its values"),
    ],
)
def test_what_a_pickle_does_is_followed(pickled, words):
    assert any(words in fault for fault in faults(io.BytesIO(pickled)))


def test_an_extra_state_of_before_zip_files_is_not_in_sight():
    file = io.BytesIO()
    torch.save(byte_tensor(pickle.dumps(1)), file, _use_new_zipfile_serialization=False)
    assert faults(io.BytesIO(file.getvalue())) == set()
    assert "its tensors follow it" in str(faults(io.BytesIO(file.getvalue()), extra_state=True))


def test_pickles_in_pickles():
    value = b"code"
    for _ in range(6):
        value = archive({"more": value})
    assert "more than 4 deep" in str(faults(io.BytesIO(value)))


def test_what_could_be_read_as_another_archive_is_refused():
    sound = archive({"a": torch.ones(3)})
    assert faults(io.BytesIO(sound)) == set()
    for changed in (b"PK\3\4" + sound, sound + b"\0", sound.replace(b"data.pkl", b"Data.pkl"), sound[:-30]):
        with pytest.raises(ValueError, match=r"no archive as torch\.save writes"):
            faults(io.BytesIO(changed))


def test_what_transformer_engine_keeps(monkeypatch):
    """In an extra state: its recipe, and tensors, each in an archive of its own."""
    module = types.ModuleType("transformer_engine.common.recipe")
    recipe = type("DelayedScaling", (), {"__module__": module.__name__})
    module.DelayedScaling = recipe
    monkeypatch.setitem(sys.modules, "transformer_engine", types.ModuleType("transformer_engine"))
    monkeypatch.setitem(sys.modules, "transformer_engine.common", types.ModuleType("transformer_engine.common"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    state = {"recipe": recipe(), "scale_fwd": torch.ones(3), "amax_history_fwd": torch.zeros(4, 3)}
    for saved in (byte_tensor(pickle.dumps(state)), [io.BytesIO(archive(state))], torch.empty(0, dtype=torch.uint8)):
        assert faults(io.BytesIO(archive(saved)), extra_state=True) == set()


def test_random_states_are_no_pickles():
    """Numbers that begin as a pickle does, in an object that nobody unpickles once more."""
    values = {"torch": torch.arange(256, dtype=torch.uint8), "seed": byte_tensor(b"\x80\x02" + bytes(range(99, 200)))}
    assert faults(io.BytesIO(archive({**values, "numpy": numpy.random.default_rng(0).bytes(4000)}))) == set()


def test_one_problem_for_what_is_in_many_places(tmp_path):
    more = {f"rng_state/shard_{rank}_8": {"a": Call(posix.mkdir, ("x",))} for rank in range(8)}
    contents = read_contents(save(tmp_path / "checkpoint", {**tensors(), **more}))
    (problem,) = check_pickles(contents)
    assert "and 7 more names posix.mkdir" in problem.what
    assert "--trust-checkpoint-globals" in problem.advice
    assert list(check_pickles(contents, {"all"})) == []
