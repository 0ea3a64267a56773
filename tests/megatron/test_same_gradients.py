"""With the same gradients, Megatron's optimizer takes the steps of one rank on any layout, but for rounding."""

import functools
import itertools

import pytest
import torch

from tests.megatron.runs import (
    ADAPTIVE,
    CP2,
    EP2,
    ETP2,
    EXACT,
    FILES,
    HERE,
    LAUNCHER,
    MUON,
    PP2,
    SHARED,
    TP2,
    WITHOUT_GQA,
    full,
    train,
    whole,
    wide,
)
from tests.megatron.test_megatron_fsdp import fsdp
from tests.optimizers.family import OPTIMIZERS as FAMILY

BOUND = 1e-5
"""Of the way from the first weights, and of the norm of state.

Rounding is less: where one rank gets gradients of which half of all entries are off in their last bit, SOAP's weights
are 5e-6 apart, those of the others 5e-7.
"""

PROGRAM = [*LAUNCHER[:-1], str(HERE / "same_gradients.py")]
GROUPED, UNTIED = ["--group-query-attention", "--num-query-groups"], "--untie-embeddings-and-output-weights"
# The short side of every logical matrix is 8, and its long side a multiple.
GPT = [flag for flag in WITHOUT_GQA if flag != UNTIED]
GPT += ["--hidden-size", 8, "--ffn-hidden-size", 24, "--num-attention-heads", 8, "--kv-channels", 8, "--num-layers", 2]
GPT += ["--seq-length", 16, "--micro-batch-size", 1, "--global-batch-size", 2, "--train-iters", 6]
GPT += [*EXACT, *FILES]
GPT += ["--clip-grad", 1e6]  # a gradient that is clipped is rounded
OPTIMIZERS = {
    "muon": MUON,
    # Where a gradient is nearly zero in its eigenbases, rounding makes its sign, which a small eps would make a step.
    "soap": "--optimizer soap --soap-max-dim 8 --soap-precondition-frequency 2 --adam-eps 1".split(),
    # Where gradients span no side, the damping is all there is.
    "shampoo": "--optimizer shampoo --shampoo-max-dim 8 --shampoo-damping 1e-2".split(),
    "kl_shampoo": """--optimizer kl_shampoo --kl-shampoo-max-dim 8 --kl-shampoo-damping 1e-2
        --kl-shampoo-basis-method eigh --kl-shampoo-weight-norm hold""".split(),
    "normuon": [*ADAPTIVE, "normuon"],
    # With so large a rate steps are not short beside what the projection to the rank moves.
    "spectron": "--optimizer spectron --spectron-rank 4 --muon-lr 0.5 --muon-min-lr 0.5".split(),
}
TP4 = ["--tensor-model-parallel-size", 4]
EXPERTS = ["--num-experts", 8, "--moe-router-topk", 2, "--moe-token-dispatcher-type", "alltoall"]
LATENT = """--multi-latent-attention --q-lora-rank 8 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 16
    --v-head-dim 8 --rotary-scaling-factor 1""".split()
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
PLAIN = [*GROUPED, 1, UNTIED]  # with TP a shard ends inside of the group
LAYOUTS = {  # ranks, flags of the layout, flags of the model
    "TP2": (2, TP2, PLAIN),
    "TP4": (4, TP4, PLAIN),
    "two query groups-TP2": (2, TP2, [*GROUPED, 2, "--kv-channels", 16, UNTIED]),
    "gated attention-TP2": (2, TP2, [*PLAIN, "--attention-output-gate"]),
    "latent attention-TP2": (2, TP2, [*LATENT, UNTIED]),
    "gate and up-TP2": (2, TP2, [*PLAIN, "--muon-split", "all"]),
    "EP2": (2, EP2, [*PLAIN, *EXPERTS]),
    "ETP2": (2, ETP2, [*PLAIN, *EXPERTS]),
    "DP2-distributed": (2, SHARED, PLAIN),
    "Megatron-FSDP": (2, fsdp("optim_grads_params"), PLAIN),
    "FSDP2": (2, ["--use-torch-fsdp2"], PLAIN),
    "TP2-FSDP2": (4, [*TP2, "--use-torch-fsdp2"], PLAIN),
    "TP2-DP2": (4, TP2, PLAIN),
    "TP2-PP2": (4, [*TP2, *PP2], PLAIN),
    "DP2": (2, [], PLAIN),
    "CP2": (2, CP2, PLAIN),
    "PP2": (2, PP2, PLAIN),
    "interleaved PP2": (2, [*PP2, "--num-layers-per-virtual-pipeline-stage", 1], [*PLAIN, "--num-layers", 4]),
    "tied-PP2": (2, PP2, PLAIN[:-1]),
}
ONE_SIDE = {"normuon", "spectron"}  # which refuse matrices that are cut along both sides
# Layouts in which these do what they do in others, run by `make test-full` alone.
PARALLEL = {"DP2", "CP2", "PP2", "interleaved PP2", "tied-PP2", "TP2-DP2", "TP2-PP2"}
OF_MODELS = {"TP4", "two query groups-TP2", "gated attention-TP2", "latent attention-TP2", "gate and up-TP2"}
LIKE_OTHERS = dict.fromkeys(ONE_SIDE, PARALLEL) | dict.fromkeys(("shampoo", "kl_shampoo"), PARALLEL | OF_MODELS)
BESIDE = {  # run by `make test-full` alone
    "adamuon": [*ADAPTIVE, "adamuon"],
    "namo": [*ADAPTIVE, "namo"],
    "scion": ["--optimizer", "scion", "--muon-lr", 4e-2, "--muon-min-lr", 4e-2],
    "signum": ["--optimizer", "signum", "--lr", 1e-3, "--min-lr", 1e-3],
    "lion": ["--optimizer", "lion", "--lr", 1e-3, "--min-lr", 1e-3],
    # so many that the rows of the fault are among them
    "dion2": ["--optimizer", "dion2", "--dion2-fraction", 0.75],
}
NAMED = {*OPTIMIZERS, *BESIDE, "adaptive_muon"}
BESIDE |= {name: ["--optimizer", name] for name in FAMILY if name not in NAMED}
SOONER = {"muon", "soap", "spectron"}  # than the wide subset, with two tensor-parallel ranks


def case(optimizer, layout):
    mark = full if layout in LIKE_OTHERS.get(optimizer, ()) or optimizer in BESIDE else wide
    if layout == "TP2" and optimizer in SOONER:
        mark = pytest.param
    return mark(optimizer, layout, id=f"{optimizer}-{layout}")


CASES = [
    case(*each)
    for each in itertools.product(OPTIMIZERS, LAYOUTS)
    if not (each[0] in ONE_SIDE and each[1] == "TP2-FSDP2")
]
CASES += [case(*each) for each in itertools.product(BESIDE, ("TP2", "EP2"))]


def trained(folder, ranks, optimizer, flags, fault=""):
    """The whole parameters and state before the first step and after the last, and the norms of gradients."""
    run = [*(OPTIMIZERS | BESIDE)[optimizer], *flags]
    found, _ = train(folder, ranks, *run, model=GPT, program=PROGRAM, environment={"FAULT": fault})
    before, after = (whole([rank[when] for rank in found]) for when in ("before", "after"))
    return before, after, found[-1]["grad_norms"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one rank makes of (optimizer, flags of the model, fault); each is trained once."""

    @functools.cache
    def made(optimizer, flags, fault):
        return trained(tmp_path_factory.mktemp("alone") / "run", 1, optimizer, flags, fault)

    return lambda optimizer, flags, fault="": made(optimizer, tuple(flags), fault)


def apart(found, expected):
    """How far parameters are apart, of the way from where both began, and state, of its norm: (name, key) -> that."""
    distances = {}
    for name, state in expected[1].items():
        begin = expected[0][name]["parameter"]
        assert torch.equal(found[0][name]["parameter"], begin), name
        assert found[1][name].keys() == state.keys(), name
        for key in state.keys() - {"cut"}:
            one, other = (result[1][name][key].double() for result in (expected, found))
            assert one.shape == other.shape, (name, key)
            if key.startswith("Q"):  # eigenvectors have either sign
                other = other * (one * other).sum(0).sign()
            length = (one - begin if key == "parameter" else one).norm().item()
            distances[name, key] = (other - one).norm().item() / length
    return distances


def beyond(distances, bound):
    return {of: distance for of, distance in distances.items() if not distance <= bound}


@pytest.mark.parametrize(("optimizer", "layout"), CASES)
@pytest.mark.shows(
    "--optimizer soap",
    "--optimizer spectron",
    "tensor, pipeline (also interleaved) and data parallelism",
    "context parallelism",
    "expert parallelism",
    "--use-distributed-optimizer in fp32",
    "--use-megatron-fsdp",
    "--use-torch-fsdp2",
)
def test_a_layout_takes_the_steps_of_one_rank(tmp_path, alone, optimizer, layout):
    ranks, flags, model = LAYOUTS[layout]
    found, expected = trained(tmp_path / "run", ranks, optimizer, [*model, *flags]), alone(optimizer, model)
    assert not beyond(apart(found, expected), BOUND)
    assert found[2] == pytest.approx(expected[2], rel=1e-6)
    faulty = apart(found, alone(optimizer, model, "shards"))
    for layer in (0, 1):
        assert faulty[f"decoder.layers.{layer}.self_attention.linear_proj.weight", "parameter"] > 100 * BOUND
    if UNTIED not in model:
        assert torch.equal(found[1][OUTPUT]["parameter"], found[1][EMBEDDING]["parameter"])
