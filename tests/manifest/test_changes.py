"""What a resume prints of the difference between the checkpoint's manifest and its own."""

import pytest

from megatron_eopt.manifest.changes import compare
from megatron_eopt.manifest.family import families
from megatron_eopt.manifest.row import LogicalMatrix
from tests.manifest.made import EMBEDDING, QKV, changed, model, row

FC2 = "decoder.layers.{0-3}.mlp.linear_fc2.weight (4 parameters)"


def lines(old, new):
    return compare(families(old), families(new))


def test_nothing_changed():
    assert lines(model(), model()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"owner": "lion"}, "owner muon -> lion"),
        ({"owner": None, "excluded": True}, "owner muon -> nobody; excluded False -> True"),
        ({"matrices": (), "update_rms": None}, "matrices 64x256 -> none; update RMS 0.2 -> none"),
        ({"lr": 2.0, "min_lr": 1.0}, "lr 0.001 -> 2.0; min_lr 1e-05 -> 1.0"),
        ({"weight_decay": 0.0}, "weight decay 0.1 -> 0.0"),
        ({"settings": {"num_ns_steps": 7}}, "num_ns_steps default -> 7"),
        ({"shape": (64, 128)}, "shape (64, 256) -> (64, 128)"),
        ({"tied_to": "x"}, "tied to none -> x"),
    ],
)
def test_a_change_of_all_layers_is_one_line(change, said):
    assert lines(model(), changed(model(), "linear_fc2", **change)) == [f"{FC2}: {said}"]


def test_matrices_that_are_cut_otherwise_are_named():
    heads = [LogicalMatrix(f"q {head}", 16, 64, "local", 1.0) for head in range(4)]
    heads += [LogicalMatrix("k", 32, 64, "local", 1.0), LogicalMatrix("v", 32, 64, "local", 1.0)]
    assert lines(model(), changed(model(), QKV, matrices=heads)) == [
        f"{QKV}: matrices q 64x64, k 32x64, v 32x64 -> 4 q 16x64, k 32x64, v 32x64"
    ]


def test_settings_are_compared_one_by_one():
    old = changed(model(), EMBEDDING, settings={"betas": (0.9, 0.95), "eps": 1e-8})
    new = changed(model(), EMBEDDING, settings={"betas": (0.9, 0.99), "eps": 1e-8})
    assert lines(old, new) == [f"{EMBEDDING}: betas (0.9, 0.95) -> (0.9, 0.99)"]
    assert lines(old, model()) == [f"{EMBEDDING}: betas (0.9, 0.95) -> default; eps 1e-08 -> default"]


def test_added_and_removed_parameters():
    assert lines(model(layers=4), model(layers=6))[1] == (
        "decoder.layers.{4-5}.mlp.linear_fc2.weight (2 parameters): added, owned by muon"
    )
    new = [each for each in model() if each.name != EMBEDDING]
    assert lines(model(), new) == [f"{EMBEDDING}: removed, was owned by adam"]
    assert lines(new, model()) == [f"{EMBEDDING}: added, owned by adam"]


def test_layers_that_changed_alike_are_together_whatever_they_were_grouped_with():
    old = changed(model(), "layers.1.mlp.linear_fc2", reason="overrides.yaml:1")
    assert lines(old, changed(old, "linear_fc2", lr=2.0)) == [f"{FC2}: lr 0.001 -> 2.0"]
    new = changed(model(), "layers.1.mlp.linear_fc2", lr=2.0)
    assert lines(model(), new) == ["decoder.layers.1.mlp.linear_fc2.weight: lr 0.001 -> 2.0"]


def test_another_number_of_ranks_and_another_file_of_overrides_are_no_changes():
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


def test_an_approximation_is_a_change():
    blockwise = changed(model(), "linear_fc2", matrices=[LogicalMatrix("", 64, 256, "blockwise", 1.0)])
    assert lines(model(), blockwise) == [f"{FC2}: orthogonalized exactly -> blockwise"]
    assert lines(blockwise, model()) == [f"{FC2}: orthogonalized blockwise -> exactly"]


def test_two_owners_cannot_be_compared():
    with pytest.raises(ValueError, match=rf"{QKV} is listed 2 times, as owned by adam and muon: expected a manifest"):
        lines(model(), [*model(), row(QKV, (128, 64))])
