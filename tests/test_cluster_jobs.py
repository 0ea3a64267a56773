"""Recipes for clusters: Megatron takes their flags, and the job of Slurm runs here, with stand-ins for Slurm alone."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_eopt.tools.plan.plan_command import planned_run
from tests.megatron.runs import write_torchrun

ROOT = Path(__file__).parents[1]
RECIPES = {"llama3-8b": 16, "llama3-70b": 128, "qwen3-30b-a3b": 32, "deepseek-v3": 1024}  # GPUs
BATCH = ROOT / "examples" / "slurm" / "train.sbatch"


@pytest.mark.wide
@pytest.mark.parametrize("name", RECIPES)
def test_megatron_takes_a_recipe_and_gpus_have_room(name):
    lines = (ROOT / "examples" / "recipes" / f"{name}.flags").read_text().splitlines()
    flags = " ".join(line.partition("#")[0] for line in lines).split()
    run = planned_run([*flags, "--tokenizer-type", "NullTokenizer"], RECIPES[name])
    state = [float(re.match(r"State, .*: (\S+) MB", text)[1].replace(",", "")) for text in run.stages]
    assert max(state) < 40e3  # of 80 GB; the rest is for parameters, gradients and activations


STAND_INS = {
    "squeue": 'date -d "+1 hour" +%Y-%m-%dT%H:%M:%S',
    "srun": 'for word in "$@"; do case $word in --*) shift ;; *) break ;; esac; done; exec "$@"',
    "scontrol": 'if [ "$1" = show ]; then echo 127.0.0.1; else echo "$@" >> "$REQUEUED"; fi',
}
SMALL = """# A model for a CPU.
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --position-embedding-type rope  # of two heads a rank
--seq-length 32 --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --vocab-size 127
--tokenizer-type NullTokenizer --lr 1e-2 --min-lr 1e-2 --lr-decay-style constant
--eval-iters 0 --eval-interval 1000 --tensor-model-parallel-size 2 --log-interval 1
--optimizer muon --muon-preset match_adamw --ckpt-format torch_dist
--save-interval 10 --hidden-dropout 0 --attention-dropout 0
--transformer-impl local --attention-backend unfused --use-cpu-initialization --no-gradient-accumulation-fusion
--no-bias-dropout-fusion --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --num-workers 0
"""


@pytest.fixture
def job(tmp_path):
    """Runs the batch file as Slurm would on one node of two GPUs, which the CPU stands in for."""
    (tmp_path / "bin").mkdir()
    for name, script in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "small.flags").write_text(SMALL)
    write_torchrun(tmp_path / "bin")

    def run(*flags, **more):
        path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        slurm = {"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2"}
        own = {"SAVE": str(tmp_path / "saved"), "PRETRAIN": "examples/pretrain_gpt.py", "RUN_FLAGS": "--cpu"}
        own |= {"REQUEUED": str(tmp_path / "requeued"), "PATH": path}
        environment = os.environ | slurm | own | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | more
        command = [shutil.which("bash"), BATCH, tmp_path / "small.flags", *map(str, flags)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)

    return run


@pytest.mark.wide
def test_a_job_looks_plans_checks_trains_and_resumes(job):
    first = job("--train-iters", 3, "--exit-interval", 2)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    marks = ["2 ranks, data-parallel size", "State, with fp32", "2 ranks: 64 MiB are summed in", r"iteration +1/"]
    places = [found.start() if (found := re.search(mark, first.stdout)) else mark for mark in marks]
    assert places == sorted(places)
    second = job("--train-iters", 3)
    assert second.returncode == 0, second.stderr[-3000:]
    assert re.findall(r" iteration +(\d+)/", second.stdout) == ["3"]


@pytest.mark.wide
def test_a_job_is_requeued_but_not_for_ever(job, tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    own = {"SLURM_JOB_END_TIME": str(int(time.time()) + 3600), "PRETRAIN": str(tmp_path / "fails.py"), "RETRIES": "1"}
    first, second = (job("--train-iters", 2, **own) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 1)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert "not back into the queue: status 1" in second.stderr


@pytest.mark.wide
def test_a_mistake_ends_a_job_before_it_trains(job):
    done = job("--train-iters", 2, "--muon-prest", "match_adamw")
    assert done.returncode == 2
    assert "unrecognized arguments: --muon-prest" in done.stderr
    done = job("--train-iters", 2, "--load", "elsewhere")
    assert done.returncode == 2
    assert "--save and --load are what SAVE says" in done.stderr
