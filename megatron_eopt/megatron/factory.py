"""Build the optimizer of a run, in phases."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron.core.optimizer as core_optimizer

from megatron_eopt.checkpoints.contents import TRACKER
from megatron_eopt.megatron import assignment, consensus, dealing, fsdp, qk_clip, releases
from megatron_eopt.megatron.checkpoints.adam_state import let_adam_be_saved
from megatron_eopt.megatron.checkpoints.fsdp_dtensor import SavedShards
from megatron_eopt.megatron.checkpoints.keys import layers_differ, set_per_layer_keys
from megatron_eopt.megatron.checkpoints.sharded_state import SavedState, refuse_unsaved
from megatron_eopt.megatron.command_line import loads_its_own
from megatron_eopt.megatron.config import config_of_run
from megatron_eopt.megatron.first_step import check_steps, warn_of_unused
from megatron_eopt.megatron.fused import Matrices, logical_matrices, tag, warnings_of_shared_keys
from megatron_eopt.megatron.given import idle_flags, idle_settings, typed_of, warnings_of
from megatron_eopt.megatron.manifest import build_manifest
from megatron_eopt.megatron.metrics_log import interval_of, measure
from megatron_eopt.megatron.model_parameters import (
    frozen_names,
    mark,
    mark_sinks,
    parameters_of,
    tag_as_megatron,
    trainable,
)
from megatron_eopt.megatron.support.facts import Run, on
from megatron_eopt.megatron.support.rules import refuse_unsupported
from megatron_eopt.megatron.wrappers import (
    distributed_wrappers,
    optimizer_parameters,
    plain_wrappers,
    remember,
    torch_optimizers,
)
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.redirect import Redirection, Redirections, becomes
from megatron_eopt.step.base import BaseOptimizer
from megatron_eopt.step.parameters import parameters_in


class OptimizerOfRun:
    """The optimizer of a run, up to its first step.

    All ranks go through the phases together: the methods below :meth:`built_by`, in their order. Errors that can be
    known before a build come by the end of :meth:`check`; until then only attributes of parameters change.
    """

    optimizer: Any = None  # Megatron's, once it is built

    def __init__(self, config: Any, model_chunks: Sequence[Any], pg_collection: Any, layer_wise: bool = False) -> None:
        self.facts = Run.of(config, model_chunks, pg_collection, layer_wise=layer_wise)
        self.config = config_of_run(config, self.facts)
        self.model_chunks = model_chunks
        self.groups = pg_collection
        self.metrics_interval = interval_of(config, self.facts.args)

    def built_by(self, build: Callable[[Any, Any], Any], config_overrides: Any) -> Any:
        """Build Megatron's optimizer by ``build(config, overrides)``."""
        consensus.on_all_ranks(lambda: refuse_unsupported(self.facts))  # pipeline stages may differ in theirs
        consensus.on_all_ranks(lambda: refuse_unwritable(self.facts.args))
        caveat = releases.caveat(self.facts.release)
        if caveat is not None:
            consensus.log_rank0(caveat)
        self.describe()
        for warning in self.warnings():
            consensus.log_rank0(f"warning: {warning}")
        of_all = parameters_of(self.model_chunks, self.groups)
        consensus.on_all_ranks(lambda: consensus.refuse_different_parameters(of_all, self.groups))
        self.assigned = assignment.assign(self.parameters, self.config, config_overrides)
        self.refuse_idle_flags()
        matrices, overrides = consensus.on_all_ranks(self.check)
        tag(matrices)
        warn_of_other_checkpoints(self.facts.args)
        self.build(build, overrides)
        self.prepare()
        self.build_manifest()
        self.attach_checkpoints()
        if self.metrics_interval:
            measure(self.optimizer, self.model_chunks, self.metrics_interval, self.facts.layer_wise)
        self.guard_first_step()
        return self.optimizer

    def describe(self) -> None:
        """Name the parameters, and mark them: as Megatron, and as declared."""
        mark_sinks(self.model_chunks)
        if self.facts.megatron_fsdp:
            fsdp.mark_shards(self.model_chunks)
        tag_as_megatron(self.model_chunks, self.groups)  # before overrides select by these attributes
        self.parameters = trainable(self.model_chunks, self.groups)
        mark(self.parameters)

    def warnings(self) -> list[str]:
        """What to say before the parameters are assigned."""
        sequence_parallel = on(self.facts.model, "sequence_parallel")
        return [
            *warnings_of(self.facts.config, self.facts.args),
            *warnings_of_shared_keys(self.parameters, self.groups.tp.size(), sequence_parallel),
        ]

    def refuse_idle_flags(self) -> None:
        """Refuse typed flags, and warn of settings, that no optimizer of any rank reads."""
        names = consensus.union(each.optimizer for each in self.assigned if each.optimizer is not None)
        idle = idle_flags(self.facts.config, self.facts.args, names)
        if idle:
            raise ValueError("\n".join(idle))
        for warning in idle_settings(self.facts.config, self.facts.args, names):
            consensus.log_rank0(f"warning: {warning}")

    def check(self) -> tuple[list[Matrices], dict[Any, Any]]:
        """Refuse assignments that cannot work; return matrices and Megatron's overrides."""
        assigned = frozenset(each.optimizer for each in self.assigned if each.optimizer is not None)
        refuse_unsupported(replace(self.facts, assigned=assigned))
        if on(self.facts.model, "qk_clip"):
            biases_cut = self.facts.laid_out and self.facts.leaves_scalars
            qk_clip.refuse_unclipped(self.model_chunks, self.groups.tp.size(), biases_cut)
        assignment.refuse_other_buffers(self.assigned)
        assignment.refuse_bad_values(self.assigned)
        overrides = assignment.MegatronOverrides(self.assigned, self.config)
        return logical_matrices(self.assigned, self.config), overrides

    def build(self, build: Callable[[Any, Any], Any], overrides: dict[Any, Any]) -> None:
        """Let Megatron build its optimizer, and check the result."""
        dealt = dealing.dealt_by_operations(self.config, self.facts.args)
        # Megatron asks for emerging-optimizers
        ours = Redirection(core_optimizer, "HAVE_EMERGING_OPTIMIZERS", becomes(True), "the optimizers built are ours")
        without_package = Redirections([ours])
        with assignment.excluded_hidden(self.assigned), without_package, dealt:
            try:
                self.optimizer = consensus.on_all_ranks(lambda: build(self.config, overrides))
            except ValueError as error:
                error.args = (f"{error}{typed_of(str(error), self.facts.args)}",)
                raise
        self.optimizer.megatron_eopt = self
        tag_as_megatron(self.model_chunks, self.groups)  # Megatron's builder has tagged by the model's config alone
        for each in optimizer_parameters(self.optimizer):
            if each.main is not None and hasattr(each.model, "qkv_split_shapes"):
                each.main.qkv_split_shapes = each.model.qkv_split_shapes  # type: ignore[attr-defined]
        remember(self.optimizer, self.model_chunks)
        consensus.on_all_ranks(lambda: assignment.refuse_unread(self.optimizer, self.assigned))
        for optimizer in torch_optimizers(self.optimizer):
            if isinstance(optimizer, BaseOptimizer):  # a scalar optimizer, which Megatron has not told of its ranks
                vars(optimizer)["pg_collection"] = self.groups

    def prepare(self) -> None:
        """Let every optimizer agree on its plan with other ranks."""
        here = [x for x in torch_optimizers(self.optimizer) if parameters_in(x.param_groups)]
        consensus.on_all_ranks(lambda: [optimizer.prepare() for optimizer in here if hasattr(optimizer, "prepare")])
        for optimizer in here:
            if isinstance(optimizer, TensorParallelMuon):
                consensus.log_rank0(optimizer.kernels())

    def build_manifest(self) -> None:
        """Record which optimizer updates every parameter, as built."""
        self.families, self.matrices_here = build_manifest(self.optimizer, self.assigned, self.config, self.groups)

    def attach_checkpoints(self) -> None:
        """Let checkpoints hold the optimizers' state."""
        if self.facts.megatron_fsdp:
            SavedShards(self.optimizer.chained_optimizers[0], self)
            return
        differ = layers_differ(self.families, frozen_names(self.model_chunks))
        set_per_layer_keys(self.model_chunks, differ)
        for wrapper in distributed_wrappers(self.optimizer):
            let_adam_be_saved(wrapper)
        for number, wrapper in enumerate(plain_wrappers(self.optimizer)):  # of which the first saves the manifest
            SavedState(wrapper, self if number == 0 else None, differ, self.facts.layer_wise)

    def guard_first_step(self) -> None:
        """Install the checks of the first step."""
        check_steps(self.optimizer, self.matrices_here, lambda: warn_of_unused(self.assigned), self.check_state)

    def check_state(self) -> None:
        """Refuse state that the first step has made and no save could hold."""
        args = self.facts.args
        if on(args, "save") and args.ckpt_format == "torch_dist":
            for wrapper in plain_wrappers(self.optimizer):
                refuse_unsaved(wrapper.optimizer)


def refuse_unwritable(args: Any) -> None:
    """Refuse a ``--save`` that no file can be written to, before a run has trained to its first save.

    Whether the disk has room is not asked: nobody knows what else is written to it until then.
    """
    if not on(args, "save") or on(args, "enable_msc"):  # which is no folder of this machine
        return
    folder = Path(args.save).absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(f"--save {args.save}: {there} is no folder that this process may write to: name another")


def warn_of_other_checkpoints(args: Any) -> None:
    """Warn where checkpoints of two runs would mix in one folder."""
    if not on(args, "save"):
        return
    finished = Path(args.save, TRACKER).exists()
    there = finished or any(Path(args.save).glob("iter_*"))
    if there and not (finished and loads_its_own(args)):
        without = "" if finished else f", since it has no {TRACKER}"
        consensus.log_rank0(
            f"warning: {args.save} has checkpoints, and this run does not load them{without}: its own will mix with "
            f"them, and replace those of equal iterations; name another folder with --save, or go on from them with "
            f"--load {args.save}"
        )
