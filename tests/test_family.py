"""What the table says of each optimizer is what the optimizer, and Megatron's command line, have."""

import argparse
import re
from types import SimpleNamespace

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig, emerging_optimizers
from megatron.training.arguments import add_megatron_arguments
from tables import all_state, state_tensors

import megatron_eopt
from megatron_eopt.family import CLASSES, LIKE_MUON, MUON, OPTIMIZERS
from megatron_eopt.from_config import config_to_kwargs
from megatron_eopt.megatron.command_line import amend
from megatron_eopt.megatron.run_flags import FLAGS
from megatron_eopt.registry import EMERGING_OPTIMIZERS, list_optimizers
from tests.optimizers.family import FOR_VECTORS, build

rows = pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=lambda row: row.name)
# What flags set that is not for a constructor: rates of groups, splits, presets, and the optimizer of the rest.
OF_MUON = {"lr", "min_lr", "weight_decay", "split", "preset", "scalar_optimizer", "momentum_from_adam", "share_over_dp"}
# Where the command line has another default than the constructor: Megatron's own flags, those of its SOAP, and where
# its run is known: auto, and what data-parallel ranks share.
OTHER_DEFAULTS = {
    ("muon", "momentum"),
    ("muon", "nesterov"),
    ("muon", "split_qkv"),
    ("muon", "tp_mode"),
    ("soap", "precondition_frequency"),
    ("soap", "share_over_dp"),
    ("shampoo", "share_over_dp"),
    ("kl_shampoo", "share_over_dp"),
}


def matrices(rows, columns):
    return [torch.nn.Parameter(torch.randn(rows, columns))]


def config(row, **settings):
    """A config that has what all flags say without being given."""
    adams = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8}
    flags = {flag.dest: flag.default for each in OPTIMIZERS.values() for flag in each.flags}
    return SimpleNamespace(**{"lr": 0.1, "weight_decay": 0.2, **adams, **flags, **settings})


MODEL = [SimpleNamespace(config=SimpleNamespace(num_attention_heads=0, num_query_groups=0, kv_channels=0))]


# Settings of execution, each with a value that is not the default.
OF_EXECUTION = {"symmetric_products": "torch", "step_kernels": "torch", "cuda_graphs": True}
OF_EXECUTION |= dict.fromkeys(["workspace", "offload_fraction", "momentum_dtype", "data_parallel_group"])
FLAGGED = {key: value for key, value in OF_EXECUTION.items() if value is not None}


def value_of(setting, kwargs):
    """What an optimizer is built with."""
    return kwargs[setting] if setting in kwargs else getattr(kwargs["execution"], setting)


def test_every_row_is_of_the_registry_and_of_the_package():
    assert sorted(OPTIMIZERS) == list_optimizers()
    assert len(OPTIMIZERS) == len(CLASSES)
    for name, cls in CLASSES.items():
        assert name in megatron_eopt.__all__
        assert getattr(megatron_eopt, name) is getattr(megatron_eopt.optimizers, name) is cls


@rows
def test_flags_are_arguments_of_the_constructor(row):
    arguments = row.settings
    lions_betas = {"beta1", "beta2"} if "betas" in arguments and row.betas == row.name else set()
    for flag in row.flags:
        if flag.setting in lions_betas or (row.name == "muon" and flag.setting in OF_MUON):
            continue
        assert flag.setting in arguments
        assert flag.choices or not isinstance(flag.default, str), flag.name
        if (row.name, flag.setting) not in OTHER_DEFAULTS:
            assert arguments[flag.setting].default == flag.default, flag.name
    of_muons_flags = {flag.setting for flag in OPTIMIZERS["muon"].flags} & set(row.of_muon)
    assert of_muons_flags <= arguments.keys()
    assert set(MUON) <= OPTIMIZERS["muon"].settings.keys()


@rows
def test_a_run_without_its_flags_builds_it_with_their_defaults(row):
    kwargs = config_to_kwargs(row, config(row), MODEL, None)
    optimizer = row.cls(matrices(96, 64), **kwargs)
    for flag in row.flags:
        if row.takes(flag.setting) and flag.setting not in OF_MUON:
            assert value_of(flag.setting, kwargs) == flag.default
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert optimizer.param_groups[0]["weight_decay"] == (0.2 if row.cls.decays_weights else 0.0)


@rows
def test_its_flags_and_what_it_takes_of_muons_reach_it(row):
    own = {flag.setting for flag in row.flags}
    for flag in row.flags:
        if row.takes(flag.setting) and flag.setting not in OF_MUON | OF_EXECUTION.keys():
            given = not flag.default if isinstance(flag.default, bool) else f"another than {flag.default}"
            kwargs = config_to_kwargs(row, config(row, **{flag.dest: given}), MODEL, None)
            assert kwargs[flag.setting] == given
    for setting, given in FLAGGED.items() if row.takes("execution") else ():
        kwargs = config_to_kwargs(row, config(row, **{f"muon_{setting}": given}), MODEL, None)
        assert value_of(setting, kwargs) == given
    for setting in {setting for setting in MUON if row.takes(setting)} - own - OF_EXECUTION.keys():
        kwargs = config_to_kwargs(row, config(row, **{f"muon_{setting}": "given"}), MODEL, None)
        assert (kwargs.get(setting) == "given") is (setting in row.of_muon or row.name == "muon"), setting


@rows
def test_the_contracts_flag_of_decay_is_honoured_or_refused(row):
    """Megatron's own field is Adam's alone, as in Megatron, which tells no other optimizer of it."""
    to_kwargs = EMERGING_OPTIMIZERS[row.name].config_to_kwargs
    for prefix in ("", "muon_", f"{row.name}_"):
        field = f"{prefix}use_decoupled_weight_decay"
        if row.name in LIKE_MUON:
            for said, of_megatron in ((False, True), (True, False)):
                found = to_kwargs(config(row, **{field: said, "decoupled_weight_decay": of_megatron}), MODEL, None)
                assert found["use_decoupled_weight_decay"] is said
                assert row.cls(matrices(6, 4), **found).param_groups[0]["use_decoupled_weight_decay"] is said
        elif prefix == "muon_":
            given = config(row, **{field: False, "decoupled_weight_decay": False})
            assert "use_decoupled_weight_decay" not in to_kwargs(given, MODEL, None)
        else:
            with pytest.raises(ValueError, match=f"{row.name} has decoupled weight decay only: leave {field} at True"):
                to_kwargs(config(row, **{field: False}), MODEL, None)


@pytest.mark.parametrize("name", ["muon", "adaptive_muon"])
def test_a_config_with_the_contracts_flag_gives_megatrons(name):
    attention = SimpleNamespace(num_attention_heads=1, num_query_groups=1, kv_channels=2)
    theirs = getattr(emerging_optimizers, f"_{name}_config_to_kwargs")
    for decoupled in (True, False):
        own = OptimizerConfig(optimizer=name, lr=0.1)
        own.muon_use_decoupled_weight_decay = decoupled  # an attribute: activate() lists every class derived from its
        given = own, [SimpleNamespace(config=attention)], None
        found = EMERGING_OPTIMIZERS[name].config_to_kwargs(*given)["use_decoupled_weight_decay"]
        assert found is theirs(*given)["use_decoupled_weight_decay"] is decoupled


@rows
def test_the_state_of_a_step_has_the_keys_and_shapes_of_the_row(row):
    params = matrices(6, 4)
    optimizer = build(row.name, params)
    params[0].grad = torch.ones(6, 4)
    optimizer.step()
    kept = {re.sub(r"_\d+$", "", key): value.shape for key, value in optimizer.state[params[0]].items()}
    assert kept.keys() <= {tensor.key for tensor in all_state(row)}
    assert {tensor.key for tensor in state_tensors(row)} <= kept.keys()
    assert all(kept[tensor.key] == (6, 4) for tensor in optimizer.state_tensors(params[0]) if tensor.dims is None)


def test_state_keys_are_those_of_every_setting():
    keys = {tensor.key for tensor in all_state(OPTIMIZERS["schedule_free_adamw"])}
    assert keys == {"z", "exp_avg_sq", "x", "schedule"}
    assert [tensor.dims for tensor in all_state(OPTIMIZERS["adaptive_muon"])[1::2]] == [None, ("rows",), ()]


@rows
def test_it_takes_vectors_where_the_row_says_so(row):
    vector = [torch.nn.Parameter(torch.ones(5))]
    if row.name in FOR_VECTORS:
        build(row.name, vector)
    else:
        with pytest.raises(ValueError, match="give it to another optimizer"):
            build(row.name, vector)


def test_megatron_has_the_flags_that_the_table_says_are_its_own():
    def parser():
        return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))

    megatrons = parser()._option_string_actions
    known = amend(parser())._option_string_actions
    ours = vars(amend(parser()).parse_args([]))
    flags = [flag for row in OPTIMIZERS.values() for flag in row.flags]
    for flag in flags:
        assert (flag.name in megatrons) is flag.megatrons, flag.name
        assert flag.name in known
        assert flag.name.startswith(f"--{flag.optimizer}-no-".replace("_", "-")) is (flag.default is True), flag.name
    for flag in (*FLAGS, *flags):
        assert ours[flag.dest] == flag.default, flag.name
