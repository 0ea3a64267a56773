"""A Megatron model on the meta device, described by flags.

Megatron's own builders run on the CPU backend (:mod:`megatron_eopt.tools.cpu`), over a process group that pretends to
communicate. Afterwards the process is as it was, but for imported modules.
"""

import importlib
import os
from argparse import Namespace
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._device
from torch.nn import Module, Parameter
from torch.overrides import TorchFunctionMode

from megatron_eopt.megatron import releases
from megatron_eopt.redirect import Redirection, Redirections, around
from megatron_eopt.tools import cpu
from megatron_eopt.tools.plan.described.arguments import parsed, refused

_STATEFUL = (  # their global variables are what a run leaves behind
    "megatron.core.config",
    "megatron.core.parallel_state",
    "megatron.core.tensor_parallel.random",
    "megatron.training.global_vars",
)


@dataclass(frozen=True)
class DescribedRun:
    """One rank of a run, as Megatron describes it."""

    args: Namespace  # validated; those that ask for a GPU are changed
    model_chunks: list[Module]  # one per virtual pipeline stage, wrapped as for training, on the meta device
    optimizer_config: Any
    config_overrides: dict[Any, Any]
    pg_collection: Any  # sizes and ranks of its groups are right, and they send nothing
    notes: tuple[str, ...]  # where the parameters' names are other than on a GPU, in lines for a user


@contextmanager
def described_run(flags: Sequence[str], rank: int = 0, world_size: int | None = None) -> Iterator[DescribedRun]:
    """What a rank of a GPT pretraining holds, without running.

    Inside, Megatron's parallel state and arguments are those of this rank, and torch.cuda is answered by the CPU. The
    model outlives the context. ``world_size`` is by default the least for the parallel sizes.

    Raises:
        ValueError: for flags that Megatron refuses, with its reason, for models that cannot be described, and for an
            initialized torch.distributed.
        RuntimeError: for a GPU, which ``CUDA_VISIBLE_DEVICES=`` hides.
    """
    with ExitStack() as stack:
        _stand_in(stack)
        for name in _STATEFUL:
            _keep(vars(importlib.import_module(name)), stack)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        args, transformer_engine, notes = parsed(flags, rank, world_size)
        _make_process_groups(args, stack)
        yield _described(args, transformer_engine, notes)


def ranks_to_describe(args: Namespace) -> list[int]:
    """The first rank of each stage: its others add numbers of experts alone."""
    experts = args.expert_tensor_parallel_size * args.expert_model_parallel_size
    # distance of a pipeline group's ranks
    stage = experts if args.use_tp_pp_dp_mapping else args.world_size // args.pipeline_model_parallel_size
    return [pipeline * stage for pipeline in range(args.pipeline_model_parallel_size)]


def _stand_in(stack: ExitStack) -> None:
    _keep(os.environ, stack)
    if not cpu.installed():
        stack.callback(cpu.undo)
    cpu.install()
    from megatron_eopt.megatron import activation

    if not activation.activated():
        stack.callback(activation.deactivate)
    activation.activate()


def _keep(namespace: MutableMapping[str, Any], stack: ExitStack) -> None:
    stack.callback(namespace.update, dict(namespace))
    stack.callback(namespace.clear)


def _make_process_groups(args: Namespace, stack: ExitStack) -> None:
    from megatron.core import tensor_parallel
    from megatron.training import global_vars, initialize
    from torch.testing._internal.distributed.fake_pg import FakeStore

    redirections = Redirections(
        [
            Redirection(dist, "new_group", _pretending, "no other rank is there to talk to"),
            Redirection(
                "megatron.core.transformer.dot_product_attention:DotProductAttention",
                "__init__",
                _of_equal_heads,
                "latent attention gives it heads of two sizes, and it is only looked at",
            ),
        ],
        importers=("megatron", "torch.distributed"),
    )
    global_vars.set_args(args)
    dist.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=args.world_size)
    stack.callback(dist.destroy_process_group)
    stack.enter_context(redirections)
    with refused("cannot lay out these parallel sizes"):
        initialize._initialize_distributed(None, None, None)
        tensor_parallel.model_parallel_cuda_manual_seed(args.seed)


@around
def _pretending(real: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kw: Any) -> Any:
    return real(ranks, timeout, "fake", *args, **kw)


@around
def _of_equal_heads(
    real: Any, self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kw: Any
) -> None:
    real(self, *args, **kw)


class _OnMeta(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in torch.utils._device._device_constructors():
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def _described(args: Namespace, transformer_engine: bool, notes: tuple[str, ...]) -> DescribedRun:
    from megatron.core import optimizer
    from megatron.core.distributed import torch_fully_sharded_data_parallel as fsdp2
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config
    from megatron.training import training

    from megatron_eopt.megatron.given import complete

    groups = ProcessGroupCollection.use_mpu_process_groups()
    with refused("cannot build this model on the CPU"):
        with _OnMeta():
            chunks = list(_chunks(args, groups, transformer_engine))
        if args.use_torch_fsdp2:  # whose mesh has numbers
            chunks = [fsdp2.TorchFullyShardedDataParallel(each.config, None, each.module) for each in chunks]
    with refused("with this package refuses the flags"):
        config, overrides = training.get_megatron_optimizer_config(args)
        complete(config, args)
        if getattr(args, "use_mup", False):
            of_mup = optimizer.get_mup_config_overrides(
                config=config,
                mup_width_mult=get_model_config(chunks[0]).mup_width_mult,
                optimizer_type=config.optimizer,
            )
            overrides = {**overrides, **(of_mup or {})}
    return DescribedRun(args, chunks, config, overrides, groups, notes)


def _chunks(args: Namespace, groups: Any, transformer_engine: bool) -> Iterator[Module]:
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
    from megatron.core.transformer.module import Float16Module
    from megatron.core.utils import get_model_config

    # torch's norms and Megatron's own attention have no part in these two, and no parameter depends on them
    split = {name: getattr(args, name) for name in ("sequence_parallel", "context_parallel_size")}
    vars(args).update(sequence_parallel=False, context_parallel_size=1)
    build = releases.gpt_builder(args, groups)
    vars(args).update(split)
    rank = groups.pp.rank()
    last = groups.pp.size() - 1
    stages: list[int | None] = [None]
    if last and args.virtual_pipeline_model_parallel_size is not None:
        stages = list(range(args.virtual_pipeline_model_parallel_size))
    for stage in stages:
        chunk = build(
            pre_process=rank == 0 and not stage,
            post_process=rank == last and stage == stages[-1],
            vp_stage=stage,
        )
        if transformer_engine:
            _replicate_down_projections(chunk)
        for parameter in chunk.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        config = get_model_config(chunk)
        vars(config).update(split)
        yield _BaseDataParallel(config, Float16Module(config, chunk) if args.fp16 or args.bf16 else chunk)


def _replicate_down_projections(chunk: Module) -> None:
    """Make MLA's down projections whole, as Transformer Engine has them."""
    for module in chunk.modules():
        for name in ("linear_q_down_proj", "linear_kv_down_proj"):
            layer = getattr(module, name, None)
            if layer is None:
                continue
            layer.weight = Parameter(layer.weight.new_empty(layer.output_size, layer.input_size))
            layer.weight.allreduce = True
            layer.weight.tensor_model_parallel = False
