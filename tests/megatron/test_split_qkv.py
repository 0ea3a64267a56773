"""QKV is split by the config of its attention, and --muon-no-split-qkv leaves it whole, whatever the optimizer."""

import json

import pytest

from megatron_eopt.family import OPTIMIZERS
from tests.contracts.scripts import run_script
from tests.optimizers.family import RECORDS

NAMES = [row.name for row in OPTIMIZERS.values() if row.owns == "matrices"]
SCRIPT = """
import json, torch
from types import SimpleNamespace
from tests.megatron import small_gpt
import megatron_eopt
from megatron.core.optimizer import OptimizerConfig

small_gpt.begin()

def trained(name, **settings):
    '''QKV after two steps, and the sizes of its matrices and of gate and up, by the manifest.'''
    torch.manual_seed(1)
    model = small_gpt.gpt(gated_linear_unit=True)
    config = OptimizerConfig(optimizer=name, lr=1e-2, spectron_rank=8, optimizer_manifest="none")
    for key, value in settings.items():
        setattr(config, key, value)
    optimizer = megatron_eopt.get_megatron_optimizer(config, [model])
    small_gpt.steps(model, optimizer, 2)
    sizes = {{family.like.name.split(".")[-2]: family.like.sizes for family in optimizer.megatron_eopt.families}}
    return model.decoder.layers[0].self_attention.linear_qkv.weight, sizes["linear_qkv"], sizes["linear_fc1"]

megatron_eopt.activate()
found = {{}}
for name in {names!r}:
    split, *_ = trained(name)
    whole, *sizes = trained(name, muon_split_qkv=False)
    declared, *_ = trained(name, optimizer_overrides={{"linear_qkv.weight": {{"split": "none"}}}})
    found[name] = [*sizes, torch.equal(whole, declared), torch.equal(whole, split)]
for bf16 in (False, True):
    model = small_gpt.gpt()
    model.aside = torch.nn.Module()
    model.aside.config = SimpleNamespace(num_attention_heads=8, num_query_groups=2, kv_channels=4)
    model.aside.linear_qkv = torch.nn.Linear(32, 48, bias=False)
    model = model.bfloat16() if bf16 else model
    config = OptimizerConfig(optimizer="muon", lr=1e-2, bf16=bf16)
    families = megatron_eopt.get_megatron_optimizer(config, [model]).megatron_eopt.families
    (found["bf16" if bf16 else "fp32"],) = [each.like.sizes for each in families if "aside" in each.like.name]
print("found", json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(selected):
    said = run_script(SCRIPT.format(names=selected("name")))
    (line,) = [line for line in said.splitlines() if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


@pytest.mark.parametrize("name", NAMES)
def test_qkv_stays_one_matrix(found, name):
    """As by an override that says so; and gate and up are split as before."""
    qkv, gate_and_up, as_declared, as_split = found[name]
    assert qkv == "96x32"
    assert as_declared
    assert as_split == RECORDS[name].by_line
    assert (", up " in gate_and_up) == OPTIMIZERS[name].cls.row_order_matters


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_projection_is_split_as_its_own_attention_says(found, dtype):
    """Also where it could be as the model's config says, by which Megatron's builder marks it."""
    assert found[dtype] == "q 32x32, k 8x32, v 8x32"
