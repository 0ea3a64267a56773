"""The figures beside peers on docs/benchmarks.md, and what it says of Megatron's own optimizers, are so."""

import math

import pages
import peers
import peers_exactness
import pytest
import torch
from peers_exactness import CASES, COLUMNS, MODES, RESUMED, WHOLE, ours

from tests.distributed.ranks import run_ranks
from tests.megatron.runs import MUON, TP2, UPSTREAM, assert_same, refused, resumed, train, whole

PAGE = peers.PAGE.read_text()


def rows(table):
    """Label -> cells, in the order of the columns."""
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines())
    return head[1:], {label: cells for label, *cells in lines}


def of(mark):
    """The rows of a table that the script writes; without what stands under it."""
    head, found = rows(pages.between(PAGE, mark).strip().partition("\n\n")[0])
    assert head == [*COLUMNS]
    return found


def test_the_tables_that_are_measured_have_the_rows_of_the_script():
    labels = [*CASES]
    at = labels.index(WHOLE) + 1
    assert [*of("exactness")] == [*labels[:at], *(f"the same, `{mode}`" for mode in MODES[1:]), *labels[at:]]
    figures = dict.fromkeys([*COLUMNS, *MODES, ours("blockwise")], 1.0)
    of_ranks = {
        precision: dict.fromkeys(["ms", "least", "most", *peers.COUNTS, "state"], figures)
        for precision in peers.PRODUCTS
    }
    made = peers.step_table(dict.fromkeys((2, 4), of_ranks), dict.fromkeys(peers.PRODUCTS, figures))
    assert rows(made)[0] == [*COLUMNS]
    assert [*of("steps")] == [*rows(made)[1]]
    assert "Measured on: " in pages.between(PAGE, "steps")


def test_dion_is_asked_for_where_the_page_is_to_be_written(monkeypatch, capsys):
    monkeypatch.setattr(peers, "dions", lambda: None)
    with pytest.raises(SystemExit):
        peers.main(["--docs"])
    assert "has a column of dion, and dion is not installed: pass --dion FOLDER" in capsys.readouterr().err


def test_products_of_a_step_are_counted_with_their_operations():
    x = torch.ones(3, 4)
    with peers.Counted() as counted:
        x @ torch.ones(4, 5)
    assert (counted.products, counted.operations, counted.collectives) == (1, 2 * 3 * 4 * 5, 0)
    assert counted.peak >= 4 * (4 * 5 + 3 * 5)


@pytest.mark.wide
def test_updates_on_two_ranks_are_those_of_the_page():
    """But for dion's, which no test has."""
    found = run_ranks(peers_exactness.beside_one, 2)[0]
    shown, written = rows(peers.exactness_table({2: found}))[1], of("exactness")
    for label, cells in shown.items():
        for column, cell, figure in zip(COLUMNS, cells, written[label], strict=True):
            figure = figure.split(" / ")[0]
            if column != "dion":
                assert (cell == "-") == (figure == "-")
                if cell != "-":  # of rounding, the size alone
                    near = {"rel": 0.1} if float(figure) > 0.01 else {"abs": 1e-5}
                    assert float(cell) == pytest.approx(float(figure), **near), (label, column)
    assert max(figures[COLUMNS[0]] for figures in found.values()) < 1e-5
    # Megatron's are off by its scales
    for adaptive in ("AdaMuon", "NorMuon"):  # of a matrix that is cut along its long side
        assert found[adaptive]["duplicated"] == pytest.approx(1 - math.sqrt(1 / 2), rel=1e-2)
    assert found[WHOLE]["blockwise"] > 0.1
    assert found[WHOLE]["distributed"] < 1e-5
    assert found[RESUMED]["duplicated"] == found[RESUMED]["torch"] == 0


RUN = ["--num-layers", 2, "--ckpt-format", "torch_dist", *MUON]


@pytest.mark.wide
@pytest.mark.parametrize("flags", [[*TP2, "--muon-tp-mode", "duplicated"], ["--use-distributed-optimizer", "--bf16"]])
def test_megatrons_muon_resumes_bit_for_bit(tmp_path, flags):
    resumed(tmp_path, 2, *RUN, "--train-iters", 4, *flags, program=UPSTREAM)


@pytest.mark.wide
def test_megatrons_muon_moves_to_one_rank(tmp_path):
    run, checkpoint = [*RUN, "--muon-tp-mode", "duplicated", "--train-iters", 4], tmp_path / "checkpoint"
    saves = ["--save", checkpoint, "--save-interval", 2, "--exit-interval", 2]
    two, _ = train(tmp_path / "two", 2, *run, *TP2, *saves, program=UPSTREAM)
    one, _ = train(tmp_path / "one", 1, *run, "--load", checkpoint, program=UPSTREAM)
    assert_same(one[0]["before"], whole([rank["after"] for rank in two]))


@pytest.mark.wide
@pytest.mark.parametrize(
    ("flags", "said", "in_a_step"),
    [
        (["--optimizer", "adaptive_muon"], "'TensorParallelAdaptiveMuon' object has no attribute 'scale_mode'", True),
        ([*MUON, "--muon-coefficient-type", "quintik"], "ValueError: Invalid coefficient type: quintik", True),
        ([*MUON, "--use-torch-fsdp2", "--untie-embeddings-and-output-weights"], "does not support Torch-FSDP2", False),
        ([*MUON, "--use-megatron-fsdp"], "Megatron-FSDP does not support the muon optimizer yet", False),
        ([*MUON, "--optimizer-cpu-offload"], "must be used in conjunction with `--use-precision-aware", False),
        (
            [*MUON, "--bf16", *"--use-distributed-optimizer --use-precision-aware-optimizer".split()],
            "--use-precision-aware-optimizer only supported with adam",
            False,
        ),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_what_megatrons_muon_refuses_or_finds_late(flags, said, in_a_step):
    output = refused("--num-layers", 1, "--train-iters", 1, *flags, program=UPSTREAM)
    assert said in output
    assert ("in step" in output) == in_a_step
