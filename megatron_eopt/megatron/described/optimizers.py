"""The optimizers of a described run: as Megatron would make them, around parameters without numbers."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.manifest import Family, ManifestRow, warnings
from megatron_eopt.megatron.checking import refuse_bad_values
from megatron_eopt.megatron.collecting import rows_here
from megatron_eopt.megatron.described.model import DescribedRun
from megatron_eopt.megatron.entries import all_entries
from megatron_eopt.megatron.fused import tag
from megatron_eopt.megatron.held import Held
from megatron_eopt.megatron.overriding import group_settings, matches, owners_of, splits
from megatron_eopt.megatron.parameters import Described, trainable
from megatron_eopt.megatron.presets import with_preset
from megatron_eopt.megatron.support.facts import Run
from megatron_eopt.megatron.support.rules import refuse_unsupported
from megatron_eopt.megatron.tagging import tag_fused_projections
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.registry import EMERGING_OPTIMIZERS, create_emerging_optimizer

_OTHERS: dict[str, type[Optimizer]] = {"adam": torch.optim.AdamW, "sgd": torch.optim.SGD}


def matches_here(run: DescribedRun) -> list[int]:
    """How many parameters of one rank each override selects, of those that it is described for.

    Raises:
        ValueError: for an optimizer that Megatron builds alone.
    """
    if run.args.optimizer in _OTHERS:
        raise ValueError(
            f"--optimizer {run.args.optimizer} is built by Megatron alone, and there is no plan: take an optimizer of "
            f"this package, such as muon"
        )
    return matches(_parameters(run), run.optimizer_config, all_entries(run.optimizer_config, run.config_overrides))


def _parameters(run: DescribedRun) -> list[Described]:
    """The trainable parameters of a rank; the experts alone where another rank of its stage has the rest."""
    groups = run.pg_collection
    found = trainable(run.model_chunks, groups)
    first = groups.tp.rank() == 0 and groups.ep.rank() == 0
    return [each for each in found if first or not getattr(each.parameter, "allreduce", True)]


class DescribedOptimizers:
    """The optimizers of one rank of a described run.

    Args:
        run: the rank.
        counts: how many parameters of all ranks each override selects.

    Raises:
        ValueError: for what the run would be refused for at its start.
    """

    def __init__(self, run: DescribedRun, counts: Sequence[int]) -> None:
        refuse_unsupported(Run.of(run.optimizer_config, run.model_chunks, run.pg_collection))
        self._run, self._config = run, with_preset(run.optimizer_config)
        entries = all_entries(self._config, run.config_overrides)
        self._owned = owners_of(_parameters(run), self._config, entries, counts)
        refuse_bad_values(self._owned, self._config, run.model_chunks, run.pg_collection)
        tag(splits(self._owned, getattr(self._config, "muon_split", "default")))
        if getattr(self._config, "muon_split_qkv", False):
            tag_fused_projections(run.model_chunks, run.pg_collection)
        self._optimizers: list[Optimizer] = []
        self._models: list[list[Tensor]] = []
        for owner in dict.fromkeys(each.owner for each in self._owned if each.owner is not None):
            self._add(owner)

    def _add(self, owner: str) -> None:
        own = [each for each in self._owned if each.owner == owner]
        primary = self._config.optimizer.removeprefix("dist_")
        groups = [
            {"params": [_main(each.described.parameter, self._config)], **group_settings(each, self._config, primary)}
            for each in own
        ]
        if owner in EMERGING_OPTIMIZERS:
            chunks, process_groups = self._run.model_chunks, self._run.pg_collection
            optimizer, _ = create_emerging_optimizer(self._config, groups, owner, chunks, process_groups)
        else:
            optimizer = _OTHERS[owner](groups, lr=0.0)  # type: ignore[call-arg]
        self._optimizers.append(optimizer)
        self._models.append([each.described.parameter for each in own])

    def _held(self) -> Iterator[Held]:
        for models, optimizer in zip(self._models, self._optimizers, strict=True):
            for parameter, group in zip(models, optimizer.param_groups, strict=True):
                yield Held(parameter, optimizer, group, group["params"][0])

    def rows(self) -> list[ManifestRow]:
        """The lines of the manifest."""
        found, without = rows_here(self._held(), self._owned, self._config, self._run.pg_collection, settled=False)
        return [*found, *without]

    def explained(self) -> list[str]:
        """The plan of every optimizer that has one."""
        planning = (each for each in self._optimizers if isinstance(each, BaseOptimizer))
        tables = ((type(each).__name__, each.explain_proposed()) for each in planning)
        return [f"{name}\n{table}" for name, table in tables if table is not None]

    def warnings(self, found: Sequence[Family]) -> list[str]:
        """What the run will warn of."""
        return warnings(found, self._config.muon_scale_mode)


def _main(parameter: Tensor, config: Any) -> Tensor:
    """What the optimizer will hold: the parameter, or an fp32 copy with its attributes."""
    main = torch.nn.Parameter(torch.empty_like(parameter, dtype=torch.float32 if config.bf16 else parameter.dtype))
    main.__dict__.update(parameter.__dict__)
    return main
