"""What optimizers of plain torch say of themselves, and what type checkers know of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from megatron_eopt import build_optimizer
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.plain.build import OWN
from tests.optimizers.family import keeps_state

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import torch
from torch.optim.lr_scheduler import LambdaLR

from megatron_eopt import OptimizerConfig, ReportingOptimizer, build_optimizer


def made(model: torch.nn.Module) -> ReportingOptimizer:
    return build_optimizer(model, OptimizerConfig(name="muon", lr=0.02))


optimizer = made(torch.nn.Linear(8, 8))
scheduler = LambdaLR(optimizer, lambda step: 1.0)
skipped: int = optimizer.skipped_steps() + optimizer.matrices.skipped_steps()
print(optimizer.explain(), f"{optimizer.state_bytes() / 2**20:.1f} MB", skipped)
"""


@pytest.mark.parametrize("name", sorted(OWN))
def test_each_says_what_it_skips_keeps_and_does(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(80, 80), nn.Linear(80, 80))
    optimizer = build_optimizer(model, name)
    for scale in (1.0, float("nan")):
        for p in model.parameters():
            p.grad = torch.full_like(p, scale)
        if name != "adamw" or scale == 1.0:
            optimizer.step()
    skipped = 0 if name == "adamw" else 1
    assert (optimizer.skipped_steps(), optimizer.matrices.skipped_steps()) == (skipped, skipped)
    assert "6400" in optimizer.explain() or "80" in optimizer.explain()
    entries = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    assert optimizer.state_bytes() == entries
    assert (entries > 0) is (name not in OPTIMIZERS or keeps_state(name) or "AdamW" in optimizer.explain())


@pytest.mark.wide
def test_a_script_of_ones_own_passes_strict_mypy(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    # as a user has it installed: our own files are not held to the rules of the script
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(script)]
    environment = os.environ | {"MYPYPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
