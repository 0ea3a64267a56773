"""A resumed run is the run that never stopped, bit for bit: every optimizer in every layout and precision."""

import itertools

import pytest
from tables import state_tensors

from megatron_eopt.family import OPTIMIZERS
from tests.megatron.runs import (
    ADAPTIVE,
    CLIP,
    CP2,
    EXACT,
    EXPERTS,
    FILES,
    MUON,
    PP2,
    SHARED,
    SMALL_GPT,
    TIED,
    TP2,
    resumed,
    train,
    whole,
)

# Learning rates that warm up and decay, another one for embeddings, growing weight decay, and clipping in every step:
# a group that is matched wrongly, or a scheduler that starts anew, shows in the parameters.
SCHEDULE = """
    --lr 1e-2 --min-lr 1e-3 --decoupled-lr 5e-3 --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 6
    --weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1 --clip-grad 0.5
""".split()
CASES = {  # flags, and what is kept beside the parameters
    "muon": (MUON, {"momentum_buffer", "exp_avg_sq"}),
    "adamuon": ([*ADAPTIVE, "adamuon"], {"momentum_buffer", "moment2_buffer", "exp_avg_sq"}),
    "normuon": ([*ADAPTIVE, "normuon"], {"momentum_buffer", "moment2_buffer", "exp_avg_sq"}),
    "namo": ([*ADAPTIVE, "namo"], {"momentum_buffer", "moment2_buffer", "exp_avg_sq"}),
    "lion": (["--optimizer", "lion", "--lr", "1e-3", "--decoupled-lr", "5e-4"], {"exp_avg"}),
    "muon+lion": ([*MUON, "--muon-scalar-optimizer", "lion"], {"momentum_buffer", "exp_avg"}),
}
OWN = {
    # a router has four rows
    "spectron": (["--spectron-rank", 4], {"factor_A_0", "momentum_buffer_B", "u_A", "projected"}),
    "soap": (["--soap-precondition-frequency", 2], {"L", "R_0", "Q_L_1", "Q_R", "steps"}),
    "shampoo": (["--shampoo-weight-norm", "hold", "--shampoo-precondition-frequency", 2], {"L", "Q_R_0", "radius_1"}),
    "kl_shampoo": (["--kl-shampoo-basis-method", "eigh"], {"L", "Q_R_0", "exp_avg"}),
    "schedule_free_adamw": ([], {"z", "exp_avg_sq", "schedule"}),
    "signum": (["--lr", "1e-3", "--decoupled-lr", "5e-4"], {"exp_avg"}),
    "scion": (["--muon-lr", "4e-4", "--muon-min-lr", "4e-5"], {"momentum_buffer"}),
}
RELATIVES = {}
for name, row in OPTIMIZERS.items():
    if name not in ("muon", "adaptive_muon", "lion"):
        flags, states = OWN.get(name, ([], {tensor.key for tensor in state_tensors(row)}))
        RELATIVES[name] = (["--optimizer", name, *flags], states)
LAYOUTS = {
    "TP2": TP2,
    "PP2": PP2,
    # the first stage has the embedding alone: no matrix, and not all of the groups
    "PP2-embedding": [*PP2, "--account-for-embedding-in-pipeline-split"],
    "DP2": [],
    "DP2-distributed": SHARED,
    "EP2": EXPERTS,
    "PP2-tied": PP2,  # the embedding is on both stages
}
PRECISIONS = {"fp32": [], "bf16": ["--bf16"]}
# Each optimizer, each layout and both precisions once; the others are run by `make test-full`.
MARKS = {
    ("muon", "EP2", "fp32"): (),
    ("adamuon", "PP2", "bf16"): pytest.mark.wide,
    ("normuon", "TP2", "fp32"): (),
    ("namo", "DP2-distributed", "bf16"): (),
    ("lion", "DP2", "fp32"): pytest.mark.wide,
    ("muon+lion", "PP2-embedding", "bf16"): (),
}
OF_RELATIVES = {
    ("TP2", "bf16"),
    ("PP2-tied", "fp32"),
    ("PP2-embedding", "bf16"),
    ("DP2", "fp32"),
    ("DP2-distributed", "bf16"),
    ("EP2", "fp32"),
}


COMBINATIONS = [
    pytest.param(*one, id="-".join(one), marks=MARKS.get(one, pytest.mark.full))
    for one in itertools.product(CASES, LAYOUTS, PRECISIONS)
    if one[1] != "PP2-tied"
]
# Those of the relatives; test_family.py has TP2 in fp32.
COMBINATIONS += [
    pytest.param(*one, id="-".join(one), marks=pytest.mark.full)
    for one in itertools.product(RELATIVES, LAYOUTS, PRECISIONS)
    if one[1:] in OF_RELATIVES
    and not (one[1] == "DP2-distributed" and OPTIMIZERS[one[0]].cls.train_weight_key)  # which it is refused for
]


def steered(optimizer):
    """The flags of an optimizer, with QK-clip."""
    flags, _ = (CASES | RELATIVES)[optimizer]
    return [*flags, *CLIP]


@pytest.mark.parametrize(("optimizer", "layout", "precision"), COMBINATIONS)
@pytest.mark.shows("--optimizer muon", "fp32", "--bf16", "--ckpt-format torch_dist")
def test_a_resumed_run_is_the_straight_one(tmp_path, optimizer, layout, precision):
    _, kept = (CASES | RELATIVES)[optimizer]
    layers = 1 if layout == "PP2-embedding" else 2
    run = ["--num-layers", layers, *SCHEDULE, *steered(optimizer), *LAYOUTS[layout], *PRECISIONS[precision]]
    model = TIED if layout == "PP2-tied" else SMALL_GPT
    (straight, output), (_, said) = resumed(tmp_path, 2, *run, "--train-iters", 6, *FILES, at=3, model=model)
    assert output.count("megatron_eopt: iteration") == 6
    assert "other settings than the checkpoint" not in said
    assert "it is left out" not in said

    states = whole([rank["after"] for rank in straight]).values()
    assert kept <= {key for state in states for key in state}
    if kept:  # SinkGD keeps nothing; of all others each parameter has an optimizer
        assert all(state.keys() - {"parameter", "main", "cut"} for state in states)


@pytest.mark.wide
@pytest.mark.parametrize(("optimizer", "precision"), zip(CASES, itertools.cycle(PRECISIONS)))
@pytest.mark.shows("--ckpt-format torch")
def test_files_of_the_torch_format_are_read_again(tmp_path, optimizer, precision):
    """Megatron's, which it reads as plain values: with logical matrices declared, which are marks on parameters."""
    declared = ["--muon-split", "all"] if optimizer != "lion" else []
    run = ["--num-layers", 2, *SCHEDULE, *steered(optimizer), *declared, *TP2]
    resumed(tmp_path, 2, *run, *PRECISIONS[precision], "--ckpt-format", "torch", "--train-iters", 4)


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", ["muon", "kl_shampoo"])
@pytest.mark.shows("context parallelism")
def test_context_parallel_ranks_train_as_one_and_resume(tmp_path, optimizer):
    """With the attention of the tests: Megatron's own over these ranks is Transformer Engine's."""
    run = ["--num-layers", 2, *SCHEDULE, *(CASES | RELATIVES)[optimizer][0], *EXACT, *FILES, "--train-iters", 4]
    (straight, _), _ = resumed(tmp_path, 2, *run, *CP2)
    (alone,), _ = train(tmp_path / "alone", 1, *run)
    assert straight[0]["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-3)
