"""The logical matrices of real models: each is orthogonalized by itself, at every tensor-parallel size."""

import pytest
import torch

from megatron_eopt.orthogonalize import newton_schulz
from megatron_eopt.orthogonalize.scale import muon_scale_factor
from tests.megatron.runs import (
    ADAPTIVE,
    EXACT,
    FILES,
    HERE,
    MLA,
    MUON,
    TP2,
    WITHOUT_GQA,
    doing,
    full,
    manifest_of,
    overriding,
    refused,
    since_0_20,
    train,
    whole,
)

pytestmark = pytest.mark.wide

LR, DECAY, FACTOR = 1e-2, 0.1, 0.2
PRECISE = [*MUON, *EXACT, "--weight-decay", DECAY]
RUN = ["--num-layers", 1, "--train-iters", 1, *PRECISE]
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


def assert_updated(found, name, rows):
    """The first step orthogonalized each matrix of such rows of a parameter by itself."""
    before, after = (found[when][name] for when in ("before", "after"))
    wanted = torch.full_like(after["parameter"], torch.nan)
    for of_matrix in rows:
        part = after["momentum_buffer"][of_matrix]
        factor = LR * FACTOR * muon_scale_factor(*part.shape)
        wanted[of_matrix] = factor * newton_schulz(part, fp32_matmul_prec="highest")
    update = (1 - LR * DECAY) * before["parameter"] - after["parameter"]
    rounding = 2**-23 * after["parameter"].abs().max().item()  # of the parameter that it is taken from
    torch.testing.assert_close(update, wanted, rtol=0, atol=5e-5 * wanted.abs().max().item() + rounding)


def interleaved(rows, *sizes):
    """Rows of each part of groups that follow one another."""
    index = torch.arange(rows).view(-1, sum(sizes))
    return [part.flatten() for part in index.split(sizes, dim=1)]


def blocks(*sizes):
    """Rows of parts that follow one another."""
    return torch.arange(sum(sizes)).split(sizes)


def trained(folder, ranks, *flags, **how):
    """One step on tensor-parallel ranks: the whole model before and after; names and sizes of matrices; the output."""
    file = folder / "manifest.json"
    run = [*RUN, *flags, "--optimizer-manifest-file", file, "--tensor-model-parallel-size", ranks]
    recorded, output = train(folder / "run", ranks, *run, **how)
    matrices = {
        name: {matrix.name: (matrix.rows, matrix.cols) for matrix in row.matrices}
        for name, row in manifest_of(file).items()
    }
    return {when: whole([rank[when] for rank in recorded]) for when in ("before", "after")}, matrices, output


@pytest.mark.parametrize("ranks", [1, 2, full(4)])
def test_a_gpt(tmp_path, ranks):
    """Two query groups: at four ranks a shard ends inside of one."""
    found, matrices, _ = trained(tmp_path, ranks, "--muon-split", "all")
    assert_updated(found, QKV, interleaved(128, 32, 16, 16))
    assert_updated(found, FC1, blocks(96, 96))
    assert matrices[QKV] == {"q": (64, 64), "k": (32, 64), "v": (32, 64)}
    assert matrices[FC1] == {"gate": (96, 64), "up": (96, 64)}


def test_gated_attention_by_heads(tmp_path):
    """Four heads of queries and of gates, two of keys and of values, in two groups."""
    found, matrices, _ = trained(tmp_path, 2, "--attention-output-gate", "--muon-split", "per_head")
    assert_updated(found, QKV, torch.arange(192).split(16))
    heads = {"q": 4, "gate": 4, "k": 2, "v": 2}
    assert list(matrices[QKV]) == [f"{part} {i}" for part in heads for i in range(heads[part])]


def test_latent_attention(tmp_path):
    found, matrices, output = trained(tmp_path, 2, *MLA, "--muon-split", "all", model=WITHOUT_GQA)
    down, up, queries = (
        f"decoder.layers.0.self_attention.linear_{name}_proj.weight" for name in ("kv_down", "kv_up", "q_up")
    )
    assert output.count(f"warning: the gradient of {down} is incomplete") == 1
    assert_updated(found, down, blocks(20, 8))
    assert_updated(found, up, interleaved(4 * 28, 12, 16))
    assert_updated(found, queries, blocks(80))
    assert matrices[up] == {"k": (48, 20), "v": (64, 20)}


PARTS = {"z": 128, "x": 128, "B": 16, "C": 16, "dt": 8}
IN_PROJ = "decoder.mixer.in_proj.weight"


def test_each_shard_of_a_mixer_has_its_part_of_every_matrix(tmp_path):
    """It has to be declared; Megatron gives it to Adam from 0.20 on."""
    to_muon = overriding(tmp_path, {"select": "mixer.in_proj.weight", "optimizer": "muon"})
    said = refused(*RUN, *to_muon, **doing("mamba"))
    assert f"{IN_PROJ} is fused of z, x, B, C and dt of a state-space layer" in said
    found, matrices, _ = trained(tmp_path, 2, "--muon-split", "all", *to_muon, **doing("mamba"))
    parts = torch.arange(sum(PARTS.values())).view(2, -1).split([size // 2 for size in PARTS.values()], dim=1)
    assert_updated(found, IN_PROJ, [part.flatten() for part in parts])
    assert matrices[IN_PROJ] == {part: (size, 64) for part, size in PARTS.items()}


@since_0_20
def test_what_megatron_keeps_from_muon_is_adams(tmp_path):
    (rank,), _ = train(tmp_path / "run", 1, *RUN, "--bf16", **doing("mamba"))
    assert rank["after"][IN_PROJ].keys() >= {"exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(
    ("split", "how"),
    [("default", {}), ("all", {}), ("all", doing("mamba"))],
    ids=["default", "all", "a state-space layer"],
)
def test_statistics_of_matrices_come_back_at_another_size(tmp_path, split, how):
    """Gate and up of SwiGLU have rows of their own, whose order in the parameter depends on the number of ranks."""
    run = ["--num-layers", 1, "--train-iters", 4, *FILES, *ADAPTIVE, "normuon", *PRECISE[2:], "--muon-split", split]
    saved = ["--save", tmp_path / "checkpoint", "--save-interval", 2]
    two, _ = train(tmp_path / "two", 2, *run, *TP2, *saved, **how)
    (one,), _ = train(tmp_path / "one", 1, *run, "--load", tmp_path / "checkpoint", "--ckpt-step", 2, **how)
    assert one["losses"] == pytest.approx(two[0]["losses"][4:], rel=1e-5)
    expected = whole([rank["after"] for rank in two]) if not how else {}  # which does not know how a mixer is cut
    for name, state in expected.items():
        for key in state.keys() - {"cut"}:
            torch.testing.assert_close(one["after"][name][key], state[key], rtol=1e-3, atol=1e-4)


def test_a_declaration_of_the_users_own(tmp_path):
    """By a name's pattern, before Megatron builds the optimizer."""
    script = tmp_path / "script.py"
    script.write_text(
        "import runpy\n"
        "from megatron_eopt import matrices\n"
        "matrices.declare('*.linear_fc2.weight', matrices.concatenated(first=16, rest=None))\n"
        "matrices.declare('linear_fc1.weight', matrices.GATE_UP)\n"
        f"runpy.run_path({str(HERE / 'pretrain.py')!r}, run_name='__main__')\n"
    )
    program = ["-m", "megatron_eopt.run", "--cpu", str(script)]
    (rank,), output = train(tmp_path / "run", 1, *RUN, program=program)
    assert_updated(rank, "decoder.layers.0.mlp.linear_fc2.weight", blocks(16, 48))
    assert "'linear_fc1.weight' is declared, but matches no trainable parameter" in output
    assert "'*.linear_fc2.weight' is declared" not in output
    overrides = overriding(tmp_path, {"select": "linear_fc2.weight", "split": "none"})
    said = refused(*RUN, *overrides, program=program)
    assert "linear_fc2.weight: split none by" in said
    assert "would have no effect, since its matrices are declared" in said
