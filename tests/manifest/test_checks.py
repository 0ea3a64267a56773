"""What a start fails on, and what it warns of."""

import pytest

from megatron_eopt.manifest.checks import problems, warnings
from megatron_eopt.manifest.family import families, merged
from tests.manifest.made import BIAS, EMBEDDING, QKV, changed, model, row


def found(rows, optimizer="muon", for_matrices=True):
    lines = problems(rows, optimizer, for_matrices)
    assert problems(families(rows), optimizer, for_matrices) == lines
    return lines


def warned(rows, scale_mode="spectral"):
    lines = warnings(rows, scale_mode)
    assert warnings(families(rows), scale_mode) == lines
    return lines


def test_a_model_with_an_owner_for_each_parameter_is_right():
    assert found(model()) == []
    assert warned(model()) == []


def test_parameters_that_nobody_owns_are_named_with_their_number():
    (line,) = found(changed(model(), "linear_fc2", owner=None, reason="in no group"))
    assert line.startswith("nobody owns decoder.layers.{0-3}.mlp.linear_fc2.weight (4 parameters) (in no group): ")
    assert "expected one optimizer for every trainable parameter" in line
    assert "optimizer: adam" in line
    assert "exclude: true" in line


def test_excluding_on_purpose_is_no_error_but_a_warning():
    rows = changed(model(), "linear_fc2", owner=None, excluded=True, reason="excluded by overrides.yaml:3")
    assert found(rows) == []
    assert warned(rows) == [
        "decoder.layers.{0-3}.mlp.linear_fc2.weight (4 parameters) keeps the value it starts with (excluded by "
        "overrides.yaml:3)"
    ]


def test_an_excluded_parameter_with_an_owner_is_an_error():
    (line,) = found(changed(model(), EMBEDDING, excluded=True))
    assert line.startswith(
        f"adam owns {EMBEDDING}, which is excluded (an embedding: default of muon): expected no owner"
    )


def test_two_owners_are_both_named():
    rows = [*model(), row(QKV, (128, 64), reason="overrides.yaml:9")]
    (line,) = found(rows)
    assert line.startswith(
        f"{QKV} is listed 2 times, as owned by adam (overrides.yaml:9) and muon (default of muon): expected one owner"
    )
    assert problems(merged([families(rows)] * 2), "muon", True) == [line]


def test_two_groups_of_one_owner_are_two_owners():
    (line,) = found([*model(), *changed([each for each in model() if "linear_fc2" in each.name], "", lr=2.0)])
    assert line.startswith("decoder.layers.{0-3}.mlp.linear_fc2.weight is listed 2 times, as owned by muon")


def test_layers_of_one_name_with_different_owners_are_right():
    assert found(changed(model(), "layers.1.mlp.linear_fc2", owner="adam", matrices=())) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"owner": "lion"}, "owner (lion and adam)"),
        ({"lr": 2.0, "min_lr": 1.0}, "lr (2.0 and 0.001), min_lr (1.0 and 1e-05)"),
        ({"weight_decay": 0.0}, "weight_decay (0.0 and 0.1)"),
        ({"settings": {"eps": 1.0}}, "settings ({'eps': 1.0} and {})"),
    ],
)
def test_tied_weights_must_be_trained_alike(change, said):
    head = row("output_layer.weight", (512, 64), weight_decay=0.1, tied_to=EMBEDDING)
    assert found([*model(), head]) == []
    (line,) = found([*model(), *changed([head], "", **change)])
    assert line.startswith(f"output_layer.weight is tied to {EMBEDDING}, and they differ in {said}: expected the same")


def test_a_tie_finds_its_partner_among_layers():
    tied = "decoder.layers.1.mlp.linear_fc2.weight"
    rows = changed(model(), "layers.3.mlp.linear_fc2", tied_to=tied)
    assert found(rows) == []
    (line,) = found(changed(rows, tied, lr=2.0))
    assert line.startswith(
        f"decoder.layers.3.mlp.linear_fc2.weight is tied to {tied}, and they differ in lr (0.001 and"
    )
    assert found(changed(rows, "layers.2.mlp.linear_fc2", lr=2.0)) == []


def test_a_tie_to_another_name_of_the_same_parameter_is_right():
    assert found(changed(model(), EMBEDDING, tied_to="output_layer.weight")) == []


def test_an_optimizer_for_matrices_that_owns_none_is_an_error():
    rows = [*changed(model(layers=1, experts=0), "", owner="adam", matrices=()), row("frozen", (2,), owner=None)]
    lines = problems(changed(rows, "frozen", excluded=True), "muon", True)
    assert [line.split(":")[0] for line in lines] == [
        "--optimizer muon is for matrices, and none is its own on any rank (parameters"
    ]
    assert "(parameters: adam owns 5, nobody owns 1): expected at least one" in lines[0]
    assert found(rows[:-1], "adam", for_matrices=False) == []
    assert "none is trainable" in problems([], "muon", True)[0]


def test_matrices_of_another_optimizer_do_not_count():
    (line,) = found(changed(model(), "", owner="adam"))
    assert line.startswith("--optimizer muon is for matrices, and none is its own on any rank")


def test_matrices_on_another_rank_are_enough():
    vectors = families(each for each in model() if not each.matrices)
    assert len(problems(vectors, "muon", True)) == 1
    assert problems(merged([vectors, families(model())]), "muon", True) == []


@pytest.mark.parametrize("rms", [0.2, 0.8, 0.05, None])
def test_updates_near_those_of_adam_are_not_warned_of(rms):
    assert warned(changed(model(), "weight", update_rms=rms)) == []


def test_updates_far_from_those_of_adam_are_one_line_for_each_class():
    matrices = [each.name for each in model() if each.matrices]
    rows = [row for name in matrices for row in changed(model(), name, update_rms=1.0) if row.name == name]
    (line,) = warned(rows)
    assert line.startswith(
        "muon with scale mode spectral makes updates of RMS 1, 5 times Adam's 0.2, for 20 parameters "
        "(decoder.layers.{0-3}.mlp.experts.local_experts.{0-2}.linear_fc1.weight and 2 more families): "
        "a learning rate that is right for Adam is too large by that; "
        "take --muon-preset match_adamw or --muon-extra-scale-factor 0.2, or keep it if lr 0.001 is chosen for it"
    )


def test_updates_too_small_name_their_range_and_the_mode_of_the_parameters():
    rows = changed(model(), "linear_qkv.weight", update_rms=0.04)
    rows = changed(rows, "linear_fc2", update_rms=0.01, owner="adaptive_muon", settings={"scale_mode": "unit_rms_norm"})
    rows = changed(rows, "layers.0.mlp.linear_fc2", update_rms=0.02)
    adaptive, plain = warned(rows, "shape_scaling")
    assert adaptive.startswith(
        "adaptive_muon with scale mode unit_rms_norm makes updates of RMS 0.01 to 0.02, 0.05 to 0.1 times Adam's 0.2, "
        "for 4 parameters"
    )
    assert "too small by that; take --muon-preset match_adamw, or keep" in adaptive
    assert plain.startswith("muon with scale mode shape_scaling makes updates of RMS 0.04, 0.2 times")


def test_the_first_update_of_adam_itself_is_not_warned_of():
    assert warned(changed(model(), BIAS, update_rms=1.0)) == []


def test_decay_of_vectors_is_one_line_for_each_decay():
    rows = changed(model(), "linear_qkv.bias", weight_decay=0.1)
    (line,) = warned(changed(rows, "final_layernorm", weight_decay=0.1))
    assert line.startswith(
        "weight decay 0.1 on vectors, 5 parameters (decoder.final_layernorm.weight and 1 more families): biases and "
        "norms mostly have none; set weight_decay 0 for shape:vector"
    )
