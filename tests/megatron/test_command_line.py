"""What is refused, and what is said, between the command line and the first step."""

import argparse
import dataclasses
import inspect
import os
import re
import sys
from types import SimpleNamespace

import megatron.core.optimizer as core
import pytest
import torch
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer import emerging_optimizers as theirs
from megatron.training import arguments, training
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import megatron_eopt
from megatron_eopt import EMERGING_OPTIMIZERS, TensorParallelMuon, activate, list_optimizers
from megatron_eopt import run as launcher
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.megatron import activation
from megatron_eopt.megatron.config import with_preset
from megatron_eopt.megatron.factory import refuse_unwritable
from megatron_eopt.megatron.given import (
    complete,
    idle_settings,
    refuse_idle_of_megatrons,
    typed_flags,
    typed_of,
    warnings_of,
    without_effect,
)
from megatron_eopt.megatron.run_flags import FLAGS
from megatron_eopt.registry import create_emerging_optimizer, takes_matrices
from tests.megatron.runs import MUON, SMALL_GPT, UPSTREAM, assert_same, refused, since_0_20, train


@pytest.fixture
def activated():
    activation.activate()
    yield
    activation.deactivate()


@pytest.fixture
def parse(activated):

    def parse(*flags):
        return arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(flags)

    return parse


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--muon-coefficient-type", "quintc", "invalid choice: 'quintc' .*polar_express"),
        ("--muon-momentum", "1.5", r"the value must lie in \[0, 1\), got 1.5"),
        ("--muon-num-ns-steps", "101", "the value must be a whole number of at least 1 and at most 100, got 101"),
        ("--muon-num-ns-steps", "five", "invalid int value: 'five'"),
        ("--optimizer-workspace", "0", "the value must be a finite number above 0, got 0"),
        ("--optimizer-metrics-interval", "-1", "the value must be a whole number of at least 0, got -1"),
    ],
)
def test_wrong_values_are_refused_when_arguments_are_parsed(parse, capsys, flag, value, message):
    with pytest.raises(SystemExit):
        parse(flag, value)
    assert re.search(f"argument {flag}: {message}", capsys.readouterr().err)


def test_no_number_of_ours_can_be_nan(activated, capsys):

    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    for flag in FLAGS:
        if flag.options.get("type") is float:
            with pytest.raises(SystemExit):
                parser.parse_args([flag.name, "nan"])
            assert f"argument {flag.name}: the value must" in capsys.readouterr().err


def test_optimizers_that_megatron_brings_along_are_refused(parse, validate, capsys):

    pytest.importorskip("emerging_optimizers")
    with pytest.raises(SystemExit):
        parse("--optimizer", "spel")
    assert "argument --optimizer: invalid choice: 'spel'" in capsys.readouterr().err
    with pytest.raises(ValueError, match="take an optimizer of this package") as raised:
        validate("--optimizer", "adam", "--optimizer-overrides", "x.yaml")
    assert "spel" not in str(raised.value)
    brought = theirs._EMERGING_OPTIMIZERS["spel"]
    theirs._EMERGING_OPTIMIZERS["spel"] = theirs.EmergingOptimizerEntry(brought.optimizer_cls)
    assert "spel" in list_optimizers()
    theirs._EMERGING_OPTIMIZERS["spel"] = brought


def with_dtypes(args):
    for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        setattr(args, name, torch.float32)  # as Megatron's validation does
    return args


def config_as_frameworks_make_it(args, **fields):
    """Megatron's fields of parsed arguments, by slime's way, and what a run makes of the config."""

    with_dtypes(args)
    names = [field.name for field in dataclasses.fields(OptimizerConfig) if hasattr(args, field.name)]
    config = OptimizerConfig(**{name: getattr(args, name) for name in names} | fields)
    complete(config, args)
    return config


@pytest.mark.parametrize(
    ("optimizer", "flags", "idle"),
    [
        (
            "adam",
            "--muon-momentum 0.3 --lion-beta1 0.8 --lion-beta2 0.8 --soap-nesterov",
            {"--muon-momentum": "muon", "--soap-nesterov": "soap", "--lion-beta1, --lion-beta2": "lion"},
        ),
        ("adam", "--muon-momentum 0.9", {"--muon-momentum": "muon"}),  # which is the default
        ("adam", "", {}),
        ("lion", "--adam-beta1 0.5 --adam-eps 1e-5", {"--adam-beta1, --adam-eps": "soap"}),
        ("soap", "--muon-scale-mode shape_scaling --muon-no-split-qkv --muon-lr 0.1", {"--muon-scale-mode": "muon"}),
        ("muon", "--muon-momentum 0.3 --muon-scalar-optimizer lion --lion-beta1 0.8", {}),
        ("muon", "--sgd-momentum 0.3 --adam-beta2 0.95", {"--sgd-momentum": "sgd"}),
        ("soap", "--optimizer-cpu-offload", {"--optimizer-cpu-offload": "muon"}),
        ("lion", "--optimizer-workspace 1", {"--optimizer-workspace": "scion"}),
        ("scion", "--optimizer-cpu-offload --optimizer-workspace 1 --muon-share-over-dp", {}),
        ("soap", "--muon-share-over-dp", {"--muon-share-over-dp": "polargrad"}),
        ("dion", "--muon-share-over-dp", {"--muon-share-over-dp": "polargrad"}),
    ],
)
def test_flags_without_effect_are_errors(parse, validate, optimizer, flags, idle):
    args = parse("--optimizer", optimizer, *flags.split())
    built = {optimizer, args.muon_scalar_optimizer if takes_matrices(optimizer) else optimizer}
    said = without_effect(optimizer, typed_flags(args), built)
    assert len(said) == len(idle)
    for line, (named, reader) in zip(said, idle.items(), strict=True):
        assert line.startswith(f"{named} without effect, with --optimizer {optimizer}: leave out, or take")
        assert reader in line.rpartition(" --optimizer ")[2].split(" or ")
        assert optimizer not in line.rpartition(" --optimizer ")[2].split(" or ")
    if optimizer == "adam" and idle:  # which this package does not build
        with pytest.raises(ValueError, match=said[0]):
            validate("--optimizer", optimizer, *flags.split())


def test_megatrons_adam_reads_megatrons_flag_of_offloading(parse):
    refuse_idle_of_megatrons(parse("--optimizer", "adam", "--optimizer-cpu-offload"))


OF_0_20 = {"muon_use_syrk": True, "muon_split_glu": False}


@pytest.mark.parametrize(
    ("optimizer", "changed", "said"),
    [
        ("muon", {}, []),
        ("muon", {"dion_momentum": 0.5}, ["--dion-momentum"]),
        ("lion", {"lion_beta1": 0.5, "muon_momentum": 0.7}, ["--muon-momentum"]),
        ("soap", OF_0_20, []),
        ("lion", OF_0_20, ["--muon-use-syrk, --muon-no-split-glu"]),
        ("soap", {"optimizer_cpu_offload": True}, ["--optimizer-cpu-offload"]),
    ],
)
def test_settings_without_effect_are_warned_of(parse, optimizer, changed, said):
    args = parse("--optimizer", optimizer, "--lr", "0.1")
    config = config_as_frameworks_make_it(args)
    vars(config).update(changed)
    found = idle_settings(config, args, [optimizer, *["adam"] * takes_matrices(optimizer)])
    assert [line.partition(" without effect, with --optimizer ")[0] for line in found] == said


def test_settings_of_a_config_without_arguments_are_warned_of(activated):
    lion = OptimizerConfig(optimizer="lion", lion_beta1=0.5)
    assert idle_settings(lion, None, ["lion"]) == []
    lion.muon_momentum = 0.7
    (said,) = idle_settings(lion, None, ["lion"])
    assert said.startswith("--muon-momentum without effect")


def test_a_schedule_for_schedule_free_is_warned_of_at_start(parse):
    for style, warned in (("cosine", 1), ("constant", 0)):
        args = parse("--optimizer", "schedule_free_adamw", "--lr", "0.1", "--lr-decay-style", style)
        config = config_as_frameworks_make_it(args)
        assert len(idle_settings(config, args, ["schedule_free_adamw"])) == warned
        assert idle_settings(config, args, ["muon"]) == []


def test_typed_flags_reach_any_config(parse):
    args = parse(*"--optimizer muon --muon-preset match_adamw --muon-lr 2e-3 --muon-split all".split())
    config = config_as_frameworks_make_it(args)
    assert (config.muon_preset, config.matrix_lr, config.muon_split) == ("match_adamw", 2e-3, "all")
    assert config.soap_precondition_frequency == 10  # the flag's default, which that of Megatron's config is not
    assert config.lr_decay_style == "linear"


def test_a_refused_setting_is_named_as_it_was_typed(parse):
    args = parse(*"--optimizer muon --muon-brake-outward 0.3 --muon-lr 2e-3".split())
    assert typed_of("brake_outward has no effect with weight_norm 'none'", args) == " (typed: --muon-brake-outward)"
    assert typed_of("beta2 has no effect", args) == ""


def test_a_config_that_contradicts_typed_flags_is_refused(parse):
    args = parse(*"--optimizer muon --muon-momentum 0.9 --muon-lr 2e-3".split())
    with pytest.raises(
        ValueError, match=r"--muon-momentum was typed, for muon_momentum=0\.9, and the config has 0\.95"
    ):
        config_as_frameworks_make_it(args, muon_momentum=0.95)
    with pytest.raises(ValueError, match=r"--muon-lr was typed, for matrix_lr=0\.002, and the config has 0\.1"):
        config_as_frameworks_make_it(args, matrix_lr=0.1)
    config_as_frameworks_make_it(args, matrix_lr=2e-3, muon_num_ns_steps=7)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"decoupled_weight_decay": False}, "decoupled_weight_decay=False without effect on all optimizers but adam"),
        ({"optimizer_offload_fraction": 0.5}, "optimizer_offload_fraction=0.5 without effect: add --optimizer-cpu-off"),
        ({"optimizer_offload_fraction": 0.5, "optimizer_cpu_offload": True}, None),
        ({"muon_lr": 0.5}, "muon_lr=0.5 of the config without effect.* did you mean 'matrix_lr'"),
        ({"dion_rank_fracton": 0.5}, "dion_rank_fracton=0.5 of the config .* did you mean 'dion_rank_fraction'"),
        ({"matrix_lr": 0.2, "muon_use_decoupled_weight_decay": False, "_of_a_framework": 1}, None),
        ({"optimizer_overrides": {"shape:tall": {"lr": 0.1}}}, None),
    ],
)
def test_fields_of_the_config_that_nothing_reads_are_named(activated, fields, said):
    config = OptimizerConfig(optimizer="muon", lr=0.1)
    vars(config).update(fields)
    assert [bool(re.match(said, line)) for line in warnings_of(config)] == [True] * (said is not None)


def report_of_torchrun(file):
    """What torchrun prints last where a rank ends with this error file."""
    return ChildFailedError("run", {0: ProcessFailure(0, 4242, 2, str(file))}).format_msg()


def test_an_error_of_the_command_line_is_said_once_and_last(parse, capsys, monkeypatch, tmp_path):
    """Megatron's usage is 700 lines, and torchrun's report comes after whatever a rank prints."""
    with pytest.raises(SystemExit, match="2"):
        parse("--no-such-flag")
    usage, error = capsys.readouterr().err.splitlines()
    assert usage.endswith("[FLAGS], which --help lists")
    assert "unrecognized arguments: --no-such-flag" in error
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit, match="2"):
        parse("--muon-coefficient-type", "quintc")
    assert capsys.readouterr().err == ""
    *_, last, _ = report_of_torchrun(tmp_path / "error.json").splitlines()
    assert "invalid choice: 'quintc'" in last


SCHEDULER = """
from types import SimpleNamespace
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
flags = SimpleNamespace(override_opt_param_scheduler=False, use_checkpoint_opt_param_scheduler=False)
OptimizerParamScheduler._check_and_set(flags, 0.02, 0.01, "learning rate")
"""
NO_INTERVAL = """
from types import SimpleNamespace
from megatron.training import training
flags = dict(train_samples=None, train_iters=2, global_batch_size=1, full_validation=False, skip_train=False)
training.get_args = lambda: SimpleNamespace(**flags, eval_interval=None)
training.get_train_valid_test_num_samples()
"""
NO_RATE = """
import torch
import megatron_eopt
from megatron_eopt import EMERGING_OPTIMIZERS, TensorParallelMuon, activate, list_optimizers
TensorParallelMuon([torch.ones(2, 2)], lr=None)
"""
ONE_RANK = """
import sys
from megatron.training.arguments import parse_and_validate_args
sys.argv += "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --tensor-model-parallel-size 2".split()
parse_and_validate_args()
"""


@pytest.mark.parametrize(
    ("script", "said", "advice"),
    [
        (
            "import torch.distributed as dist; dist.init_process_group('gloo')",
            "MASTER_ADDR",
            "start the ranks by torchrun",
        ),
        (ONE_RANK, "world size (1)", "one rank was started, and the flags need more: start the ranks by torchrun"),
        ("a = 1, None\na[0] // a[1]", "TypeError: unsupported operand", None),
        (NO_INTERVAL, "TypeError: unsupported operand", "--eval-interval is missing"),
        (NO_RATE, "lr must be a number", "--lr is missing"),
        (SCHEDULER, "0.02 and checkpoint", "--override-opt-param-scheduler takes that of the flags"),
        ("raise AssertionError('Megatron requires CUDA.')", "requires CUDA", "put --cpu before the script"),
        ("raise ValueError('quintic has 5 polynomials:\\ntake 5')", "quintic has 5 polynomials:", None),
    ],
)
def test_an_error_says_what_to_do(activated, monkeypatch, tmp_path, script, said, advice):

    monkeypatch.setattr(training, "get_args", training.get_args)  # which a script replaces
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises((AssertionError, TypeError, ValueError)) as raised:
        launcher.main([str(tmp_path / "script.py")])
    report = report_of_torchrun(tmp_path / "error.json")
    assert said in report
    assert (advice or "") in report
    assert [advice in note for note in getattr(raised.value, "__notes__", [])] == ([] if advice is None else [True])


def test_flags_and_defaults(parse):
    args = parse("--optimizer", "muon")
    assert args.muon_tp_mode == "auto"  # Megatron's own default is blockwise, an approximation
    assert (args.muon_momentum, args.muon_nesterov, args.muon_split_qkv) == (0.9, False, True)
    assert (args.muon_coefficient_type, args.muon_num_ns_steps) == ("quintic", 5)
    assert (args.muon_scale_mode, args.muon_extra_scale_factor) == ("spectral", 1.0)
    assert (args.muon_fp32_matmul_prec, args.muon_symmetric_products) == ("medium", None)


@pytest.mark.parametrize(("flags", "gib"), [([], 2), (["--optimizer-workspace", "0.25"], 0.25)])
def test_the_workspace_reaches_the_optimizer(parse, flags, gib):

    config = config_as_frameworks_make_it(parse("--optimizer", "muon", "--lr", "0.1", *flags))
    groups = [{"params": [torch.nn.Parameter(torch.ones(4, 4))]}]
    model = SimpleNamespace(config=SimpleNamespace(num_attention_heads=4, num_query_groups=2, kv_channels=8))
    muon, _ = create_emerging_optimizer(config, groups, "muon", [model], None)
    assert muon.execution.workspace == gib * 2**30


def test_activation_can_be_repeated_and_undone():

    def seen():
        changed = (core, theirs, arguments)
        changing = [(each.__name__, key, id(value)) for each in changed for key, value in vars(each).items()]
        entries = (dict(theirs._EMERGING_OPTIMIZERS), dict(EMERGING_OPTIMIZERS))
        return changing, core.OptimizerConfig.__init__, entries

    before = seen()
    activate()
    once = seen()
    assert once != before
    assert core._EMERGING_OPTIMIZERS is theirs._EMERGING_OPTIMIZERS
    assert dict(EMERGING_OPTIMIZERS) == core._EMERGING_OPTIMIZERS
    activate()
    assert seen() == once
    activation.deactivate()
    assert seen() == before


def test_without_megatron_training_the_core_is_activated(monkeypatch):

    for name in [name for name in sys.modules if name.startswith("megatron.training")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "megatron.training", None)
    activation.activate()
    assert dict(EMERGING_OPTIMIZERS) == core._EMERGING_OPTIMIZERS
    activation.deactivate()


def test_a_config_that_names_no_tp_mode_gets_auto():

    before = OptimizerConfig(optimizer="muon", lr=0.1)
    mode = before.muon_tp_mode
    assert mode in ("blockwise", "duplicated")  # 0.20
    activation.activate()
    try:
        assert before.muon_tp_mode == mode
        assert OptimizerConfig(optimizer="muon", lr=0.1).muon_tp_mode == "auto"
        assert OptimizerConfig(optimizer="muon", lr=0.1, muon_tp_mode="blockwise").muon_tp_mode == "blockwise"
    finally:
        activation.deactivate()
    assert OptimizerConfig(optimizer="muon", lr=0.1).muon_tp_mode == mode


def test_classes_keep_the_default_of_their_signature(activated):
    opt = TensorParallelMuon([torch.nn.Parameter(torch.ones(4, 4))])
    assert opt.tp_mode == "duplicated"


def test_what_cannot_run_is_refused_at_start():
    said = refused("--num-layers", 1, "--train-iters", 1, *MUON, "--muon-num-ns-steps", 6)
    assert "ValueError: quintic has 5 polynomials" in said


@pytest.fixture
def validate(parse, monkeypatch):
    """What Megatron does with flags before it builds a model, for a rank of one; the validated arguments."""

    def validate(*flags):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9))
        args = parse(*SMALL_GPT, "--num-layers", "1", "--train-iters", "1", *map(str, flags))
        args.rank, args.world_size = 0, 1
        return arguments.validate_args(args)

    return validate


def test_megatrons_checks_take_every_optimizer(validate):
    for name in ("adam", *OPTIMIZERS):
        assert validate("--optimizer", name).optimizer == name


def test_a_preset_that_does_not_fit_is_refused(parse):
    args = parse(*"--optimizer soap --muon-preset megatron --soap-basis-of previous".split())
    with pytest.raises(ValueError, match=r"the run also says .*previous"):
        with_preset(args, args)


def test_a_folder_without_a_checkpoint_is_refused(validate, tmp_path):
    no_checkpoint = "latest_checkpointed_iteration.txt, and the run would begin with random weights"
    load = ["--load", tmp_path / "run", "--save-interval", 1]
    for elsewhere in ([], ["--save", tmp_path / "other"]):
        with pytest.raises(ValueError, match=no_checkpoint):
            validate(*MUON, *load, *elsewhere)
    validate("--optimizer", "adam", *load)  # which is left as it is
    validate(*MUON, *load, "--save", tmp_path / "other" / ".." / "run")
    validate(*MUON, *load, "--pretrained-checkpoint", tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("1")
    validate(*MUON, *load)


def test_a_folder_that_cannot_be_saved_to_is_refused_at_start(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    for save in ("file", "file/run"):
        with pytest.raises(ValueError, match="file is no folder"):
            refuse_unwritable(SimpleNamespace(save=tmp_path / save))
    refuse_unwritable(SimpleNamespace(save=tmp_path / "new" / "run"))
    refuse_unwritable(SimpleNamespace(save=None))
    monkeypatch.setattr(os, "access", lambda folder, mode: folder != tmp_path)  # root may write anywhere
    with pytest.raises(ValueError, match="no folder that this process may write to"):
        refuse_unwritable(SimpleNamespace(save=tmp_path / "new" / "run"))


def test_our_factory_takes_what_megatrons_takes():
    from megatron.core.optimizer import get_megatron_optimizer

    ours = list(inspect.signature(megatron_eopt.get_megatron_optimizer).parameters)
    assert ours == list(inspect.signature(get_megatron_optimizer).parameters)


@since_0_20
def test_megatrons_flag_for_symmetric_products():
    said = refused("--num-layers", 1, "--train-iters", 1, *MUON, "--muon-use-syrk")
    assert re.search(r"kernel 'triton' of symmetric products cannot serve: .*by --muon-use-syrk", said)


def test_adam_is_left_as_it_is(tmp_path):
    run = ["--num-layers", 1, "--train-iters", 3, "--optimizer", "adam"]
    (ours,), output = train(tmp_path / "ours", 1, *run)
    (theirs,), _ = train(tmp_path / "theirs", 1, *run, program=UPSTREAM)
    assert ours["losses"] == theirs["losses"]
    assert_same(ours["after"], theirs["after"])
    assert "megatron_eopt:" not in output


@pytest.mark.parametrize(
    ("flags", "refusal", "expected"),
    [
        (["--use-torch-fsdp2", "--ckpt-format", "torch_dcp"], None, (False, False)),
        (["--use-torch-fsdp2", "--use-distributed-optimizer"], "distributed optimizer", None),
        (["--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"], None, (True, False)),
        (["--use-distributed-optimizer"], None, (False, True)),
    ],
)
def test_megatrons_checks_of_fsdp_hold(parse, monkeypatch, flags, refusal, expected):

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9))
    args = parse(*SMALL_GPT, "--num-layers", "1", "--train-iters", "1", "--optimizer", "muon", *flags)
    args.rank, args.world_size = 0, 2
    if refusal is not None:
        with pytest.raises(AssertionError, match=refusal):
            arguments.validate_args(args)
        assert args.optimizer == "muon"
        return
    assert arguments.validate_args(args) is args
    assert args.optimizer == "muon"
    assert (args.use_distributed_optimizer, args.use_layer_wise_distributed_optimizer) == expected
