"""A described run: a model from flags, on the meta device, for any rank of any number of them.

Run as a program, on ranks of its own, this file builds the same model for real, and leaves what it is made of.
"""

import os
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.tools.plan.model import described_run
from tests.megatron.runs import MUON, SMALL_GPT, start

pytestmark = [pytest.mark.wide, pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is in use")]

SMALL = [*SMALL_GPT, *MUON, "--num-layers", "4", "--train-iters", "1", "--global-batch-size", "16"]
TIED = [flag for flag in SMALL if flag != "--untie-embeddings-and-output-weights"]
EXPERTS = "--num-experts 4 --moe-layer-freq ([0,1]*2) --moe-ffn-hidden-size 48 --moe-router-topk 2".split()
FOUR_RANKS = """--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --expert-model-parallel-size 2
    --expert-tensor-parallel-size 1""".split()
GROUPS = ("tp", "pp", "dp", "dp_cp", "ep", "expt_tp", "expt_dp")


def contents(chunks, groups):
    """What a rank holds, in plain values: per parameter its shape, dtype and marks; its place in each group."""
    of_training = ("main_grad", "grad_added_to_main_grad")
    parameters = [
        {
            name: (
                list(parameter.shape),
                str(parameter.dtype),
                {key: value for key, value in vars(parameter).items() if key not in of_training},
            )
            for name, parameter in chunk.named_parameters()
        }
        for chunk in chunks
    ]
    places = {name: (getattr(groups, name).rank(), getattr(groups, name).size()) for name in GROUPS}
    return {"parameters": parameters, "places": places}


def settings(config, overrides):
    plain = {key: repr(value) for key, value in vars(config).items() if key != "timers"}
    return {"config": plain, "overrides": re.sub(" at 0x[0-9a-f]+", "", repr(overrides))}


def shapes(run):
    return {name: tuple(parameter.shape) for chunk in run.model_chunks for name, parameter in chunk.named_parameters()}


def without(flags, name, values=1):
    at = flags.index(name)
    return flags[:at] + flags[at + 1 + values :]


def test_equals_the_real_model_on_every_rank(tmp_path):
    flags = [*TIED, *EXPERTS, *FOUR_RANKS, "--bf16", "--mtp-num-layers", "1"]
    program = ["-m", "megatron_eopt.run", "--cpu", __file__]
    done = start(4, *flags, program=program, record=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]
    for rank in range(4):
        real = torch.load(tmp_path / f"{rank}.pt")
        with described_run(flags, rank, 4) as (run, overrides):
            assert {parameter.device.type for chunk in run.model_chunks for parameter in chunk.parameters()} == {"meta"}
            found = contents(run.model_chunks, run.groups)
            assert found["parameters"] == real["parameters"]
            assert found["places"] == real["places"]
            assert settings(run.config, overrides) == real["settings"]


def test_flags_that_need_a_gpu_or_files_change_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ["--tensor-model-parallel-size", "2"]
    with described_run([*SMALL, *sizes, "--bf16"], world_size=2) as (run, _):
        expected = contents(run.model_chunks, run.groups)
    gpu = """--transformer-impl transformer_engine --fp8-format hybrid --tp-comm-overlap --sequence-parallel
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --attention-backend flash
        --save here --save-interval 5 --load nowhere --data-path nowhere --tensorboard-dir here""".split()
    flags = [flag for flag in SMALL if not flag.startswith("--no-") or flag == "--no-create-attention-mask"]
    with described_run([*flags, *sizes, "--bf16", *gpu], world_size=2) as (run, _):
        found = contents(run.model_chunks, run.groups)
    for chunk in found["parameters"] + expected["parameters"]:
        for _, _, marks in chunk.values():
            marks.pop("sequence_parallel", None)
    assert found == expected
    assert not list(tmp_path.iterdir())


LATENT = """--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8
    --v-head-dim 16 --tensor-model-parallel-size 2""".split()


@pytest.mark.parametrize(("layers", "parts"), [("transformer_engine", 1), ("local", 2)])
def test_transformer_engines_down_projections_are_whole(layers, parts):
    flags = without(without(SMALL, "--group-query-attention", 0), "--num-query-groups")
    with described_run([*flags, *LATENT, "--transformer-impl", layers], world_size=2) as (run, _):
        found = shapes(run)
    attention = "module.decoder.layers.0.self_attention"
    assert found[f"{attention}.linear_q_down_proj.weight"] == (24 // parts, 64)
    assert found[f"{attention}.linear_kv_down_proj.weight"] == ((16 + 8) // parts, 64)
    assert found[f"{attention}.linear_q_up_proj.weight"] == (4 * (16 + 8) // 2, 24)


def test_grouped_experts_are_layers_of_their_own():
    flags = [*SMALL, *EXPERTS, "--expert-model-parallel-size", "4", "--moe-grouped-gemm"]
    with described_run([*flags, "--transformer-impl", "transformer_engine"], 2, 4) as (run, _):
        found = {name: shape for name, shape in shapes(run).items() if "experts" in name and "layers.1." in name}
    assert found == {
        "module.decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight": (2 * 48, 64),
        "module.decoder.layers.1.mlp.experts.local_experts.0.linear_fc2.weight": (64, 48),
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*SMALL, "--use-checkpoint-args", "--load", "nowhere"], "--use-checkpoint-args cannot be described"),
        ([*SMALL, "--hybrid-layer-pattern", "M*M*"], "--hybrid-layer-pattern cannot be described"),
        ([*SMALL, "--use-megatron-fsdp"], "--use-megatron-fsdp cannot be described"),
        ([*SMALL_GPT, "--num-layers", "2", "--train-iters", "1"], "unknown optimizer 'adam'"),
    ],
)
def test_what_cannot_be_described_is_refused(flags, message):
    with pytest.raises(ValueError, match=message), described_run(flags):
        pass


def build():
    """The real model, as megatron.training builds it before the optimizer."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training import argument_utils, training
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron

    from megatron_eopt.megatron.factory import OptimizerOfRun
    from megatron_eopt.megatron.given import complete

    args = parse_and_validate_args()
    initialize_megatron()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    config = argument_utils.gpt_config_from_args(args)
    chunks = config.get_builder_cls()(config).build_distributed_models(
        groups, ddp_config=training.get_megatron_ddp_config(args)
    )
    config, overrides = training.get_megatron_optimizer_config(args)
    complete(config, args)  # as our builder does
    config = OptimizerOfRun(config, chunks, groups).config
    found = contents(chunks, groups) | {"settings": settings(config, overrides)}
    torch.save(found, Path(os.environ["RECORD"]) / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    build()
