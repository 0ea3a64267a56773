"""pretrain.py with rates of slow products and fast exchanges, at which ranks lend matrices of a small GPT."""

import functools
import runpy
from pathlib import Path

from megatron_eopt.megatron import dealing
from megatron_eopt.parallel.cost import Rates

dealing.deal = functools.partial(dealing.deal, rates=Rates(flops=1e6, bytes=1e12, latency=1e-9))
runpy.run_path(str(Path(__file__).parent / "pretrain.py"), run_name="__main__")
