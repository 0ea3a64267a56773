"""Steps as users have them: clipped, accumulated, skipped, scheduled, of a preset's size, under muP."""

import json

import pytest
import torch

from tests.megatron.runs import MUON, SMALL_GPT, TP2, assert_same_ranks, refused, resumed, start, train, whole
from tests.megatron.test_users import CASES, EP2, ETP2, EXPERTS, SHARED, manifest_of, watched

pytestmark = pytest.mark.wide

EXACT = [*MUON, "--muon-fp32-matmul-prec", "highest"]
RUN = ["--num-layers", 2, *EXACT]
SCALE = 2.0**26  # makes a gradient norm of 1 more than 5e7
UNCHECKED = "--no-check-for-nan-in-loss-and-grad"
FC1 = "decoder.layers.1.mlp.linear_fc1.weight"


def doing(what):
    return {"program": CASES, "environment": {"DO": what}}


def matrices(snapshot):
    """Name -> parameter, of those that Muon has momentum of."""
    return {name: state["parameter"] for name, state in snapshot.items() if "momentum_buffer" in state}


def update(rank, decay=0.01):
    """What the first step subtracted from each parameter, beside the decay, in units of the learning rate."""
    before, after = rank["before"], rank["after"]
    return {name: ((1 - 1e-2 * decay) * before[name]["parameter"] - after[name]["parameter"]) / 1e-2 for name in after}


def rms(tensor):
    return tensor.square().mean().sqrt().item()


@pytest.mark.parametrize("clip", [1.0, 0], ids=["clipped", "not clipped"])
def test_a_gradient_of_any_size_makes_the_same_matrix_update(tmp_path, clip):
    """Adam divides by the size of the gradient, too: its updates differ by no more than its eps makes them."""
    run = [*RUN, "--train-iters", 1, "--clip-grad", clip]
    (one,), _ = train(tmp_path / "one", 1, *run)
    (large,), _ = train(tmp_path / "large", 1, *run, **doing(f"multiply_loss:{SCALE}"))
    assert large["grad_norms"][0] == pytest.approx(SCALE * one["grad_norms"][0], rel=1e-5)
    assert large["grad_norms"][0] > 5e7
    expected, found = update(one), update(large)
    for name in matrices(one["after"]):
        # the parameters are of size 1 at most, and their last bits are those of the update times the learning rate
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=2e-4 * expected[name].abs().max().item())
    for name in one["after"].keys() - matrices(one["after"]).keys():
        large_enough = expected[name].abs() > 0.9  # where the gradient is far above eps
        assert large_enough.any(), name
        torch.testing.assert_close(found[name][large_enough], expected[name][large_enough], rtol=0, atol=0.1)


def test_accumulated_gradients_make_the_same_steps(tmp_path):
    run = [*RUN, "--train-iters", 3, "--global-batch-size", 4, "--micro-batch-size"]
    (at_once,), _ = train(tmp_path / "one", 1, *run, 4)
    (accumulated,), _ = train(tmp_path / "four", 1, *run, 1)
    assert len(accumulated["losses"]) == 4 * len(at_once["losses"])
    assert accumulated["grad_norms"] == pytest.approx(at_once["grad_norms"], rel=1e-5)
    for name, parameter in matrices(at_once["after"]).items():
        found = accumulated["after"][name]
        torch.testing.assert_close(found["parameter"], parameter, rtol=0, atol=1e-5)
        momentum = at_once["after"][name]["momentum_buffer"]
        atol = 1e-4 * momentum.abs().max().item()
        torch.testing.assert_close(found["momentum_buffer"], momentum, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("size", "what", "flags"),
    [
        (1, "skip_above:100 multiply_loss:1e4:3", []),
        (2, "skip_above:100 multiply_loss:1e4:3", SHARED),
        # with a loss scale Megatron looks for values that are not finite, and skips the step of all parameters
        (1, "multiply_loss:nan:3", ["--bf16", "--loss-scale", 1, UNCHECKED]),
    ],
    ids=["too large", "too large-shared", "not finite"],
)
def test_a_step_that_megatron_skips_leaves_everything_as_it_was(tmp_path, size, what, flags):
    run = [*RUN, *flags, "--train-iters", 3]
    two, _ = train(tmp_path / "two", size, *run, "--exit-interval", 2, **doing(what))
    three, output = train(tmp_path / "three", size, *run, **doing(what))
    assert "number of skipped iterations:   1" in output
    assert all(len(rank["grad_norms"]) == 3 for rank in three)
    assert_same_ranks(three, two)


def test_a_first_step_that_megatron_skips_proves_nothing_and_fails_nothing(tmp_path):
    """The matrices are counted in the next one."""
    run = [*RUN, "--train-iters", 2]
    (rank,), _ = train(tmp_path / "run", 1, *run, **doing("skip_above:100 multiply_loss:1e4:1"))
    assert matrices(rank["after"])
    done = start(1, *SMALL_GPT, *run, **doing("skip_above:100 multiply_loss:1e4:1 skip_a_matrix"))
    assert "11 matrices were updated in the first step" in done.stdout
    assert "iteration        1/" in done.stdout
    assert "iteration        2/" not in done.stdout


def test_a_gradient_that_is_not_finite_holds_its_matrix_only(tmp_path):
    run = [*RUN, UNCHECKED, "--train-iters", 3]
    what = "multiply_gradient:layers.1.mlp.linear_fc1:nan:3"
    (two,), _ = train(tmp_path / "two", 1, *run, "--exit-interval", 2, **doing(what))
    (three,), output = train(tmp_path / "three", 1, *run, **doing(what))
    assert "gradients are not finite" in output
    for key in ("parameter", "momentum_buffer"):
        assert torch.equal(three["after"][FC1][key], two["after"][FC1][key])
    for name, state in three["after"].items():
        assert state["parameter"].isfinite().all()
        assert name == FC1 or not torch.equal(state["parameter"], two["after"][name]["parameter"]), name


def test_a_run_whose_losses_are_not_finite_leaves_matrices_whole_and_ends(tmp_path):
    """Adam has no such protection, so that from then on no gradient is finite: an error, which names the matrices."""
    done = start(1, *SMALL_GPT, *RUN, UNCHECKED, "--train-iters", 9, **doing("multiply_loss:nan:2"), record=tmp_path)
    assert done.returncode != 0
    assert "gradients were not finite in 5 steps in a row" in done.stdout
    assert "iteration        7/" not in done.stdout
    after = torch.load(tmp_path / "0.pt")["after"]
    assert all(parameter.isfinite().all() for parameter in matrices(after).values())
    assert all(state["momentum_buffer"].isfinite().all() for state in after.values() if "momentum_buffer" in state)


@pytest.mark.parametrize(
    ("optimizer", "atol"),
    [("muon", 1e-5), ("adaptive_muon", 1e-4)],  # which divides by second moments, however small
)
@pytest.mark.shows("decoupled_weight_decay=False")
def test_decay_that_is_part_of_the_gradient_is_the_same_on_two_ranks_and_after_a_stop(tmp_path, optimizer, atol):
    """Adam's by Megatron's setting, which no other optimizer reads, and that of matrices by an override."""
    run = [*RUN, "--optimizer", optimizer, "--train-iters", 4, "--weight-decay", 1, "--ckpt-format", "torch_dist"]
    file = tmp_path / "overrides.yaml"
    file.write_text(f"optimizer:{optimizer}: {{weight_decay_method: l2}}")
    flags = [*run, "--optimizer-overrides", file]
    alone, output = train(tmp_path / "alone", 1, *flags, **doing("coupled_decay"))
    assert "decoupled_weight_decay=False without effect on all optimizers but adam" in output
    (straight, _), _ = resumed(tmp_path, 2, *flags, *TP2, **doing("coupled_decay"))
    (decoupled,), _ = train(tmp_path / "decoupled", 1, *run, **doing("coupled_decay"))
    found = whole([rank["after"] for rank in straight])
    for name, parameter in matrices(alone[0]["after"]).items():
        torch.testing.assert_close(found[name]["parameter"], parameter, rtol=0, atol=atol)
        assert not torch.allclose(decoupled["after"][name]["parameter"], parameter, rtol=0, atol=1e-3), name


def test_rates_keep_their_ratio_in_every_step_and_groups_without_decay_have_none(tmp_path):
    schedule = ["--lr", 1e-2, "--min-lr", 1e-3, "--lr-decay-style", "cosine", "--lr-decay-iters", 6]
    own = ["--lr-warmup-iters", 2, "--muon-lr", 3e-2, "--muon-min-lr", 3e-3, "--weight-decay", 0.1]
    run = [*RUN, *schedule, *own, "--train-iters", 6, "--ckpt-format", "torch_dist"]
    (_, straight), (_, again) = resumed(tmp_path, 1, *run, at=3, **doing("watch"))
    (steps,), (rest,) = watched(straight), watched(again)
    assert [step["groups"] for step in rest] == [step["groups"] for step in steps[3:]]
    rates = []
    for step in steps:
        (of_muon,) = {group["lr"] for group in step["groups"] if group["of"] == "TensorParallelMuon"}
        (of_adam,) = {group["lr"] for group in step["groups"] if group["of"] == "AdamW"}
        assert of_muon == pytest.approx(3 * of_adam, rel=1e-12)
        assert {group["weight_decay"] for group in step["groups"] if group["wd_mult"] == 0} == {0}
        assert {group["weight_decay"] for group in step["groups"] if group["wd_mult"] == 1} == {0.1}
        rates.append(of_adam)
    assert rates[0] < rates[1] < rates[2] > rates[3] > rates[4] > rates[5]


@pytest.mark.parametrize("layout", [EP2, ETP2], ids=["EP2", "ETP2"])
def test_the_norm_of_the_gradient_is_that_of_one_process(tmp_path, layout):
    """Of a model with experts, which start from the same weights since these are from a checkpoint."""
    run = [*RUN, *EXPERTS, "--train-iters", 4, "--ckpt-format", "torch_dist", "--clip-grad", 0.5]
    save = ["--save", tmp_path / "checkpoint", "--save-interval", 2]
    (alone,), _ = train(tmp_path / "one", 1, *run, *save)
    load = ["--load", tmp_path / "checkpoint", "--ckpt-step", 2]
    ranks, _ = train(tmp_path / "two", 2, *run, *layout, *load)
    for rank in ranks:
        assert rank["grad_norms"] == pytest.approx(alone["grad_norms"][2:], rel=1e-5)
    whole_matrices = matrices(alone["after"])
    for number, rank in enumerate(ranks):
        for name, found in matrices(rank["after"]).items():
            expected = whole_matrices[name]
            if found.shape != expected.shape:  # an expert's, of which each rank has some columns, or rows of both parts
                expected = part_of(expected, found.shape, number)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def part_of(parameter, shape, number):
    """One of two parts of linear_fc2, or of the two halves of linear_fc1."""
    if parameter.shape[1] != shape[1]:
        return parameter.chunk(2, 1)[number]
    return torch.cat([half.chunk(2)[number] for half in parameter.chunk(2)])


@pytest.mark.parametrize(
    ("preset", "predicted"),
    [
        ("match_adamw", lambda rows, cols: 0.2),
        ("keller", lambda rows, cols: max(1, rows / cols) ** 0.5 / max(rows, cols) ** 0.5),
        ("unit_rms", lambda rows, cols: (rows / cols) ** 0.5 / max(rows, cols) ** 0.5),
    ],
    ids=["match_adamw", "keller", "unit_rms"],
)
def test_a_preset_makes_updates_of_the_size_that_it_predicts(tmp_path, preset, predicted):
    run = ["--num-layers", 1, "--optimizer", "muon", "--muon-preset", preset, "--train-iters", 1]
    # one sequence of 32 tokens makes gradients of rank 32; these are of full rank
    batch = ["--micro-batch-size", 8, "--global-batch-size", 8, "--muon-coefficient-type", "polar_express"]
    manifest = tmp_path / "manifest.json"
    precise = ["--muon-num-ns-steps", 8, "--muon-fp32-matmul-prec", "highest"]
    (rank,), _ = train(tmp_path / "run", 1, *run, *batch, *precise, "--optimizer-manifest-file", manifest)
    updates = update(rank)
    rows = {name: row for name, row in manifest_of(manifest).items() if row.matrices}
    assert rows.keys() == matrices(rank["after"]).keys()
    for name, row in rows.items():
        assert row.update_rms == pytest.approx(max(predicted(each.rows, each.cols) for each in row.matrices))
        if len(row.matrices) == 1:
            assert rms(updates[name]) == pytest.approx(row.update_rms, rel=0.15), name


PUBLISHED = {
    "kimi-k2": "--muon-momentum 0.95 --muon-extra-scale-factor 0.2 --muon-coefficient-type simple",
    "deepseek-v4": "--muon-momentum 0.95 --muon-nesterov --muon-extra-scale-factor 0.18 --muon-num-ns-steps 10 "
    "--muon-coefficient-type deepseekv4",
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_a_published_preset_is_the_run_of_its_flags(tmp_path, preset):
    run = ["--num-layers", 1, "--optimizer", "muon", "--train-iters", 2]
    (by_name,), output = train(tmp_path / "name", 1, *run, "--muon-preset", preset)
    (by_flags,), _ = train(tmp_path / "flags", 1, *run, *PUBLISHED[preset].split())
    assert_same_ranks([by_name], [by_flags])
    (line,) = [line for line in output.splitlines() if f"--muon-preset {preset} sets" in line]
    assert "momentum 0.95" in line
    assert "published with --weight-decay 0.1" in line


def test_a_preset_that_the_run_contradicts_is_refused():
    run = ["--num-layers", 1, "--optimizer", "muon", "--train-iters", 1, "--muon-preset"]
    assert (
        "--muon-preset match_adamw stands for scale_mode spectral, extra_scale_factor 0.2, but the run also says "
        "scale_mode shape_scaling: keep the preset, or what it stands for as flags"
    ) in refused(*run, "match_adamw", "--muon-scale-mode", "shape_scaling")
    # 0.95 is the default of Megatron's config, and not that of its flag
    assert "but the run also says momentum 0.95:" in refused(*run, "eo-0.5", "--muon-momentum", 0.95)


def test_updates_that_are_far_from_adams_are_warned_of(tmp_path):
    run = ["--num-layers", 1, "--optimizer", "muon", "--train-iters", 1]
    _, output = train(tmp_path / "megatron", 1, *run)
    (warning,) = [line for line in output.splitlines() if line.startswith("megatron_eopt: warning:")]
    assert "muon with scale mode spectral makes updates of RMS 1, 5 times Adam's 0.2" in warning
    assert "too large by that; take --muon-preset match_adamw" in warning
    _, output = train(tmp_path / "preset", 1, *run, "--muon-preset", "match_adamw")
    assert "megatron_eopt: warning:" not in output


MUP = ["--use-mup", "--mup-base-hidden-size", 32]  # half of the model's, so that rates are halved


def test_mup_scales_the_rate_of_no_matrix_of_muons(tmp_path):
    """Their updates have a size that fits the width by themselves, and a second factor would count it twice."""
    manifest = tmp_path / "manifest.json"
    run = [*RUN, *MUP, "--muon-preset", "unit_rms", "--muon-extra-scale-factor", 1, "--train-iters", 1]
    (rank,), _ = train(tmp_path / "run", 1, *run, "--optimizer-manifest-file", manifest)
    found = manifest_of(manifest)
    assert {row.lr for row in found.values()} == {1e-2}  # vectors, embeddings and the output layer keep theirs
    assert {group["lr"] for groups in rank["groups"] for group in groups} == {1e-2}


def test_mup_scales_the_rate_of_a_hidden_matrix_that_is_given_to_adam(tmp_path):
    """As it does where Adam has them all."""
    overrides, manifest = tmp_path / "overrides.json", tmp_path / "manifest.json"
    overrides.write_text(json.dumps([{"select": "linear_proj.weight", "optimizer": "adam"}]))
    adam = ["--num-layers", 1, *MUP, "--optimizer", "adam", "--train-iters", 1]
    (rank,), _ = train(tmp_path / "adam", 1, *adam)
    assert {group["lr"] for groups in rank["groups"] for group in groups} == {1e-2, 5e-3}
    run = [*RUN, *MUP, "--train-iters", 1, "--optimizer-overrides", overrides, "--optimizer-manifest-file", manifest]
    train(tmp_path / "run", 1, *run)
    rates = {name: row.lr for name, row in manifest_of(manifest).items() if name.endswith("linear_proj.weight")}
    assert set(rates.values()) == {5e-3}


@pytest.mark.parametrize("optimizer", ["muon", pytest.param("adaptive_muon", marks=pytest.mark.full)])
def test_a_warmup_of_the_momentum_goes_on_after_a_stop(tmp_path, optimizer):
    run = [*RUN, *TP2, "--optimizer", optimizer, "--train-iters", 6, "--ckpt-format", "torch_dist", "--clip-grad", 0]
    warmup = ["--muon-momentum-warmup", 4]
    _, (_, output) = resumed(tmp_path, 2, *run, *warmup)
    assert "goes on with other settings" not in output
    first, _ = train(tmp_path / "warm", 2, *run, *warmup, "--train-iters", 1)
    plain, _ = train(tmp_path / "plain", 2, *run, "--train-iters", 1)
    for name, state in first[0]["after"].items():
        if "momentum_buffer" in state:  # (1 - beta) of the first gradient
            expected = plain[0]["after"][name]["momentum_buffer"] * (1 - 0.85) / (1 - 0.95)
            torch.testing.assert_close(state["momentum_buffer"], expected, rtol=1e-5, atol=1e-8)
