"""A resumed run is the run that never stopped, bit for bit: every optimizer in every layout and precision."""

import pytest

from tests.megatron.runs import (
    CLIP,
    CP2,
    EXACT,
    EXPERTS,
    FILES,
    FLAGS,
    PP2,
    SHARED,
    SMALL_GPT,
    TIED,
    TP2,
    resumed,
    train,
    whole,
)
from tests.optimizers.family import OPTIMIZERS, keeps_state

# Learning rates that warm up and decay, another one for embeddings, growing weight decay, and clipping in every step:
# a group that is matched wrongly, or a scheduler that starts anew, shows in the parameters.
SCHEDULE = """
    --lr 1e-2 --min-lr 1e-3 --decoupled-lr 5e-3 --lr-decay-style cosine --lr-warmup-iters 2 --lr-decay-iters 6
    --weight-decay-incr-style linear --start-weight-decay 0.01 --end-weight-decay 0.1 --clip-grad 0.5
""".split()
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
# The others are run by `make test-full`; test_family.py has TP2 in fp32.
SOONER = {
    ("muon", "EP2", "fp32"): (),
    ("adamuon", "PP2", "bf16"): pytest.mark.wide,
    ("normuon", "TP2", "fp32"): (),
    ("namo", "DP2-distributed", "bf16"): (),
    ("lion", "DP2", "fp32"): pytest.mark.wide,
    ("muon+lion", "PP2-embedding", "bf16"): (),
}
OF_ALL = {
    "TP2": "bf16",
    "PP2-tied": "fp32",
    "PP2-embedding": "bf16",
    "DP2": "fp32",
    "DP2-distributed": "bf16",
    "EP2": "fp32",
}
COMBINATIONS = [
    pytest.param(*one, id="-".join(one), marks=SOONER.get(one, pytest.mark.full))
    for one in {**SOONER, **{(name, *each): () for name in FLAGS for each in OF_ALL.items()}}
    if one[:2] != ("schedule_free_adamw", "DP2-distributed")  # which is refused
]


@pytest.mark.parametrize(("optimizer", "layout", "precision"), COMBINATIONS)
@pytest.mark.shows("--optimizer muon", "fp32", "--bf16", "--ckpt-format torch_dist")
def test_a_resumed_run_is_the_straight_one(tmp_path, optimizer, layout, precision):
    layers = 1 if layout == "PP2-embedding" else 2
    run = ["--num-layers", layers, *SCHEDULE, *FLAGS[optimizer], *CLIP, *LAYOUTS[layout], *PRECISIONS[precision]]
    model = TIED if layout == "PP2-tied" else SMALL_GPT
    (straight, output), (_, said) = resumed(tmp_path, 2, *run, "--train-iters", 6, *FILES, at=3, model=model)
    assert output.count("megatron_eopt: iteration") == 6
    assert "other settings than the checkpoint" not in said
    assert "it is left out" not in said

    if optimizer not in OPTIMIZERS or keeps_state(optimizer):  # each parameter has an optimizer
        states = whole([rank["after"] for rank in straight]).values()
        assert all(state.keys() - {"parameter", "main", "cut"} for state in states)


@pytest.mark.wide
@pytest.mark.parametrize(("optimizer", "precision"), [("normuon", "bf16"), ("muon+lion", "fp32")])
@pytest.mark.shows("--ckpt-format torch")
def test_files_of_the_torch_format_are_read_again(tmp_path, optimizer, precision):
    """Megatron's, which it reads as plain values: with logical matrices declared, which are marks on parameters."""
    run = ["--num-layers", 2, *SCHEDULE, *FLAGS[optimizer], *CLIP, "--muon-split", "all", *TP2]
    resumed(tmp_path, 2, *run, *PRECISIONS[precision], "--ckpt-format", "torch", "--train-iters", 4)


@pytest.mark.wide
@pytest.mark.parametrize("optimizer", ["muon", "kl_shampoo"])
@pytest.mark.shows("context parallelism")
def test_context_parallel_ranks_train_as_one_and_resume(tmp_path, optimizer):
    """With the attention of the tests: Megatron's own over these ranks is Transformer Engine's."""
    run = ["--num-layers", 2, *SCHEDULE, *FLAGS[optimizer], *EXACT, *FILES, "--train-iters", 4]
    (straight, _), _ = resumed(tmp_path, 2, *run, *CP2)
    (alone,), _ = train(tmp_path / "alone", 1, *run)
    assert straight[0]["grad_norms"] == pytest.approx(alone["grad_norms"], rel=1e-3)
