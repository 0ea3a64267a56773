"""Settings that differ between ranks: each flag, each field of a config, each override, and what users' code makes."""

import argparse
import copy
import dataclasses
from unittest import mock

import pytest
import torch
from megatron.core.optimizer import OptimizerConfig

from megatron_eopt.megatron import activation
from megatron_eopt.megatron.consensus import of_command_line, of_config, of_entries
from megatron_eopt.megatron.overrides import all_entries
from megatron_eopt.parallel.agreement import differences
from tests.megatron.runs import HERE, LAUNCHER, MUON, SMALL_GPT, start

# Not compared, each with the reason; beside them free texts, which are names and paths but for those of the data.
HARMLESS = {
    "local_rank": "is of the rank",
    "attention_backend": "is a kernel, whose results are summed over the ranks that share them",
}
DATA = {"split", "data_path", "train_data_path", "valid_data_path", "test_data_path", "step_batch_size_schedule"}


@pytest.fixture(scope="module")
def flags():
    activation.activate()
    from megatron.training import arguments

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(add_help=False))
    with mock.patch.object(arguments, "add_megatron_arguments", return_value=parser):  # made once, it takes 0.1 s
        yield parser._actions
    activation.deactivate()


def other(value, action):
    """Another value for a flag."""
    if action.choices:
        return next(each for each in action.choices if each != value)
    if isinstance(value, bool) or action.nargs == 0:
        return not value
    return 7 if action.type in (int, float) else "another"


def test_each_flag_is_compared_but_for_names_and_paths(flags):
    args = argparse.Namespace(**{each.dest: each.default for each in flags})
    of_all, silent = of_command_line(args), []
    for each in flags:
        one = argparse.Namespace(**vars(args) | {each.dest: other(getattr(args, each.dest), each)})
        match differences(of_all, of_command_line(one), 0, 3):
            case []:
                silent.append(each)
            case [line]:
                flag, _, values = line.partition(" is ")
                assert each.dest in [same.dest for same in flags if flag in same.option_strings]
                assert values.endswith(" on rank 3")
    compared = {each.dest for each in flags} - {each.dest for each in silent}
    assert {"seed", "clip_grad", "muon_momentum", "lr", "lr_decay_style", "loss_scale", *DATA} <= compared
    for each in silent:
        is_text = each.choices is None and each.nargs != 0 and each.type in (None, str)
        assert is_text or each.dest in HARMLESS, each.dest


def test_data_may_lie_elsewhere_on_a_node(flags):
    args = argparse.Namespace(**{each.dest: each.default for each in flags})
    args.data_path = ["0.3", "/local0/wiki_text_document", "0.7", "/local0/code_text_document"]
    one = argparse.Namespace(**vars(args) | {"data_path": [each.replace("0/", "1/") for each in args.data_path]})
    assert differences(of_command_line(args), of_command_line(one)) == []
    one.data_path[0] = "0.4"
    assert len(differences(of_command_line(args), of_command_line(one))) == 1


def test_each_field_of_a_config_is_compared_but_for_paths(flags):
    config = OptimizerConfig(optimizer="muon", lr=1e-2)
    silent = set()
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if isinstance(value, torch.dtype):  # follows from flags
            continue
        another = not value if isinstance(value, bool) else 7.5 if value is None or isinstance(value, float) else "b"
        one = copy.copy(config)
        setattr(one, each.name, another)
        lines = differences(of_config(config), of_config(one))
        assert all(f"OptimizerConfig.{each.name} is {value!r} on rank 0 and {another!r} on rank 1" == x for x in lines)
        silent |= set() if lines else {each.name}
    assert silent == {"config_logger_dir"}


def test_overrides_are_compared_wherever_they_stand(flags, tmp_path):
    def written(name, text):
        (tmp_path / name).write_text(text)
        config = OptimizerConfig(optimizer="muon", lr=1e-2)
        config.optimizer_overrides = str(tmp_path / name)
        return of_entries(all_entries(config, None))

    one = written("one.yaml", "linear_fc1.weight: {lr: 0.1}")
    assert differences(one, written("two.yaml", "\n# the same\nlinear_fc1.weight: {lr: 0.1}")) == []
    (line,) = differences(one, written("three.yaml", "linear_fc1.weight: {lr: 0.2}"))
    assert "('linear_fc1.weight', {'lr': 0.1}) on rank 0 and ('linear_fc1.weight', {'lr': 0.2})" in line
    line, _ = differences(one, written("four.yaml", "{linear_fc1.weight: {lr: 0.1}, '*': {lr: 0.2}}"))
    assert line.startswith("the number of overrides is ")


@pytest.mark.wide
@pytest.mark.parametrize("flag", ["--muon-momentum 0.5", "--seed 7"])
def test_a_flag_of_one_rank_ends_the_run_on_all(flag):
    name, value = flag.split()
    arguments = ["--num-layers", "2", "--train-iters", "1", "--tensor-model-parallel-size", "2"]
    done = start(2, *SMALL_GPT, *MUON, *arguments, environment={"ON_ONE_RANK": f"1 {flag}"})
    assert done.returncode
    for rank in range(2):
        lines = [x for x in done.stdout.splitlines() if x.startswith(f"[rank{rank}]: ")]
        assert "ValueError: ranks have different settings, and would train a wrong model" in lines[-2]
        assert lines[-1].startswith(f"[rank{rank}]: {name} is ")
        assert lines[-1].endswith(f" on rank 0 and {value} on rank 1")


@pytest.mark.wide
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_what_differs_on_one_rank_is_refused_on_all(axis):
    """A config, and overrides: the program says what was refused."""
    done = start(2, axis, program=[*LAUNCHER[:-1], str(HERE / "differing.py")])
    assert not done.returncode, done.stdout[-3000:]
    assert done.stdout.count("all were refused") == 2
