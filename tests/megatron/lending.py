"""pretrain.py with rates of slow products and a fast link, at which ranks share the matrices of a small GPT."""

import functools
import runpy
from pathlib import Path

from megatron_eopt.megatron import dealing
from megatron_eopt.parallel.cost import Rates
from megatron_eopt.parallel.deal import deal

dealt_at_rates = functools.partial(deal, rates=Rates(flops=1e6, bytes=1e12, latency=1e-9))

if __name__ == "__main__":
    dealing.deal = dealt_at_rates
    runpy.run_path(str(Path(__file__).parent / "pretrain.py"), run_name="__main__")
