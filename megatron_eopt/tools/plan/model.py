"""A Megatron model on the meta device, described by flags.

Megatron's own builders run on the CPU backend (:mod:`megatron_eopt.tools.cpu`), over a process group that pretends to
communicate.
"""

import io
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import Module, Parameter

from megatron_eopt.redirect import Original, Redirection, Redirections, answer, around
from megatron_eopt.tools import cpu
from megatron_eopt.tools.plan.parsed import READ_LATER, parsed

if TYPE_CHECKING:
    from megatron_eopt.megatron.factory import OptimizerOfRun


@contextmanager
def described_run(
    flags: Sequence[str], rank: int = 0, world_size: int = 1
) -> Iterator[tuple["OptimizerOfRun", dict[Any, Any]]]:
    """What a rank of a GPT pretraining builds, before it is built, and Megatron's overrides.

    Inside, Megatron's parallel state and arguments are those of this rank, torch.cuda is answered by the CPU, and
    nothing is printed. The model is on the meta device, and arguments that ask for a GPU are changed. Sizes and ranks
    of process groups are right, and they send nothing.
    """
    with ExitStack() as stack:
        stack.callback(os.environ.update, dict(os.environ))  # Megatron's attention reads there what it has written
        stack.callback(os.environ.clear)
        stack.callback(cpu.undo)
        cpu.install()
        from megatron_eopt.megatron import activation

        stack.callback(activation.deactivate)
        activation.activate()
        stack.enter_context(redirect_stdout(io.StringIO()))
        stack.callback(setattr, sys, "argv", sys.argv)
        sys.argv = ["pretrain", *flags]  # Megatron's parser reads from here alone
        args, typed = parsed(rank, world_size)
        _make_process_groups(args, stack)
        yield _described(args, typed)


def _make_process_groups(args: Namespace, stack: ExitStack) -> None:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.training import global_vars, initialize
    from torch.testing._internal.distributed.fake_pg import FakeStore

    layer_wise = "megatron.core.optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer"
    redirections = Redirections(
        [
            Redirection(
                dist,
                "new_group",
                around(lambda real, **given: real(**given | {"backend": "fake"})),
                "no other rank is there to talk to",
            ),
            Redirection(
                "megatron.core.transformer.dot_product_attention:DotProductAttention",
                "__init__",
                around(lambda real, *args, k_channels=None, v_channels=None, **kw: real(*args, **kw)),
                "latent attention gives it heads of two sizes, and it is only looked at",
            ),
            Redirection(torch.Tensor, "type", _type_on_gpu, "Megatron takes fp32 copies of a GPU's tensors alone"),
            Redirection(layer_wise, "shard_params", _undealt, "the manifest has what all data-parallel ranks have"),
            Redirection(layer_wise, "set_bucket_layerwise_params_list", answer(), "there are no gradient buffers"),
        ],
        importers=("megatron", "torch.distributed"),
    )
    stack.callback(global_vars.unset_global_variables)
    global_vars.set_args(args)
    dist.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=args.world_size)
    stack.callback(dist.destroy_process_group)
    stack.callback(parallel_state.destroy_model_parallel)
    stack.enter_context(redirections)
    initialize._initialize_distributed(None, None, None)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)


@around
def _type_on_gpu(real: Original, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    found = real(tensor, *args, **kwargs)
    return found.replace(".meta.", ".") if isinstance(found, str) else found


@around
def _undealt(shard_params: Original, self: Any, *args: Any) -> None:
    self.dp_cp_params_list = None  # as on a single rank
    self.expt_dp_params_list = None


def _described(args: Namespace, typed: Namespace) -> tuple["OptimizerOfRun", dict[Any, Any]]:
    from megatron.core import optimizer
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import training

    from megatron_eopt.megatron.factory import OptimizerOfRun
    from megatron_eopt.megatron.given import complete

    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = list(_chunks(args, groups, typed.transformer_impl != "local"))
    vars(args).update({name: getattr(typed, name) for name in READ_LATER})
    for chunk in chunks:
        chunk.ddp_config = training.get_megatron_ddp_config(args)
    config, overrides = training.get_megatron_optimizer_config(args)
    complete(config, args)
    if args.use_mup:
        overrides |= optimizer.get_mup_config_overrides(config, chunks[0].config.mup_width_mult, config.optimizer)
    return OptimizerOfRun(config, chunks, groups), overrides


def _chunks(args: Namespace, groups: Any, transformer_engine: bool) -> Iterator[Any]:
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.distributed.torch_fully_sharded_data_parallel import TorchFullyShardedDataParallel
    from megatron.training.argument_utils import gpt_config_from_args

    # torch's norms and Megatron's own attention have no part in these two, and no parameter depends on them
    split = {name: getattr(args, name) for name in ("sequence_parallel", "context_parallel_size")}
    vars(args).update(sequence_parallel=False, context_parallel_size=1)
    config = gpt_config_from_args(args)
    vars(args).update(split)
    with torch.device("meta"):
        builder = config.get_builder_cls()(config)
        built = builder.build_distributed_models(groups, wrap_with_ddp=False, data_parallel_random_init=False)
    for chunk in built:
        if transformer_engine:
            _replicate_down_projections(chunk)
            _record_largest_logits(chunk)
        vars(chunk.config).update(split)
        if args.use_torch_fsdp2:
            yield TorchFullyShardedDataParallel(chunk.config, None, chunk)
        else:
            yield _BaseDataParallel(chunk.config, chunk)


def _replicate_down_projections(chunk: Module) -> None:
    """Make MLA's down projections whole, as Transformer Engine has them."""
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes

    for name, layer in chunk.named_modules():
        if name.endswith((".linear_q_down_proj", ".linear_kv_down_proj")):
            layer.weight = Parameter(layer.weight.new_empty(layer.output_size, layer.input_size))
            layer.weight.allreduce = True
            set_defaults_if_not_set_tensor_model_parallel_attributes(layer.weight)


def _record_largest_logits(chunk: Module) -> None:
    """Let attention say that it records them, as Transformer Engine's does."""
    from megatron_eopt.megatron.qk_clip import MAXIMA

    for layer in chunk.modules():
        if hasattr(layer, "core_attention"):
            setattr(layer.core_attention, MAXIMA, None)
