"""pretrain.py with rates of slow products and a fast link, at which ranks share the matrices of a small GPT.

On rank NODES nothing says how many ranks a node has. Where LOSE is "missing" or "nan", so is the gradient of the
largest matrix in the third step of the rank that has it.
"""

import functools
import os
import runpy
from pathlib import Path

import torch

from megatron_eopt import TensorParallelMuon
from megatron_eopt.megatron import dealing
from megatron_eopt.parallel.cost import Rates
from megatron_eopt.parallel.deal import deal

dealt_at_rates = functools.partial(deal, rates=Rates(flops=1e6, bytes=1e12, latency=1e-9))


def lose(how, step=TensorParallelMuon.step):
    steps = []

    def losing(self, *args):
        steps.append(True)
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.numel() > 40_000 and len(steps) == 3:
                p.grad = None if how == "missing" else torch.full_like(p, torch.nan)
        return step(self, *args)

    TensorParallelMuon.step = losing


if __name__ == "__main__":
    dealing.deal = dealt_at_rates
    if os.environ.get("NODES") == os.environ["RANK"]:
        del os.environ["LOCAL_WORLD_SIZE"]
    if "LOSE" in os.environ:
        lose(os.environ["LOSE"])
    runpy.run_path(str(Path(__file__).parent / "pretrain.py"), run_name="__main__")
