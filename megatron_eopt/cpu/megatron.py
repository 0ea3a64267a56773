"""What Megatron itself has to do otherwise. It is imported by the redirections, when they are installed."""

import importlib.util
from pathlib import Path
from typing import Any

from megatron_eopt.redirect import Redirection, answer, around


def _compile_helpers(real: Any) -> None:
    if Path(real.__code__.co_filename).with_name("Makefile").exists():
        real()


def _forked_worker(real: Any, rank: int, mp_mode: str = "fork") -> Any:
    return real(rank, "fork")


def _copied_for_writer(real: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    real(self, *args, **kwargs)
    self.write_buckets = [
        (file, key, (objects, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (objects, tensors) in self.write_buckets
    ]


def _is_there(module: str) -> bool:
    """Whether a module of Megatron's is installed, found without importing its parents, as find_spec would."""
    package, *rest = module.partition(":")[0].split(".")
    spec = importlib.util.find_spec(package)
    roots: Any = spec.submodule_search_locations if spec else None
    return any(Path(root, *rest).with_suffix(".py").exists() for root in roots or ())


def redirections() -> list[Redirection]:
    """What no redirection of torch reaches; nothing where Megatron-Core is not installed."""
    utils, initialize = "megatron.core.datasets.utils", "megatron.training.initialize"
    writer = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync"
    built = "the wheel ships them built, but without the Makefile that this runs"
    warming_up = (
        "nothing is compiled, and warming it up draws numbers, how many depends on the tensor-parallel size: the "
        "weights would depend on it too"
    )
    forked = "a new interpreter would write asynchronous saves without this backend, and the trainer wait for it"
    copied = "a tensor that is on the host is not copied there, so an asynchronous save would write later steps"
    found = [
        Redirection(utils, "compile_helpers", around(_compile_helpers), built),
        # megatron.training needs packages that megatron-core does not declare; without them nobody warms up
        Redirection(initialize, "set_jit_fusion_options", answer(), warming_up, required=False),
        Redirection(initialize, "init_persistent_async_worker", around(_forked_worker), forked, required=False),
        Redirection(writer, "prepare_write_data", around(_copied_for_writer), copied),
    ]
    return [redirection for redirection in found if _is_there(redirection.target)]
