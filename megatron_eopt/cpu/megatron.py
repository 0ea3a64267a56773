"""What Megatron itself has to do otherwise. It is imported by the redirections, when they are installed."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_eopt.redirect import Redirection, answer, named_as


def _compile_helpers(real: Callable[[], None]) -> Callable[[], None]:
    def compile_helpers() -> None:
        if Path(real.__code__.co_filename).with_name("Makefile").exists():
            real()

    return named_as(real, compile_helpers)


def _forked_worker(real: Callable[..., Any]) -> Callable[..., Any]:
    def init_persistent_async_worker(rank: int, mp_mode: str = "fork") -> Any:
        return real(rank, "fork")

    return named_as(real, init_persistent_async_worker)


def _copied_for_writer(real: Callable[..., None]) -> Callable[..., None]:
    def prepare_write_data(self: Any, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        self.write_buckets = [
            (file, key, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
            for file, key, (objects, tensors) in self.write_buckets
        ]

    return named_as(real, prepare_write_data)


def _installed(module: str) -> bool:
    """Whether a module of Megatron's is there, found without importing its parents, as find_spec would."""
    package, *rest = module.partition(":")[0].split(".")
    spec = importlib.util.find_spec(package)
    roots: Any = spec.submodule_search_locations if spec else None
    return any(Path(root, *rest).with_suffix(".py").exists() for root in roots or ())


def redirections() -> list[Redirection]:
    """What no redirection of torch reaches; nothing where Megatron-Core is not installed."""
    found = [
        Redirection(
            "megatron.core.datasets.utils",
            "compile_helpers",
            _compile_helpers,
            "the wheel ships them built, but without the Makefile that this runs",
        ),
        # megatron.training needs packages that megatron-core does not declare; without them nobody warms up
        Redirection(
            "megatron.training.initialize",
            "set_jit_fusion_options",
            answer(),
            "nothing is compiled, and warming it up draws numbers, how many depends on the tensor-parallel size: the "
            "weights would depend on it too",
            required=False,
        ),
        Redirection(
            "megatron.training.initialize",
            "init_persistent_async_worker",
            _forked_worker,
            "a new interpreter would write asynchronous saves without this backend, and the trainer wait for it",
            required=False,
        ),
        Redirection(
            "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync",
            "prepare_write_data",
            _copied_for_writer,
            "a tensor that is on the host is not copied there, so an asynchronous save would write later steps",
        ),
    ]
    return [redirection for redirection in found if _installed(redirection.target)]
