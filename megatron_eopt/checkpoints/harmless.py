"""Names that pickles of checkpoints may have, and what each stands for.

Megatron-Core 0.18 to 0.20, Transformer Engine, torch and this package write these. None of them can run code of a
pickle or open a file, whatever its arguments are. Where torch's, numpy's or Python's own could, a function of ours is
in its place, which takes only what those packages write.
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
from dataclasses import is_dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

import numpy
import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem, metadata, planner


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

    def ignore(self, *items: Any) -> None:
        """Take items, as lists, dicts and sets do."""

    append = extend = add = __setitem__ = ignore


def refuse(why: str) -> NoReturn:
    """Refuse a pickle."""
    raise UnpicklingError(why)


def is_imported(module: str, name: str) -> bool:
    """Whether a name is a class that a run imports, and ``verify-checkpoint`` does without."""
    if module in ENUMS:
        return re.fullmatch(r"[A-Z]\w*", name) is not None
    return name in IMPORTED.get(module, "").split()


def imported(module: str, name: str) -> Any:
    """A class of Megatron or Transformer Engine; None where that is not installed."""
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    is_enum = isinstance(found, type) and issubclass(found, enum.Enum)
    return found if isinstance(found, type) and (is_enum or module not in ENUMS) else None


def check_state(state: Any) -> None:
    """Refuse a state that is more than attributes."""
    if type(state) is not dict:
        refuse("it has a state that is no dict")
    for name in state:
        if type(name) is not str or name.startswith("__"):
            refuse("it changes more of an object than its attributes")


def _encoded(text: Any, encoding: Any) -> bytes:
    if encoding not in ("latin1", "latin-1"):  # others are programs
        refuse("it encodes what is no text of bytes")
    return str.encode(text, "latin1")


def _tensor_with_attributes(make: Any, kind: Any, arguments: Any, state: Any) -> Tensor:
    if kind not in (Tensor, torch.nn.Parameter):
        refuse("it has a tensor of another class")
    made = make(*arguments)
    if type(made) is not kind:
        refuse("it has a tensor of another class")
    check_state(state)
    if any(hasattr(Tensor, name) for name in state):
        refuse("it changes a method of a tensor")
    vars(made).update(state)
    return made


def _dtype_of_array(name: Any, align: Any = False, copy: Any = True) -> numpy.dtype[Any]:
    if type(name) is not str or not re.fullmatch(r"[<|=]?(b1|[iu][1248]|f[248]|c8|c16)", name):
        refuse("it has an array of what are no numbers")
    return numpy.dtype(name)


def _empty_array(kind: Any, shape: Any, dtype: Any) -> numpy.ndarray[Any, Any]:
    return numpy.ndarray(0, numpy.int8)


def _scalar(dtype: Any, data: Any) -> Any:
    return numpy.frombuffer(data, dtype)[0]


def _state_of_array(array: Any, state: Any) -> None:
    _, shape, dtype, by_columns, data = state
    if not all(type(size) is int and size >= 0 for size in shape) or type(data) is not bytes:
        refuse("it has an array of what are no numbers")
    if math.prod(shape) * dtype.itemsize != len(data):
        refuse("it has an array that is larger than its data")
    array.__setstate__((1, shape, dtype, by_columns, data))


def _state_of_dtype(dtype: Any, state: Any) -> None:
    """Let a dtype of numbers be as it is."""
    if state[:2] not in ((3, "<"), (3, "|")) or state[2:] != (None, None, None, -1, -1, 0):
        refuse("it has an array of what are no numbers")


def _state_of_index(index: Any, state: Any) -> None:
    check_state(state)
    if not all(isinstance(value, str | int | torch.Size | Unknown | None) for value in state.values()):
        refuse("it has an index of no tensor")  # a run would hash what is there
    vars(index).update(state)


# Class -> what gives its instances a state, where its own would take more.
STATES: dict[type, Callable[[Any, Any], None]] = {
    metadata.MetadataIndex: _state_of_index,
    numpy.ndarray: _state_of_array,
    **{type(numpy.dtype(name)): _state_of_dtype for name in "b1 i1 i2 i4 i8 u1 u2 u4 u8 f2 f4 f8 c8 c16".split()},
}
_ARRAYS = {"_reconstruct": _empty_array, "scalar": _scalar}
_PATHS = dict.fromkeys(("Path", "PosixPath", "PurePosixPath"), Path)
_OF_METADATA = """BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta TensorProperties
    TensorStorageMetadata _MEM_FORMAT_ENCODING"""
_OF_FILES = "_StorageInfo _StoragePrefix"
_OF_PLANS = "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType"
_BY_MODULE: dict[str, dict[str, Any]] = {
    "argparse": {"Namespace": argparse.Namespace},
    "types": {"SimpleNamespace": types.SimpleNamespace},
    "signal": {"Signals": signal.Signals},
    "collections": {"OrderedDict": OrderedDict, "defaultdict": defaultdict},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,
    "datetime": {"timedelta": datetime.timedelta},
    "io": {"BytesIO": io.BytesIO},
    "_io": {"BytesIO": io.BytesIO},
    "_codecs": {"encode": _encoded},
    "builtins": {
        **{kind.__name__: kind for kind in (set, frozenset, complex, bytes, bytearray, list, dict, int)},
        "long": int,  # as protocol 2 calls it
    },
    "numpy": {"ndarray": "numpy.ndarray", "dtype": _dtype_of_array},
    "numpy.core.multiarray": _ARRAYS,
    "numpy._core.multiarray": _ARRAYS,
    "torch": {
        **{name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
        "Size": torch.Size,
        "device": torch.device,
        "Generator": torch.Generator,
        "Tensor": Tensor,
    },
    "torch._C": {"Generator": torch.Generator},
    "torch._tensor": {"_rebuild_from_type_v2": _tensor_with_attributes},
    "torch._utils": {
        name: getattr(torch._utils, name)
        for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
    },
    "torch.nn.parameter": {"Parameter": torch.nn.Parameter},
    "torch.serialization": {"_get_layout": torch.serialization._get_layout},
    "torch.storage": {"UntypedStorage": torch.serialization.StorageType("ByteStorage")},
    filesystem.__name__: {name: getattr(filesystem, name) for name in _OF_FILES.split()},
    metadata.__name__: {name: getattr(metadata, name) for name in _OF_METADATA.split() if hasattr(metadata, name)},
    planner.__name__: {name: getattr(planner, name) for name in _OF_PLANS.split() if hasattr(planner, name)},
}
NAMES = {(module, name): value for module, values in _BY_MODULE.items() for name, value in values.items()}
# Of which a pickle may set the state of an instance. An enum's would be that of the process.
CLASSES = {value for value in NAMES.values() if isinstance(value, type) and is_dataclass(value)} | {
    argparse.Namespace,
    types.SimpleNamespace,
    OrderedDict,
    io.BytesIO,
    torch.Generator,
}
IMPORTED = {
    "megatron.core.optimizer.optimizer_config": "OptimizerConfig AdamOptimizerConfig SGDOptimizerConfig",
    "megatron.core.rerun_state_machine": "RerunDiagnostic RerunMode RerunState",
    "megatron.core.extensions.transformer_engine": "TEDelayedScaling",
    "transformer_engine.common.recipe": """CustomRecipe DelayedScaling Float8BlockScaling Float8CurrentScaling Format
        MMParams MXFP8BlockScaling NVFP4BlockScaling QParams _FormatHelper _OverrideLinearPrecision""",
}
ENUMS = {"megatron.core.enums", "megatron.core.transformer.enums"}  # of nothing else, to which each release adds
