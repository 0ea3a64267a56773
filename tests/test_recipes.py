"""The recipes of docs/contributing.md lead to green, and name all files that are touched."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "contributing.md").read_text()
OPTIMIZER = '''"""ColumnNorm: gradients whose columns have one norm."""

from typing import Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from megatron_eopt.parallel.exchange_cost import Side
from megatron_eopt.settings.records import Setting
from megatron_eopt.settings.values import ABOVE_0, Scalar
from megatron_eopt.step.parameters import DescribedMatrix, Matrices
from megatron_eopt.step.stacked_optimizer import StackedOptimizer
from megatron_eopt.step.stacks import MatrixPlan, Rule, Stack
from megatron_eopt.step.state import StateTensor


class ColumnNorm(StackedOptimizer):
    """ColumnNorm: ``W <- (1 - lr weight_decay) W - lr X``, of ``G`` whose columns have the l2 norm ``sqrt(m) size``."""

    own_settings = (Setting("size", "RMS of the entries of an update.", ABOVE_0),)

    def __init__(
        self,
        params: ParamsT,
        lr: Scalar = 0.01,
        weight_decay: float = 0.01,
        size: float = 1.0,
        **settings: Unpack[Matrices],
    ) -> None:
        super().__init__(params, locals())

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Describe none."""
        return []

    def _describe(self, name: str, plan: MatrixPlan, parameter: Tensor) -> DescribedMatrix:
        size = self.group_of(parameter)["size"]
        return DescribedMatrix(name, plan.layout.shape, "norms" if plan.layout.sharded else "local", size, size)

    def _side_sums(self, plan: MatrixPlan, parameter: Tensor) -> list[Side]:
        return [Side(1, 1, torch.float64.itemsize)]

    def update(self, stack: Stack) -> Rule:
        """Columns over their norms."""
        shard, X = self.engine.shard(stack.matrix), stack.gradient.mT
        squares = X.norm(dim=2, keepdim=True, dtype=torch.float64).square()
        squares = yield stack.side_sums(squares, 1)
        rms = (squares.narrow(1, shard.left, X.shape[1]) / stack.matrix.shape[0]).sqrt().to(X.dtype)
        return (stack.group["size"] * X / rms.clamp(min=torch.finfo(X.dtype).tiny)).mT
'''
ROW = 'OptimizerSpec(name="column_norm", cls=ColumnNorm, of_muon=("split_qkv",), flags=("size",)),'
# Recipe -> file -> what is put behind the first place of a text.
ADDED = {
    "Add a coefficient set": {
        "megatron_eopt/orthogonalize/coefficients.py": [
            ('Literal["simple"', ', "plain3"'),
            ('"simple": (_SIMPLE,),', '\n    "plain3": ((1.5, -0.5, 0.0),),'),
        ],
        "megatron_eopt/orthogonalize/forms.py": [('("cubic5", 5): ((), (3,)),', '\n    ("plain3", 5): ((), (3,)),')],
    },
    "Add a setting": {
        "tests/optimizers/test_settings.py": [("TABLE = {", '\n    "size": ABOVE_0,')],
    },
    "Add an optimizer": {
        "megatron_eopt/family.py": [
            ("import Dion2 as Dion2", "\nfrom megatron_eopt.optimizers.column_norm import ColumnNorm as ColumnNorm"),
            ("_SPECS = (", f"\n    {ROW}"),
        ],
        "megatron_eopt/settings/presets.py": [("TO_BEGIN_WITH = {", '\n    "column_norm": ToBeginWith(1 / 3),')],
        "tests/optimizers/family.py": [
            ("RECORDS = defaultdict(Record) | {", '\n    "column_norm": Record(calls={"all_reduce": 3}),'),
        ],
        "docs/python.md": [
            ("::: megatron_eopt.optimizers.dion2.Dion2", "\n\n::: megatron_eopt.optimizers.column_norm.ColumnNorm"),
        ],
    },
}


@pytest.mark.wide
def test_recipes_lead_to_green(tmp_path):
    for folder in ("megatron_eopt", "tests", "docs", "scripts", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in filter(Path.is_file, ROOT.iterdir()):
        shutil.copy(file, tmp_path)
    (tmp_path / "megatron_eopt/optimizers/column_norm.py").write_text(OPTIMIZER)
    for recipe, files in ADDED.items():
        section = PAGE.partition(f"## {recipe}\n")[2].partition("\n## ")[0]
        assert files.keys() <= {*re.findall(r"`([\w/.]+)`", section)}, recipe
        for name, places in files.items():
            text = (tmp_path / name).read_text()
            for place, added in places:
                assert place in text
                text = text.replace(place, place + added, 1)
            (tmp_path / name).write_text(text)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "scripts/tables.py"], cwd=tmp_path, env=environment, check=True)
    near = "column_norm or ColumnNorm or plain3 or size or up_to_date or reference or every_set"
    command = [sys.executable, "-m", "pytest", "-q", "tests", "-m", "not wide and not full", "-k", near]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
