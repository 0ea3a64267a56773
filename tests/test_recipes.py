"""Recipes for clusters: Megatron takes their flags, and the job of Slurm runs here, with stand-ins for Slurm alone."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from megatron_eopt.tools.plan.model import described_run
from megatron_eopt.tools.plan.plan_command import planned_run

ROOT = Path(__file__).parents[1]
RECIPES = {"llama3-8b": 16, "llama3-70b": 128, "qwen3-30b-a3b": 32, "deepseek-v3": 1024}  # GPUs
BATCH = ROOT / "examples" / "slurm" / "train.sbatch"
JOB = yaml.safe_load((ROOT / "examples" / "kubernetes" / "pytorchjob.yaml").read_text())


def flags_of(name):
    lines = (ROOT / "examples" / "recipes" / f"{name}.flags").read_text().splitlines()
    return " ".join(line.partition("#")[0] for line in lines).split()


def test_every_recipe_is_here():
    assert {path.stem for path in (ROOT / "examples" / "recipes").glob("*.flags")} == RECIPES.keys()


@pytest.mark.wide
@pytest.mark.parametrize("name", RECIPES)
def test_megatron_takes_a_recipe_counts_its_samples_and_every_gpu_has_room(name):
    flags = [*flags_of(name), "--tokenizer-type", "NullTokenizer"]
    run = planned_run(flags, RECIPES[name])
    state = [float(re.match(r"State, .*: (\S+) MB", text)[1].replace(",", "")) for text in run.stages]
    assert max(state) < 40e3  # of 80 GB; the rest is for parameters, gradients and activations
    with described_run(flags, 0, RECIPES[name]) as (described, _):
        from megatron.training.training import get_train_valid_test_num_samples

        training, *others = get_train_valid_test_num_samples()
    args = described.facts.args
    assert training == args.train_iters * args.global_batch_size
    assert min(others) >= 10 * args.global_batch_size


def test_shell_scripts_pass_shellcheck(tmp_path):
    """The batch file, and the script of a pod."""
    (container,) = JOB["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    script = tmp_path / "pytorchjob.sh"
    script.write_text("#!/bin/bash\n" + container["args"][0])
    command = [Path(sys.executable).with_name("shellcheck"), BATCH, script]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_a_pytorchjob_has_what_the_operator_and_kubernetes_ask_for():
    """Pods as a dry run of kubectl would see them, and strictly: a field that nothing knows is an error."""
    assert (JOB["apiVersion"], JOB["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = JOB["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"}
    assert replicas["Master"]["replicas"] == 1
    for each in replicas.values():
        kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", **each["template"]}, "1.30", strict=True)
        assert each["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
        (container,) = each["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # by which the operator finds it
        mounted = {volume["name"] for volume in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in each["template"]["spec"]["volumes"]}
        files = re.findall(r"examples/\S+\.(?:py|flags)", str(container))
        assert files
        assert all((ROOT / file).exists() for file in files)


COMMANDS = {
    "megatron-eopt": 'if [ "$1" = "$MISTAKE" ]; then exit 2; fi',
    "torchrun": """case $* in *check_ranks*) exit "${UNREACHED:-0}" ;; esac
        if [ -n "${SAVES:-}" ]; then echo 7 > "$SAVE/latest_checkpointed_iteration.txt"; fi; exit "${FAILS:-0}\"""",
}


@pytest.mark.parametrize(
    ("happens", "status"),
    [
        ({}, 0),
        ({"MISTAKE": "doctor"}, 2),
        ({"MISTAKE": "plan"}, 2),
        ({"UNREACHED": "1"}, 130),
        ({"FAILS": "1"}, 130),
        ({"FAILS": "1", "RETRIES": "0"}, 1),
        ({"FAILS": "1", "SAVES": "1"}, 130),
        ({"SAVES": "1"}, 0),
    ],
)
def test_a_pod_starts_again_only_where_that_helps(tmp_path, happens, status):
    """By ExitCode the operator takes 128 and more for that."""
    for name, script in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    (container,) = JOB["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    given = {each["name"]: each["value"] for each in container["env"]} | {"SAVE": str(tmp_path), "WORLD_SIZE": "16"}
    environment = os.environ | given | happens | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([*container["command"], *container["args"]], cwd=ROOT, env=environment, check=False)
    assert done.returncode == status


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
    from tests.megatron.runs import write_torchrun

    write_torchrun(tmp_path / "bin")

    def run(*flags, **more):
        path = os.pathsep.join([str(tmp_path / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]])
        slurm = {"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "here", "SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "2"}
        own = {"SAVE": str(tmp_path / "saved"), "PRETRAIN": "examples/pretrain_gpt.py", "RUN_FLAGS": "--cpu"}
        own |= {"REQUEUED": str(tmp_path / "requeued"), "PATH": path}
        environment = os.environ | slurm | own | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | more
        command = [shutil.which("bash"), BATCH, tmp_path / "small.flags", *map(str, flags)]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)

    return run, tmp_path / "requeued"


@pytest.mark.wide
def test_a_job_looks_plans_checks_trains_and_resumes(job):
    run, requeued = job
    first = run("--train-iters", 3, "--exit-interval", 2)
    assert first.returncode == 0, first.stdout[-3000:] + first.stderr[-3000:]
    marks = ["2 ranks, data-parallel size", "State, with fp32", "2 ranks: 64 MiB are summed in", r"iteration +1/"]
    places = [found.start() if (found := re.search(mark, first.stdout)) else mark for mark in marks]
    assert places == sorted(places)
    second = run("--train-iters", 3)
    assert second.returncode == 0, second.stderr[-3000:]
    assert re.findall(r" iteration +(\d+)/", second.stdout) == ["3"]
    assert not requeued.exists()


@pytest.mark.wide
def test_a_job_goes_back_into_the_queue_but_not_if_it_fails_again_and_again(job, tmp_path):
    run, requeued = job
    saves = "import sys; open(sys.argv[sys.argv.index('--save') + 1] + '/latest_checkpointed_iteration.txt', 'w')"
    (tmp_path / "saved").mkdir()
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    (tmp_path / "saves.py").write_text(f"{saves}.write('7'); raise SystemExit(3)")
    own = {"SLURM_JOB_END_TIME": str(int(time.time()) + 3600)}
    for script, status, said in (
        ("fails", 0, "back into the queue: status 1, last saved iteration: nothing"),
        ("saves", 0, "back into the queue: status 1, last saved iteration: 7"),
        ("fails", 0, "back into the queue: status 1, last saved iteration: 7"),
        ("fails", 1, "not back into the queue: status 1, and nothing new was saved in 2 starts (7)"),
    ):
        requeued.unlink(missing_ok=True)
        done = run("--train-iters", 2, PRETRAIN=str(tmp_path / f"{script}.py"), RETRIES="1", **own)
        assert done.returncode == status
        assert said in done.stderr
        assert requeued.exists() == (status == 0)


@pytest.mark.full
def test_a_job_saves_before_its_time_ends_and_goes_on(job, tmp_path):
    """One minute from when its training starts, of many iterations."""
    run, requeued = job
    own = {"SLURM_JOB_END_TIME": str(int(time.time()) + 15 * 60 + 150)}
    done = run("--train-iters", 100000, "--log-interval", 1000, **own)
    assert done.returncode == 0, done.stderr[-3000:]
    (iteration,) = re.findall(r"back into the queue: status 0, last saved iteration: (\d+)", done.stderr)
    assert 0 < int(iteration) < 100000
    assert requeued.read_text() == "requeue 7\n"
    shorter = "--train-iters", iteration, "--use-checkpoint-opt_param-scheduler"
    done = run(*shorter, SLURM_JOB_END_TIME=str(int(time.time()) + 3600))
    assert done.returncode == 0, done.stderr[-3000:]  # which has nothing to go on with
    assert requeued.read_text() == "requeue 7\n"
    done = run("--train-iters", 100000, SLURM_JOB_END_TIME=str(int(time.time()) + 60))
    assert done.returncode == 2
    assert "in less than MARGIN_MINUTES" in done.stderr


@pytest.mark.wide
def test_a_mistake_ends_a_job_before_it_trains(job):
    run, requeued = job
    for mistake, message in (
        (["--muon-prest", "match_adamw"], "unrecognized arguments: --muon-prest"),
        (["--load", "elsewhere"], "--save and --load are what SAVE says"),
        (["--save=elsewhere"], "--save and --load are what SAVE says"),
    ):
        done = run("--train-iters", 2, *mistake)
        assert done.returncode == 2
        assert message in done.stderr
        assert "ranks: 64 MiB" not in done.stdout
    assert not requeued.exists()
