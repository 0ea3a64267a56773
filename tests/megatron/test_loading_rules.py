"""Why a checkpoint is refused, and which settings a group goes on with: the rules alone, without a run."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt import TensorParallelMuon
from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.checkpoints.states import BLOCK, BLOCK_FORMAT
from megatron_eopt.megatron.checkpoints.changes import report_padding, report_settings
from megatron_eopt.megatron.checkpoints.fsdp_dtensor import SavedShards
from megatron_eopt.megatron.checkpoints.group_settings import restore_schedules, schedules, settings_after_load
from megatron_eopt.megatron.checkpoints.refusals import mismatch, of_another, stacks_layers

MODEL = {"decoder.weight", "output.weight"}


def states(parameter, *keys):
    return {f"optimizer.state.{key}.{parameter}" for key in keys}


MUON = states("decoder.weight", "momentum_buffer")
NORMUON = MUON | {"optimizer.state.moment2_buffer.decoder.weight"}
ADAM = states("decoder.weight", "exp_avg", "exp_avg_sq")
FP32_COPY = states("decoder.weight", "fp32_param")
DISTRIBUTED = ADAM | states("decoder.weight", "param")  # as the distributed optimizer saves by parameter


FROM_ADAM = "--muon-momentum-from-adam"
BY_ADAM = "it holds exp_avg, exp_avg_sq for decoder.weight, and Muon needs momentum_buffer: Adam wrote it. "
OTHER_SETTINGS = "another optimizer wrote it, or this one with other settings"
HEAD = states("output.weight", "momentum_buffer")


@pytest.mark.parametrize(
    ("wanted", "stored", "messages"),
    [
        (MUON, ADAM, [BY_ADAM, FROM_ADAM]),
        (MUON | FP32_COPY, DISTRIBUTED, [FROM_ADAM]),
        (NORMUON, ADAM, [OTHER_SETTINGS]),  # there is nothing to make its second moments from
        (MUON, ADAM | HEAD, [OTHER_SETTINGS]),  # Muon had some, and these are loaded
        (NORMUON, MUON, ["and Muon needs moment2_buffer, momentum_buffer: ", OTHER_SETTINGS]),
        (MUON | FP32_COPY, MUON, ["it holds momentum_buffer for decoder.weight, and Muon needs fp32_param, momentum_"]),
        (HEAD, MUON, ["holds no state for output.weight, and Muon needs"]),
    ],
)
def test_reasons_and_the_import_from_adam_where_it_helps(wanted, stored, messages):
    found = mismatch("Muon", wanted, MODEL | stored)
    assert all(message in found for message in messages)
    assert not (FROM_ADAM in found and OTHER_SETTINGS in found)


def test_a_state_that_is_there_is_no_reason():
    for stored in (MUON, MUON | states("output.weight", "exp_avg")):  # of another optimizer beside it
        assert mismatch("Muon", MUON, MODEL | stored) is None


@pytest.mark.parametrize(
    ("name", "wrote", "refused"),
    [
        ("Scion", "TensorParallelMuon", True),
        (None, "SOAP", True),  # Adam, to whom a part of it would be enough
        ("Scion", "Scion", False),
        ("Scion", "TheirMuon", False),
        (None, "AdamW", False),
    ],
)
def test_equal_names_and_shapes_do_not_make_it_the_same_state(name, wrote, refused):
    block = {"optimizer": wrote, "groups": [{"names": {"decoder.weight": [[0, 2]]}}]}
    found = of_another(name, MUON, [block])
    expected = f"{wrote} wrote the state of decoder.weight, and {name or 'an optimizer of Megatron'} would take it"
    assert expected in found if refused else found is None
    assert of_another(name, HEAD, [block]) is None


NOW = {"params": [1], "lr": 0.0, "weight_decay": 0.2, "max_lr": 1e-2, "min_lr": 0.0, "betas": (0.9, 0.95), "rung": "b"}
THEN = {"lr": 3e-3, "weight_decay": 0.2, "max_lr": 1e-2, "min_lr": 0.0, "betas": [0.9, 0.95], "rung": "a"}


@pytest.mark.parametrize("was", [160, 128])
def test_another_padding_of_the_vocabulary(capsys, was):
    requested = [
        SimpleNamespace(key=key, allow_shape_mismatch=padded, global_shape=(160, 4))
        for key, padded in {"output.weight": True, "decoder.weight": False}.items()
    ]
    report_padding(requested, {"output.weight": (was, 4), "decoder.weight": (2, 4)})
    said = capsys.readouterr().out
    assert said == "" if was == 160 else f"output.weight is (160, 4), and was ({was}, 4)" in said


OWN = {"nesterov": False, "use_decoupled_weight_decay": True, "weight_decay_method": "palm"}
LOADED = THEN | {"params": [1], "betas": (0.9, 0.95)}


@pytest.mark.parametrize(
    ("now", "then", "expected", "changed"),
    [
        ({}, [{}], LOADED, {}),
        # what the user changed counts and is named
        ({"betas": (0.9, 0.99)}, [{}], LOADED | {"betas": (0.9, 0.99)}, {"betas": ([0.9, 0.95], (0.9, 0.99))}),
        # a changed schedule does not go on where the old one stood
        ({"max_lr": 5e-3}, [{}], LOADED | {"max_lr": 5e-3, "lr": 0.0}, {"max_lr": (1e-2, 5e-3)}),
        # where groups of other values are now one
        ({}, [{"weight_decay": 0.2}, {"weight_decay": 0.4}], LOADED, {"weight_decay": (0.4, 0.2)}),
        ({}, [{"lr": 1e-3}, {"lr": 2e-3}], LOADED | {"lr": 0.0}, {"lr": ([1e-3, 2e-3], 0.0)}),
        # a count of steps is no setting that the user has changed
        ({"step": 1}, [{"step": 7}], LOADED | {"step": 7}, {}),
        # what an override had set goes, and what the optimizer had computed comes along
        ({}, [{"optimizer": "lion", "d": 0.5}], LOADED | {"d": 0.5}, {"optimizer": ("lion", "the optimizer's own")}),
        # what comes back from a file as lists is the same
        ({"set": [(1.0, 2.0)]}, [{"set": [[1.0, 2.0]]}], LOADED | {"set": [(1.0, 2.0)]}, {}),
        # an empty group stays as it was built
        ({}, [], NOW, {}),
        # a checkpoint from before a setting was one of groups leaves it as the run has it
        (OWN, [OWN | {"nesterov": True}], LOADED | OWN, {"nesterov": (True, False)}),
    ],
)
def test_the_settings_with_which_a_group_goes_on(now, then, expected, changed):
    found = settings_after_load(NOW | now, [THEN | group for group in then], {"rung"})
    assert found == (expected, changed)


def test_the_schedule_of_the_checkpoint_and_counts_that_differ():
    now = NOW | {"max_lr": 5e-3, "end_wd": 0.3, "weight_decay": 0.3}
    then = THEN | {"wd_mult": 0.0}
    assert settings_after_load(now, [then], {"rung"}, from_checkpoint=True) == (LOADED | {"wd_mult": 0.0}, {})
    several = [then, then | {"max_lr": 2e-2}]
    settings, changed = settings_after_load(now, several, {"rung"}, from_checkpoint=True)
    assert (settings["max_lr"], settings["lr"]) == (5e-3, 0.0)
    assert changed["max_lr"] == (1e-2, 5e-3)
    grown = NOW | {"weight_decay": 0.1}
    assert settings_after_load(grown, [THEN], {"rung"}, decay_grows=True) == (LOADED, {})
    with pytest.raises(ValueError, match=r"different 'step': \[7, 8\]; keep the groups of the run that saved"):
        settings_after_load(NOW, [THEN | {"step": step} for step in (7, 8)], frozenset())


QUINTIC = TensorParallelMuon([torch.ones(2, 2)])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, ""),
        ({"lr": 0.1, "weight_decay": 0.2, "num_ns_steps": 3, "weight_norm": "brake"}, ""),  # groups have them
        ({"tp_mode": "auto"}, "tp_mode duplicated -> auto"),
    ],
)
def test_settings_of_the_whole_optimizer_that_changed_are_named(capsys, settings, said):
    again = TensorParallelMuon([torch.ones(2, 2)], **settings)
    report_settings("Muon", QUINTIC.settings(), again.settings())
    printed = capsys.readouterr().out
    assert ("Muon goes on with other settings than the checkpoint has" in printed) is bool(said)
    assert said in printed


def test_rates_that_a_load_overwrote_are_the_runs_again(capsys):
    """As 0.20 does for --override-opt-param-scheduler, after which nothing else would tell."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    (group,) = optimizer.param_groups
    group.update(max_lr=4e-2, min_lr=4e-3, wd_mult=0.0)
    kept = schedules(optimizer)
    group.update(max_lr=1e-2, min_lr=1e-3)
    restore_schedules(optimizer, kept)
    assert (group["max_lr"], group["min_lr"], group["wd_mult"], group["lr"]) == (4e-2, 4e-3, 0.0, 0.1)
    assert "Megatron gave 1 parameter groups other rates in the load" in capsys.readouterr().out


def test_stacked_layers_are_named_to_a_run_that_has_them_apart():
    assert "stacks the state of all layers (optimizer.state.m.decoder.layers.mlp" in stacks_layers(
        ["decoder.layers.mlp.weight", "optimizer.state.m.decoder.layers.mlp.weight"]
    )
    assert stacks_layers(["decoder.layers.mlp.weight", "optimizer.state.m.decoder.layers.0.mlp.weight"]) is None


LATER = (
    f"it was written by a later release of megatron_eopt (format {BLOCK_FORMAT + 1}; this one reads up to "
    f"{BLOCK_FORMAT}): update the package"
)


def test_a_later_format_is_refused_under_megatron_fsdp():
    run = json.dumps({"format": BLOCK_FORMAT + 1, "anything": "else"})
    with pytest.raises(CheckpointError, match=re.escape(f"the checkpoint cannot serve this run: {LATER}")):
        SavedShards.load_state_dict(None, {"state": {}, "settings": {}, BLOCK: {"run": run}})
