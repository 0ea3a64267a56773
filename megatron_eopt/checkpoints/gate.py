"""The gate: all that is unpickled of a checkpoint goes through it.

A pickle names classes and functions of any module, and has them called. Here only the names in ``harmless.py`` are
what they say. Any other name becomes an inert stand-in, and is told to the caller. Python's own unpickler and torch's
own reader of archives do the rest, and ``verify-checkpoint`` and runs load by the same.
"""

import enum
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, BinaryIO

import torch

from megatron_eopt.checkpoints import harmless
from megatron_eopt.checkpoints.bounds import FILE_BYTES
from megatron_eopt.checkpoints.harmless import Unknown, refuse

_INNER = {("torch.storage", "_load_from_bytes"), ("megatron.core.safe_globals", "safe_load_from_bytes")}
_GENERATORS = {("torch", "Generator"), ("torch._C", "Generator")}
_TUPLES = 1000  # in a tuple: Python's hash of them calls itself, which ends a process
# Without these nothing is named by a number, and no memory is taken for data that are not there. The second line has
# those of protocols 0 and 1, which import encodings.
_REFUSED = """
    EXT1 EXT2 EXT4 INST OBJ PERSID BYTEARRAY8 NEXT_BUFFER READONLY_BUFFER
    INT LONG FLOAT STRING BINSTRING SHORT_BINSTRING UNICODE GET PUT
""".split()
_TUPLE_MAKERS = "TUPLE TUPLE1 TUPLE2 TUPLE3 REDUCE NEWOBJ NEWOBJ_EX".split()


class ForeignNameError(pickle.UnpicklingError):
    """A pickle names what is neither harmless nor trusted."""


@dataclass
class Load:
    """One load: what it may name, and what it has named."""

    # For a run, in which a foreign name is an error, and names of Megatron and Transformer Engine are their classes.
    # Otherwise both are stand-ins.
    real: bool = False
    trusted: Mapping[str, Any] = field(default_factory=dict)  # name -> what it stands for, None to be imported
    location: str | None = "cpu"  # of tensors; None for the device from which they were saved
    foreign: set[str] = field(default_factory=set)  # names that are neither harmless nor trusted
    missing: set[str] = field(default_factory=set)  # classes of what is not installed

    def load_bytes(self, data: bytes) -> Any:
        """Load one pickle; an exception for what is none, or does more."""
        return self._unpickler()(io.BytesIO(data)).load()

    def load_saved(self, file: BinaryIO) -> Any:
        """Load what ``torch.save`` wrote."""
        file.seek(0)
        if file.read(4) == b"PK\3\4":
            file.seek(0)  # from where torch's reader reads
            records = torch._C.PyTorchFileReader(file).get_all_records()
            if "constants.pkl" in records:
                refuse("it is a program of TorchScript")
        elif file.seek(0, io.SEEK_END) > FILE_BYTES:
            refuse("it is nothing that torch.save writes")
        else:  # as torch writes storages within pickles; and a file with a name torch would take for a tar file
            file.seek(0)
            file = io.BytesIO(file.read())
        file.seek(0)
        unpickler = self._unpickler()
        module = SimpleNamespace(
            __name__=__name__, Unpickler=unpickler, load=lambda file, **how: unpickler(file, **how).load()
        )
        return torch.load(file, map_location=self.location, pickle_module=module, weights_only=False)

    def load_inner(self, data: bytes) -> Any:
        """Load what ``torch.save`` wrote into a pickle."""
        return self.load_saved(io.BytesIO(data))

    def load_extra_state(self, value: Any) -> Any:
        """An extra state of a module, whose bytes some modules unpickle.

        They do so by themselves. So a run gets bytes that are written anew, from what was loaded here; and none where
        those modules are not installed.
        """
        if isinstance(value, list):
            return [self.load_extra_state(each) for each in value]
        if isinstance(value, torch.Tensor) and value.numel():
            if value.nbytes > value.untyped_storage().nbytes():
                refuse("it has a tensor that is larger than its data")
            inner = self.load_bytes(value.detach().cpu().numpy().tobytes())
        elif isinstance(value, bytes | bytearray):
            inner = self.load_bytes(bytes(value))
        elif isinstance(value, io.BytesIO):
            inner = self.load_inner(value.getvalue())
        else:
            return value
        if not self.real:
            return value
        return torch.empty(0, dtype=torch.uint8) if self.missing else _written(inner, value)

    def find(self, module: str, name: str) -> Any:
        """What a name stands for; None where it is to be imported."""
        path = f"{module}.{name}"
        if (module, name) in _INNER:
            return self.load_inner
        if (module, name) in _GENERATORS and not self.real:
            return _stand_in(path)  # the GPU that it names may not be here
        found = harmless.NAMES.get((module, name))
        if found is not None:
            return found
        if harmless.is_imported(module, name):
            found = harmless.imported(module, name) if self.real else None
            if found is None:
                self.missing.add(path)
            return found or _stand_in(path)
        if path in self.trusted:
            return self.trusted[path]
        self.foreign.add(path)
        if self.real:
            raise ForeignNameError(f"names {path}")
        return _stand_in(path)

    def trusts(self, kind: type) -> bool:
        """Whether the user trusts a class."""
        path = f"{kind.__module__}.{kind.__qualname__}"
        return path in self.trusted or any(kind is each for each in self.trusted.values())

    def _unpickler(self) -> Any:
        return type("Unpickler", (_GatedUnpickler,), {"gate": self})


def _stand_in(path: str) -> type[Unknown]:
    return type(path.rpartition(".")[2], (Unknown,), {"name": path})


def _written(inner: Any, like: Any) -> Any:
    """Bytes that load as ``inner``, in the form of others."""
    if isinstance(like, torch.Tensor):
        return torch.frombuffer(bytearray(pickle.dumps(inner)), dtype=torch.uint8).to(like.device)
    if isinstance(like, io.BytesIO):
        file = io.BytesIO()
        torch.save(inner, file)
        file.seek(0)
        return file
    return type(like)(pickle.dumps(inner))


class _Operations(dict[int, Callable[[Any], None]]):
    def __missing__(self, key: int) -> Callable[[Any], None]:
        refuse(f"it has an operation (0x{key:02x}) that pickles of plain data have not")


_Unpickler: Any = pickle._Unpickler  # Python's own, in Python: that in C sets the state of anything


def _bounded(load: Callable[[Any], None]) -> Callable[[Any], None]:
    """An operation after which a tuple is not too deep."""

    def load_and_count(self: Any) -> None:
        load(self)
        made = self.stack[-1]
        if isinstance(made, tuple):
            inside = [self.tuples.get(id(each), 1) for each in made if isinstance(each, tuple)]
            self.tuples[id(made)] = count = 1 + sum(inside)
            if count > _TUPLES:
                refuse(f"it has tuples in tuples, more than {_TUPLES:,}")

    return load_and_count


class _GatedUnpickler(_Unpickler):
    gate: Load

    def __init__(self, file: BinaryIO, **how: Any) -> None:
        super().__init__(file, **how)
        self.tuples: dict[int, int] = {}  # identity -> number of tuples inside

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for."""
        module = "builtins" if module == "__builtin__" else module  # Python 2's, as torch writes it
        found = self.gate.find(module, name)
        return super().find_class(module, name) if found is None else found

    def load_binpersid(self) -> None:
        """Take a storage from outside of the pickle; torch has other things there, too."""
        identity = self.stack[-1]
        if type(identity) is not tuple or identity[:1] != ("storage",):
            refuse("it has what is outside of it")
        super().load_binpersid()

    def load_build(self) -> None:
        """Give an instance its state, where that changes nothing else."""
        state = self.stack.pop()
        instance = self.stack[-1]
        kind = type(instance)
        if isinstance(instance, Unknown):
            instance.arguments = (*instance.arguments, state)
        elif kind in harmless.STATES:
            harmless.STATES[kind](instance, state)
        elif self.gate.trusts(kind):
            self.stack.append(state)
            super().load_build()
        elif kind not in harmless.CLASSES and not _is_imported(kind):
            refuse(f"it changes a {kind.__name__}, which has no state of its own")
        elif hasattr(kind, "__setstate__"):
            instance.__setstate__(state)
        else:
            harmless.check_state(state)
            vars(instance).update(state)

    dispatch = _Operations(_Unpickler.dispatch)
    for _name in _TUPLE_MAKERS:
        dispatch[getattr(pickle, _name)[0]] = _bounded(dispatch[getattr(pickle, _name)[0]])
    for _name in _REFUSED:
        del dispatch[getattr(pickle, _name)[0]]
    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.BINPERSID[0]] = load_binpersid


def _is_imported(kind: type) -> bool:
    return harmless.is_imported(kind.__module__, kind.__qualname__) and not issubclass(kind, enum.Enum)
