"""The optimizers of a described run: as Megatron would make them, around parameters without numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.manifest import Row
from megatron_eopt.megatron.checking import refuse_bad_values
from megatron_eopt.megatron.collecting import rows_here
from megatron_eopt.megatron.described.model import DescribedRun
from megatron_eopt.megatron.entries import all_entries
from megatron_eopt.megatron.fused import tag
from megatron_eopt.megatron.held import Held
from megatron_eopt.megatron.overriding import Owned, group_settings, matches, owners_of, splits
from megatron_eopt.megatron.parameters import Described, trainable
from megatron_eopt.megatron.presets import with_preset
from megatron_eopt.megatron.support import Run
from megatron_eopt.megatron.support.rules import refuse_unsupported
from megatron_eopt.megatron.tagging import tag_fused_projections
from megatron_eopt.optimizers.logical import LogicalMatrices
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


@dataclass(frozen=True)
class PlannedRank:
    """What the optimizers of one rank will do.

    Attributes:
        rows: the lines of the manifest.
        explained: the plan of every optimizer that has one, as a table.
        scale_mode: of the run.
    """

    rows: list[Row]
    explained: list[str]
    scale_mode: str


def planned_rank(run: DescribedRun, counts: Sequence[int]) -> PlannedRank:
    """Make the optimizers of one rank, around parameters without numbers, as the run would, and ask them.

    Args:
        run: the rank.
        counts: how many parameters of all ranks each override selects.

    Raises:
        ValueError: for what the run would be refused for at its start.
    """
    chunks, groups = run.model_chunks, run.pg_collection
    refuse_unsupported(Run.of(run.optimizer_config, chunks, groups))
    config = with_preset(run.optimizer_config)
    owned = owners_of(_parameters(run), config, all_entries(config, run.config_overrides), counts)
    refuse_bad_values(owned, config, chunks, groups)
    tag(splits(owned, getattr(config, "muon_split", "default")))
    if getattr(config, "muon_split_qkv", False):
        tag_fused_projections(chunks, groups)
    names = dict.fromkeys(each.owner for each in owned if each.owner is not None)
    held = [each for name in names for each in _held_by(name, owned, config, run)]
    found, without = rows_here(held, owned, config, groups, settled=False)
    optimizers = dict.fromkeys(each.optimizer for each in held)
    tables = {each: each.explain_proposed() for each in optimizers if isinstance(each, LogicalMatrices)}
    explained = [f"{type(each).__name__}\n{table}" for each, table in tables.items() if table is not None]
    return PlannedRank([*found, *without], explained, config.muon_scale_mode)


def _held_by(name: str, owned: Sequence[Owned], config: Any, run: DescribedRun) -> Iterator[Held]:
    """Build the optimizer of this name; the parameters of which it is the optimizer."""
    own = [each for each in owned if each.owner == name]
    primary = config.optimizer.removeprefix("dist_")
    groups = [
        {"params": [_main(each.described.parameter, config)], **group_settings(each, config, primary)} for each in own
    ]
    if name in EMERGING_OPTIMIZERS:
        optimizer, _ = create_emerging_optimizer(config, groups, name, run.model_chunks, run.pg_collection)
    else:
        optimizer = _OTHERS[name](groups, lr=0.0)  # type: ignore[call-arg]
    for each, group in zip(own, optimizer.param_groups, strict=True):
        yield Held(each.described.parameter, optimizer, group, group["params"][0])


def _main(parameter: Tensor, config: Any) -> Tensor:
    """What the optimizer will hold: the parameter, or an fp32 copy with its attributes."""
    main = torch.nn.Parameter(torch.empty_like(parameter, dtype=torch.float32 if config.bf16 else parameter.dtype))
    main.__dict__.update(parameter.__dict__)
    return main
