import importlib
import re
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt import Execution, registry
from megatron_eopt.optimizers import TensorParallelMuon
from megatron_eopt.optimizers.soap import SOAP


@pytest.fixture(autouse=True)
def _restore(monkeypatch):
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))
    before = dict(registry.EMERGING_OPTIMIZERS)
    yield
    registry.EMERGING_OPTIMIZERS.clear()
    registry.EMERGING_OPTIMIZERS.update(before)


def config(**settings):
    defaults = {
        "lr": 0.1,
        "weight_decay": 0.2,
        "decoupled_weight_decay": False,
        "muon_momentum": 0.8,
        "muon_nesterov": True,
        "muon_split_qkv": True,
        "muon_fp32_matmul_prec": "highest",
        "muon_coefficient_type": "polar_express",
        "muon_num_ns_steps": 6,
        "muon_scale_mode": "unit_rms_norm",
        "muon_extra_scale_factor": 0.3,
        "muon_tp_mode": "distributed",
        "adam_beta1": 0.7,
        "adam_beta2": 0.9,
    }
    return SimpleNamespace(**{**defaults, **settings})


def model(**settings):
    defaults = {"num_attention_heads": 8, "num_query_groups": 2, "kv_channels": 16}
    return [SimpleNamespace(config=SimpleNamespace(**{**defaults, **settings}))]


class Plain(torch.optim.SGD):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, *, rank=4, **kwargs):
        super().__init__(params, lr)
        self.settings = (lr, betas, eps, rank, kwargs)


def test_muon_is_there_and_the_dict_is_live():
    before = registry.list_optimizers()
    assert {"adaptive_muon", "lion", "muon"} < set(before) == set(registry.EMERGING_OPTIMIZERS)
    entry = registry.EmergingOptimizerEntry(Plain)
    registry.register_optimizer("plain", entry)
    assert registry.EMERGING_OPTIMIZERS["plain"] is registry.get_optimizer_entry("plain") is entry
    assert registry.list_optimizers() == sorted([*before, "plain"])


@pytest.mark.parametrize("deleted", [[], ["muon"], ["muon", "mine"]])
def test_megatrons_dict_is_as_it_was_afterwards(deleted):
    own, theirs = registry.Registry(), {"muon": "Megatron's", "adam": "its own"}
    entry = registry.EmergingOptimizerEntry(Plain)
    own["muon"] = own["mine"] = entry
    own.forward(theirs, make_room=["muon"])
    assert theirs == {"muon": entry, "adam": "its own", "mine": entry}
    assert own["adam"] == "its own"
    for name in deleted:
        del own[name]
    own.forward_no_more()
    assert theirs == {"muon": "Megatron's", "adam": "its own"}
    assert set(own) == {"muon", "mine"} - {*deleted}


def test_an_unknown_name_gives_the_nearest():
    message = r"unknown optimizer 'mun' \(did you mean 'muon'\?\): registered are adaptive_muon, .*lion, "
    with pytest.raises(ValueError, match=message):
        registry.get_optimizer_entry("mun")
    with pytest.raises(ValueError, match="'xyz': registered"):
        registry.get_optimizer_entry("xyz")


@pytest.mark.parametrize("name", [None, "", 5, Plain])
def test_a_name_is_text(name):
    message = f"the name of an optimizer is text, got {re.escape(repr(name))}: write @register_optimizer"
    for given in ([name], [name, registry.EmergingOptimizerEntry(Plain)]):
        with pytest.raises(TypeError, match=message):
            registry.register_optimizer(*given)


def test_a_taken_name_is_refused():
    with pytest.raises(ValueError, match="'muon' is registered already"):
        registry.register_optimizer("muon", registry.EmergingOptimizerEntry(Plain))


def made(name, params=None, **settings):
    """What Megatron gets for a config: an optimizer of one small matrix, and what makes its state."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(4, 4))] if params is None else params}]
    return registry.create_emerging_optimizer(config(**settings), groups, name, model(), None)


def test_any_object_with_the_four_attributes_is_an_entry():
    entry = SimpleNamespace(
        optimizer_cls=Plain, init_state_fn=print, config_to_kwargs=lambda *_: {"rank": 7}, default_param_overrides={}
    )
    assert registry.register_optimizer("plain", entry) is entry
    optimizer, init_state = made("plain")
    assert (optimizer.settings[3], init_state) == (7, print)


def test_groups_of_two_optimizers_are_refused():
    groups = [{"params": [torch.nn.Parameter(torch.ones(4, 4))], "optimizer": name} for name in ("muon", "lion")]
    with pytest.raises(ValueError, match="groups of one optimizer name several: lion, muon"):
        registry.create_emerging_optimizer(config(), groups, "muon", model(), None)


def test_the_decorator_keeps_builders_of_plain_torch():
    @registry.register_optimizer("plain")
    def build(param_groups, config):
        return Plain(param_groups, lr=config.lr)

    assert registry.get_optimizer_builder("plain") is build
    assert "plain" not in registry.EMERGING_OPTIMIZERS
    with pytest.raises(ValueError, match="'plain' is registered already"):
        registry.register_optimizer("plain")(build)
    with pytest.raises(ValueError, match=r"unknown optimizer 'plan' \(did you mean 'plain'\?\)"):
        registry.get_optimizer_builder("plan")


def built(name, **said):
    return made(name, decoupled_weight_decay=True, muon_split_qkv=False, adam_eps=1e-8, **said)[0]


def test_a_config_gives_the_workspace_and_dtypes_of_momenta():
    for name in ("muon", "adaptive_muon", "scion"):
        assert built(name).execution == built(name, optimizer_momentum_dtype="fp32").execution == Execution()
        assert built(name, optimizer_workspace=0.5).execution == Execution(workspace=2**29)
        assert built(name, optimizer_momentum_dtype="bf16").execution == Execution(momentum_dtype=torch.bfloat16)
    built("lion", optimizer_workspace=0.5)  # which has nothing to bound
    for wrong in (0.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"--optimizer-workspace must be .* GiB above 0, got {wrong}"):
            built("muon", optimizer_workspace=wrong)
    with pytest.raises(ValueError, match="unknown --optimizer-momentum-dtype 'fp8': expected one of fp32, bf16"):
        built("muon", optimizer_momentum_dtype="fp8")


@pytest.mark.parametrize("name", ["muon", "soap", "spectron"])
def test_a_model_without_attention_has_nothing_to_split(name):
    settings = config(decoupled_weight_decay=True, adam_eps=1e-8, split_qkv=True, spectron_rank=2)
    for missing in ("num_attention_heads", "num_query_groups", "kv_channels"):
        p = torch.nn.Parameter(torch.ones(64, 4))
        given = settings, [{"params": [p]}], name, model(**{missing: 0}), None
        optimizer, _ = registry.create_emerging_optimizer(*given)
        assert len(optimizer.matrix_layouts(p)) == 1
        p.is_qkv = True
        with pytest.raises(ValueError, match="split_qkv needs qkv_split_shapes: 3 or 4 positive integers, got None"):
            registry.create_emerging_optimizer(*given)
        p.qkv_split_shapes = [16, 8, 8]
        optimizer, _ = registry.create_emerging_optimizer(*given)
        assert [layout.shape[0] for layout in optimizer.matrix_layouts(p)] == [32, 16, 16]


def test_an_entry_without_config_to_kwargs_is_built_like_adam():
    """A value with the optimizer's name before it wins, and what a partial has is not taken from the config."""
    registry.register_optimizer("plain", registry.EmergingOptimizerEntry(Plain))
    optimizer, init_state = made("plain", plain_rank=9, plain_lr=0.5, eps=1e-3)
    assert optimizer.settings == (0.5, (0.7, 0.9), 1e-3, 9, {})
    with pytest.raises(TypeError, match=r"Plain has no init_state\(\)"):
        init_state(optimizer)
    registry.register_optimizer("partial", registry.EmergingOptimizerEntry(partial(Plain, rank=4)))
    assert made("partial", partial_rank=9, eps=1e-3)[0].settings == (0.1, (0.7, 0.9), 1e-3, 4, {})
    fields = SimpleNamespace(params=[], lr=0.5, momentum=0.9, weight_decay=0.7)
    found = registry.kwargs_from_config(partial(Traced, [], 0.1), "mine", fields)  # by position
    assert found == {"momentum": 0.9, "weight_decay": 0.7}


def muon_by_function(param_groups, **kwargs) -> TensorParallelMuon:
    return TensorParallelMuon(param_groups, **kwargs)


def unnamed(param_groups, **kwargs):
    return TensorParallelMuon(param_groups, **kwargs)


@pytest.mark.parametrize(
    ("made_by", "known"),
    [
        (partial(partial(TensorParallelMuon, momentum=0.6), nesterov=False), True),
        (muon_by_function, True),
        (unnamed, False),
    ],
)
def test_what_makes_an_optimizer_may_be_a_partial_or_a_function(made_by, known):
    registry.register_optimizer("made", registry.EmergingOptimizerEntry(made_by, lambda *_: None, lambda *_: {"lr": 5}))
    optimizer, _ = made("made")
    assert type(optimizer) is TensorParallelMuon
    assert (optimizer.param_groups[0]["lr"], registry.name_of(optimizer)) == (5, "made")
    assert registry.takes_matrices("made") is known
    assert not registry.class_named("made").row_order_matters
    registry.register_optimizer("factors", registry.EmergingOptimizerEntry(partial(SOAP)))
    assert registry.class_named("factors").row_order_matters


class Traced(torch.optim.SGD):
    """A constructor behind a ``__new__`` that takes anything."""

    def __new__(cls, *args, **kwargs):
        return super().__new__(cls)

    def __init__(self, params, lr=1e-3, momentum=0.0, weight_decay=0.0, betas=None):
        super().__init__(params, lr=lr, momentum=momentum, weight_decay=weight_decay)


@pytest.mark.parametrize(("gate", "shapes"), [(False, [64, 16, 16]), (True, [64, 64, 16, 16])])
def test_split_shapes_of_a_model(gate, shapes):
    assert registry.get_qkv_split_shapes(model(attention_output_gate=gate)[0].config) == shapes


@pytest.mark.parametrize(
    ("shape", "embedding", "expected"),
    [((4, 4), False, False), ((4, 4), True, True), ((4,), False, True), ((2, 4, 4), False, True)],
)
def test_what_is_left_to_adam(shape, embedding, expected):
    p = torch.nn.Parameter(torch.ones(shape))
    p.is_embedding_or_output_parameter = embedding
    assert registry.is_nonlinear_or_embedding(p) is registry.is_muon_excluded(p) is expected
    p.use_muon = False
    assert registry.is_nonlinear_or_embedding(p) is expected
    assert registry.is_muon_excluded(p) is True


def test_an_entry_may_choose_its_class_by_the_config():
    """As entries of later Megatrons do; those of the installed one have no such field."""
    entry = registry.EmergingOptimizerEntry(Plain, config_to_cls=lambda config: config.chosen)
    registry.register_optimizer("plain", entry)
    for cls in (type("Other", (Plain,), {}), Plain):
        assert type(made("plain", chosen=cls)[0]) is cls


@pytest.mark.parametrize("name", ["muon", "adaptive_muon", "spectron", "soap"])
def test_megatrons_flag_for_symmetric_products_names_the_kernel(name):
    def asked(**settings):
        fields = {"decoupled_weight_decay": True, "muon_symmetric_products": None, "muon_use_syrk": True, **settings}
        given = config(**fields)
        kwargs = registry.EMERGING_OPTIMIZERS[name].config_to_kwargs(given, model(), None)
        return kwargs["execution"].symmetric_products if "execution" in kwargs else kwargs["symmetric_products"]

    assert asked() == asked(muon_symmetric_products="triton") == "triton"
    assert asked(muon_use_syrk=False) is None
    with pytest.raises(ValueError, match=r"--muon-use-syrk asks for symmetric products by Triton, and .* for torch"):
        asked(muon_symmetric_products="torch")


def test_megatrons_names_are_aliases():
    for name in """create_emerging_optimizer default_adam_based_eopt_config_to_kwargs default_param_overrides_factory
        eopt_init_state_fn get_qkv_split_shapes is_muon_excluded is_nonlinear_or_embedding kwargs_from_config
        muon_config_to_kwargs EMERGING_OPTIMIZERS""".split():
        assert getattr(registry, f"_{name}") is getattr(registry, name)


def test_the_default_routing_needs_megatron():
    code = (
        "import sys, megatron_eopt\n"
        "try:\n"
        "    megatron_eopt.get_optimizer_entry('muon').default_param_overrides\n"
        "except RuntimeError as error:\n"
        "    print(error, 'megatron' in sys.modules)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "call megatron_eopt.activate() first False" in said


def test_the_default_routing_speaks_megatrons_language():
    importlib.import_module("megatron_eopt.megatron.overrides")  # as activate() does
    routing = registry.default_param_overrides_factory
    weight, input_of_mamba = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    input_of_mamba.use_muon = False
    plain = (registry.EmergingOptimizerEntry(Plain, default_param_overrides=given) for given in (None, routing))
    for entry in (registry.get_optimizer_entry("muon"), registry.EmergingOptimizerEntry(Plain), *plain):
        ((key, settings),) = entry.default_param_overrides.items()
        assert settings == {"optimizer": "adam"}
        assert key.matches(torch.nn.Parameter(torch.ones(4)), "norm.weight")
        assert not key.matches(weight, "linear.weight")
        assert key.matches(input_of_mamba, "in_proj.weight") is (entry.optimizer_cls is TensorParallelMuon)
    own = registry.EmergingOptimizerEntry(Plain, default_param_overrides={})
    assert own.default_param_overrides == {}


@pytest.mark.parametrize("name", registry.OPTIMIZERS)
def test_what_a_config_of_megatron_brings_is_not_warned_of(name, caplog):
    built(name, spectron_rank=2)
    assert "no effect" not in caplog.text


def test_an_entry_of_a_users_renames_none_of_ours():
    registry.register_optimizer("z_mine", registry.EmergingOptimizerEntry(TensorParallelMuon))
    assert registry.name_of(TensorParallelMuon([torch.nn.Parameter(torch.ones(4, 4))])) == "muon"
