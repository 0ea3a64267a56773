"""Write the tables of the docs that follow from the table of optimizers, ``megatron_eopt/family.py``.

    python scripts/tables.py

A page has them between ``<!-- NAME -->`` and ``<!-- end -->``, and ``tests/test_tables.py`` compares them.
"""

import ast
import inspect
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import get_args

import torch
from state_bytes import DATA, bytes_rows, share_rows
from support_matrix import RELEASES, support_matrix

from megatron_eopt.family import LIKE_MUON, MUON, OPTIMIZERS, Flag, OptimizerSpec
from megatron_eopt.megatron.arguments import RUN_FLAGS
from megatron_eopt.megatron.releases import MAIN
from megatron_eopt.optimizers.state import StateTensor
from megatron_eopt.orthogonalize.choices import listing
from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.routing.settings import OF_ALL, kind_of, optimizer_names, settings_of
from megatron_eopt.settings.records import SECOND_MOMENT, names_of

DOCS = Path(__file__).resolve().parents[1] / "docs"

MEANINGS = {
    "optimizer": "what updates the parameter: adam, sgd or a registered name",
    "lr": "the largest learning rate of the schedule",
    "min_lr": "the smallest learning rate of the schedule",
    "lr_mult": "multiplies lr, and min_lr where no entry sets it",
    "weight_decay": "weight decay",
    "start_wd": "weight decay at the start of Megatron's schedule of it",
    "end_wd": "weight decay at the end of that schedule",
    "wd_mult": "multiplies the weight decay",
    "betas": "decay rates of the moments, as [0.9, 0.95]",
    "eps": "added to the root of the second moment",
    "momentum": "decay rate of the momentum",
    "num_ns_steps": "Newton-Schulz steps",
    "coefficient_type": f"the Newton-Schulz coefficients: {listing(get_supported_coefficient_types())}",
    "scale_mode": f"how the size of an update follows from the shape: {listing(get_args(ScaleMode))}",
    "extra_scale_factor": "multiplies the update",
    "rank": "of the factors that a weight becomes",
    "split": "the logical matrices: none, default, all or per_head; false is none, true is default",
    "exclude": "no optimizer updates the parameter, and it keeps its value",
}
"""What settings of overrides mean, for the table of them."""


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    lines = ("|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in (head, *rows))
    first, *rest = lines
    return "\n".join((first, "|---" * len(head) + "|", *rest))


def code(names: Iterable[str]) -> str:
    """Names, each in backticks."""
    return ", ".join(f"`{name}`" for name in names)


def prose(text: str) -> str:
    """Text in lines that a person can read in an editor."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def owns() -> str:
    """Which parameters each optimizer is given in Megatron."""
    of = {kind: [row.name for row in OPTIMIZERS.values() if row.owns == kind] for kind in ("matrices", "all")}
    matrices = "matrices, and declared stacks of them ([logical matrices](logical-matrices.md))"
    rest = "embeddings, output layer, norms, biases: Megatron's Adam (`--muon-scalar-optimizer`)"
    rows = [(code(of["matrices"]), matrices, rest), (code([*of["all"], "adam"]), "everything", "")]
    return table(("", "updates", "the rest"), rows)


def state() -> str:
    """The state tensors of each optimizer; those that keep the same share a line."""
    kept: dict[tuple[str, str], list[str]] = {}
    for row in OPTIMIZERS.values():
        for settings in ({}, *row.state_settings):
            tensors = row.state_tensors(MATRIX, **settings)
            said = code([row.name]) + "".join(f", `{key}={value!r}`" for key, value in settings.items())
            kept.setdefault((", ".join(map(_described, tensors)), _bytes(tensors)), []).append(said)
    rows = [(", ".join(names), *what) for what, names in kept.items()]
    return table(("", "state", "bytes"), [("`adam`", "`exp_avg`, `exp_avg_sq`", ADAM_BYTES), *rows])


MATRIX = (131, 101)  # m x n; no other dimension of a state tensor has one of these lengths
MOST_NUMBERS = 8  # that a state tensor has of each matrix; more are as many as a rank
SIDES: dict[object, str] = {
    "rows": "m",
    "columns": "n",
    131: "m",
    101: "n",
}
ADAM_BYTES = "8 mn"


def _sides(tensor: StateTensor) -> list[object]:
    """The dimensions of a state tensor: letters, of which a rank is "r", and small numbers."""
    return ["m", "n"] if tensor.dims is None else [SIDES.get(dim, _rank_or_number(dim)) for dim in tensor.dims]


def _rank_or_number(dim: object) -> object:
    return "r" if isinstance(dim, int) and dim > MOST_NUMBERS else dim


def _described(tensor: StateTensor) -> str:
    shape = "" if tensor.dims is None else f" ({' x '.join(map(str, _sides(tensor))) or 'a number'})"
    return f"`{tensor.key}`{shape}"


def _bytes(tensors: Iterable[StateTensor], with_numbers: bool = True) -> str:
    """Bytes of the state tensors of a matrix of m x n in fp32, as a formula; also of those that are a few numbers."""
    counts = Counter[str]()
    for tensor in tensors:
        letters = sorted(side for side in _sides(tensor) if isinstance(side, str))
        if not letters and not with_numbers:
            continue
        numbers = prod(side for side in _sides(tensor) if isinstance(side, int))
        size = "".join(letters) if len({*letters}) == len(letters) else f"{letters[0]}²"
        counts[size] += numbers * (tensor.dtype or torch.float32).itemsize
    return " + ".join(f"{count} {size}".rstrip() for size, count in sorted(counts.items(), key=lambda x: not x[0]))


def plain() -> str:
    """What plain torch builds."""
    rest: dict[str, list[str]] = {"AdamW": [], "its own Adam": [], "the same": ["adamw"]}
    for row in OPTIMIZERS.values():
        if row.plain:
            kind = "the same" if row.owns == "all" else "its own Adam" if row.vectors else "AdamW"
            rest[kind].append(row.name)
    return table(("`name`", "all but matrices have"), [(code(names), of_rest) for of_rest, names in rest.items()])


def support() -> str:
    """What works with which release of Megatron-Core."""
    rows, tests = [], shown_by()
    for lines in zip(*(support_matrix(release) for release in RELEASES), strict=True):
        # what to take instead is what is looked for; releases where it works need no word then
        notes = [line.note for line in lines if line.works == "no"] or [line.note for line in lines]
        shown = ", ".join(sorted(tests.get(lines[0].feature, ())))
        rows.append((lines[0].feature, *(line.works for line in lines), shown, notes[0]))
    of_releases = (f"{release} (main)" if release == MAIN else release for release in RELEASES)
    return table(("feature", *of_releases, "shown by", ""), rows)


def shown_by() -> dict[str, set[str]]:
    """Feature -> the files of tests that show, in real runs, that it works: what the mark ``shows`` names."""
    found: dict[str, set[str]] = {}
    for path in sorted((DOCS.parent / "tests" / "megatron").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.shows":
                for feature in node.args:
                    found.setdefault(ast.literal_eval(feature), set()).add(path.stem)
    return found


def held() -> str:
    """Bytes that the busiest rank holds."""
    models = (f"{size}, DP{data}" for size in ("8B", "70B") for data in DATA)
    return table(("flags", "momentum", *models), bytes_rows())


def shares() -> str:
    """What the busiest rank is dealt."""
    return table(("", *(f"DP{data}" for data in DATA)), share_rows())


def override_settings() -> str:
    """Settings that several optimizers share."""
    rows = []
    for key, meaning in MEANINGS.items():
        having = [name for name in optimizer_names() if key in settings_of(name)]
        default = OF_ALL[key] if key in OF_ALL else settings_of(having[0])[key]
        rows.append((code([key]), kind_of(default), "all" if key in OF_ALL else ", ".join(having), meaning))
    return table(("key", "value", "optimizers", "meaning"), rows)


def override_settings_of_one() -> str:
    """Settings that single optimizers have beside those."""
    found = dict[tuple[str, str], list[str]]()
    for name in optimizer_names():
        for key, default in settings_of(name).items():
            if key not in MEANINGS:
                found.setdefault((key, kind_of(default)), []).append(name)
    rows = [(code([key]), expected, ", ".join(names)) for (key, expected), names in sorted(found.items())]
    return table(("key", "value", "optimizers"), rows)


def flags_of(flags: Iterable[Flag], holds_for: bool = False) -> str:
    """Flags with their defaults, values and meanings."""
    rows = []
    for flag in flags:
        values = code(flag.choices) if flag.choices else "" if isinstance(flag.default, bool) else _kind(flag)
        row = (code([flag.name]) + " *" * flag.megatrons, _default(flag), values, flag.help)
        rows.append((*row, _holds_for(flag)) if holds_for else row)
    return table(("flag", "default", "values", "", *(["also of"] if holds_for else [])), rows)


def _default(flag: Flag) -> str:
    if isinstance(flag.default, bool):
        return "off"
    if flag.default is None:
        return "that of the run" if flag.field else ""
    return code([flag.default]) if isinstance(flag.default, str) else f"{flag.default:g}".replace("e-0", "e-")


def _kind(flag: Flag) -> str:
    kind = flag.kind if flag.default is None else type(flag.default)
    if flag.metavar == "NAMES":
        return "names"
    if flag.metavar == "RULE":
        return "`ema:DECAY`, `tail:STEPS`"
    return {int: "a whole number", float: "a number", str: "a file"}[kind]


def _holds_for(flag: Flag) -> str:
    """Optimizers other than the flag's own that it holds for."""
    others = [row for row in OPTIMIZERS.values() if row.name != flag.optimizer]
    if flag.setting in (*MUON, *names_of(SECOND_MOMENT)):
        return code(row.name for row in others if flag.setting in row.of_muon)
    if flag.setting == "preset":
        return code(name for name in LIKE_MUON if name != flag.optimizer)
    if flag.setting == "momentum_from_adam":
        return code(row.name for row in others if row.takes_adams)
    return "all of matrices" if flag.shared else ""


def flags() -> str:
    """The page of flags: those of a run, Muon's, and the other optimizers' own."""
    text = [FLAGS_HEAD, flags_of(RUN_FLAGS), MUON_HEAD, flags_of(OPTIMIZERS["muon"].flags, holds_for=True)]
    for row in OPTIMIZERS.values():
        if row.name != "muon":
            first, *_ = inspect.cleandoc(row.cls.__doc__ or "").splitlines()
            text += [f"## {row.name}", prose(re.sub(r" \[1\]", "", first).replace("``", "`"))]
            text += [prose(_flags_of_others(row))]
            text += [flags_of(row.flags) if row.flags else ""]
    return "\n\n".join(filter(None, text))


def _flags_of_others(row: OptimizerSpec) -> str:
    """Flags of other optimizers that hold for it, in a sentence."""
    names = [flag.name for flag in OPTIMIZERS["muon"].flags if flag.setting in row.of_muon]
    names += [f"--adam-{setting}" for setting in ("beta1", "beta2", "eps") if row.betas == "adam"]
    text = (
        "It takes the flags of [Muon](#muon) that hold for all optimizers of matrices. "
        if row.owns == "matrices"
        else ""
    )
    also = "also " if text else ""
    return text + (f"It {also}takes {code(names)}." if names else "")


FLAGS_HEAD = """---
search:
  boost: 4
---

# Flags

Every flag that the optimizers of this package have, and Megatron's own of the same optimizers. The page is made from
the table of optimizers (`megatron_eopt/family.py`) by `python scripts/tables.py`.

`--optimizer NAME` takes any name of the registry. All but `muon` need Megatron-Core 0.18 or later. Megatron's `--lr`,
`--weight-decay`, `--clip-grad` and the schedules hold for every optimizer of a run.

A flag with a star is Megatron's own and means what it means there; where this package takes more values, they are
listed. A flag of an optimizer that the run does not have, also by no override, has no effect, which is warned of.
Settings of single parameters are [overrides](overrides.md).

## Of every run"""

MUON_HEAD = """## muon

The last column has the optimizers that a flag holds for beside Muon. Where `--muon-lr`, `--muon-min-lr` or
`--muon-weight-decay` is given, `--lr`, `--min-lr` or `--weight-decay` is for the parameters that are no matrices.

Pages of their own: [presets](presets.md), [logical matrices](logical-matrices.md) for `--muon-split`,
[planning](planning.md) for `--muon-tp-mode`."""


def _bytes_of(row: OptimizerSpec) -> str:
    """Bytes by its settings, each formula once."""
    formulas = [_bytes(row.state_tensors(MATRIX, **settings), False) for settings in ({}, *row.state_settings)]
    return ", ".join(dict.fromkeys(formulas))


def costs() -> str:
    """What each optimizer keeps, and what was measured of it: the figures of the comparison, beside Adam's."""
    _, figures, _ = parts("compare.md", (DOCS / "compare.md").read_text(encoding="utf-8"), "figures")
    head, *lines = (line.strip("| ").split(" | ") for line in figures.splitlines() if line.startswith("| "))
    measured = {line[0]: dict(zip(head, line, strict=True)) for line in lines}
    kept = {"adam": ADAM_BYTES} | {row.name: _bytes_of(row) for row in OPTIMIZERS.values()}

    def beside_adam(name: str) -> tuple[str, str]:
        if name not in measured:
            return "not compared", "-"
        own, adams = (measured[each]["seconds per step"] for each in (name, "adam"))
        time = "-" if "-" in (own, adams) else f"{float(own) / float(adams):.2f}"
        return measured[name]["less Adam's"], time

    rows = [(code([name]), of_matrix, *beside_adam(name)) for name, of_matrix in kept.items()]
    return table(("", "bytes of a matrix", "test loss less Adam's", "time of a step by Adam's"), rows)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "choosing.md": {"costs": costs},
    "optimizers.md": {"owns": owns, "state": state},
    "reference/overrides.md": {"settings": override_settings, "settings of one": override_settings_of_one},
    "plain-torch.md": {"plain": plain},
    "measured.md": {"shares": shares},
    "state.md": {"bytes": held},
    "support.md": {"support": support},
}


def made(page: str) -> str:
    """The text of a page with its tables up to date.

    Raises:
        ValueError: if the page lacks the marks of a table.
    """
    if page == "flags.md":
        return flags() + "\n"
    text = (DOCS / page).read_text(encoding="utf-8")
    for name, table_of in PAGES[page].items():
        before, _, after = parts(page, text, name)
        text = f"{before}\n{table_of()}\n\n{after}"
    return text


def parts(page: str, text: str, name: str) -> tuple[str, str, str]:
    """The text of a page up to the mark of a table, between its marks, and from the mark of the end on.

    Raises:
        ValueError: if the page lacks the marks.
    """
    before, begin, rest = text.partition(f"<!-- {name} -->\n")
    inside, end, after = rest.partition("<!-- end -->\n")
    if not begin or not end:
        raise ValueError(f"docs/{page}: expected '<!-- {name} -->', and '<!-- end -->' behind it, each on a line")
    return before + begin, inside, end + after


def main() -> None:
    """Write all pages."""
    for page in ("flags.md", *PAGES):
        (DOCS / page).write_text(made(page), encoding="utf-8")


if __name__ == "__main__":
    main()
