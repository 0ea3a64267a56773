"""State moves between layouts unchanged, and training goes on as if the run had never moved."""

import functools
import itertools

import pytest

from tests.megatron.runs import (
    EP2,
    EXACT,
    FILES,
    FLAGS,
    PP2,
    SHARED,
    TP2,
    assert_same,
    full,
    losses,
    saving,
    train,
    whole,
    wide,
)
from tests.megatron.test_same_gradients import GPT, PLAIN, PROGRAM
from tests.megatron.test_same_gradients import OPTIMIZERS as OF_SAME_GRADIENTS

(TP, _), (PP, _), (EP, _) = TP2, PP2, EP2
TP_CHAIN = [(2, [TP, 2]), (1, []), (2, [TP, 2]), (4, [TP, 4])]
BF16 = ["--bf16"]
FSDP = ["--use-torch-fsdp2"]
EXPERTS = ["--num-experts", 8, "--moe-token-dispatcher-type", "alltoall"]
FSDP_CHAIN = [(2, FSDP), (4, [*FSDP, TP, 2]), (1, []), (4, FSDP)]
ONE_EACH = ["--micro-batch-size", 1]  # the four of a step are enough for four ranks
# Ranks and flags of the layouts that a run is in, one after the other, and the flags that it always has. All start with
# the same weights, which on pipeline and expert ranks would be other random numbers.
CHAINS = {
    "TP": (TP_CHAIN, []),
    "TP-bf16": (TP_CHAIN, BF16),
    "PP": ([(1, []), (2, [PP, 2]), (1, [])], []),
    "TP-DP": ([(4, [TP, 2]), (2, []), (1, []), (4, [TP, 2])], []),
    "DP-distributed": ([(2, SHARED), (1, SHARED), (2, SHARED)], BF16),
    "DP-distributed-fp32": ([(2, SHARED), (1, []), (2, SHARED), (1, SHARED)], []),
    "FSDP": (FSDP_CHAIN, ONE_EACH),
    "FSDP-bf16": (FSDP_CHAIN, [*BF16, *ONE_EACH]),
    "FSDP-alone": ([FSDP_CHAIN[0], *FSDP_CHAIN[2:]], [*BF16, *ONE_EACH]),
    "EP": ([(1, []), (2, [EP, 2]), (1, [])], EXPERTS),
    # Two of each kind. Where experts meet tensor parallelism, Megatron asks for kernels of sequence parallelism.
    "TP2-PP2-DP2": ([(1, []), (8, [TP, 2, PP, 2, *SHARED]), (8, [TP, 4]), (1, [])], []),
    "PP2-EP2-ETP2": (
        [(1, []), (8, [PP, 2, EP, 2, "--expert-tensor-parallel-size", 2]), (4, [EP, 4]), (1, [])],
        [*EXPERTS, *ONE_EACH],
    ),
    # Keys of the second number its optimizers; in the third, which has no flag, experts have an optimizer of their own.
    "EP-distributed": (
        [(1, []), (2, [EP, 2, *SHARED]), (2, [EP, 2]), (4, [EP, 2, *SHARED])],
        [*EXPERTS, *BF16, *ONE_EACH],
    ),
}
STEPS = 2  # in each layout
# The others are run by `make test-full`.
SOONER = {("muon", "TP"): pytest.param, ("muon", "PP"): pytest.param, ("soap", "TP-DP"): wide}
SOONER |= {("muon", chain): wide for chain in ("EP-distributed", "TP2-PP2-DP2", "PP2-EP2-ETP2", "FSDP")}
SOONER |= {("muon", "DP-distributed-fp32"): wide}
OF_ALL = ("TP-bf16", "PP", "DP-distributed", "FSDP-bf16", "FSDP-alone", "EP")
ONE_SIDE = {"normuon", "spectron"}  # which refuse matrices that are cut along both sides
MOVES = [
    SOONER.get(move, full)(*move, id="-".join(move))
    for move in {**SOONER, **dict.fromkeys(itertools.product(FLAGS, OF_ALL))}
    if move[1] != ("FSDP-bf16" if move[0] in ONE_SIDE else "FSDP-alone")
    and move != ("schedule_free_adamw", "DP-distributed")  # which is refused
]


@pytest.fixture(scope="module")
def unmoved(tmp_path_factory):
    """(optimizer, flags of the model) -> losses of a run on one rank; each is made once."""

    @functools.cache
    def of(optimizer, *model):
        flags, how = run(optimizer, model), same_gradients(optimizer, model)
        return losses(train(tmp_path_factory.mktemp("unmoved") / "run", 1, *flags, **how)[0])

    return of


def run(optimizer, model):
    flags = FLAGS[optimizer]
    if optimizer == "soap":  # with fewer tokens than a matrix has rows, rounding chooses a part of its bases
        flags = [*flags, "--seq-length", 256, "--max-position-embeddings", 256]
    if same_gradients(optimizer, model):
        flags = [*PLAIN, *OF_SAME_GRADIENTS[optimizer]]
    return ["--num-layers", 2, *model, *flags, *EXACT, *FILES, "--train-iters", len(TP_CHAIN) * STEPS]


def same_gradients(optimizer, model):
    """How to train with the same gradients on any layout, where else SOAP's bases would follow from rounding."""
    return {"model": GPT, "program": PROGRAM} if optimizer == "soap" and "--bf16" not in model else {}


@pytest.mark.parametrize(("optimizer", "chain"), MOVES)
def test_a_run_moves(tmp_path, unmoved, optimizer, chain):
    layouts, model = CHAINS[chain]
    checkpoint = saving(tmp_path / "checkpoint", STEPS)
    state, seen = None, []
    for number, (ranks, layout) in enumerate(layouts):
        load = ["--load", tmp_path / "checkpoint"] if number else []
        how = same_gradients(optimizer, model)
        flags = [*run(optimizer, model), *layout, *checkpoint, *load]
        recorded, _ = train(tmp_path / str(number), ranks, *flags, **how)
        if state is not None:
            assert_same(whole([rank["before"] for rank in recorded]), state)
        state = whole([rank["after"] for rank in recorded])
        seen += losses(recorded)
    rel = 1e-2 if "--bf16" in model else 1e-5 if how else 1e-4
    assert seen == pytest.approx(unmoved(optimizer, *model)[: len(seen)], rel=rel)
