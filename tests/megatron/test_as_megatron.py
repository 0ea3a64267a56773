"""The same script with Megatron's own Muon and with ours: overrides by what Megatron tags, and weight decay."""

import functools
import json

import pytest

from tests.contracts.scripts import run_script
from tests.megatron.test_megatron_fsdp import EXACT, SHARDED, after, assert_close, trained

pytest.importorskip("emerging_optimizers")

QKV, FC1 = "layers.0.self_attention.linear_qkv.weight", "layers.0.mlp.experts.local_experts.1.linear_fc1.weight"
EXPERTS = ["--num-experts", "4", "--moe-token-dispatcher-type", "alltoall"]

SCRIPT = """
import json, torch
from tests.megatron import small_gpt
whose = {whose!r}
if whose != "theirs":
    import megatron_eopt
    megatron_eopt.activate()
from megatron.core import optimizer as core
from megatron.core.optimizer import OptimizerConfig, emerging_optimizers as registry
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

small_gpt.begin()
build = core.get_megatron_optimizer if whose != "our function" else megatron_eopt.get_megatron_optimizer

def has(tag):
    return ParamPredicate(name="has " + tag, fn=lambda p: bool(getattr(p, tag, False)))

def model_and_config(name, **settings):
    torch.manual_seed(1)
    model = small_gpt.gpt(num_moe_experts=2, moe_token_dispatcher_type="alltoall")
    config = OptimizerConfig(optimizer=name, lr=1e-2, min_lr=0.0)
    for key, value in settings.items():
        setattr(config, key, value)
    return model, config

def built(name="muon", overrides=None, **settings):
    '''Name of a parameter -> its optimizer and its largest rate, in a new model.'''
    model, config = model_and_config(name, **settings)
    given = {{**core.get_standard_config_overrides(config), **overrides}} if overrides else None
    optimizer = build(config, [model], given)
    names = {{id(p): name for name, p in model.named_parameters()}}
    found = {{}}
    for each in optimizer.chained_optimizers:
        for group in each.optimizer.param_groups:
            for p in group["params"]:
                found[names[id(p)]] = [type(each.optimizer).__name__, group.get("max_lr")]
    return found

cases = {{}}
for tag in ("is_qkv", "expert_tp"):
    for kind, key in (("attr", ParamKey(attr=tag)), ("predicate", ParamKey(predicate=has(tag)))):
        cases[f"{{kind}} {{tag}}"] = built(overrides={{key: {{"max_lr": 5e-3}}}})
    to_adam = ParamPredicate(
        name=f"or {{tag}}", fn=lambda p: registry._is_nonlinear_or_embedding(p) or getattr(p, tag, False)
    )
    registry._EMERGING_OPTIMIZERS[f"mine_{{tag}}"] = registry.EmergingOptimizerEntry(
        registry.TensorParallelMuon,
        registry._eopt_init_state_fn,
        registry._muon_config_to_kwargs,
        {{ParamKey(predicate=to_adam): {{"optimizer": "adam"}}}},
    )
    cases[f"entry {{tag}}"] = built(f"mine_{{tag}}")
    if whose == "our function":
        cases[f"text {{tag}}"] = built(optimizer_overrides={{f"attr:{{tag}}": {{"lr": 5e-3}}}})

def trained(**settings):
    '''Norms of a matrix and of an embedding after a step with much decay.'''
    precise = {{"muon_fp32_matmul_prec": "high", "muon_tp_mode": "duplicated", "weight_decay": 20.0}}
    model, config = model_and_config("muon", **precise, **settings)
    small_gpt.steps(model, build(config, [model]), 1)
    weights = model.decoder.layers[0].self_attention.linear_proj.weight, model.embedding.word_embeddings.weight
    return [weight.norm().item() for weight in weights]

decays = {{
    "decoupled": trained(),
    "Adam's is not": trained(decoupled_weight_decay=False),
    "Muon's is not": trained(muon_use_decoupled_weight_decay=False),
}}
if whose == "our function":
    to_l2 = {{"optimizer:muon": {{"weight_decay_method": "l2"}}}}
    decays["Muon's is not, by an override"] = trained(optimizer_overrides=to_l2)
print("found", json.dumps({{"cases": cases, "decays": decays}}))
"""


@functools.cache
def found(whose):
    said = run_script(SCRIPT.format(whose=whose))
    (line,) = [line for line in said.splitlines() if line.startswith("found ")]
    return json.loads(line.removeprefix("found "))


def test_overrides_find_the_tags_that_megatrons_own_muon_finds():
    """Through Megatron's builder, and through ours, which takes selectors in text as well."""
    theirs = found("theirs")["cases"]
    for kind in ("attr", "predicate"):
        for tag, name in (("is_qkv", QKV), ("expert_tp", FC1)):
            rates = {parameter: rate for parameter, (_, rate) in theirs[f"{kind} {tag}"].items()}
            assert rates[f"decoder.{name}"] == 5e-3  # else the comparison says nothing
            assert set(rates.values()) == {5e-3, 1e-2}
    assert theirs["entry is_qkv"][f"decoder.{QKV}"][0] == theirs["entry expert_tp"][f"decoder.{FC1}"][0] == "AdamW"
    assert found("through Megatron")["cases"] == theirs
    ours = dict(found("our function")["cases"])
    for tag in ("is_qkv", "expert_tp"):
        assert ours.pop(f"text {tag}") == theirs[f"attr {tag}"]
    assert ours == theirs


def test_megatrons_field_of_weight_decay_reaches_adam_alone():
    """Decay that is part of the gradient is had by a setting of Muon's, which both know, or by an override."""
    theirs = found("theirs")["decays"]
    for whose in ("through Megatron", "our function"):
        ours = found(whose)["decays"]
        for setting, norms in theirs.items():
            assert ours[setting] == pytest.approx(norms, rel=1e-5), setting
    matrix, embedding = zip(*(theirs[setting] for setting in ("decoupled", "Adam's is not")), strict=True)
    assert matrix[0] == matrix[1]
    assert embedding[0] != pytest.approx(embedding[1], rel=1e-2)
    assert ours["Muon's is not, by an override"] == ours["Muon's is not"]
    assert ours["Muon's is not"][0] != pytest.approx(ours["decoupled"][0], rel=1e-2)


@pytest.mark.wide
def test_selectors_of_a_file_find_the_tags_under_megatron_fsdp(tmp_path):
    """Experts as well, which Megatron marks by their names alone; and they train as without it."""
    file, manifest = tmp_path / "overrides.json", tmp_path / "manifest.json"
    file.write_text(json.dumps({"attr:is_qkv": {"lr": 2e-3}, "attr:expert_tp": {"optimizer": "adam"}}))
    run = [*EXACT, *EXPERTS, "--optimizer-overrides", file, "--optimizer-manifest-file", manifest]
    expected = trained(tmp_path / "without", 1, *run, steps=3)
    found = trained(tmp_path / "run", 2, *run, *SHARDED, steps=3)
    rows = {family["pattern"]: family for family in json.loads(manifest.read_text())["families"]}
    assert {name for name, row in rows.items() if row["lr"] == 2e-3} == {f"decoder.{QKV.replace('.0.', '.*.')}"}
    of_experts = {f"decoder.layers.*.mlp.experts.local_experts.*.linear_{n}.weight" for n in ("fc1", "fc2")}
    assert {name for name, row in rows.items() if row["owner"] == "adam" and "linear" in name} == of_experts
    assert_close(after(found), after(expected))
