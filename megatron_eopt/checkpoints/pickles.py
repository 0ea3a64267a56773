"""What a pickle names and calls, found without running it.

A pickle is a program for a machine with a stack: it names classes and functions of any module, calls them and puts
values together. Here the stack holds constants, tuples and names; all else is unknown. What depends on unknown values,
such as a computed name, is a fault like a name that is not allowed.
"""

import io
import math
import pickletools
import re
import struct
import zipfile
from typing import Any, BinaryIO, NamedTuple

import torch

from megatron_eopt.checkpoints.bounds import ARCHIVES, DEPTH, OBJECT_BYTES


class Global(NamedTuple):
    """A class or function, as a pickle names it."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class _Tuple(NamedTuple):
    items: tuple[Any, ...]
    depth: int


class _UnresolvedError(ValueError):
    """What a pickle does depends on more than its constants."""


OF_METADATA = """BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties
    TensorStorageMetadata _MEM_FORMAT_ENCODING"""
# What Megatron-Core 0.17 to 0.19, Transformer Engine, torch and this package write, by module. Constructing these with
# any arguments does no harm; the only functions among them make tensors and arrays.
_NAMES = {
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "signal": "Signals",
    "collections": "OrderedDict defaultdict",
    "pathlib": "Path PosixPath PurePosixPath",
    "pathlib._local": "Path PosixPath PurePosixPath",
    "datetime": "timedelta",
    "io": "BytesIO",
    "_io": "BytesIO",
    "_codecs": "encode",
    "builtins": "set frozenset complex slice range bytes bytearray dict list tuple int float bool str",
    "numpy": "ndarray dtype",
    "numpy.dtypes": "UInt32DType",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy._core.multiarray": "_reconstruct scalar",
    "torch": "Size device Tensor Generator",
    "torch._C": "Generator",
    "torch._tensor": "_rebuild_from_type_v2",
    "torch._utils": "_rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter",
    "torch.nn.parameter": "Parameter",
    "torch.serialization": "_get_layout",
    "torch.storage": "TypedStorage UntypedStorage _load_from_bytes",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": OF_METADATA,
    "torch.distributed.checkpoint.planner": """BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType""",
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig AdamOptimizerConfig SGDOptimizerConfig",
    "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
    "megatron.core.safe_globals": "safe_load_from_bytes",
    "megatron.core.extensions.transformer_engine": "TEDelayedScaling",
    "transformer_engine.common.recipe": """CustomRecipe DelayedScaling Float8BlockScaling Float8CurrentScaling Format
        MMParams MXFP8BlockScaling NVFP4BlockScaling QParams _FormatHelper""",
}
_ALLOWED = {Global(module, name) for module, names in _NAMES.items() for name in names.split()}
_ALLOWED |= {Global("torch", each.__name__) for each in torch._storage_classes}
_ALLOWED |= {Global("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)}
# They have nothing but enums, to which each release adds.
_ENUMS = {"megatron.core.enums", "megatron.core.transformer.enums"}
_BYTES = {Global("builtins", "bytes"), Global("builtins", "bytearray")}
_ENCODE = Global("_codecs", "encode")
_LOADED = {Global("torch.storage", "_load_from_bytes"), Global("megatron.core.safe_globals", "safe_load_from_bytes")}
_OF_CONSTANTS = {_ENCODE, *_BYTES, *_LOADED}  # harmless if their arguments are known
# All that a module's extra state may have: some modules unpickle its bytes once more. What makes bytes of other values,
# or swaps them, would hide them.
_OF_BYTES = Global("torch", "ByteStorage")
_IN_EXTRA_STATE = {Global("_io", "BytesIO"), Global("io", "BytesIO"), _ENCODE, *_BYTES, _OF_BYTES}
_IN_EXTRA_STATE |= {Global("collections", "OrderedDict"), Global("torch._utils", "_rebuild_tensor_v2")}

NAMES = "names "
_FIRST_OF_LEGACY = 0x1950A86A20F9469CFC6C  # begins what torch saves not as a zip file; four more pickles follow
_BEGINNINGS = {b"PK", *(bytes([0x80, protocol]) for protocol in range(2, 6))}
_END = struct.Struct("<4s36xQQ4s4xQ4x4s18x")  # of a zip file that torch wrote: its last 98 bytes
_DIRECTORY = 2**24  # bytes, of which an entry has about a hundred

_MARKED = {op.name for op in pickletools.opcodes if pickletools.markobject in op.stack_before}  # take all above a mark
_TAKES = {op.name: len(op.stack_before) - 2 * (op.name in _MARKED) for op in pickletools.opcodes} | {"OBJ": 0}
_CONSTANTS = {op.name for op in pickletools.opcodes if op.arg and op.stack_after and not op.stack_before}
_CONSTANTS -= {"GLOBAL", "PERSID", "GET", "BINGET", "LONG_BINGET", "EXT1", "EXT2", "EXT4"}
_BYTE_STRINGS = {"SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "BYTEARRAY8"}
_CHANGES = {"BUILD", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS"}
_CALLS = {"REDUCE", "NEWOBJ", "NEWOBJ_EX", "OBJ"}
_TUPLES = {"EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"}
_MEMOIZE = {"MEMOIZE", "PUT", "BINPUT", "LONG_BINPUT"}
_GET = {"GET", "BINGET", "LONG_BINGET"}


def is_allowed(named: Global) -> bool:
    """Whether it is harmless in a checkpoint."""
    if named.module in _ENUMS:
        return re.fullmatch(r"[A-Z]\w*", named.name) is not None
    return named in _ALLOWED


def faults(file: BinaryIO, extra_state: bool = False) -> set[str]:
    """What is wrong with pickles; an exception without any.

    A fault that begins with :data:`NAMES` goes on with a name, and any other says what cannot be told. ``file`` is a
    pickle, or what ``torch.save`` wrote; ``extra_state``: of a module, and some modules unpickle theirs once more.
    """
    found, waiting = set[str](), [(file, extra_state, True, 0)]
    for file, extra_state, surely, level in waiting:  # grows in the loop
        seen = _Seen(extra_state)
        try:
            _look(file, seen)
        except _UnresolvedError as reason:
            found.add(f"cannot be followed without running it: {reason}")
        except Exception as error:  # what is no pickle raises anything, and would have run up to there
            if level == 0:
                raise
            if surely:
                found.add(f"holds bytes that are no pickle ({error})")
        for named in seen.names:
            if not is_allowed(named) or (extra_state and named not in _IN_EXTRA_STATE):
                found.add(f"{NAMES}{named}")
        constants = [(data, sure or extra_state) for data, sure in seen.constants if data]
        inner = [(data, sure) for data, sure in constants if sure or data[:2] in _BEGINNINGS]
        if inner and level == ARCHIVES:
            return {*found, f"holds pickles in pickles, more than {ARCHIVES} deep"}
        waiting += [(io.BytesIO(data), False, sure, level + 1) for data, sure in inner]
    return found


class _Seen:
    """What a pickle names, and the bytes in it."""

    def __init__(self, extra_state: bool) -> None:
        self.extra_state, self.names, self._left = extra_state, set[Global](), OBJECT_BYTES
        self.constants: list[tuple[bytes, bool]] = []  # bytes, and whether they surely are a pickle
        self.needs_constants = extra_state  # it names functions whose arguments must be known

    def keep(self, data: bytes, surely: bool = False) -> None:
        """Keep bytes to look at, within a bound."""
        self._left -= len(data)
        if self._left < 0:
            raise _UnresolvedError(f"it makes more than {OBJECT_BYTES:,} bytes")
        self.constants.append((data, surely))


def _look(file: BinaryIO, seen: _Seen) -> None:
    start = file.read(4)
    file.seek(0)
    if start == b"PK\3\4":
        with open_archive(file) as archive:
            for entry in archive.infolist():
                if entry.filename.endswith("/data.pkl"):
                    _walk(io.BytesIO(archive.read(entry)), seen)
                elif "/data/" in entry.filename:
                    seen.keep(archive.read(entry))
    elif _walk(file, seen) == _FIRST_OF_LEGACY:
        if seen.extra_state:
            raise _UnresolvedError("its tensors follow it")
        for _ in range(4):
            _walk(file, seen)


def _walk(file: BinaryIO, seen: _Seen) -> Any:
    """The constant that a pickle loads as, or None."""
    stack, marks, memo = list[Any](), list[int](), dict[int, Any]()
    argument: Any
    for op, argument, _ in pickletools.genops(file):
        kind = op.name
        if kind in _MEMOIZE:
            index = len(memo) if argument is None else argument
            if index > len(memo):  # Python would allocate all before it
                raise _UnresolvedError("it numbers its values otherwise than pickles do")
            memo[index] = stack[-1]
        elif kind in _GET:
            stack.append(memo[argument])
        elif kind in _CONSTANTS:
            if kind in _BYTE_STRINGS:
                argument = bytes(argument)
                seen.keep(argument)
            stack.append(argument)
        elif kind == "MARK":
            marks.append(len(stack))
        else:
            start = (marks.pop() if kind in _MARKED else len(stack)) - _TAKES[kind]
            if start < (marks[-1] if marks else 0):
                raise ValueError(f"{kind} takes values that are not there")
            taken = stack[start:]
            stack[start:] = [_made(kind, argument, taken, seen)] * len(op.stack_after)
    return taken[0]  # of the last operation, STOP


def _made(kind: str, argument: Any, taken: list[Any], seen: _Seen) -> Any:
    """The value that an operation makes; None if unknown."""
    for position, each in enumerate(taken if seen.needs_constants else ()):
        of_constants = type(each) is Global and each in _OF_CONSTANTS and not (kind == "REDUCE" and position == 0)
        if of_constants or (seen.extra_state and each == _OF_BYTES and kind not in _TUPLES):
            raise _UnresolvedError("it takes a function for a value, or makes bytes of one")
    if kind in _TUPLES:
        depth = 1 + max([each.depth for each in taken if type(each) is _Tuple], default=0)
        if depth > DEPTH:
            raise _UnresolvedError(f"it has tuples in tuples, more than {DEPTH} deep")
        return _Tuple(tuple(taken), depth)
    if kind in _CHANGES:
        if type(taken[0]) in (Global, _Tuple, str, bytes):
            raise _UnresolvedError("it changes what is no container of its own")
        return taken[0]
    if kind in _CALLS:
        if type(taken[0]) is not Global:
            raise _UnresolvedError("it computes what it calls")
        items = taken[1].items if kind == "REDUCE" and type(taken[1]) is _Tuple else (None,)
        return _call(taken[0], items, seen) if seen.needs_constants else None
    if kind in ("GLOBAL", "INST", "STACK_GLOBAL"):
        named = taken if kind == "STACK_GLOBAL" else argument.split(" ", 1)
        if not all(isinstance(each, str) for each in named):
            raise _UnresolvedError("it computes a name")
        module, name = named
        found = Global("builtins" if module == "__builtin__" else module, name)  # Python 2's, as torch writes it
        seen.names.add(found)
        seen.needs_constants |= found in _OF_CONSTANTS
        return None if kind == "INST" else found
    if kind.startswith("EXT"):
        raise _UnresolvedError("it names what is registered elsewhere")
    return taken[0] if kind == "DUP" else None


def _call(function: Global, items: tuple[Any, ...], seen: _Seen) -> bytes | None:
    if function in _OF_CONSTANTS:
        match items:
            case (bytes() as made,) if function != _ENCODE:
                pass
            case (str() as text, "latin1" | "latin-1") if function not in _LOADED:
                made = text.encode("latin1")
            case () if function in _BYTES:
                made = b""
            case _:
                raise _UnresolvedError(f"it calls {function} with more than constants")
        seen.keep(made, function in _LOADED)
        return None if function in _LOADED else made
    if seen.extra_state and function.name == "_rebuild_tensor_v2":
        match items:
            case (_, 0, _Tuple(items=sizes), _Tuple(items=strides), _, _) if len(sizes) <= 64:
                if list(strides) == [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]:
                    return None
        raise _UnresolvedError("it has a part of a tensor's bytes")
    return None


def open_archive(file: BinaryIO) -> zipfile.ZipFile:
    """Open what ``torch.save`` wrote; ``ValueError`` for ambiguous zip files."""
    file.seek(max(0, (size := file.seek(0, io.SEEK_END)) - _END.size))
    end = file.read()
    if len(end) == _END.size and end.endswith(b"\0\0"):
        *signatures, length, start, at = (_END.unpack(end)[index] for index in (0, 3, 5, 1, 2, 4))
        written = signatures == [b"PK\6\6", b"PK\6\7", b"PK\5\6"] and at == start + length == size - _END.size
        if written and length <= _DIRECTORY:
            archive = zipfile.ZipFile(file)
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            root = names[0].split("/")[0] if names else ""
            one = all(name.startswith(f"{root}/") for name in names) and f"{root}/data.pkl" in names
            distinct = len({name.casefold() for name in names}) == len(names)  # torch looks for them in any case
            plain = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)
            if one and distinct and plain and f"{root}/constants.pkl" not in names:  # which is TorchScript's
                if not any(entry.CRC for entry in entries):  # saved without checksums: zipfile then compares none
                    for entry in entries:
                        entry.CRC = None  # type: ignore[assignment]
                return archive
    raise ValueError("it is no archive as torch.save writes them, or it is damaged")
