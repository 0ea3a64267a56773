"""Names that pickles of checkpoints may have, and what each stands for.

Megatron-Core 0.17 to 0.20, Transformer Engine, torch and this package write these. A name stands for a constant, for a
class whose instances get a state and no constructor's call, or for a :class:`Maker`: a function of ours in the place of
a function or constructor, which takes only what those packages write. So nothing here can do harm, whatever its
arguments are: neither run code, nor open a file, nor allocate more than the pickle's size pays for.
"""

import argparse
import datetime
import enum
import importlib
import io
import math
import re
import signal
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn, Protocol

import numpy
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.serialization import StorageType
from torch.storage import TypedStorage

DIMENSIONS = 64  # of a tensor, which is what torch allows
_PER_CALL = 256  # bytes that a call costs at least
PER_VALUE = 16
_GENERATOR_BYTES = 2**13


class Payer(Protocol):
    """A load, in which copies are paid for by the size of what is loaded."""

    @property
    def real(self) -> bool:
        """Whether a run gets what is loaded."""

    def pay(self, size: int) -> None:
        """Account for bytes of memory, or refuse."""

    def load_inside(self, data: bytes) -> Any:
        """Load what ``torch.save`` wrote into a pickle."""


class Unknown:
    """Stands for an object whose class is not loaded."""

    name = "?"
    arguments: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> "Unknown":
        """Keep the arguments."""
        made = super().__new__(cls)
        made.arguments = arguments
        return made

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.arguments))})"


@dataclass(frozen=True, slots=True)
class Maker:
    """What is called in the place of a function or constructor."""

    make: Callable[..., Any]  # of the load, and of the arguments in the pickle


def refuse(why: str) -> NoReturn:
    """Refuse a pickle."""
    raise UnpicklingError(why)


def resolve(module: str, name: str) -> Any:
    """What a harmless name stands for; None for any other name, a string for a class to be imported."""
    found = _NAMES.get((module, name))
    if found is None and module in _ENUMS and re.fullmatch(r"[A-Z]\w*", name):
        return IMPORTED
    return found


def imported(module: str, name: str) -> Any:
    """A class of Megatron or Transformer Engine; None where that is not installed."""
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    is_enum = isinstance(found, type) and issubclass(found, enum.Enum)
    return found if isinstance(found, type) and (is_enum or module not in _ENUMS) else None


def check_key(key: Any) -> None:
    """Refuse what takes long to hash, or cannot be without ending the process."""
    kind = type(key)
    if kind is str or kind in _PLAIN or isinstance(key, _INERT):
        return
    if kind is int and -(2**64) < key < 2**64:
        return
    if kind is metadata.MetadataIndex:
        inside = vars(key)
        if isinstance(inside.get("fqn"), str | Unknown) and (
            inside.get("offset") is None or type(inside["offset"]) is torch.Size
        ):
            return
    elif isinstance(key, tuple) and len(key) <= DIMENSIONS:
        for value in key:
            if type(value) not in (str, *_PLAIN) and not (type(value) is int and -(2**64) < value < 2**64):
                refuse("it has values in the key of a dict that Megatron does not write there")
        return
    refuse(f"it has a {kind.__name__} for the key of a dict")


_PLAIN = (bool, float, bytes, type(None), torch.Size)
_INERT = (enum.Enum, torch.dtype, Unknown)


def _paid(make: Callable[..., Any]) -> Maker:
    def pay_and_make(load: Payer, *arguments: Any) -> Any:
        load.pay(_PER_CALL)
        return make(load, *arguments)

    return Maker(pay_and_make)


def _numbers(values: Any) -> tuple[int, ...]:
    if not isinstance(values, tuple) or len(values) > DIMENSIONS:
        refuse("it has a size that no tensor has")
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        refuse("it has a size that no tensor has")
    return tuple(values)


def _size(load: Payer, values: Any) -> torch.Size:
    return torch.Size(_numbers(values))


def _encoded(load: Payer, text: Any, encoding: Any) -> bytes:
    if type(text) is not str or type(encoding) is not str or encoding not in ("latin1", "latin-1"):
        refuse("it encodes what is no text of bytes")
    load.pay(len(text))
    return text.encode("latin1")


def _bytes(load: Payer) -> bytes:
    return b""


def _bytearray(load: Payer, data: Any = b"") -> bytearray:
    if type(data) is not bytes:
        refuse("it makes bytes of what are none")
    load.pay(len(data))
    return bytearray(data)


def _set(load: Payer, values: Any = ()) -> set[Any]:
    if type(values) not in (list, tuple):
        refuse("it makes a set of what is no list")
    load.pay(PER_VALUE * len(values))
    for value in values:
        check_key(value)
    return set(values)


def _frozenset(load: Payer, values: Any = ()) -> frozenset[Any]:
    return frozenset(_set(load, values))


def _complex(load: Payer, real: Any, imaginary: Any) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        refuse("it makes a number of what is none")
    return complex(real, imaginary)


def _defaultdict(load: Payer, factory: Any = None) -> defaultdict[Any, Any]:
    if factory is not None and not any(factory is each for each in _FACTORIES):
        refuse("it has a dict whose missing values are made by a function")
    return defaultdict(factory)


def _path(load: Payer, *parts: Any) -> Path:
    if not all(type(part) is str for part in parts):
        refuse("it has a path of what is no text")
    load.pay(sum(map(len, parts)))
    return Path(*parts)


def _timedelta(load: Payer, *parts: Any) -> datetime.timedelta:
    if len(parts) > 3 or not all(type(part) is int for part in parts):
        refuse("it has a time of what is no number")
    return datetime.timedelta(*parts)


def _layout(load: Payer, name: Any) -> torch.layout:
    layouts = [value for value in vars(torch).values() if isinstance(value, torch.layout)]
    found = [layout for layout in layouts if str(layout) == name]
    return found[0] if found else refuse("it has an unknown layout of a tensor")


def _device(load: Payer, kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or len(kind) > DIMENSIONS or (index is not None and type(index) is not int):
        refuse("it has no name of a device")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _generator(load: Payer, device: Any = None) -> torch.Generator:
    load.pay(_GENERATOR_BYTES)
    if device is not None and not isinstance(device, torch.device):
        refuse("it has a generator on what is no device")
    if not load.real:
        return torch.Generator()  # the GPU that it names may not be here
    return torch.Generator(device)


def _tensor(
    load: Payer,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any = False,
    hooks: Any = None,
    metadata: Any = None,
    dtype: Any = None,
) -> Tensor:
    load.pay(4 * _PER_CALL)
    if not isinstance(storage, TypedStorage) or hooks or metadata:
        refuse("it has a tensor with more than data")
    dtype = storage.dtype if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        refuse("it has a tensor of no dtype")
    untyped, size, stride, (offset,) = storage._untyped_storage, _numbers(size), _numbers(stride), _numbers((offset,))
    entries = math.prod(size)
    last = offset + sum((count - 1) * step for count, step in zip(size, stride, strict=True)) if entries else -1
    if max(entries, last + 1) * dtype.itemsize > untyped.nbytes():
        refuse("it has a tensor that is larger than its data")
    made = torch.empty(0, dtype=dtype, device=untyped.device).set_(untyped, offset, size, stride)
    return made.requires_grad_() if requires_grad is True else made


def _tensor_v3(
    load: Payer,
    storage: Any,
    offset: Any,
    size: Any,
    stride: Any,
    requires_grad: Any,
    hooks: Any,
    dtype: Any,
    metadata: Any = None,
) -> Tensor:
    return _tensor(load, storage, offset, size, stride, requires_grad, hooks, metadata, dtype)


def _parameter(load: Payer, data: Any, requires_grad: Any, hooks: Any = None) -> torch.nn.Parameter:
    if not isinstance(data, Tensor) or hooks:
        refuse("it has a parameter with more than data")
    return torch.nn.Parameter(data, requires_grad is True)


def _tensor_with_attributes(load: Payer, make: Any, kind: Any, arguments: Any, state: Any) -> Tensor:
    kinds = (Tensor, torch.nn.Parameter)
    if not any(make is each for each in _TENSORS) or not any(kind is each for each in kinds):
        refuse("it has a tensor of another class")
    if type(arguments) is not tuple:
        refuse("it has a tensor of another class")
    made = make.make(load, *arguments)
    if state:
        check_state(state)
        load.pay(PER_VALUE * len(state))
        if any(hasattr(Tensor, name) for name in state):
            refuse("it changes a method of a tensor")
        vars(made).update(state)
    return made


def _inner(load: Payer, data: Any) -> Any:
    if type(data) is not bytes:
        refuse("it loads what are no bytes")
    load.pay(len(data))
    return load.load_inside(data)


def _dtype_of_array(load: Payer, name: Any, align: Any = False, copy: Any = True) -> numpy.dtype[Any]:
    if type(name) is not str or not re.fullmatch(r"[<|=]?(b1|[iu][1248]|f[248]|c8|c16)", name):
        refuse("it has an array of what are no numbers")
    return numpy.dtype(name)


def _empty_array(load: Payer, kind: Any, shape: Any, dtype: Any) -> numpy.ndarray[Any, Any]:
    if kind is not numpy.ndarray:
        refuse("it has an array of another class")
    return numpy.ndarray(0, numpy.int8)


def _scalar(load: Payer, dtype: Any, data: Any) -> Any:
    if not isinstance(dtype, numpy.dtype) or type(data) is not bytes or len(data) != dtype.itemsize:
        refuse("it has a number of what is none")
    return numpy.frombuffer(data, dtype)[0]


def check_state(state: Any) -> None:
    """Refuse a state that is more than attributes."""
    if type(state) is not dict:
        refuse("it has a state that is no dict")
    for name in state:
        if type(name) is not str or name.startswith("__"):
            refuse("it changes more of an object than its attributes")


def state_of_array(load: Payer, array: Any, state: Any) -> None:
    """Give an array its numbers."""
    if type(state) is not tuple or len(state) != 5:
        refuse("it has an array without numbers")
    _, shape, dtype, by_columns, data = state
    shape = _numbers(shape)
    if not isinstance(dtype, numpy.dtype) or type(by_columns) is not bool or type(data) is not bytes:
        refuse("it has an array of what are no numbers")
    if math.prod(shape) * dtype.itemsize != len(data):
        refuse("it has an array that is larger than its data")
    load.pay(len(data))
    array.__setstate__((1, shape, dtype, by_columns, data))


def state_of_dtype(load: Payer, dtype: Any, state: Any) -> None:
    """Let a dtype of numbers be as it is."""
    if type(state) is not tuple or state[:2] not in ((3, "<"), (3, "|")) or state[2:] != _NO_FIELDS:
        refuse("it has an array of what are no numbers")


def state_of_file(load: Payer, file: Any, state: Any) -> None:
    """Fill a file in memory."""
    if type(state) is not tuple or len(state) != 3 or type(state[0]) is not bytes or type(state[1]) is not int:
        refuse("it has a file without bytes")
    load.pay(len(state[0]))
    file.__setstate__((*state[:2], None))


def state_of_generator(load: Payer, generator: Any, state: Any) -> None:
    """Set a generator of random numbers."""
    if type(state) is not tuple or len(state) != 3 or type(state[2]) is not Tensor or state[2].dtype != torch.uint8:
        refuse("it has a generator without a state")
    if not all(value is None or type(value) is int for value in state[:2]):
        refuse("it has a generator without a state")
    if load.real:
        generator.set_state(state[2])


_NO_FIELDS = (None, None, None, -1, -1, 0)
# Class -> what gives its instances a state, where that is more than attributes.
STATES: dict[type, Callable[[Payer, Any, Any], None]] = {
    numpy.ndarray: state_of_array,
    io.BytesIO: state_of_file,
    torch.Generator: state_of_generator,
    **{type(numpy.dtype(name)): state_of_dtype for name in "b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16".split()},
}


class _Imported:
    """Stands for a class that is imported when it is needed."""


IMPORTED = _Imported()
_FACTORIES = (list, dict, set, int)
_V1, _V2, _V3, _PARAMETER = Maker(_tensor), Maker(_tensor), Maker(_tensor_v3), Maker(_parameter)
_TENSORS = (_V1, _V2, _V3, _PARAMETER)
_ARRAYS = {"_reconstruct": _paid(_empty_array), "scalar": _paid(_scalar)}
_PATHS = dict.fromkeys(("Path", "PosixPath", "PurePosixPath"), _paid(_path))
_OF_METADATA = """BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties
    TensorStorageMetadata _MEM_FORMAT_ENCODING"""
_OF_PLANS = "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType"
_OF_TORCH: dict[str, Any] = {
    "Size": _paid(_size),
    "device": _paid(_device),
    "Generator": _paid(_generator),
    "Tensor": Tensor,
    **{name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{kind.__name__: StorageType(kind.__name__) for kind in torch._storage_classes if kind.__module__ == "torch"},
}
_BY_MODULE: dict[str, dict[str, Any]] = {
    "argparse": {"Namespace": argparse.Namespace},
    "types": {"SimpleNamespace": types.SimpleNamespace},
    "signal": {"Signals": signal.Signals},
    "collections": {"OrderedDict": OrderedDict, "defaultdict": _paid(_defaultdict)},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "datetime": {"timedelta": _paid(_timedelta)},
    "io": {"BytesIO": io.BytesIO},
    "_io": {"BytesIO": io.BytesIO},
    "_codecs": {"encode": _paid(_encoded)},
    "builtins": {
        "set": _paid(_set),
        "frozenset": _paid(_frozenset),
        "complex": _paid(_complex),
        "bytes": _paid(_bytes),
        "bytearray": _paid(_bytearray),
        **{kind.__name__: kind for kind in (list, dict, int)},  # which make missing values of a dict
        "long": int,  # as protocol 2 calls it
    },
    "numpy": {"ndarray": numpy.ndarray, "dtype": _paid(_dtype_of_array)},
    "numpy.core.multiarray": _ARRAYS,
    "numpy._core.multiarray": _ARRAYS,
    "torch": _OF_TORCH,
    "torch._C": {"Generator": _OF_TORCH["Generator"]},
    "torch._tensor": {"_rebuild_from_type_v2": Maker(_tensor_with_attributes)},
    "torch._utils": {
        "_rebuild_tensor": _V1,
        "_rebuild_tensor_v2": _V2,
        "_rebuild_tensor_v3": _V3,
        "_rebuild_parameter": _PARAMETER,
    },
    "torch.nn.parameter": {"Parameter": torch.nn.Parameter},
    "torch.serialization": {"_get_layout": _paid(_layout)},
    "torch.storage": {"UntypedStorage": StorageType("ByteStorage"), "_load_from_bytes": _paid(_inner)},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo": filesystem._StorageInfo},
    metadata.__name__: {name: getattr(metadata, name) for name in _OF_METADATA.split() if hasattr(metadata, name)},
    planner.__name__: {name: getattr(planner, name) for name in _OF_PLANS.split() if hasattr(planner, name)},
    "megatron.core.safe_globals": {"safe_load_from_bytes": _paid(_inner)},
}
# Classes that are imported for a run, and which `verify-checkpoint` does without.
_TO_IMPORT = {
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig AdamOptimizerConfig SGDOptimizerConfig",
    "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
    "megatron.core.extensions.transformer_engine": "TEDelayedScaling",
    "transformer_engine.common.recipe": """CustomRecipe DelayedScaling Float8BlockScaling Float8CurrentScaling Format
        MMParams MXFP8BlockScaling NVFP4BlockScaling QParams _FormatHelper _OverrideLinearPrecision""",
}
_ENUMS = {"megatron.core.enums", "megatron.core.transformer.enums"}  # of nothing else, to which each release adds
_NAMES: dict[tuple[str, str], Any] = {
    **{(module, name): value for module, values in _BY_MODULE.items() for name, value in values.items()},
    **{(module, name): IMPORTED for module, names in _TO_IMPORT.items() for name in names.split()},
}
_VALUES = (list, dict, int, Tensor, torch.nn.Parameter, numpy.ndarray)  # of which a pickle makes no instances itself
CLASSES = {value for value in _NAMES.values() if isinstance(value, type) and value not in _VALUES}
