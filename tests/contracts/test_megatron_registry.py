"""Scripts written for Megatron-Core's registry of emerging optimizers, before and after ``activate()``.

Each runs in a process of its own, with the emerging-optimizers package and without it.
"""

import re

import pytest

from tests.contracts.scripts import run_script
from tests.megatron.runs import without_emerging_optimizers

pytestmark = [pytest.mark.wide, pytest.mark.parametrize("package", ["with the package", "without the package"])]

USERS = """
import torch
class Mine(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})
    def _init_group(self, group, skip_non_grad_params=True):
        for p in group["params"]:
            if p.grad is not None or not skip_non_grad_params:
                self.state[p]["mean"] = torch.zeros_like(p)
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            self._init_group(group)
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"])
"""

MODEL = """
from tests.megatron import small_gpt

def model():
    small_gpt.begin()
    return small_gpt.gpt()

def train(model, optimizer):
    losses = small_gpt.steps(model, optimizer)
    assert losses[-1] < losses[0], losses
"""


@pytest.fixture
def run(package, tmp_path):
    """Run a script, which asserts; what it has printed and logged."""
    hidden = [without_emerging_optimizers(tmp_path / "hidden")] if package == "without the package" else []
    return lambda script: run_script(script, *hidden)


def test_a_script_builds_through_megatron(run):
    said = run(
        USERS
        + MODEL
        + """
import megatron_eopt
megatron_eopt.activate()
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.emerging_optimizers import (
    EmergingOptimizerEntry, TensorParallelMuon, _EMERGING_OPTIMIZERS, _eopt_init_state_fn, _is_nonlinear_or_embedding,
    _muon_config_to_kwargs,
)
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

class HalfMuon(TensorParallelMuon):
    def orthogonalize(self, p, grad, **kwargs):
        return 0.5 * super().orthogonalize(p, grad, **kwargs)

_EMERGING_OPTIMIZERS["half_muon"] = EmergingOptimizerEntry(
    optimizer_cls=HalfMuon,
    init_state_fn=_eopt_init_state_fn,
    config_to_kwargs=_muon_config_to_kwargs,
    default_param_overrides={
        ParamKey(predicate=ParamPredicate(name="nonlinear_or_embedding", fn=_is_nonlinear_or_embedding)): {
            "optimizer": "adam"
        }
    },
)
_EMERGING_OPTIMIZERS["mine"] = EmergingOptimizerEntry(Mine)
model = model()
for name in ("muon", "half_muon", "mine"):
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer=name, lr=1e-2, muon_momentum=0.8), [model])
    built = [type(each.optimizer).__name__ for each in optimizer.chained_optimizers]
    assert built == [{"muon": "TensorParallelMuon", "half_muon": "HalfMuon", "mine": "Mine"}[name], "AdamW"], built
    if name != "mine":
        assert isinstance(optimizer.chained_optimizers[0].optimizer, megatron_eopt.TensorParallelMuon)
        assert optimizer.chained_optimizers[0].optimizer.param_groups[0]["momentum"] == 0.8
    train(model, optimizer)
config = OptimizerConfig(optimizer="muon", lr=1e-2)
config.muon_use_decoupled_weight_decay = False
optimizer = get_megatron_optimizer(config, [model]).chained_optimizers[0].optimizer
assert optimizer.param_groups[0]["use_decoupled_weight_decay"] is False
"""
    )
    assert re.search(r"^half_muon +4 ", said, re.MULTILINE)  # of the manifest's totals


def test_all_of_megatrons_names_are_ours_and_come_back(run):
    run(
        """
import inspect, types
import megatron.core.optimizer as core
from megatron.core.optimizer import emerging_optimizers as theirs
import megatron_eopt
from megatron_eopt import registry
from megatron_eopt.megatron import activation

def own():
    return {
        name: value for name, value in vars(theirs).items()
        if isinstance(value, type | types.FunctionType) and value.__module__ == theirs.__name__
    }

before, entries = dict(vars(theirs)), dict(theirs._EMERGING_OPTIMIZERS)
copies = {name: getattr(core, name) for name in ("_create_emerging_optimizer", "_get_qkv_split_shapes")}
assert {"TensorParallelMuon", "EmergingOptimizerEntry", "_kwargs_from_config"} < own().keys()
megatron_eopt.activate()
assert not own()
for name, value in before.items():
    if isinstance(value, type | types.FunctionType) and value.__module__ == theirs.__name__:
        assert getattr(theirs, name) is getattr(registry, name), name
        taken, asked = (list(inspect.signature(each).parameters) for each in (getattr(theirs, name), value))
        assert taken[:len(asked)] == asked, name
for name in copies:
    assert getattr(core, name) is getattr(registry, name), name
assert theirs._EMERGING_OPTIMIZERS is core._EMERGING_OPTIMIZERS is before["_EMERGING_OPTIMIZERS"]
assert theirs.HAVE_EMERGING_OPTIMIZERS is core.HAVE_EMERGING_OPTIMIZERS is before["HAVE_EMERGING_OPTIMIZERS"]
assert theirs._EMERGING_OPTIMIZERS["muon"].optimizer_cls is megatron_eopt.TensorParallelMuon
assert theirs._EMERGING_OPTIMIZERS["spectron"].optimizer_cls is megatron_eopt.Spectron
activation.deactivate()
assert vars(theirs) == before
assert theirs._EMERGING_OPTIMIZERS == entries
assert {name: getattr(core, name) for name in copies} == copies
assert registry.EMERGING_OPTIMIZERS["muon"].optimizer_cls is megatron_eopt.TensorParallelMuon
"""
    )


def test_entries_that_come_before_and_after_are_seen_by_both(run):
    said = run(
        USERS
        + """
from megatron.core.optimizer.emerging_optimizers import EmergingOptimizerEntry, _EMERGING_OPTIMIZERS
before = EmergingOptimizerEntry(Mine, default_param_overrides={})
taken = EmergingOptimizerEntry(Mine, default_param_overrides={})
_EMERGING_OPTIMIZERS["before"], _EMERGING_OPTIMIZERS["scion"] = before, taken
original = dict(_EMERGING_OPTIMIZERS)

import megatron_eopt
from megatron_eopt import EMERGING_OPTIMIZERS, get_optimizer_entry, list_optimizers, register_optimizer
from megatron_eopt.megatron import activation
ours_before = megatron_eopt.EmergingOptimizerEntry(Mine, default_param_overrides={})
register_optimizer("ours_before", ours_before)
assert "before" not in EMERGING_OPTIMIZERS
megatron_eopt.activate()
import megatron.core.optimizer.emerging_optimizers as later

# Megatron's own entry class and ours, through both registries
_EMERGING_OPTIMIZERS["after"] = after = EmergingOptimizerEntry(Mine, default_param_overrides={})
later._EMERGING_OPTIMIZERS["later"] = last = later.EmergingOptimizerEntry(Mine, default_param_overrides={})
registered = EmergingOptimizerEntry(Mine, default_param_overrides={})
register_optimizer("registered", registered)
assert dict(EMERGING_OPTIMIZERS) == _EMERGING_OPTIMIZERS
brought = {"laprop", "mop", "rekls", "sinkhorn_muon", "spel"} & set(_EMERGING_OPTIMIZERS)
assert list_optimizers() == sorted(set(_EMERGING_OPTIMIZERS) - brought)
expected = {
    "before": before, "scion": taken, "ours_before": ours_before, "after": after, "later": last,
    "registered": registered,
}
for name, entry in expected.items():
    assert get_optimizer_entry(name) is _EMERGING_OPTIMIZERS[name] is entry, name
assert EMERGING_OPTIMIZERS["muon"].optimizer_cls is megatron_eopt.TensorParallelMuon
try:
    register_optimizer("before", registered)
except ValueError as error:
    assert "'before' is registered already" in str(error)
else:
    raise AssertionError("a name is given once")
EMERGING_OPTIMIZERS["before"] = registered  # through ours, but it stays where its user put it
_EMERGING_OPTIMIZERS["polargrad"] = taken
del EMERGING_OPTIMIZERS["later"]
assert "later" not in _EMERGING_OPTIMIZERS

activation.deactivate()
assert _EMERGING_OPTIMIZERS == original | {"before": registered, "after": after, "polargrad": taken}
assert EMERGING_OPTIMIZERS["registered"] is registered
assert EMERGING_OPTIMIZERS["scion"].optimizer_cls is megatron_eopt.Scion
assert EMERGING_OPTIMIZERS["polargrad"].optimizer_cls is megatron_eopt.PolarGrad
assert not {"before", "after", "later"} & set(EMERGING_OPTIMIZERS)
megatron_eopt.activate()
assert _EMERGING_OPTIMIZERS["registered"] is EMERGING_OPTIMIZERS["registered"] is registered
assert _EMERGING_OPTIMIZERS["polargrad"] is EMERGING_OPTIMIZERS["polargrad"] is taken
"""
    )
    kept = re.findall(r"--optimizer (\w+) is what was put into Megatron's registry before activate\(\)", said)
    assert kept[0] == "scion"
    assert sorted(kept[1:]) == ["polargrad", "scion"]


def test_a_users_muon_stays_his(run):
    said = run(
        USERS
        + MODEL
        + """
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.emerging_optimizers import EmergingOptimizerEntry, _EMERGING_OPTIMIZERS
_EMERGING_OPTIMIZERS["muon"] = EmergingOptimizerEntry(Mine)
import megatron_eopt
megatron_eopt.activate()
model = model()
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="muon", lr=1e-2), [model])
assert [type(each.optimizer).__name__ for each in optimizer.chained_optimizers] == ["Mine", "AdamW"]
train(model, optimizer)
optimizer.chained_optimizers[0].init_state_fn(optimizer.chained_optimizers[0].optimizer)
"""
    )
    assert "--optimizer muon is what was put into Megatron's registry before activate()" in said
    assert "--optimizer adaptive_muon is what" not in said


def test_the_package_is_demanded_no_more(run, package):
    run(
        USERS
        + MODEL
        + f"""
there = {package == "with the package"}
import megatron_eopt
megatron_eopt.activate()
import megatron.core.optimizer as core
from megatron.core.optimizer.emerging_optimizers import HAVE_EMERGING_OPTIMIZERS
assert HAVE_EMERGING_OPTIMIZERS is there
if HAVE_EMERGING_OPTIMIZERS:
    from emerging_optimizers.soap import SOAP

seen = []
def kwargs(config, model_chunks, pg_collection):
    seen.append(core.HAVE_EMERGING_OPTIMIZERS)
    raise KeyError("a builder that fails")

core._EMERGING_OPTIMIZERS["fails"] = megatron_eopt.EmergingOptimizerEntry(Mine, config_to_kwargs=kwargs)
model = model()
try:
    core.get_megatron_optimizer(core.OptimizerConfig(optimizer="fails", lr=1e-2), [model])
except KeyError:
    assert seen == [True]
assert core.HAVE_EMERGING_OPTIMIZERS is there
if there:  # one of those that have no counterpart here
    optimizer = core.get_megatron_optimizer(core.OptimizerConfig(optimizer="laprop", lr=1e-3), [model])
    from emerging_optimizers.scalar_optimizers import LaProp
    assert [type(each.optimizer).__name__ for each in optimizer.chained_optimizers] == ["LaProp", "AdamW"]
    train(model, optimizer)
for name, scalar in (("lion", "adam"), ("muon", "lion")):
    config = core.OptimizerConfig(optimizer=name, lr=1e-3, muon_scalar_optimizer=scalar)
    optimizer = core.get_megatron_optimizer(config, [model])
    assert any(isinstance(each.optimizer, megatron_eopt.Lion) for each in optimizer.chained_optimizers)
    train(model, optimizer)
assert core.HAVE_EMERGING_OPTIMIZERS is there
"""
    )


def test_state_is_made_by_either_contract(run):
    run(
        USERS
        + """
import megatron_eopt
megatron_eopt.activate()
from megatron.core.optimizer.emerging_optimizers import EmergingOptimizerEntry, _eopt_init_state_fn

class Ours(Mine):
    _init_group = None
    def init_state(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["mean"] = torch.zeros_like(p)

for cls in (Mine, Ours):
    p, q = (torch.nn.Parameter(torch.ones(2, 2)) for _ in range(2))
    optimizer = cls([{"params": [p]}, {"params": [q]}])
    _eopt_init_state_fn(optimizer)
    assert all(torch.equal(optimizer.state[each]["mean"], torch.zeros(2, 2)) for each in (p, q))
    EmergingOptimizerEntry(cls).init_state_fn(optimizer, None)

class Neither(Mine):
    def _init_group(self, group, grads):
        raise AssertionError("torch's contract is another")

try:
    _eopt_init_state_fn(Neither([p]))
except TypeError as error:
    assert "Neither has no init_state(), and no _init_group(group, skip_non_grad_params=False)" in str(error)
else:
    raise AssertionError("neither is there")
"""
    )
