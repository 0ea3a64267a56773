"""The gate: a pickle of a checkpoint has nothing called but names of a short list.

torch's reader (``weights_only``) and Python's (``find_class``) ask a list before they call what a pickle names. Ours
replaces torch's, which has more. No pickle gets what the process shares, as an enum's members, and could change it.
"""

import io
import os
import pickle
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copyreg import clear_extension_cache
from enum import EnumType
from functools import partial
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy
import torch
from torch import serialization
from torch.distributed.checkpoint import filesystem, metadata

# torch's variables: loads are safe, or are not, whatever the caller says. DCP asks for weights_only=False.
_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_NOT_SAFE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
readings: list[tuple[str, ...]] = []  # what is trusted, by each :func:`reading` around


class _StandIn(SimpleNamespace):
    """Stands for what is not read, and for classes of a Megatron that is not imported."""

    def __init__(self, *values: Any) -> None:
        super().__init__(values=values)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Array(numpy.ndarray[Any, Any]):
    """An array of numbers, and the function that makes it empty: numpy's would take bytes for pointers to objects."""

    def __new__(cls, *_: Any) -> "_Array":
        return super().__new__(cls, 0)

    def __setstate__(self, state: Any) -> None:
        _, shape, of, by_columns, data = state
        super().__setstate__((1, shape, _of_numbers(of), by_columns, data))

    def __reduce__(self) -> Any:
        return numpy.asarray(self).__reduce__()


def _scalar(of: _StandIn, data: bytes) -> Any:
    """Stands for numpy's function of this name."""
    (value,) = numpy.frombuffer(data, _of_numbers(of))
    return value


def _of_numbers(of: _StandIn) -> Any:
    """The dtype that this stands for."""
    dtype = numpy.dtype(str(of.values[0])).newbyteorder(of.state[1])
    if dtype.kind not in "biufc":
        raise pickle.UnpicklingError(f"it has values of numpy's {dtype}, which are no numbers")
    return dtype


class _Properties(metadata.TensorProperties):
    """Becomes torch's, without what is deprecated: a layout, and a member of an enum."""

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.__init__(state[0], strides=(*state[5:], None)[0])  # type: ignore[misc]
        self.__class__ = metadata.TensorProperties  # type: ignore[assignment]


_OBJECTS = """
    _io.BytesIO argparse.Namespace numpy._core.multiarray._reconstruct numpy.core.multiarray._reconstruct
    numpy._core.multiarray.scalar numpy.core.multiarray.scalar numpy.dtype numpy.ndarray pathlib.PosixPath
    pathlib._local.PosixPath signal.Signals torch._C.Generator types.SimpleNamespace
    megatron.core.enums.ModelType megatron.core.optimizer.optimizer_config.OptimizerConfig
    megatron.core.rerun_state_machine.RerunDiagnostic megatron.core.rerun_state_machine.RerunMode
    megatron.core.rerun_state_machine.RerunState megatron.core.transformer.enums.AttnBackend
    megatron.core.transformer.enums.CudaGraphModule megatron.core.transformer.enums.CudaGraphScope
    megatron.core.transformer.enums.InferenceCudaGraphScope
"""
_OURS = {"dtype": _StandIn, "ndarray": _Array, "_reconstruct": _Array, "scalar": _scalar}  # instead of numpy's
_NOT_READ = """
    collections.OrderedDict pathlib.PosixPath pathlib._local.PosixPath torch._tensor._rebuild_from_type_v2
    torch._utils._rebuild_tensor_v2 torch.distributed.checkpoint.filesystem._StoragePrefix
    torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING torch.distributed.checkpoint.planner.BytesIOWriteData
    torch.distributed.checkpoint.planner.SavePlan torch.distributed.checkpoint.planner.TensorWriteData
    torch.distributed.checkpoint.planner.WriteItem torch.distributed.checkpoint.planner.WriteItemType
    torch.serialization._get_layout torch.storage._load_from_bytes
    megatron.core.extensions.transformer_engine.TEDelayedScaling megatron.core.safe_globals.safe_load_from_bytes
    transformer_engine.common.recipe.DelayedScaling transformer_engine.common.recipe.Float8BlockScaling
    transformer_engine.common.recipe.Float8CurrentScaling transformer_engine.common.recipe.Format
    transformer_engine.common.recipe.MMParams transformer_engine.common.recipe.MXFP8BlockScaling
    transformer_engine.common.recipe.NVFP4BlockScaling transformer_engine.common.recipe.QParams
    transformer_engine.common.recipe._FormatHelper
"""
_OF_METADATA: dict[str, Any] = {
    **dict.fromkeys(_NOT_READ.split(), _StandIn),
    **{f"{metadata.__name__}.{name}": getattr(metadata, name) for name in metadata.__all__},
    **{f"{each.__module__}.{each.__name__}": each for each in (filesystem._StorageInfo, torch.Size)},
    f"{metadata.__name__}.TensorProperties": _Properties,
}
_DTYPES = {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}


@contextmanager
def reading(*trusted: str) -> Iterator[None]:
    """Within, torch's reader and this module call what the short list has, and what is trusted.

    Until then the whole process has other variables of torch and another list of safe names: torch takes these from
    nowhere else, and it is Megatron that calls it. All is put back at the end.
    """
    readings.append(tuple(filter(None, trusted)))
    forced = {name: os.environ.pop(name) for name in (_SAFE, _NOT_SAFE) if name in os.environ}
    registered = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    try:
        os.environ[_SAFE] = "1"
        with serialization.safe_globals(list(_allowed())):
            yield
    finally:
        os.environ.pop(_SAFE, None)
        os.environ.update(forced)
        serialization.add_safe_globals(registered)
        readings.pop()


def _allowed() -> Iterator[tuple[Any, str]]:
    found: dict[str, Any] = {}
    for path in _OBJECTS.split():
        module, _, name = path.rpartition(".")
        found[path] = _OURS.get(name) or getattr(sys.modules.get(module), name, _StandIn)
    for name in sum(readings, ()):
        path = name if "." in name else f"builtins.{name}"  # as torch says it
        found[path] = pkgutil.resolve_name(path)
    for path, value in found.items():
        yield partial(value) if isinstance(value, EnumType) else value, path  # of an enum its members, not the class


class _Unpickler(pickle.Unpickler):
    """Python's own, for what DCP and Transformer Engine pickle."""

    def find_class(self, module: str, name: str) -> Any:
        """What makes an object of this name: a class of this load alone, of which a pickle may change attributes."""
        path = f"{module}.{name}"
        if path in _DTYPES or path in sum(readings, ()):
            return super().find_class(module, name)
        if path not in _OF_METADATA:
            raise pickle.UnpicklingError(f"GLOBAL {path}")
        made = _OF_METADATA[path]
        return type(name, (), {"__new__": lambda _, *given: made.__new__(made, *given)})


def load_pickle(data: bytes) -> Any:
    """Load ``.metadata``, or bytes that a module of Transformer Engine unpickles by itself."""
    clear_extension_cache()  # or extension codes would not ask find_class
    return _Unpickler(io.BytesIO(data)).load()


def load_saved(file: BinaryIO) -> Any:
    """Load what ``torch.save`` wrote."""
    with reading():
        return torch.load(file, map_location="cpu", weights_only=True)
