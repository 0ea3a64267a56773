"""The gate: a pickle of a checkpoint has nothing called but names of a short list.

torch's reader (``weights_only``) and Python's unpickler (``find_class``) ask a list before they call what a pickle
names. Ours stand in for torch's own, to which Megatron and torch add classes that do more than hold data. They give a
pickle nothing that the process shares, as members of an enum, of which it could then change the attributes.
"""

import argparse
import io
import os
import pickle
import pkgutil
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from copyreg import clear_extension_cache
from dataclasses import is_dataclass
from enum import EnumType
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy
import torch
from torch import serialization
from torch.distributed.checkpoint import filesystem, metadata

_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # torch's: also where a caller says weights_only=False, as DCP does
_trusted: ContextVar[tuple[str, ...] | None] = ContextVar("_trusted", default=None)


class _Absent(SimpleNamespace):
    """Stands for what is not read, and for classes of a Megatron that is not imported."""

    def __init__(self, *values: Any) -> None:
        super().__init__(values=values)


class _Dtype:
    """A dtype of numbers; numpy's own can be given the state of another."""

    def __init__(self, name: str, align: bool = False, copy: bool = False) -> None:
        self.dtype = numpy.dtype(name)
        if self.dtype.kind not in "biufc":
            raise pickle.UnpicklingError(f"it has an array of {name}, which are no numbers")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array(numpy.ndarray[Any, Any]):
    """An array of numbers, and the function that makes it empty."""

    def __new__(cls, *_: Any) -> "_Array":
        return super().__new__(cls, 0)

    def __setstate__(self, state: Any) -> None:
        _, shape, of, by_columns, data = state
        numpy.frombuffer(data, of.dtype).reshape(shape)  # raises for more numbers than bytes
        super().__setstate__((1, shape, of.dtype, by_columns, data))

    def __reduce__(self) -> Any:
        return numpy.asarray(self).__reduce__()


class _Properties(metadata.TensorProperties):
    """Becomes torch's, without what is deprecated: a layout, and a member of an enum."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        dtype, _, requires_grad, _, *rest = state
        self.__init__(dtype, torch.strided, requires_grad, torch.contiguous_format, *rest)  # type: ignore[misc]
        self.__class__ = metadata.TensorProperties  # type: ignore[assignment]


_NAMES: dict[str, Any] = {
    "argparse.Namespace": argparse.Namespace,
    "types.SimpleNamespace": SimpleNamespace,
    "_io.BytesIO": io.BytesIO,
    "pathlib.PosixPath": Path,
    "pathlib._local.PosixPath": Path,
    "signal.Signals": signal.Signals,
    "torch._C.Generator": torch.Generator,
    "numpy.dtype": _Dtype,
    "numpy.ndarray": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.core.multiarray._reconstruct": _Array,
}
_OF_MEGATRON = """
    enums.ModelType transformer.enums.AttnBackend transformer.enums.CudaGraphModule transformer.enums.CudaGraphScope
    transformer.enums.InferenceCudaGraphScope optimizer.optimizer_config.OptimizerConfig
    rerun_state_machine.RerunDiagnostic rerun_state_machine.RerunMode rerun_state_machine.RerunState
"""
_NOT_READ = {  # module -> of .metadata, and of extra states of Transformer Engine
    metadata.__name__: "_MEM_FORMAT_ENCODING",
    filesystem.__name__: "_StoragePrefix",
    "torch.distributed.checkpoint.planner": "BytesIOWriteData SavePlan TensorWriteData WriteItem WriteItemType",
    "torch.serialization": "_get_layout",
    "torch.storage": "_load_from_bytes",
    "torch._utils": "_rebuild_tensor_v2",
    "torch._tensor": "_rebuild_from_type_v2",
    "collections": "OrderedDict",
    "megatron.core.safe_globals": "safe_load_from_bytes",
    "megatron.core.extensions.transformer_engine": "TEDelayedScaling",
    "transformer_engine.common.recipe": """DelayedScaling Float8BlockScaling Float8CurrentScaling Format MMParams
        MXFP8BlockScaling NVFP4BlockScaling QParams _FormatHelper""",
}
_OF_METADATA: dict[str, Any] = {
    **{f"{module}.{name}": _Absent for module, names in _NOT_READ.items() for name in names.split()},
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    **{f"{metadata.__name__}.{name}": getattr(metadata, name) for name in metadata.__all__},
    f"{metadata.__name__}.TensorProperties": _Properties,
    f"{filesystem.__name__}._StorageInfo": filesystem._StorageInfo,
    "torch.Size": torch.Size,
    "pathlib.PosixPath": Path,
    "pathlib._local.PosixPath": Path,
}


@contextmanager
def reading(*trusted: str) -> Iterator[None]:
    """Within, torch's reader and this module call what the short list has, and what is trusted."""
    names = (*(_trusted.get() or ()), *filter(None, trusted))
    token = _trusted.set(names)
    forced = os.environ.pop(_FORCED, None)
    registered = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    try:
        os.environ[_FORCED] = "1"
        with serialization.safe_globals(list(_allowed(names))):
            yield
    finally:
        os.environ.pop(_FORCED, None)
        os.environ.update({} if forced is None else {_FORCED: forced})
        serialization.add_safe_globals(registered)
        _trusted.reset(token)


def is_reading() -> bool:
    """Whether this is within :func:`reading`."""
    return _trusted.get() is not None


def _allowed(trusted: tuple[str, ...]) -> Iterator[tuple[Any, str]]:
    found = dict(_NAMES)
    for path in _OF_MEGATRON.split():
        module, _, name = f"megatron.core.{path}".rpartition(".")
        found[f"{module}.{name}"] = getattr(sys.modules.get(module), name, _Absent)
    for name in trusted:
        path = name if "." in name else f"builtins.{name}"  # as torch says it
        found[path] = pkgutil.resolve_name(path)
    for path, value in found.items():
        yield partial(value) if isinstance(value, EnumType) else value, path  # of an enum its members, not the class


class _Unpickler(pickle.Unpickler):
    """Python's own, for what DCP and Transformer Engine pickle."""

    def find_class(self, module: str, name: str) -> Any:
        """What makes an object of this name."""
        path = f"{module}.{name}"
        if path in (_trusted.get() or ()):
            return super().find_class(module, name)
        if path not in _OF_METADATA:
            raise pickle.UnpicklingError(f"GLOBAL {path}")
        made = _OF_METADATA[path]
        if not isinstance(made, type):
            return made
        make = partial(object.__new__, made) if is_dataclass(made) else made
        # A class of this load alone, since a pickle may change the attributes of a class, too.
        return type(name, (), {"__new__": lambda _, *given: make(*given)})


def load_pickle(data: bytes) -> Any:
    """Load ``.metadata``, or bytes that a module of Transformer Engine unpickles by itself."""
    clear_extension_cache()  # or extension codes would not ask find_class
    return _Unpickler(io.BytesIO(data)).load()


def load_saved(file: BinaryIO) -> Any:
    """Load what ``torch.save`` wrote."""
    with reading():
        return torch.load(file, map_location="cpu", weights_only=True)


def check_extra_state(value: Any) -> None:
    """Refuse names in the bytes of an extra state."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, torch.Tensor) and each.numel():
            load_pickle(each.detach().cpu().contiguous().numpy().tobytes())


def reason(error: Exception) -> str:
    """Why a pickle cannot be loaded, and what to do."""
    said = str(error).rpartition("WeightsUnpickler error: ")[2]
    if named := re.search(r"GLOBAL (\S+)", said):
        return (
            f"names {named[1]}, which a load would call. Load a checkpoint only from where you would run a program. "
            f"If you know what it does: --trust-checkpoint-globals {named[1]}"
        )
    return f"cannot be loaded ({type(error).__name__}: {said.partition(chr(10))[0]})"
