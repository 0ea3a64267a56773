"""The logical matrices of real models: each is orthogonalized by itself, at every tensor-parallel size."""

import json

import pytest
import torch

from megatron_eopt.orthogonalize import newton_schulz
from megatron_eopt.orthogonalize.scale import muon_scale_factor
from tests.megatron.runs import CASES, HERE, MLA, MUON, TP2, WITHOUT_GQA, refused, since_0_20, train, whole

pytestmark = pytest.mark.wide

LR, DECAY, FACTOR = 1e-2, 0.1, 0.2
PRECISE = [*MUON, "--muon-fp32-matmul-prec", "highest", "--weight-decay", DECAY]
RUN = ["--num-layers", 1, "--train-iters", 1, *PRECISE]
QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"


def update(recorded):
    """What the first step subtracted, beside the decay."""
    before, after = recorded["before"], recorded["after"]
    return {name: (1 - LR * DECAY) * before[name]["parameter"] - after[name]["parameter"] for name in after}


def expected(momentum, rows):
    """The update of matrices that are made of such rows of a parameter, each by itself."""
    result = torch.full_like(momentum, torch.nan)
    for of_matrix in rows:
        part = momentum[of_matrix]
        result[of_matrix] = (
            LR * FACTOR * muon_scale_factor(*part.shape) * newton_schulz(part, fp32_matmul_prec="highest")
        )
    return result


def assert_updated(found, name, rows):
    """Matrices of such rows of a parameter were each orthogonalized by itself."""
    wanted = expected(found["after"][name]["momentum_buffer"], rows)
    rounding = 2**-23 * found["after"][name]["parameter"].abs().max().item()  # of the parameter that it is taken from
    torch.testing.assert_close(update(found)[name], wanted, rtol=0, atol=5e-5 * wanted.abs().max().item() + rounding)


def interleaved(rows, *sizes):
    """Rows of each part of groups that follow one another."""
    index = torch.arange(rows).view(-1, sum(sizes))
    return [part.flatten() for part in index.split(sizes, dim=1)]


def blocks(rows, *sizes):
    """Rows of parts that follow one another."""
    return list(torch.arange(rows).split(list(sizes)))


def matrices(folder, name):
    """Names and sizes of the matrices of a parameter, by the manifest."""
    manifest = json.loads(folder.read_text())
    (family,) = [each for each in manifest["families"] if each["pattern"] == name.replace(".0.", ".*.")]
    return {matrix["name"]: (matrix["rows"], matrix["cols"]) for matrix in family["matrices"]}


def recorded(ranks):
    return {when: whole([rank[when] for rank in ranks]) for when in ("before", "after")}


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_a_gpt(tmp_path, ranks):
    """Two query groups: at four ranks a shard ends inside of one."""
    manifest = tmp_path / "manifest.json"
    flags = ["--muon-split", "all", "--optimizer-manifest-file", manifest, "--tensor-model-parallel-size", ranks]
    found = recorded(train(tmp_path / "run", ranks, *RUN, *flags)[0])
    assert_updated(found, QKV, interleaved(128, 32, 16, 16))
    assert_updated(found, FC1, blocks(192, 96, 96))
    assert matrices(manifest, QKV) == {"q": (64, 64), "k": (32, 64), "v": (32, 64)}
    assert matrices(manifest, FC1) == {"gate": (96, 64), "up": (96, 64)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_gated_attention_by_heads(tmp_path, ranks):
    """Four heads of queries and of gates, two of keys and of values, in two groups."""
    manifest = tmp_path / "manifest.json"
    flags = ["--attention-output-gate", "--muon-split", "per_head", "--optimizer-manifest-file", manifest]
    run = [*RUN, *flags, "--tensor-model-parallel-size", ranks]
    found = recorded(train(tmp_path / "run", ranks, *run)[0])
    assert_updated(found, QKV, torch.arange(192).split(16))
    assert list(matrices(manifest, QKV)) == [
        f"{part} {i}" for part, n in (("q", 4), ("gate", 4), ("k", 2), ("v", 2)) for i in range(n)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_latent_attention(tmp_path, ranks):
    manifest = tmp_path / "manifest.json"
    run = [*RUN, *MLA, "--muon-split", "all", "--optimizer-manifest-file", manifest]
    ranks_found, output = train(tmp_path / "run", ranks, *run, "--tensor-model-parallel-size", ranks, model=WITHOUT_GQA)
    warning = "warning: the gradient of decoder.layers.0.self_attention.linear_kv_down_proj.weight is incomplete"
    assert output.count(warning) == ranks - 1
    found = recorded(ranks_found)
    attention = "decoder.layers.0.self_attention"
    assert_updated(found, f"{attention}.linear_kv_down_proj.weight", blocks(28, 20, 8))
    assert_updated(found, f"{attention}.linear_kv_up_proj.weight", interleaved(4 * 28, 12, 16))
    assert_updated(found, f"{attention}.linear_q_up_proj.weight", blocks(80, 80))
    assert matrices(manifest, f"{attention}.linear_kv_up_proj.weight") == {"k": (48, 20), "v": (64, 20)}


MIXER = {"program": CASES, "environment": {"DO": "mamba"}}
IN_PROJ = {"z": 128, "x": 128, "B": 16, "C": 16, "dt": 8}


def to_muon(folder):
    """Flags that give the mixer to Muon, which Megatron gives to Adam from 0.20 on."""
    file = folder / "overrides.json"
    file.write_text('[{"select": "mixer.in_proj.weight", "optimizer": "muon"}]')
    return ["--optimizer-overrides", file]


@pytest.mark.parametrize(
    ("mixer", "what"),
    [
        ("mamba", "z, x, B, C and dt of a state-space layer"),
        pytest.param("delta_product", "z, V, K, Q, b and a of a gated delta product", marks=since_0_20),
    ],
)
def test_a_mixer_has_to_be_declared(tmp_path, mixer, what):
    said = refused(*RUN, *to_muon(tmp_path), program=CASES, environment={"DO": mixer})
    assert f"decoder.mixer.in_proj.weight is fused of {what}" in said


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("mixer", "expected"),
    [
        ("mamba", IN_PROJ),
        pytest.param(
            "delta_product",
            {"z": 128, "V0": 128, "V1": 128, "K0": 16, "K1": 16, "Q": 16, "b0": 8, "b1": 8, "a": 8},
            marks=since_0_20,
        ),
    ],
)
def test_a_mixer(tmp_path, mixer, expected, ranks):
    """Each shard has its part of every matrix."""
    manifest, name = tmp_path / "manifest.json", "decoder.mixer.in_proj.weight"
    flags = ["--muon-split", "all", "--optimizer-manifest-file", manifest, "--tensor-model-parallel-size", ranks]
    how = {"program": CASES, "environment": {"DO": mixer}}
    found = recorded(train(tmp_path / "run", ranks, *RUN, *flags, *to_muon(tmp_path), **how)[0])
    shards = torch.arange(sum(expected.values())).view(ranks, -1)
    parts = shards.split([size // ranks for size in expected.values()], dim=1)
    assert_updated(found, name, [part.flatten() for part in parts])
    assert matrices(manifest, name) == {part: (size, 64) for part, size in expected.items()}


@since_0_20
@pytest.mark.parametrize("mixer", ["mamba", "delta_product"])
@pytest.mark.parametrize("precision", [[], ["--bf16"]], ids=["fp32", "bf16"])
def test_what_megatron_keeps_from_muon_is_adams(tmp_path, mixer, precision):
    how = {"program": CASES, "environment": {"DO": mixer}}
    (rank,), _ = train(tmp_path / "run", 1, *RUN, *precision, **how)
    assert rank["after"]["decoder.mixer.in_proj.weight"].keys() >= {"exp_avg", "exp_avg_sq"}


@since_0_20
@pytest.mark.parametrize("split", ["default", "all"])
def test_mappings_of_hyper_connections(tmp_path, split):
    """Four residual streams: as many rows of pre and post, and sixteen of the residual mapping."""
    manifest, name = tmp_path / "manifest.json", "decoder.mixer.mapping_proj.weight"
    flags = ["--muon-split", split, "--optimizer-manifest-file", manifest]
    how = {"program": CASES, "environment": {"DO": "hyper_connection"}}
    found = recorded(train(tmp_path / "run", 1, *RUN, *flags, **how)[0])
    sizes = {"pre": 4, "post": 4, "res": 16} if split == "all" else {"": 24}
    assert_updated(found, name, blocks(24, *sizes.values()))
    if split == "all":
        assert matrices(manifest, name) == {part: (size, 256) for part, size in sizes.items()}


def test_statistics_of_a_state_space_layer_move_to_another_size(tmp_path):
    adaptive = ["--optimizer", "adaptive_muon", "--adaptive-muon-moment2-method", "normuon", *PRECISE[2:]]
    run = ["--num-layers", 1, "--train-iters", 4, "--ckpt-format", "torch_dist", *adaptive, "--muon-split", "all"]
    straight, _ = train(tmp_path / "straight", 2, *run, *TP2, **MIXER)
    save = ["--exit-interval", 2, "--save-interval", 2, "--save", tmp_path / "checkpoint"]
    train(tmp_path / "two", 2, *run, *TP2, *save, **MIXER)
    (resumed,), _ = train(tmp_path / "one", 1, *run, "--load", tmp_path / "checkpoint", **MIXER)
    assert resumed["losses"] == pytest.approx(straight[0]["losses"][-len(resumed["losses"]) :], rel=1e-5)


@pytest.mark.parametrize("split", ["default", "all"])
def test_statistics_of_logical_matrices_come_back_at_another_size(tmp_path, split):
    """Gate and up of SwiGLU have rows of their own, whose order in the parameter depends on the number of ranks."""
    adaptive = ["--optimizer", "adaptive_muon", "--adaptive-muon-moment2-method", "normuon", *PRECISE[2:]]
    run = ["--num-layers", 1, "--train-iters", 4, "--ckpt-format", "torch_dist", *adaptive, "--muon-split", split]
    (straight,), _ = train(tmp_path / "straight", 1, *run)
    save = ["--exit-interval", 2, "--save-interval", 2, "--save", tmp_path / "checkpoint"]
    train(tmp_path / "two", 2, *run, *save, *TP2)
    (resumed,), _ = train(tmp_path / "one", 1, *run, "--load", tmp_path / "checkpoint")
    assert resumed["losses"] == pytest.approx(straight["losses"][-len(resumed["losses"]) :], rel=1e-5)
    for name, state in straight["after"].items():
        for key, value in state.items():
            if key != "cut":
                torch.testing.assert_close(resumed["after"][name][key], value, rtol=1e-3, atol=1e-4)


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
    assert_updated(rank, "decoder.layers.0.mlp.linear_fc2.weight", blocks(64, 16, 48))
    assert "'linear_fc1.weight' is declared, but matches no trainable parameter" in output
    assert "'*.linear_fc2.weight' is declared" not in output
    overrides = tmp_path / "overrides.json"
    overrides.write_text('[{"select": "linear_fc2.weight", "split": "none"}]')
    said = refused(*RUN, "--optimizer-overrides", overrides, program=program)
    assert "linear_fc2.weight: split none by" in said
    assert "would have no effect, since its matrices are declared" in said
