"""Start real Megatron runs on this machine and read what they recorded."""

import atexit
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from examples import loopback
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.routing import from_json, rows
from tests.optimizers.family import RECORDS

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

# A GPT with grouped queries, SwiGLU, RMSNorm and RoPE. Its vocabulary is padded to 128 at any number of ranks, so that
# losses can be compared.
SMALL_GPT = """
    --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --swiglu --normalization RMSNorm --position-embedding-type rope --seq-length 32 --max-position-embeddings 32
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --min-lr 1e-2 --lr-decay-style constant
    --vocab-size 127 --make-vocab-size-divisible-by 32 --tokenizer-type NullTokenizer
    --untie-embeddings-and-output-weights --disable-bias-linear
    --transformer-impl local --attention-backend unfused --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion
    --no-persist-layer-norm --no-rope-fusion --no-create-attention-mask-in-dataloader --num-workers 0
    --hidden-dropout 0 --attention-dropout 0 --log-interval 1 --eval-iters 0 --eval-interval 1000
""".split()
WITHOUT_GQA = SMALL_GPT.copy()
WITHOUT_GQA[(_first := WITHOUT_GQA.index("--group-query-attention")) : _first + 3] = []
TIED = [flag for flag in SMALL_GPT if flag != "--untie-embeddings-and-output-weights"]
MLA = """--multi-latent-attention --q-lora-rank 24 --kv-lora-rank 20 --qk-head-dim 12 --qk-pos-emb-head-dim 8
    --v-head-dim 16 --rotary-scaling-factor 1""".split()
TP2, PP2, CP2, EP2, ETP2 = (
    [f"--{name}-parallel-size", 2]
    for name in ("tensor-model", "pipeline-model", "context", "expert-model", "expert-tensor")
)
MOE = ["--num-experts", 4, "--moe-router-topk", 2, "--moe-ffn-hidden-size", 48]
EXPERTS = ["--num-experts", 4, *EP2, "--moe-token-dispatcher-type", "alltoall"]
SHARED = ["--use-distributed-optimizer"]
OVERLAP = ["--overlap-grad-reduce", "--overlap-param-gather"]
EXACT = ["--muon-fp32-matmul-prec", "highest"]
FILES = ["--ckpt-format", "torch_dist"]
MUON = ["--optimizer", "muon", "--muon-nesterov", "--muon-momentum", "0.95", "--muon-extra-scale-factor", "0.2"]
ADAPTIVE = ["--optimizer", "adaptive_muon", *MUON[2:], "--adaptive-muon-moment2-method"]
# Flags of every optimizer, and of what else of Muon keeps other state.
FLAGS = {
    "muon": MUON,
    **{method: [*ADAPTIVE, method] for method in ("adamuon", "normuon", "namo")},
    "muon+lion": [*MUON, "--muon-scalar-optimizer", "lion"],
    **{
        name: ["--optimizer", name, *RECORDS[name].megatron.split()]
        for name in OPTIMIZERS
        if name not in ("muon", "adaptive_muon")
    },
}
# What a user may have on beside, and resumes with. Most logits of a model that is not trained are above the threshold.
CLIP = ["--qk-clip", "--qk-clip-threshold", "5e-3"]
LAUNCHER = ["-m", "megatron_eopt.run", "--cpu", str(HERE / "pretrain.py")]
FAULTY = [*LAUNCHER[:-1], str(HERE / "faulty.py")]
CASES = [*LAUNCHER[:-1], str(HERE / "user_cases.py")]
UPSTREAM = [str(HERE / "upstream.py"), str(HERE / "pretrain.py")]
LAID_OUT = {"environment": {"FROM_PROVIDER": "1"}}  # gradient buffers are, for whole matrices
since_0_20 = pytest.mark.since(0, 20)


def wide(*values, id=None):
    """A case of the wide subset."""
    return pytest.param(*values, id=id, marks=pytest.mark.wide)


def full(*values, id=None):
    """A case of the long matrices."""
    return pytest.param(*values, id=id, marks=pytest.mark.full)


def doing(what):
    """How to start a run to which something is done: see user_cases.py."""
    return {"program": CASES, "environment": {"DO": what}}


def saving(folder, step):
    """Flags of a run that saves after a step, and ends."""
    return ["--save", folder, "--save-interval", step, "--exit-interval", step]


def overriding(folder, *entries):
    """Flags of a run with overrides, which are written to a file."""
    file = folder / "overrides.json"
    file.write_text(json.dumps(entries))
    return ["--optimizer-overrides", file]


def manifest_of(file):
    """Name of each parameter -> its row."""
    found = rows(from_json(json.loads(file.read_text())))
    by_name = {row.name: row for row in found}
    assert len(by_name) == len(found), "a parameter has two optimizers"
    return by_name


def write_torchrun(folder):
    """A command for PATH that stands in for torchrun, and listens on the loopback interface alone."""
    folder.mkdir(exist_ok=True)
    (folder / "torchrun").write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT}/examples/loopback.py" "$@"\n')
    (folder / "torchrun").chmod(0o755)


def without_emerging_optimizers(folder):
    """A folder for PYTHONPATH that hides the emerging-optimizers package, which users need not have."""
    (folder / "emerging_optimizers-0.0.0.dist-info").mkdir(parents=True)
    metadata = "Metadata-Version: 2.1\nName: emerging-optimizers\nVersion: 0.0.0\n"
    (folder / "emerging_optimizers-0.0.0.dist-info" / "METADATA").write_text(metadata)
    (folder / "emerging_optimizers.py").write_text("raise ImportError('hidden by the test')\n")
    return folder


class _Forks:
    """A process that has imported Megatron and forks for each run of a launcher; started when it is first needed."""

    def __init__(self, launcher):
        self._launcher, self._process = launcher, None

    def run(self, program, ranks, arguments, environment, directory, timeout):
        if self._process is None:
            self._begin()
        with tempfile.NamedTemporaryFile(suffix=".txt") as output:
            store = loopback.listening_store()
            address = loopback.environment(store)
            size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            run = {
                "program": program,
                "ranks": ranks,
                "arguments": arguments,
                "environment": address | size | environment,
                "directory": str(directory),
                "output": output.name,
                "seconds": timeout,
            }
            print(json.dumps(run), file=self._process.stdin, flush=True)
            status = int(self._process.stdout.readline())
            return subprocess.CompletedProcess(arguments, status, Path(output.name).read_text())

    def _begin(self):
        folder = tempfile.TemporaryDirectory()
        path = _path(self._launcher, Path(folder.name) / "hidden")
        self._process = subprocess.Popen(
            [sys.executable, *self._launcher, str(HERE / "forked.py")],
            env=_environment(path) | {"LOCAL_WORLD_SIZE": "8"},  # the CPU backend counts its devices once
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        atexit.register(self._end, folder)

    def _end(self, folder):
        self._process.stdin.close()
        self._process.wait(timeout=30)
        folder.cleanup()


_forks = {tuple(program[:-1]): _Forks(program[:-1]) for program in (LAUNCHER, UPSTREAM)}


def _path(launcher, folder, packages=None):
    hidden = without_emerging_optimizers(folder) if launcher != UPSTREAM[:-1] else None
    return [str(each) for each in (hidden, packages, ROOT, os.environ.get("PYTHONPATH")) if each]


def _environment(path):
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "CUDA_VISIBLE_DEVICES": "",  # the CPU backend refuses to stand in for a GPU that is there
    }


def start(
    ranks,
    *arguments,
    program=LAUNCHER,
    packages=None,
    record=None,
    timeout=240,
    directory=ROOT,
    environment=None,
    forked=True,
):
    """Run a program on ranks of this machine, over loopback; the finished process, with its output as text.

    Those of the two launchers fork from a process that has imported Megatron, unless ``forked`` is False; any other is
    started by torchrun.
    ``packages`` is a folder whose packages come before the installed ones.
    """
    arguments = without_idle([*map(str, arguments)])
    environment = (environment or {}) | ({} if record is None else {"RECORD": str(record)})
    if forked and packages is None and (forks := _forks.get(tuple(program[:-1]))):
        return forks.run(program[-1], ranks, arguments, environment, directory, timeout)
    with tempfile.TemporaryDirectory() as name:
        path = _path(program[:-1], Path(name) / "hidden", packages)
        torchrun = [sys.executable, ROOT / "examples" / "loopback.py", f"--nproc-per-node={ranks}"]
        return subprocess.run(
            [*torchrun, *program, *arguments],
            env=_environment(path) | environment,
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )


def without_idle(arguments):
    """Without precision and eps, which tests give to all runs, where the optimizer reads none and would refuse them."""
    named = [value for flag, value in itertools.pairwise(arguments) if flag == "--optimizer"]
    row = OPTIMIZERS.get(named[-1]) if named else None
    idle = set()
    if row is not None and "fp32_matmul_prec" not in row.of_muon:
        idle.add(EXACT[0])
    if row is not None and row.owns == "all" and row.betas != "adam":
        idle.add("--adam-eps")
    return [each for flag, each in itertools.pairwise(["", *arguments]) if not idle & {flag, each}]


def train(folder, ranks, *arguments, model=SMALL_GPT, **how):
    """Train a model, started in the way that :func:`start` takes; what each rank recorded, and the output."""
    folder.mkdir(parents=True)
    done = start(ranks, *model, *arguments, record=folder, **how)
    if done.returncode:
        lines = done.stdout.splitlines()
        said = [line for line in lines if line.startswith("[rank")][-40:]
        # what ends a process by a signal says so in one line, among those of the ranks that lost it
        others = [line for line in lines if not line.startswith("[rank")][-40 if said else -200 :]
        raise AssertionError("\n".join([f"exit status {done.returncode}", *others, *said]))
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)], done.stdout


def refused(*arguments, ranks=1, model=SMALL_GPT, **how):
    """What a run says that ends with an error before its first step."""
    done = start(ranks, *model, *arguments, **how)
    assert done.returncode != 0
    assert "iteration        1/" not in done.stdout
    return done.stdout


def resumed(folder, ranks, *run, at=2, **how):
    """A run that saves on the way, and the one that goes on from there, which ends the same bit for bit.

    Returns what :func:`train` does of each. ``at`` is the step after which the second one goes on.
    """
    save, load = (["--save", folder / "checkpoint", "--save-interval", at], ["--load", folder / "checkpoint"])
    straight = train(folder / "straight", ranks, *run, *save, **how)
    again = train(folder / "resumed", ranks, *run, *load, "--ckpt-step", at, **how)
    assert_same_ranks(again[0], straight[0])
    for one, other in zip(again[0], straight[0], strict=True):
        assert one["groups"] == other["groups"]
        assert one["grad_norms"] == other["grad_norms"][at:]
        assert one["losses"] == other["losses"][len(other["losses"]) - len(one["losses"]) :]
    return straight, again


RATES = ("max_lr", "min_lr", "lr", "start_wd", "end_wd", "weight_decay")


def assert_flags_win(folder, *run, before, after, ranks=1, **how):
    """A resume with ``--override-opt-param-scheduler`` has the rates of a run with the same flags, in every step.

    ``before`` and ``after`` are the flags of the run that saves and of the one that goes on. Returns what that one's
    ranks recorded.
    """

    def rates(groups):
        return [[{key: group.get(key) for key in RATES} for group in of_one] for of_one in groups]

    run = [*run, "--lr-decay-style", "cosine", "--lr-decay-iters", 8, "--train-iters", 4]
    train(folder / "saved", ranks, *run, *before, *saving(folder / "checkpoint", 2), **how)
    load = ["--load", folder / "checkpoint", "--override-opt-param-scheduler"]
    loaded, _ = train(folder / "loaded", ranks, *run, *after, *load, **how)
    fresh, _ = train(folder / "fresh", ranks, *run, *after, **how)
    for one, other in zip(loaded, fresh, strict=True):
        assert [*map(rates, one["groups_of_steps"])] == [*map(rates, other["groups_of_steps"][2:])]
        assert rates(one["groups"]) == rates(other["groups"])
    return loaded


def assert_same(a, b):
    """Two snapshots are equal bit for bit, in what they hold and in every tensor."""
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].keys() == b[name].keys(), name
        for key in a[name]:
            equal = torch.equal(a[name][key], b[name][key]) if key != "cut" else a[name][key] == b[name][key]
            assert equal, (name, key)


def assert_same_ranks(found, expected):
    """Each rank of two runs ends with the same parameters and state, bit for bit."""
    for one, other in zip(found, expected, strict=True):
        assert_same(one["after"], other["after"])


def unchanged(ranks):
    """Names of the parameters of which no rank's part was changed by training."""
    of_ranks = {}
    for rank in ranks:
        for name, after in rank["after"].items():
            same = torch.equal(rank["before"][name]["parameter"], after["parameter"])
            of_ranks[name] = of_ranks.get(name, True) and same
    return {name for name, same in of_ranks.items() if same}


def assert_trains_as(found, expected, rel=1e-5):
    """Two runs have the same losses and the same norms of gradients, but for rounding."""
    assert losses(found) == pytest.approx(losses(expected), rel=rel)
    for rank in found:
        assert rank["grad_norms"] == pytest.approx(expected[0]["grad_norms"], rel=rel)


def whole(snapshots):
    """The snapshots of all ranks as one of the whole model: what any layout is compared with.

    Ranks that have the same part of a parameter must agree bit for bit; where only one of them has its optimizer state,
    as under the distributed optimizer, that is taken.
    """
    found = {}  # name -> which part -> what the ranks that have it recorded
    for snapshot in snapshots:
        for name, recorded in snapshot.items():
            part = found.setdefault(name, {}).setdefault(recorded["cut"][1], {"cut": recorded["cut"]})
            both = recorded.keys() & part.keys() - {"cut"}
            elsewhere = {key for key in both if of_one_rank(key) and not recorded[key].numel()}
            for key in both - elsewhere:
                lacking = of_one_rank(key) and not part[key].numel()
                assert lacking or torch.equal(recorded[key], part[key]), (name, key, "differs between replicas")
            part.update({key: value for key, value in recorded.items() if key not in elsewhere})
    return {name: _joined(name, [parts[index] for index in sorted(parts)]) for name, parts in found.items()}


def of_one_rank(key):
    """Whether one rank of those that share a matrix may keep a state tensor alone."""
    return key[0] in "LRQP"


def _joined(name, parts):
    first = parts[0]
    return {key: _join(name, key, parts) for key in first if key != "cut"} | {"cut": first["cut"]}


def _join(name, key, parts):
    tensors = [part[key] for part in parts]
    if of_one_rank(key):
        tensors = [tensor for tensor in tensors if tensor.numel()]
    if len(tensors) == 1:
        return tensors[0]
    dim, shape = parts[0]["cut"][0], parts[0]["parameter"].shape
    of_matrix = key[-1].isdigit()  # of one of several logical matrices
    if tensors[0].shape != shape or of_matrix:  # which is cut as its parameter
        # Something of rows or columns, or of neither, which is equal where it does not lie along the side that is cut.
        # No shard of a matrix of the small GPT is square, so that a statistic's length says along which side it lies.
        if all(torch.equal(tensors[0], other) for other in tensors):
            return tensors[0]
        shapes = {tensor.shape for tensor in tensors}
        assert not shapes <= {(), (shape[1 - dim],)}, (name, key, "differs between parts")
        dim = 0
    # Each shard is a part of the gate over a part of the up projection; of one of the two it is a part as it is.
    if name.endswith("linear_fc1.weight") and not of_matrix:
        halves = zip(*(tensor.chunk(2, dim) for tensor in tensors), strict=True)
        return torch.cat([torch.cat(half, dim) for half in halves], dim)
    return torch.cat(tensors, dim)


def assert_close_in_bf16(found, expected):
    """Matrices of a bf16 run of five steps of Muon are where they are on another layout, as far as rounding lets them.

    Layouts sum gradients in bf16 in different orders, which changes them by 2^-9 of their norm. The slope of the
    iteration is at most that of its polynomials at zero, 3.4445 each, so that a factor, which is as long as the root of
    its rank, changes by 3.4445^5 2^-9 at most.
    """
    assert losses(found) == pytest.approx(losses(expected), rel=1e-2)
    at, other = (whole([rank["after"] for rank in ranks]) for ranks in (found, expected))
    before = whole([rank["before"] for rank in expected])
    matrices = [name for name in other if "momentum_buffer" in other[name]]
    assert matrices
    for name in matrices:
        main = other[name]["main"]
        travelled, apart = (main - before[name]["main"]).norm(), at[name].get("main", at[name]["parameter"]) - main
        assert apart.norm() <= 3.4445**5 * 2**-9 / min(main.shape) ** 0.5 * travelled, name


def losses(ranks):
    """The loss of each micro-batch in order, whichever rank took it: data-parallel ranks take turns."""
    different = dict.fromkeys(tuple(rank["losses"]) for rank in ranks if rank["losses"])
    return [loss for turn in zip(*different, strict=True) for loss in turn]
