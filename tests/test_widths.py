"""What `make widths` is made of: the best rate between those that were tried, and the runs that it is found by."""

import argparse
import math

import pages
import pytest
import widths
from megatron.training.arguments import add_megatron_arguments

from megatron_eopt.megatron.command_line import amend


def around(rate, tried):
    """Losses whose least is at a rate."""
    return {each: 2 + math.log(each / rate) ** 2 for each in tried}


def test_the_best_rate_lies_between_those_that_were_tried():
    tried = (0.0125, 0.025, 0.05, 0.1)
    for rate in (0.031, 0.05, 0.069):
        assert widths.best(around(rate, tried)) == pytest.approx(rate)
    for rate in (0.01, 0.15):
        with pytest.raises(ValueError, match="is at the end of those that were tried"):
            widths.best(around(rate, tried))


def test_runs_differ_in_what_follows_from_the_width_and_in_the_rate():
    parser = amend(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)))
    for way in widths.WAYS.values():
        for width in widths.WIDTHS:
            args = parser.parse_args(widths.flags(way, width, 0.1))
            assert (args.hidden_size, args.num_attention_heads * args.kv_channels) == (width, width)
            assert (args.num_query_groups * 2, args.ffn_hidden_size / width) == (args.num_attention_heads, 2.75)
            assert (args.matrix_lr, args.matrix_min_lr) == (0.1, 0.01)
            preset = "unit_rms" if "--use-mup" in way.flags else "match_adamw"
            assert (args.use_mup, args.muon_preset) == (preset == "unit_rms", preset)


def test_the_docs_have_a_best_rate_that_carries_over():
    text = pages.between(widths.PAGE.read_text(), "widths")
    factor = float(
        text.partition(f"{widths.WAYS['mup'].title}: the best rates differ by a factor of ")[2].split(".\n")[0]
    )
    assert factor <= 1.5
