"""What our optimizers change in Megatron's command line."""

import argparse
from typing import Any, get_args

from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.parallel.plan import TpMode
from megatron_eopt.registry import list_optimizers

DEFAULT_TP_MODE: TpMode = "duplicated"


def amend(parser: argparse.ArgumentParser, unavailable: frozenset[str] = frozenset()) -> argparse.ArgumentParser:
    """Let Megatron's parser know our optimizers, and refuse there what would fail in the first step.

    - ``--optimizer`` takes every registered name, and no longer those that nothing here can build.
    - ``--muon-coefficient-type`` takes the known names only.
    - ``--muon-fp32-matmul-prec`` also takes highest.
    - ``--muon-tp-mode`` is exact where the user gives none.

    Args:
        parser: Megatron's parser, with its arguments added.
        unavailable: names of optimizers to take out of ``--optimizer``.

    Returns:
        The same parser.
    """
    optimizer = _action(parser, "--optimizer")
    theirs = [name for name in optimizer.choices or () if name not in unavailable]
    optimizer.choices = theirs + [name for name in list_optimizers() if name not in theirs]
    _restrict(parser, "--muon-coefficient-type", get_supported_coefficient_types())
    _restrict(parser, "--muon-fp32-matmul-prec", get_args(MatmulPrecision))
    _restrict(parser, "--muon-tp-mode", get_args(TpMode))
    tp_mode = _action(parser, "--muon-tp-mode")
    tp_mode.default = DEFAULT_TP_MODE
    tp_mode.help = (
        "How matrices that are sharded over tensor-parallel ranks are orthogonalized: all exact but blockwise, which "
        "treats each shard as a matrix of its own. auto takes the cheapest exact way for each bucket of equal "
        "matrices. Default: %(default)s."
    )
    return parser


def _restrict(parser: argparse.ArgumentParser, flag: str, choices: tuple[Any, ...]) -> None:
    action = _action(parser, flag)
    action.choices = list(choices)
    action.help = f"{(action.help or '').split(' Valid types')[0]} One of {', '.join(choices)}."


def _action(parser: argparse.ArgumentParser, flag: str) -> argparse.Action:
    # argparse has no public way to look an argument up
    return parser._option_string_actions[flag]
