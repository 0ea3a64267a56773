"""The optimizers of a checkpoint: who they are, and state that is missing, left over or zero."""

import pytest
import torch

from megatron_eopt.checkpoints.contents import read_contents
from megatron_eopt.tools.verify.optimizers import check_states, distributed_format, groups, optimizer_states
from tests.checkpoints.made import block, common, save, tensors


def made(folder, values, state=None):
    return read_contents(save(folder / "checkpoint", values, state))


def said(contents):
    return [(problem.severity, problem.what) for problem in check_states(contents)]


@pytest.mark.parametrize(
    ("states", "name"),
    [
        (["momentum_buffer"], "with momentum_buffer"),
        (["momentum_buffer", "moment2_buffer"], "with moment2_buffer and momentum_buffer"),
        (["momentum_buffer", "row_norms"], "with momentum_buffer and row_norms"),
        (["exp_avg"], "with exp_avg"),
        (["L", "R"], "with L and R"),
    ],
)
def test_an_optimizer_is_known_by_its_states(tmp_path, states, name):
    contents = made(tmp_path, tensors(states), common(optimizer="lion"))
    first, adam = optimizer_states(contents)
    assert (first.name, first.source, [*first.kept]) == (name, "by its state keys", ["mlp.fc1", "mlp.fc2"])
    assert (adam.name, [*adam.kept]) == ("with exp_avg and exp_avg_sq", ["norm"])
    assert said(contents) == []


def test_all_of_adam(tmp_path):
    (adam,) = optimizer_states(made(tmp_path, tensors(["exp_avg", "exp_avg_sq"])))
    assert (adam.name, len(adam.states["exp_avg"])) == ("with exp_avg and exp_avg_sq", 3)


@pytest.mark.parametrize("wrapped", [False, True], ids=["fp32", "with main copies"])
def test_what_the_package_wrote_down(tmp_path, wrapped):
    state = common()
    part = {"param_groups": [{"lr": 0.5}]}
    written = {"megatron_eopt": block()}
    state["optimizer"] = {0: {"optimizer": part, **written} if wrapped else {**part, **written}, 1: {}}
    contents = made(tmp_path, tensors(), state)
    muon = optimizer_states(contents)[0]
    assert (muon.name, muon.source) == ("TensorParallelMuon", "written down by megatron_eopt")
    assert (muon.block["settings"]["lr"], [*muon.kept]) == (0.01, ["mlp.fc1", "mlp.fc2"])
    assert groups(contents) == {"0.0": {"lr": 0.5}}
    assert said(contents) == []


def test_layers_of_a_stacked_tensor_may_be_in_several_groups(tmp_path):
    written = block()
    written["groups"] *= 2
    state = {**common(), "optimizer": {"param_groups": [{"lr": 0.5}, {"lr": 0.1}], "megatron_eopt": written}}
    contents = made(tmp_path, tensors(), state)
    assert [*optimizer_states(contents)[0].kept["mlp.fc1"]] == ["momentum_buffer"]
    assert said(contents) == []


def test_one_optimizer_that_is_not_chained(tmp_path):
    state = {**common(), "optimizer": {"param_groups": [{"lr": 0.5}], "megatron_eopt": block()}}
    contents = made(tmp_path, tensors(), state)
    assert groups(contents) == {"0.0": {"lr": 0.5}}
    assert optimizer_states(contents)[0].name == "TensorParallelMuon"


@pytest.mark.parametrize("written", [False, True], ids=["by its keys", "written down"])
def test_states_of_each_logical_matrix(tmp_path, written):
    values = tensors(["momentum_buffer", "moment2_buffer"])
    whole = values.pop("optimizer.state.moment2_buffer.mlp.fc2")
    values |= {f"optimizer.state.moment2_buffer_{matrix}.mlp.fc2": whole for matrix in range(3)}
    state = common()
    state["optimizer"] = {0: {"megatron_eopt": block("AdaptiveMuon")}} if written else {}
    contents = made(tmp_path / "whole", values, state)
    assert said(contents) == []
    assert len(optimizer_states(contents)[0].states["moment2_buffer"]) == 4


def test_state_that_was_written_down_and_is_not_there(tmp_path):
    values = tensors()
    del values["optimizer.state.momentum_buffer.mlp.fc2"]
    state = common()
    state["optimizer"] = {0: {"megatron_eopt": block()}}
    assert said(made(tmp_path / "one", values, state))[0] == (
        "error",
        "momentum_buffer is missing for mlp.fc2; TensorParallelMuon keeps momentum_buffer",
    )
    state["optimizer"] = {0: {"megatron_eopt": block("Own", states=["momentum_buffer", "other"])}}
    assert said(made(tmp_path / "all", tensors(), state)) == [
        ("error", f"other is missing for mlp.fc{n}; Own keeps momentum_buffer and other") for n in (1, 2)
    ]


def test_state_that_only_some_parameters_have_is_missing_where_it_was(tmp_path):
    """A side may be too long for SOAP to keep a factor of it."""
    values = tensors(["exp_avg", "L_0", "L_1"])
    for number in (0, 1):
        del values[f"optimizer.state.L_{number}.mlp.fc2"]
    state = common()
    written = block("SOAP", states=["L", "exp_avg"], partly={"L": {"mlp.fc1": [[0, 2]]}})
    state["optimizer"] = {0: {"megatron_eopt": written}}
    assert said(made(tmp_path / "whole", values, state)) == []
    for number in (0, 1):
        del values[f"optimizer.state.L_{number}.mlp.fc1"]
    missing = [("error", "L is missing for mlp.fc1; SOAP keeps L and exp_avg")]
    assert said(made(tmp_path / "damaged", values, state)) == missing


def test_two_optimizers_that_keep_the_same_are_told_apart_by_what_was_written_down(tmp_path):
    state = common()
    written = [block("Lion"), block("Own", ["norm"])]
    state["optimizer"] = {index: {"megatron_eopt": each} for index, each in enumerate(written)}
    values = tensors(["exp_avg"])
    del values["optimizer.state.exp_avg_sq.norm"]
    contents = made(tmp_path, values, state)
    assert [(each.name, [*each.kept]) for each in optimizer_states(contents)] == [
        ("Lion", ["mlp.fc1", "mlp.fc2"]),
        ("Own", ["norm"]),
    ]
    assert said(contents) == []


def test_a_parameter_without_state(tmp_path):
    values = tensors()
    del values["optimizer.state.momentum_buffer.mlp.fc2"]
    values |= {"mlp.router.expert_bias": torch.ones(4), "count": torch.ones(2, dtype=torch.int64)}
    assert said(made(tmp_path, values)) == [("warning", "no optimizer keeps anything for mlp.fc2")]


def test_state_without_a_parameter(tmp_path):
    values = tensors()
    del values["mlp.fc2"]
    assert said(made(tmp_path, values)) == [
        ("error", "there is optimizer state for parameters that are not there: mlp.fc2")
    ]


def test_no_optimizer(tmp_path):
    values = {key: value for key, value in tensors().items() if not key.startswith("optimizer.")}
    assert said(made(tmp_path, values)) == [("warning", "there is no optimizer state")]


def test_the_distributed_optimizer_is_named(tmp_path):
    values = {key: value for key, value in tensors().items() if not key.startswith("optimizer.")}
    values["optimizer.distributed.dp_group_idx_0.gbuf_idx_0.bucket_idx_0.exp_avg"] = torch.ones(8)
    contents = made(
        tmp_path, values, {**common(), "content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
    )
    assert distributed_format(contents) == "dp_reshardable"
    assert said(contents) == []
    assert optimizer_states(contents) == []
