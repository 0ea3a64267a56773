"""Whether a run's flags would load a checkpoint: the model, the optimizer, the precision, the schedule."""

from types import SimpleNamespace

import pytest
import torch

from megatron_eopt.checkpoints.contents import read_contents
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.tools.verify.would_load import parse_flags, would_load
from tests.checkpoints.made import block, common, save, tensors

WHOLE = """--num-layers 2 --hidden-size 8 --ffn-hidden-size 12 --num-attention-heads 2 --swiglu --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear --optimizer muon
    --lr 0.01 --min-lr 0.001 --lr-decay-style cosine --train-iters 10 --global-batch-size 4"""


@pytest.fixture
def compared(tmp_path):
    def compare(flags, values=None, **saved):
        contents = read_contents(save(tmp_path / "checkpoint", values, common(**saved)))
        return would_this_load(contents, flags)

    return compare


def would_this_load(contents, flags):
    problems, notes = would_load(contents, *parse_flags(flags.split()))
    return SimpleNamespace(problems=tuple(problems), notes=tuple(notes))


def errors(comparison):
    assert all(problem.severity == "error" for problem in comparison.problems)
    return " | ".join(f"{problem.what} -> {problem.advice}" for problem in comparison.problems)


def test_the_same_run(compared):
    same = compared(WHOLE)
    assert (same.problems, same.notes) == ((), ())
    assert compared("").problems == ()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--num-layers 4", "num_layers was 2 and is 4"),
        ("--ffn-hidden-size 16", "ffn_hidden_size was 12 and is 16"),
        ("--group-query-attention --num-query-groups 1", "num_query_groups was None and is 1"),
        ("--num-experts 8", "num_experts was None and is 8"),
        ("--normalization LayerNorm", "normalization was RMSNorm and is LayerNorm"),
        ("--kv-channels 8", "kv_channels was 4 and is 8"),
    ],
)
def test_another_model(compared, flags, words):
    assert f"another model: {words} -> give {flags.split()[-2]}" in errors(compared(f"{WHOLE} {flags}"))


def test_what_a_whole_command_line_leaves_out_has_megatrons_default(compared):
    assert "swiglu was True and is False" in errors(compared(WHOLE.replace("--swiglu", "")))
    said = errors(compared(WHOLE.replace("--disable-bias-linear", "")))
    assert "add_bias_linear was False and is True -> give --disable-bias-linear as it was" in said
    assert "the run wants adam" in errors(compared(WHOLE.replace("--optimizer muon", "")))


def test_what_a_part_of_one_leaves_out_is_not_compared(compared):
    part = compared("--lr 0.01")
    assert part.problems == ()
    assert "not a whole command line" in part.notes[0]
    assert compared(f"{WHOLE} --num-layers 4 --use-checkpoint-args").problems == ()


@pytest.mark.parametrize("exported", [False, True])
def test_an_average_of_weights(tmp_path, exported):
    state = common()
    state["optimizer"][0]["megatron_eopt"] = block(average={"schedule": [0.9, 0, 4], "exported": exported})
    contents = read_contents(save(tmp_path / "checkpoint", state=state))
    assert would_this_load(contents, "--optimizer muon").problems == ()
    assert would_this_load(contents, f"{WHOLE} --optimizer-weight-average ema:0.9").problems == ()
    (problem,) = would_this_load(contents, WHOLE).problems
    assert problem.severity == ("error" if exported else "warning")
    assert problem.advice.startswith("give --optimizer-weight-average ema:0.9")


def test_flags_that_say_nothing_are_listed(compared):
    notes = compared(f"{WHOLE} --data-path /x --foo 3 --data-path /y").notes
    assert notes == ("not compared: --data-path, --foo",)
    with pytest.raises(ValueError, match=r"the flags after --.*num-layers"):
        parse_flags(["--num-layers", "two"])


def test_the_schedulers_flags_are_known_by_both_spellings():
    for flag in ("--override-opt-param-scheduler", "--override-opt_param-scheduler"):
        assert parse_flags([flag]) == ({"override_opt_param_scheduler": True}, [])
    for flag in ("--use-checkpoint-opt-param-scheduler", "--use-checkpoint-opt_param-scheduler"):
        assert parse_flags([flag]) == ({"use_checkpoint_opt_param_scheduler": True}, [])


def test_sizes_may_change(compared):
    found = compared(f"{WHOLE} --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2")
    assert found.problems == ()
    assert found.notes == ("TP 1 to 4, PP 1 to 2: torch_dist loads at any sizes",)


ADAM, ADAPTIVE = ["exp_avg", "exp_avg_sq"], ["momentum_buffer", "moment2_buffer"]


@pytest.mark.parametrize(
    ("states", "was", "wanted", "words"),
    [
        (ADAM, "adam", "muon", "--muon-momentum-from-adam"),
        (ADAPTIVE, "adaptive_muon", "muon", "keep --optimizer adaptive_muon"),
        (["momentum_buffer"], "muon", "adaptive_muon", "keep --optimizer muon"),
        (["momentum_buffer"], "muon", "adam", "it holds the state of muon, and the run wants adam"),
        (["exp_avg"], "lion", "adam", "it holds the state of lion"),
    ],
)
def test_another_optimizer(compared, states, was, wanted, words):
    flags = WHOLE.replace("muon", wanted)
    said = errors(compared(flags, tensors(states), optimizer=was))
    assert words in said
    assert "--no-load-optim" in said
    assert compared(f"{flags} --no-load-optim", tensors(states), optimizer=was).problems == ()


def test_momenta_in_bf16_load_into_a_run_in_fp32_and_back(compared):
    for was, now in (("fp32", "bf16"), ("bf16", "fp32")):
        flags = f"{WHOLE} --optimizer-momentum-dtype {now}"
        assert compared(flags, tensors(["momentum_buffer"]), optimizer_momentum_dtype=was).problems == ()


@pytest.mark.parametrize("name", ["muon", "scion", "polargrad"])
def test_adams_momentum_may_be_taken_by_name(compared, name):
    flags = f"{WHOLE.replace('muon', name)} --muon-momentum-from-adam"
    assert compared(flags, tensors(ADAM), optimizer="adam").problems == ()


@pytest.mark.parametrize("name", ["adaptive_muon", "muon_hyperball", "soap"])
def test_adams_momentum_is_not_all_that_others_need(compared, name):
    flags = f"{WHOLE.replace('muon', name)} --muon-momentum-from-adam"
    said = errors(compared(flags, tensors(ADAM), optimizer="adam"))
    assert f"holds the state of adam, and the run wants {name} -> keep --optimizer adam" in said


def test_old_names_of_an_optimizer(compared):
    assert compared(WHOLE, optimizer="dist_muon").problems == ()
    assert compared(WHOLE.replace("muon", "dist_muon")).problems == ()


def test_another_second_moment(compared):
    flags = WHOLE.replace("muon", "adaptive_muon") + " --adaptive-muon-moment2-method normuon"
    saved = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "adamuon"}
    assert "was adamuon and is normuon" in errors(compared(flags, tensors(ADAPTIVE), **saved))


@pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=lambda row: row.name)
def test_every_optimizer_is_what_its_run_asked_for(compared, row):
    other = "signum" if row.name == "lion" else "lion"
    values = tensors(row.state_keys)
    assert compared(WHOLE.replace("muon", row.name), values, optimizer=row.name).problems == ()
    said = errors(compared(WHOLE.replace("muon", other), values, optimizer=row.name))
    assert f"it holds the state of {row.name}, and the run wants {other}" in said


SPLITS_QKV = {"muon_split": "default", "muon_split_qkv": True}


@pytest.mark.parametrize(
    ("name", "saved", "flags", "words"),
    [
        ("spectron", {"spectron_rank": 32}, "", "spectron_rank was 32 and is 64, which keeps other state"),
        ("spectron", {"spectron_rank": 64}, "", None),
        ("spectron", {"muon_split": "default"}, "--muon-split all", "muon_split was default and is all"),
        ("soap", {"soap_max_dim": 10000}, "--soap-max-dim 64", "soap_max_dim was 10000 and is 64"),
        ("soap", {"muon_split": "default"}, "--muon-split all", None),
        ("soap", {"muon_split": "default"}, "--muon-split per_head", "muon_split was default and is per_head"),
        ("muon_hyperball", {"muon_split": "default"}, "--muon-split all", "muon_split was default and is all"),
        ("muon", {"muon_split": "default"}, "--muon-split all", None),
        *(
            (name, SPLITS_QKV, "--muon-no-split-qkv", "muon_split_qkv was True and is False")
            for name in ("spectron", "soap", "shampoo", "kl_shampoo", "psgd_kron", "muon_hyperball", "dion", "muown")
        ),
        ("soap", SPLITS_QKV | {"muon_split_qkv": False}, "", "muon_split_qkv was False and is True"),
        ("soap", SPLITS_QKV | {"muon_split_qkv": False}, "--muon-split all", "muon_split was default and is all"),
        ("soap", {"muon_split": "all", "muon_split_qkv": True}, "--muon-split all --muon-no-split-qkv", None),
        ("soap", SPLITS_QKV, "--muon-split all --muon-no-split-qkv", None),
    ],
)
def test_flags_that_decide_what_an_optimizer_keeps(compared, name, saved, flags, words):
    flags = f"{WHOLE.replace('muon', name)} {flags}"
    found = compared(flags, tensors(["kept"]), optimizer=name, **saved)
    assert found.problems == () if words is None else words in errors(found)
    changed = "muon_split" in saved and name == "muon"
    assert any("the update changes" in note for note in found.notes) is changed


def test_another_precision(compared):
    assert "in half precision wants fp32_param" in errors(compared(f"{WHOLE} --bf16"))
    assert "give --bf16" in errors(compared(WHOLE, tensors(dtype=torch.bfloat16), bf16=True))
    assert compared(f"{WHOLE} --bf16", tensors(dtype=torch.bfloat16), bf16=True).problems == ()


def test_another_schedule(compared):
    said = errors(compared(f"{WHOLE} --lr 0.02 --train-iters 20"))
    assert "lr was 0.01 and is 0.02; the schedule was 40 samples long and is 80" in said
    assert "--override-opt-param-scheduler" in said
    assert compared(f"{WHOLE} --lr 0.02 --override-opt-param-scheduler").problems == ()


def test_settings_of_every_optimizer_that_change_the_update_are_noted(compared):
    flags = f"{WHOLE.replace('muon', 'scion')} --scion-radius 20 --scion-no-constrained"
    saved = {"optimizer": "scion", "scion_radius": 50.0, "scion_constrained": True}
    assert compared(flags, tensors(["momentum_buffer"]), **saved).notes == (
        "--scion-radius is 20.0 and was 50.0: the update changes from here on",
        "--scion-no-constrained is False and was True: the update changes from here on",
    )
    assert compared(f"{WHOLE} --muon-momentum 0.9").notes == (
        "--muon-momentum is 0.9 and was 0.95: the update changes from here on",
    )


def test_no_optimizer_to_load(compared):
    values = {"norm": torch.ones(8)}
    assert "the run wants optimizer state, and there is none" in errors(compared(WHOLE, values))
    assert compared(f"{WHOLE} --finetune", values).problems == ()


def test_the_distributed_optimizer(tmp_path):
    values = {"norm": torch.ones(8), "optimizer.distributed.dp_group_idx_0.exp_avg": torch.ones(8)}
    state = common(optimizer="adam") | {"content_metadata": {"distrib_optim_sharding_type": "dp_reshardable"}}
    contents = read_contents(save(tmp_path / "checkpoint", values, state))

    def said(flags):
        return errors(would_this_load(contents, flags))

    assert said("--optimizer adam") == ""
    assert "cannot change TP -> save it with --dist-ckpt-optim-fully-reshardable" in said(
        "--tensor-model-parallel-size 2"
    )
    assert "Adam's is in flat buckets (dp_reshardable)" in said("--optimizer muon")
