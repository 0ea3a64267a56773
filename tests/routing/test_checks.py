"""What a start fails on, what it warns of, and what a resume prints."""

import pytest

from megatron_eopt.routing.checks import compare, problems, warnings, with_schedule
from megatron_eopt.routing.patterns import LogicalMatrix, families, merged
from tests.routing.manifests import BIAS, EMBEDDING, QKV, changed, model, row

FC2 = "decoder.layers.{0-3}.mlp.linear_fc2.weight (4 parameters)"


def found(rows, optimizer="muon", for_matrices=True):
    return problems(families(rows), optimizer, for_matrices)


def warned(rows, scale_mode="spectral"):
    return warnings(families(rows), scale_mode)


def test_parameters_without_an_optimizer_are_named():
    assert found(model()) == warned(model()) == []
    (line,) = found(changed(model(), "linear_fc2", optimizer=None, reason="in no group"))
    assert line.startswith(f"no optimizer has {FC2} (in no group): ")
    assert "exclude: true" in line


def test_excluding_on_purpose_is_no_error_but_a_warning():
    rows = changed(model(), "linear_fc2", optimizer=None, excluded=True, reason="excluded by overrides.yaml:3")
    assert found(rows) == []
    assert warned(rows) == [f"{FC2} keeps the value it starts with (excluded by overrides.yaml:3)"]


def test_an_excluded_parameter_with_an_optimizer_is_an_error():
    (line,) = found(changed(model(), EMBEDDING, excluded=True))
    assert line.startswith(
        f"adam has {EMBEDDING}, which is excluded (an embedding: default of muon): expected no optimizer"
    )


def test_two_optimizers_are_both_named():
    rows = [*model(), row(QKV, (128, 64), reason="overrides.yaml:9")]
    (line,) = found(rows)
    assert line.startswith(f"{QKV} is listed 2 times, ")
    assert "optimizer adam, reason overrides.yaml:9" in line
    assert "optimizer muon, reason default of muon" in line


def test_what_ranks_say_differently_is_named():
    other = changed(model(), BIAS, lr=2.0)
    (line,) = problems(merged([families(model()), families(other)]), "muon", True)
    assert line.startswith(f"{BIAS} is listed 2 times, lr 2.0 and lr 0.001: expected one optimizer")


@pytest.mark.parametrize("change", [{"optimizer": "lion"}, {"lr": 2.0, "min_lr": 1.0}, {"settings": {"eps": 1.0}}])
def test_tied_weights_must_be_trained_alike(change):
    head = row("output_layer.weight", (512, 64), weight_decay=0.1, tied_to=EMBEDDING)
    assert found([*model(), head]) == []
    (line,) = found([*model(), *changed([head], "", **change)])
    assert line.startswith(f"output_layer.weight is tied to {EMBEDDING}, and they differ, ")
    for name, value in (change.get("settings") or change).items():
        assert f"{name} {value}" in line


def test_a_tie_finds_its_partner_among_layers():
    tied = "decoder.layers.1.mlp.linear_fc2.weight"
    rows = changed(model(), "layers.3.mlp.linear_fc2", tied_to=tied)
    assert found(rows) == []
    (line,) = found(changed(rows, tied, lr=2.0))
    assert line.startswith(f"decoder.layers.3.mlp.linear_fc2.weight is tied to {tied}, and they differ, ")
    assert found(changed(rows, "layers.2.mlp.linear_fc2", lr=2.0)) == []


def test_an_optimizer_for_matrices_that_has_none_is_an_error():
    adams = changed(model(), "", optimizer="adam")
    (line,) = found(adams)
    assert line.startswith("--optimizer muon is for matrices, and it has none on any rank: ")
    assert found(adams, "adam", for_matrices=False) == []
    # matrices on another rank are enough
    vectors = families(each for each in model() if not each.matrices)
    assert problems(merged([vectors, families(model())]), "muon", True) == []


def test_updates_far_from_adams_are_one_line_a_class():
    for rms in (0.2, 0.8, None):
        assert warned(changed(model(), "weight", update_rms=rms)) == []
    assert warned(changed(model(), BIAS, update_rms=1.0)) == []  # Adam's own first one
    rows = changed(model(), "linear_qkv.weight", update_rms=1.0)
    small = {"optimizer": "adaptive_muon", "settings": {"scale_mode": "unit_rms_norm"}}
    rows = changed(rows, "linear_fc2", update_rms=0.01, **small)
    rows = changed(rows, "layers.0.mlp.linear_fc2", update_rms=0.02)
    adaptive, plain = warned(rows)
    assert adaptive.startswith(
        "adaptive_muon with scale mode unit_rms_norm makes updates of RMS 0.01 to 0.02, 0.05 to 0.1 times Adam's 0.2, "
        "for 4 parameters (decoder.layers."
    )
    assert "too small by that; take --muon-preset match_adamw" in adaptive
    assert plain.startswith("muon with scale mode spectral makes updates of RMS 1, 5 times Adam's 0.2, ")
    assert "too large by that" in plain


def test_decay_of_vectors_is_one_line_for_each_decay():
    rows = changed(model(), "linear_qkv.bias", weight_decay=0.1)
    (line,) = warned(changed(rows, "final_layernorm", weight_decay=0.1))
    assert line.startswith(
        "weight decay 0.1 on vectors, 5 parameters (decoder.final_layernorm.weight and 1 more families): biases and "
        "norms mostly have none; set weight_decay 0 for shape:vector"
    )


def lines(old, new):
    return compare(families(old), families(new))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"optimizer": "lion"}, "optimizer muon -> lion"),
        ({"optimizer": None, "excluded": True}, "optimizer muon -> none; excluded False -> True"),
        ({"matrices": (), "update_rms": None}, "matrices 64x256 -> none; update RMS 0.2 -> none"),
        ({"shape": (64, 128)}, "shape (64, 256) -> (64, 128)"),
        ({"settings": {"betas": (0.9, 0.95), "eps": 1}}, "betas default -> (0.9, 0.95); eps default -> 1"),
        ({"matrices": [LogicalMatrix("", 64, 256, "blockwise", 1.0)]}, "orthogonalized exactly -> blockwise"),
    ],
)
def test_a_change_of_all_layers_is_one_line(change, said):
    assert lines(model(), changed(model(), "linear_fc2", **change)) == [f"{FC2}: {said}"]


def test_what_changed_alike_is_one_line():
    rows = model()
    of_all = [f"all {len(rows)} parameters: lr 0.001 -> 2.0"]
    assert lines(rows, changed(rows, "", lr=2.0)) == of_all
    two = changed(changed(rows, "linear_fc2", lr=2.0), EMBEDDING, lr=2.0)
    assert lines(rows, two) == [f"{FC2}, {EMBEDDING}: lr 0.001 -> 2.0"]


def test_a_schedule_of_another_manifest_changes_nothing_else():
    old = changed(model(), "", settings={"lr_mult": 0.5})
    new = changed(model(), "linear_fc2", lr=2.0, min_lr=1.0, weight_decay=0.7, settings={"lr_mult": 2.0, "eps": 1})
    counts = with_schedule(families(new), families(old))
    assert compare(families(old), counts) == [f"{FC2}: eps default -> 1"]
    (line,) = [line for line in compare(families(new), counts) if "linear_fc2" in line]
    assert line == f"{FC2}: lr 2.0 -> 0.001; min_lr 1.0 -> 1e-05; weight decay 0.7 -> 0.1; lr_mult 2.0 -> 0.5"


def test_added_and_removed_parameters():
    (line,) = [line for line in lines(model(layers=4), model(layers=6)) if "fc2" in line]
    assert "decoder.layers.{4-5}.mlp.linear_fc2.weight (2 parameters)" in line
    assert line.endswith(": added, with the optimizer muon")
    new = [each for each in model() if each.name != EMBEDDING]
    assert lines(model(), new) == [f"{EMBEDDING}: removed, had the optimizer adam"]


def test_layers_that_changed_alike_are_one_line():
    old = changed(model(), "layers.1.mlp.linear_fc2", reason="overrides.yaml:1")
    assert lines(old, changed(old, "linear_fc2", lr=2.0)) == [f"{FC2}: lr 0.001 -> 2.0"]
    new = changed(model(), "layers.1.mlp.linear_fc2", lr=2.0)
    assert lines(model(), new) == ["decoder.layers.1.mlp.linear_fc2.weight: lr 0.001 -> 2.0"]


def test_other_ranks_and_another_file_are_no_changes():
    new = changed(
        model(),
        "linear_fc2",
        layout="whole",
        matrices=[LogicalMatrix("", 64, 256, "local", 1.0)],
        state_bytes=99,
        reason="elsewhere",
        sources={"lr": "elsewhere.yaml:1"},
        overruled=("lr 2.0 by c",),
    )
    assert lines(model(), new) == []
