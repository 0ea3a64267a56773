"""What the start of a planned run would refuse, and warn of."""

from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from megatron_eopt.megatron.factory import OptimizerOfRun
from megatron_eopt.megatron.given import idle_flags, idle_settings
from megatron_eopt.megatron.overrides import Overrides, all_entries
from megatron_eopt.megatron.support.facts import primary_of
from megatron_eopt.registry import takes_matrices
from megatron_eopt.routing import ParameterInfo, ParamPattern, problems, warnings
from megatron_eopt.routing.precedence import unmatched


class Foreseen(NamedTuple):
    """What can be known before the ranks of a run are there."""

    refused: list[str]
    doubtful: list[str]  # refused, unless it is for what a plan does not build
    warned: list[str]


def foreseen(
    run: OptimizerOfRun, overrides: Overrides, manifest: Sequence[ParamPattern], infos: Iterable[ParameterInfo]
) -> Foreseen:
    """What a start says of all its ranks together.

    ``run`` and ``overrides`` are those of any stage, ``manifest`` and ``infos`` are of all.
    """
    config = run.facts.config
    args = run.facts.args
    name = primary_of(config)
    built = {family.like.optimizer for family in manifest if family.like.optimizer}
    refused = idle_flags(config, args, built) + problems(manifest, name, takes_matrices(name))
    doubtful = []
    missing = unmatched(all_entries(run.config, overrides), infos, name)
    elsewhere = _not_built(args)
    if elsewhere:
        unless = f"unless it is for {' or '.join(elsewhere)}, which a plan does not build"
        doubtful = [f"{line} ({unless})" for line in missing]
    else:
        refused += missing
    warned = idle_settings(config, args, built) + warnings(manifest, run.config.muon_scale_mode)
    return Foreseen(refused, doubtful, warned)


def _not_built(args: Namespace) -> list[str]:
    """Where a selector may match, and a plan has no parameters."""
    elsewhere = []
    if args.expert_model_parallel_size > 1:
        elsewhere.append("experts of other ranks")
    if args.transformer_impl != "local":
        elsewhere.append("layers of Transformer Engine")
    return elsewhere
