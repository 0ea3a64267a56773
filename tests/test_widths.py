"""What `make widths` is made of: the best rate between those that were tried, and the runs that it is found by."""

import argparse
import math
import sys
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_eopt.megatron.arguments import amend

ROOT = Path(__file__).resolve().parent.parent

sys.path.insert(0, str(ROOT / "scripts" / "bench"))
import pages  # noqa: E402
import widths  # noqa: E402


def around(rate, tried):
    """Losses whose least is at a rate."""
    return {each: 2 + math.log(each / rate) ** 2 for each in tried}


@pytest.mark.parametrize("rate", [0.031, 0.05, 0.069])
def test_the_best_rate_lies_between_those_that_were_tried(rate):
    assert widths.best(around(rate, (0.0125, 0.025, 0.05, 0.1))) == pytest.approx(rate)


@pytest.mark.parametrize("rate", [0.01, 0.15])
def test_a_best_rate_at_the_end_is_none(rate):
    with pytest.raises(ValueError, match=r"is at the end of those that were tried.*try more"):
        widths.best(around(rate, (0.0125, 0.025, 0.05, 0.1)))


def test_the_table_says_by_how_much_the_best_rates_differ():
    tried = (0.025, 0.05, 0.1, 0.2)
    text = widths.table({"mup": {64: around(0.05, tried), 128: around(0.075, tried)}})
    assert "| muP, --muon-preset unit_rms | 128 |" in text
    assert "the best rates differ by a factor of 1.50." in text


@pytest.mark.parametrize("way", widths.WAYS.values(), ids=widths.WAYS)
@pytest.mark.parametrize("width", widths.WIDTHS)
def test_runs_differ_in_what_follows_from_the_width_and_in_the_rate(way, width):
    parser = amend(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)))
    args = parser.parse_args(widths.flags(way, width, 0.1))
    assert (args.hidden_size, args.num_attention_heads * args.kv_channels) == (width, width)
    assert (args.num_query_groups * 2, args.ffn_hidden_size / width) == (args.num_attention_heads, 2.75)
    assert (args.matrix_lr, args.matrix_min_lr) == (0.1, 0.01)
    assert (args.use_mup, args.muon_preset) == (
        (True, "unit_rms") if "--use-mup" in way.flags else (False, "match_adamw")
    )


def test_the_docs_have_a_best_rate_that_carries_over():
    text = pages.between(widths.PAGE.read_text(), "widths")
    factor = float(
        text.partition(f"{widths.WAYS['mup'].title}: the best rates differ by a factor of ")[2].split(".\n")[0]
    )
    assert factor <= 1.5
