"""Steps as users have them: clipped, skipped, of a preset's size, under muP."""

import pytest
import torch

from tests.megatron.runs import (
    EP2,
    ETP2,
    EXACT,
    FILES,
    MOE,
    MUON,
    SHARED,
    SMALL_GPT,
    TP2,
    assert_same_ranks,
    doing,
    manifest_of,
    overriding,
    refused,
    resumed,
    start,
    train,
    whole,
)

pytestmark = pytest.mark.wide

RUN = ["--num-layers", 2, *MUON, *EXACT]
ONE = ["--num-layers", 1, "--optimizer", "muon", "--train-iters", 1]
SCALE = 2.0**26  # makes a gradient norm of 1 more than 5e7
UNCHECKED = "--no-check-for-nan-in-loss-and-grad"
MISSED = "11 matrices were updated in the first step on rank 0, and the manifest has 12"


def matrices(snapshot):
    """Name -> parameter, of those that Muon has momentum of."""
    return {name: state["parameter"] for name, state in snapshot.items() if "momentum_buffer" in state}


def update(rank, decay=0.01):
    """What the first step subtracted from each parameter, beside the decay, in units of the learning rate."""
    before, after = rank["before"], rank["after"]
    return {name: ((1 - 1e-2 * decay) * before[name]["parameter"] - after[name]["parameter"]) / 1e-2 for name in after}


def test_a_gradient_of_any_size_makes_the_same_matrix_update(tmp_path):
    """Adam divides by the size of the gradient, too: its updates differ by no more than its eps makes them."""
    run = [*RUN, "--train-iters", 1, "--clip-grad", 0]
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


@pytest.mark.parametrize(
    ("size", "what", "flags"),
    [
        (2, "skip_above:100 multiply_loss:1e4:3", ["--bf16", *SHARED]),
        # with a loss scale Megatron looks for values that are not finite, and skips the step of all parameters
        (1, "multiply_loss:nan:3", ["--bf16", "--loss-scale", 1, UNCHECKED]),
    ],
    ids=["too large", "not finite"],
)
def test_a_step_that_megatron_skips_leaves_everything_as_it_was(tmp_path, size, what, flags):
    run = [*RUN, *flags, "--train-iters", 3]
    two, _ = train(tmp_path / "two", size, *run, "--exit-interval", 2, **doing(what))
    three, output = train(tmp_path / "three", size, *run, **doing(what))
    assert "number of skipped iterations:   1" in output
    assert all(len(rank["grad_norms"]) == 3 for rank in three)
    assert_same_ranks(three, two)


def test_a_matrix_that_is_left_out_ends_the_first_step():
    """One that Megatron skips proves nothing."""
    assert MISSED in refused(*RUN, "--train-iters", 1, **doing("skip_a_matrix"))
    skipping = doing("skip_above:100 multiply_loss:1e4:1 skip_a_matrix")
    done = start(1, *SMALL_GPT, *RUN, "--train-iters", 2, **skipping)
    assert MISSED in done.stdout
    assert "iteration        1/" in done.stdout
    assert "iteration        2/" not in done.stdout


def test_a_gradient_that_is_not_finite_holds_all_matrices(tmp_path):
    run = [*RUN, UNCHECKED, "--train-iters", 3]
    how = doing("multiply_gradient:layers.1.mlp.linear_fc1:nan:3")
    (two,), _ = train(tmp_path / "two", 1, *run, "--exit-interval", 2, **how)
    (three,), output = train(tmp_path / "three", 1, *run, **how)
    assert "gradients are not finite" in output
    for name, state in three["after"].items():
        if "momentum_buffer" in state:  # the others are Megatron's Adam's, which is not under this flag
            for key in ("parameter", "momentum_buffer"):
                assert torch.equal(state[key], two["after"][name][key]), name


def test_losses_that_are_not_finite_leave_matrices_whole(tmp_path):
    """Adam has no such protection, so that from then on no gradient is finite: an error, which names the matrices."""
    done = start(1, *SMALL_GPT, *RUN, UNCHECKED, "--train-iters", 9, **doing("multiply_loss:nan:2"), record=tmp_path)
    assert done.returncode != 0
    assert "gradients were not finite in 5 steps in a row" in done.stdout
    assert "iteration        7/" not in done.stdout
    after = torch.load(tmp_path / "0.pt")["after"]
    for state in (state for state in after.values() if "momentum_buffer" in state):
        assert state["parameter"].isfinite().all()
        assert state["momentum_buffer"].isfinite().all()


@pytest.mark.shows("decoupled_weight_decay=False")
def test_coupled_decay_is_the_same_on_two_ranks_and_after_a_stop(tmp_path):
    """Adam's by Megatron's setting, which no other optimizer reads, and that of matrices by an override."""
    run, how = [*RUN, "--train-iters", 4, "--weight-decay", 1, *FILES], doing("coupled_decay")
    flags = [*run, *overriding(tmp_path, {"select": "optimizer:muon", "weight_decay_method": "l2"})]
    alone, output = train(tmp_path / "alone", 1, *flags, **how)
    assert "decoupled_weight_decay=False without effect on all optimizers but adam" in output
    (straight, _), _ = resumed(tmp_path, 2, *flags, *TP2, **how)
    (decoupled,), _ = train(tmp_path / "decoupled", 1, *run, **how)
    found = whole([rank["after"] for rank in straight])
    for name, parameter in matrices(alone[0]["after"]).items():
        torch.testing.assert_close(found[name]["parameter"], parameter, rtol=0, atol=1e-5)
        assert not torch.allclose(decoupled["after"][name]["parameter"], parameter, rtol=0, atol=1e-3), name


def test_the_gradient_norm_of_experts_is_that_of_one_process(tmp_path):
    """They start from the same weights since these are from a checkpoint."""
    run = [*RUN, *MOE, "--train-iters", 4, *FILES, "--clip-grad", 0.5]
    save = ["--save", tmp_path / "checkpoint", "--save-interval", 2]
    (alone,), _ = train(tmp_path / "one", 1, *run, *save)
    for layout in (EP2, ETP2):
        load = ["--load", tmp_path / "checkpoint", "--ckpt-step", 2]
        ranks, _ = train(tmp_path / layout[0], 2, *run, *layout, *load)
        for rank in ranks:
            assert rank["grad_norms"] == pytest.approx(alone["grad_norms"][2:], rel=1e-5)
        found = whole([rank["after"] for rank in ranks])
        for name, expected in matrices(alone["after"]).items():
            torch.testing.assert_close(found[name]["parameter"], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("preset", "predicted"),
    [
        ("match_adamw", lambda rows, cols: 0.2),
        ("keller", lambda rows, cols: max(1, rows / cols) ** 0.5 / max(rows, cols) ** 0.5),
        ("unit_rms", lambda rows, cols: (rows / cols) ** 0.5 / max(rows, cols) ** 0.5),
    ],
)
def test_a_preset_makes_updates_of_the_size_that_it_predicts(tmp_path, preset, predicted):
    manifest = tmp_path / "manifest.json"
    run = [*ONE, "--muon-preset", preset, "--optimizer-manifest-file", manifest]
    # one sequence of 32 tokens makes gradients of rank 32; these are of full rank
    batch = ["--micro-batch-size", 8, "--global-batch-size", 8, "--muon-coefficient-type", "polar_express"]
    (rank,), _ = train(tmp_path / "run", 1, *run, *batch, "--muon-num-ns-steps", 8, *EXACT)
    updates = update(rank)
    rows = {name: row for name, row in manifest_of(manifest).items() if row.matrices}
    assert rows.keys() == matrices(rank["after"]).keys()
    for name, row in rows.items():
        assert row.update_rms == pytest.approx(max(predicted(each.rows, each.cols) for each in row.matrices))
        if len(row.matrices) == 1:
            assert updates[name].square().mean().sqrt().item() == pytest.approx(row.update_rms, rel=0.15), name


def test_a_published_preset_is_the_run_of_its_flags(tmp_path):
    flags = "--muon-momentum 0.95 --muon-extra-scale-factor 0.2 --muon-coefficient-type simple".split()
    by_name, output = train(tmp_path / "name", 1, *ONE, "--muon-preset", "kimi-k2")
    by_flags, _ = train(tmp_path / "flags", 1, *ONE, *flags)
    assert_same_ranks(by_name, by_flags)
    (line,) = [line for line in output.splitlines() if "--muon-preset kimi-k2 sets" in line]
    assert "published with --weight-decay 0.1" in line


def test_a_preset_that_the_run_contradicts_is_refused():
    # 0.95 is the default of Megatron's config, and not that of its flag
    said = refused(*ONE, "--muon-preset", "eo-0.5", "--muon-momentum", 0.95)
    assert "but the run also says momentum 0.95:" in said
