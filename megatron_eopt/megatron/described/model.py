"""A Megatron model without its numbers: what the flags of a pretrain command describe, on one rank of any run.

    with described_run(["--num-layers", "80", ..., "--tensor-model-parallel-size", "8"], rank=0) as run:
        for name, parameter in run.model_chunks[0].named_parameters():
            print(name, tuple(parameter.shape))

No GPU is needed, nothing of size is allocated, and no other rank exists: Megatron's own builders run on the CPU backend
of this package (:mod:`megatron_eopt.cpu`), over a process group that pretends to communicate, and all tensors are on
torch's meta device. Afterwards the process is as it was, but for the modules that it imported.
"""

import importlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Module

from megatron_eopt import cpu
from megatron_eopt.megatron.described.arguments import Parsed, parsed, refused
from megatron_eopt.megatron.described.chunks import layers_of_gpu, model_chunks
from megatron_eopt.redirect import Redirection, Redirections

# Their global variables are what a run leaves behind.
_STATEFUL = (
    "megatron.core.config",
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel.random",
    "megatron.training.global_vars",
)


@dataclass(frozen=True)
class DescribedRun:
    """One rank of a run.

    Attributes:
        args: Megatron's arguments, validated; those that ask for a GPU are changed.
        model_chunks: the parts of the model on this rank, one per virtual pipeline stage, wrapped as for training, so
            that parameters have the names that Megatron's optimizer sees; on the meta device, with all attributes.
        optimizer_config: Megatron's ``OptimizerConfig``.
        config_overrides: its overrides per group of parameters, keyed by ``ParamKey``.
        pg_collection: the process groups of this rank; their sizes and ranks are right, and they send nothing.
        notes: where the parameters' names are other than on a GPU, in lines for a user.
    """

    args: Namespace
    model_chunks: list[Module]
    optimizer_config: Any
    config_overrides: dict[Any, Any]
    pg_collection: Any
    notes: tuple[str, ...]


@contextmanager
def described_run(flags: Sequence[str], rank: int = 0, world_size: int | None = None) -> Iterator[DescribedRun]:
    """What a rank of a Megatron GPT pretraining holds, without running it.

    Inside, Megatron's parallel state and arguments are those of this rank, and torch.cuda is answered by the CPU. The
    model outlives the context, the process groups do not.

    Args:
        flags: those of the pretrain command, as they follow the script's name.
        rank: which rank; see :func:`ranks_to_describe`.
        world_size: ranks of the run; None for as few as the parallel sizes allow.

    Raises:
        ValueError: for flags that Megatron refuses, with its reason, and for models that cannot be described.
        RuntimeError: where torch.distributed is initialized already, or a GPU is there, which
            ``CUDA_VISIBLE_DEVICES=`` (set, and empty) hides.
    """
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is initialized, and a described run needs one of its own: call it before, or in a "
            "process that takes part in no run"
        )
    with ExitStack() as stack:
        stack.enter_context(_stand_ins())
        for name in _STATEFUL:
            stack.enter_context(_globals_kept(name))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        found = parsed(flags, rank, world_size)
        stack.enter_context(_process_groups(found.args))
        yield _described(found)


def ranks_to_describe(args: Namespace) -> list[int]:
    """The fewest ranks that together hold every parameter: one per pipeline stage and expert-parallel rank.

    The first rank of each stage has tensor-, expert- and data-parallel rank 0. The others of the stage are there for
    their experts; what else they hold, the first holds as well, or another tensor-parallel shard of it.

    Args:
        args: validated, as of a :class:`DescribedRun`.
    """
    experts = args.expert_tensor_parallel_size * args.expert_model_parallel_size
    # how far the ranks of one pipeline group are from each other, by the order that Megatron numbers ranks in
    stage = experts if args.use_tp_pp_dp_mapping else args.world_size // args.pipeline_model_parallel_size
    return [
        pipeline * stage + expert * args.expert_tensor_parallel_size
        for pipeline in range(args.pipeline_model_parallel_size)
        for expert in range(args.expert_model_parallel_size)
    ]


@contextmanager
def _stand_ins() -> Iterator[None]:
    """The CPU backend and our optimizers, unless the process has them already."""
    backend, environment = cpu.installed(), dict(os.environ)
    cpu.install()
    try:
        from megatron_eopt.megatron import activation

        active = activation._active is not None
        activation.activate()
        try:
            yield
        finally:
            if not active:
                activation.deactivate()
    finally:
        if not backend:
            cpu.undo()
        os.environ.clear()
        os.environ.update(environment)


@contextmanager
def _globals_kept(module: str) -> Iterator[None]:
    namespace = vars(importlib.import_module(module))
    before = dict(namespace)
    try:
        yield
    finally:
        namespace.clear()
        namespace.update(before)


@contextmanager
def _process_groups(args: Namespace) -> Iterator[None]:
    """Megatron's parallel state at a rank of a world that has this one process."""
    from megatron.core import tensor_parallel
    from megatron.training import global_vars, initialize
    from torch.testing._internal.distributed.fake_pg import FakeStore

    redirections = Redirections(
        [
            Redirection(owner=dist, name="new_group", make=_pretending, reason="no other rank is there to talk to"),
            *layers_of_gpu(),
        ],
        importers=("megatron", "torch.distributed"),
    )
    global_vars.set_args(args)
    dist.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=args.world_size)
    try:
        redirections.install()
        with refused("cannot lay out these parallel sizes"):
            initialize._initialize_distributed(None, None, None)
            tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
        yield
    finally:
        redirections.undo()
        dist.destroy_process_group()


def _pretending(real: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return real(ranks, timeout, "fake", *args, **kwargs)

    return new_group


def _described(found: Parsed) -> DescribedRun:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import training

    args, groups = found.args, ProcessGroupCollection.use_mpu_process_groups()
    with refused("cannot build this model without a GPU"):
        chunks = model_chunks(found, groups)
        config, overrides = training.get_megatron_optimizer_config(args)
        if getattr(args, "use_mup", False):
            overrides = {**overrides, **_mup_overrides(config, chunks[0])}
    return DescribedRun(args, chunks, config, overrides, groups, found.notes)


def _mup_overrides(config: Any, chunk: Module) -> dict[Any, Any]:
    from megatron.core.optimizer import get_mup_config_overrides
    from megatron.core.utils import get_model_config

    width = get_model_config(chunk).mup_width_mult
    return get_mup_config_overrides(config=config, mup_width_mult=width, optimizer_type=config.optimizer) or {}
