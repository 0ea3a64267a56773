"""Recommended settings: Megatron takes the flags of the page, and their lines end below AdamW's best."""

import argparse
import shlex

import pytest
import recommended
from megatron.training.arguments import add_megatron_arguments
from tables import DEMO_LR, begin_flags

from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.megatron.command_line import amend
from megatron_eopt.settings.presets import TO_BEGIN_WITH


def test_flags_to_begin_with_mean_the_rates_of_the_table():
    parser = amend(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)))
    for name in OPTIMIZERS:
        args = parser.parse_args(["--optimizer", name, *shlex.split(begin_flags(name, DEMO_LR))])
        rates = args.lr, args.min_lr
        if OPTIMIZERS[name].owns == "matrices":
            rates = args.matrix_lr, args.matrix_min_lr
        assert rates[0] == pytest.approx(DEMO_LR * TO_BEGIN_WITH[name].rate, rel=0.05), name
        assert rates[1] == pytest.approx(rates[0] if args.lr_decay_style == "constant" else rates[0] / 10), name


def test_recommended_lines_end_below_adamws_best(monkeypatch):
    monkeypatch.setattr(recommended, "train", lambda *run: pytest.fail(f"{run} is not recorded"))
    runs = recommended.Runs(recommended.RESULTS)
    best = recommended.best_rate(runs)
    for name in recommended.NAMES:
        assert runs.mean(name, best * TO_BEGIN_WITH[name].rate) < runs.mean("adamw", best)
