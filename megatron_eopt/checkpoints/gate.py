"""The gate: all that is unpickled of a checkpoint goes through it.

A pickle is a program for a machine with a stack: it names classes and functions of any module, and has them called.
This machine knows only the operations that are in pickles of plain data, and only the names in ``harmless.py``. Any
other name becomes an inert stand-in, of which nothing is called, and is told to the caller. ``verify-checkpoint`` and
runs load by the same machine, so what one says of a checkpoint holds for the other.
"""

import enum
import io
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import torch
from torch.serialization import StorageType, default_restore_location
from torch.storage import TypedStorage

from megatron_eopt.checkpoints import harmless
from megatron_eopt.checkpoints.archives import open_archive, root_of
from megatron_eopt.checkpoints.bounds import ARCHIVES, OBJECT_BYTES
from megatron_eopt.checkpoints.harmless import Maker, Unknown, refuse

# Those of protocols 2 to 5 that make plain data. Without the rest nothing is swapped, named by number or made anew.
_OPERATIONS = """
    PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 LONG4 BINFLOAT
    SHORT_BINUNICODE BINUNICODE BINUNICODE8 SHORT_BINBYTES BINBYTES BINBYTES8
    EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST EMPTY_DICT EMPTY_SET
    MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL BINPERSID
""".split()
_FIRST_OF_LEGACY = 0x1950A86A20F9469CFC6C  # begins what torch saves not as a zip file
_VERSION_OF_LEGACY = 1001
_FREE = 2**24  # bytes that small pickles may copy
_COPIES = 16  # of the size of a pickle: of a state, the names are in the file once, and in each instance


class ForeignNameError(pickle.UnpicklingError):
    """A pickle names what is neither harmless nor trusted."""


@dataclass
class Load:
    """One load: what it may name, what it has named, what it may still copy."""

    # For a run, in which a foreign name is an error, and names of Megatron and Transformer Engine are their classes.
    # Otherwise both are stand-ins.
    real: bool = False
    trusted: Mapping[str, Any] = field(default_factory=dict)  # name -> what it stands for, None to be imported
    on_device: bool = False  # tensors go where they were saved from
    data: bool = True  # read tensors' data
    foreign: set[str] = field(default_factory=set)  # names that are neither harmless nor trusted
    missing: set[str] = field(default_factory=set)  # classes of what is not installed
    _left: int = _FREE
    _depth: int = 0

    def pay(self, size: int) -> None:
        """Account for bytes of memory, or refuse."""
        self._left -= size
        if self._left < 0:
            refuse("it copies more than its size")

    def load_pickle(self, file: BinaryIO, storages: Callable[[Any], Any] | None = None) -> Any:
        """Load one pickle; an exception for what is none, or does more."""
        return _Machine(file, self, storages).load()

    def load_bytes(self, data: bytes) -> Any:
        """Load a pickle of these bytes."""
        self._left += _COPIES * len(data)
        return self.load_pickle(io.BytesIO(data))

    def load_saved(self, file: BinaryIO) -> Any:
        """Load what ``torch.save`` wrote into a file of its own."""
        self._left += _COPIES * file.seek(0, io.SEEK_END)
        return self._load_saved(file)

    def load_inside(self, data: bytes) -> Any:
        """Load what ``torch.save`` wrote into a pickle."""
        return self._load_saved(io.BytesIO(data))

    def load_extra_state(self, value: Any) -> Any:
        """An extra state of a module, whose bytes some modules unpickle.

        They do so by themselves. So a run gets bytes that are written anew, from what was loaded here; and none where
        those modules are not installed.
        """
        if isinstance(value, list):
            return [self.load_extra_state(each) for each in value]
        if isinstance(value, torch.Tensor) and value.numel():
            inner = self.load_bytes(value.detach().cpu().numpy().tobytes())
        elif isinstance(value, bytes | bytearray):
            inner = self.load_bytes(bytes(value))
        elif isinstance(value, io.BytesIO):
            inner = self.load_saved(io.BytesIO(value.getvalue()))
        else:
            return value
        if not self.real:
            return value
        return torch.empty(0, dtype=torch.uint8) if self.missing else _written(inner, value)

    def _load_saved(self, file: BinaryIO) -> Any:
        if self._depth == ARCHIVES:
            refuse(f"it has pickles in pickles, more than {ARCHIVES} deep")
        self._depth += 1
        file.seek(0)
        if file.read(4) == b"PK\3\4":
            made = self._load_zipped(file)
        elif file.seek(0, io.SEEK_END) > OBJECT_BYTES:
            refuse("it is nothing that torch.save writes")
        else:
            file.seek(0)
            made = self._load_legacy(io.BytesIO(file.read()))
        self._depth -= 1
        return made

    def _load_zipped(self, file: BinaryIO) -> Any:
        with open_archive(file) as archive:
            root = root_of(archive)
            entries = {entry.filename.removeprefix(root): entry for entry in archive.infolist()}
            if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
                refuse("it was saved on a machine with another order of bytes")
            if entries["data.pkl"].file_size > OBJECT_BYTES:
                refuse(f"its pickle has more than {OBJECT_BYTES:,} bytes")
            made: dict[str, torch.UntypedStorage] = {}

            def storage(identity: Any) -> TypedStorage:
                dtype, key, location, size, _ = _storage(identity, 5)
                if key not in made:
                    if entries[f"data/{key}"].file_size != size:
                        refuse("it has a tensor whose data have another size")
                    if self.data:
                        made[key] = self._placed(_untyped(archive.read(entries[f"data/{key}"])), location)
                    else:
                        made[key] = torch.UntypedStorage(size, device="meta")
                return _typed(made[key], dtype, size)

            return self.load_pickle(io.BytesIO(archive.read(entries["data.pkl"])), storage)

    def _load_legacy(self, file: BinaryIO) -> Any:
        """What torch wrote before it had zip files, and still writes of storages within pickles."""
        if self.load_pickle(file) != _FIRST_OF_LEGACY or self.load_pickle(file) != _VERSION_OF_LEGACY:
            refuse("it is nothing that torch.save writes")
        machine = self.load_pickle(file)
        if type(machine) is not dict or machine.get("little_endian") is not True:
            refuse("it was saved on a machine with another order of bytes")
        made: dict[str, tuple[torch.UntypedStorage, int]] = {}

        def storage(identity: Any) -> TypedStorage:
            dtype, key, location, size, view = _storage(identity, 6)
            if view is not None:
                refuse("it has a storage within another")
            if key not in made:
                self.pay(size)
                made[key] = self._placed(torch.UntypedStorage(size), location), dtype.itemsize
            return _typed(made[key][0], dtype, size)

        value = self.load_pickle(file, storage)
        keys = self.load_pickle(file)
        if type(keys) is not list or not all(type(key) is str for key in keys) or sorted(keys) != sorted(made):
            refuse("it has other data than tensors")
        for key in keys:
            untyped, itemsize = made[key]
            (entries,) = struct.unpack("<q", file.read(8))
            data = file.read(untyped.nbytes())
            if entries * itemsize != untyped.nbytes() or len(data) != untyped.nbytes():
                refuse("it has a tensor whose data have another size")
            if data:
                untyped.copy_(_untyped(data))
        return value

    def _placed(self, storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
        if not self.on_device or location == "cpu":
            return storage
        return default_restore_location(storage, location)


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


def _storage(identity: Any, length: int) -> tuple[torch.dtype, str, str, int, Any]:
    if type(identity) is not tuple or len(identity) != length or identity[0] != "storage":
        refuse("it has what is outside of it")
    _, kind, key, location, entries, *view = identity
    if type(kind) is not StorageType or type(key) is not str or type(location) is not str:
        refuse("it has what is outside of it")
    if type(entries) is not int or not 0 <= entries < 2**63:
        refuse("it has a tensor of no size")
    return kind.dtype, key, location, entries * kind.dtype.itemsize, view[0] if view else None


def _untyped(data: bytes) -> torch.UntypedStorage:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).untyped_storage() if data else torch.UntypedStorage(0)


def _typed(storage: torch.UntypedStorage, dtype: torch.dtype, size: int) -> TypedStorage:
    if storage.nbytes() != size:
        refuse("it has a tensor whose data have another size")
    return TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


class _Operations(dict[int, Callable[[Any], None]]):
    def __missing__(self, key: int) -> Callable[[Any], None]:
        refuse(f"it has an operation (0x{key:02x}) that pickles of plain data have not")


_Unpickler: Any = pickle._Unpickler


class _Machine(_Unpickler):
    """Python's own unpickler with fewer operations; its memo is a dict, so no number in it takes memory."""

    def __init__(self, file: BinaryIO, load: Load, storages: Callable[[Any], Any] | None) -> None:
        super().__init__(file)
        self._load, self._storages = load, storages
        # By identity, what the pickle has named: enums, classes that get a state, and what is trusted.
        self._enums: dict[int, Any] = {}
        self._classes: dict[int, Any] = {}
        self._trusted: dict[int, Any] = {}
        self._stand_ins: dict[str, type[Unknown]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """What a name stands for."""
        module = "builtins" if module == "__builtin__" else module  # Python 2's, as torch writes it
        found = harmless.resolve(module, name)
        path = f"{module}.{name}"
        if found is None:
            return self._foreign(module, name, path)
        if found is harmless.IMPORTED:
            found = harmless.imported(module, name) if self._load.real else None
            if found is None:
                self._load.missing.add(path)
                return self._stand_in(path)
        elif not isinstance(found, type) or found not in harmless.CLASSES:
            return found
        named = self._enums if issubclass(found, enum.Enum) else self._classes
        named[id(found)] = found
        return found

    def _foreign(self, module: str, name: str, path: str) -> Any:
        if path in self._load.trusted:
            found = self._load.trusted[path] or super().find_class(module, name)
            self._trusted[id(found)] = found
            return found
        self._load.foreign.add(path)
        if self._load.real:
            raise ForeignNameError(f"names {path}")
        return self._stand_in(path)

    def _stand_in(self, path: str) -> type[Unknown]:
        if path not in self._stand_ins:
            self._stand_ins[path] = type(path.rpartition(".")[2], (Unknown,), {"name": path})
        return self._stand_ins[path]

    def persistent_load(self, identity: Any) -> Any:
        """A storage beside the pickle."""
        return self._storages(identity) if self._storages else refuse("it has what is outside of it")

    def load_reduce(self) -> None:
        """Call what a pickle may call."""
        arguments, function = self.stack.pop(), self.stack[-1]
        if type(arguments) is not tuple:
            refuse("it calls with what are no arguments")
        self.stack[-1] = self._call(function, arguments)

    def _call(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if id(function) in self._trusted:
            return function(*arguments)
        if type(function) is Maker:
            return function.make(self._load, *arguments)
        if id(function) in self._enums:
            (value,) = arguments
            harmless.check_key(value)
            return function(value)
        return self._instance(function, arguments)

    def load_newobj(self) -> None:
        """Make an instance without its constructor."""
        arguments, kind = self.stack.pop(), self.stack[-1]
        if type(arguments) is not tuple:
            refuse("it makes an instance of what are no arguments")
        if id(kind) in self._trusted:
            self.stack[-1] = kind.__new__(kind, *arguments)
        else:
            self.stack[-1] = self._instance(kind, arguments)

    def _instance(self, kind: Any, arguments: tuple[Any, ...]) -> Any:
        if isinstance(kind, type) and issubclass(kind, Unknown):
            return kind(*arguments)
        if id(kind) not in self._classes:
            refuse("it calls what is no function or class")
        if arguments:
            if not issubclass(kind, tuple):  # one with names, such as of Transformer Engine
                refuse(f"it calls the constructor of {kind.__qualname__}")
            harmless.check_key(arguments)
        return kind.__new__(kind, *arguments)

    def load_build(self) -> None:
        """Give an instance its state."""
        state, instance = self.stack.pop(), self.stack[-1]
        kind = type(instance)
        if id(kind) in self._trusted:
            self.stack.append(state)
            super().load_build()
        elif isinstance(instance, Unknown):
            instance.arguments = (*instance.arguments, state)
        elif kind in harmless.STATES:
            harmless.STATES[kind](self._load, instance, state)
        elif id(kind) not in self._classes:
            refuse(f"it changes a {kind.__name__}, which has no state of its own")
        elif hasattr(kind, "__setstate__"):
            instance.__setstate__(state)
        else:
            harmless.check_state(state)
            self._load.pay(harmless.PER_VALUE * len(state))
            vars(instance).update(state)

    def _append(self, items: list[Any]) -> None:
        container = self.stack[-1]
        if type(container) is list or id(type(container)) in self._trusted:
            container.extend(items)
        elif not isinstance(container, Unknown):
            refuse(f"it appends to a {type(container).__name__}")

    def load_append(self) -> None:
        """Append an item."""
        item = self.stack.pop()
        self._append([item])

    def load_appends(self) -> None:
        """Append items."""
        items = self.pop_mark()
        self._append(items)

    def load_setitem(self) -> None:
        """Set an item of a dict."""
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def load_setitems(self) -> None:
        """Set items of a dict."""
        items = self.pop_mark()
        self._set(items)

    def _set(self, items: list[Any]) -> None:
        container = self.stack[-1]
        if isinstance(container, Unknown):
            return
        if type(container) not in _DICTS and id(type(container)) not in self._trusted:
            refuse(f"it sets items of a {type(container).__name__}")
        for index in range(0, len(items), 2):
            harmless.check_key(items[index])
            container[items[index]] = items[index + 1]

    def load_additems(self) -> None:
        """Add items to a set."""
        items = self.pop_mark()
        if type(self.stack[-1]) is not set:
            refuse(f"it adds items to a {type(self.stack[-1]).__name__}")
        for item in items:
            harmless.check_key(item)
            self.stack[-1].add(item)

    def load_frozenset(self) -> None:
        """Make a set that does not change."""
        items = self.pop_mark()
        for item in items:
            harmless.check_key(item)
        self.append(frozenset(items))

    dispatch = _Operations(
        {
            **{getattr(pickle, name)[0]: _Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPERATIONS},
            pickle.REDUCE[0]: load_reduce,
            pickle.NEWOBJ[0]: load_newobj,
            pickle.BUILD[0]: load_build,
            pickle.APPEND[0]: load_append,
            pickle.APPENDS[0]: load_appends,
            pickle.SETITEM[0]: load_setitem,
            pickle.SETITEMS[0]: load_setitems,
            pickle.ADDITEMS[0]: load_additems,
            pickle.FROZENSET[0]: load_frozenset,
        }
    )


_DICTS = (dict, harmless.OrderedDict, harmless.defaultdict)
