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
from functools import partial
from math import prod
from typing import Any, get_args

import torch
from state_bytes import DATA, bytes_rows  # which finds scripts/bench
from support_matrix import RELEASES, support_matrix

from megatron_eopt.family import LIKE_MUON, MUON, OPTIMIZERS
from megatron_eopt.flags import CliFlag
from megatron_eopt.megatron.run_flags import RUN_FLAGS
from megatron_eopt.optimizer_spec import OptimizerSpec
from megatron_eopt.orthogonalize.choices import listing
from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types
from megatron_eopt.orthogonalize.scale import ScaleMode
from megatron_eopt.routing.settings import OF_ALL, kind_of, optimizer_names, settings_of
from megatron_eopt.settings.presets import PRESETS, RECOMMENDED, TO_BEGIN_WITH
from megatron_eopt.settings.records import CAUTION, MOMENTUM, NORM, RELATIVE, SCALE, SECOND_MOMENT, names_of
from megatron_eopt.step.state import MOMENTUM_BUFFER, StateTensor

from pages import DOCS, between, markdown, replaced  # isort: skip

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


STATE_SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    "adaptive_muon": ({"moment2_method": "normuon"}, {"moment2_method": "namo"}),
    "soap": ({"weight_norm": "hold"},),
    "shampoo": ({"weight_norm": "hold"},),
    "kl_shampoo": ({"weight_norm": "hold"},),
    "psgd_kron": ({"max_dim": 110},),
    "schedule_free_adamw": ({"betas": (0.4, 0.95)},),  # below 0.5 the average is kept
}
"""Arguments of constructors that change the state."""


def state_tensors(row: OptimizerSpec, shape: tuple[int, int] = (128, 128), **settings: Any) -> list[StateTensor]:
    """State of an fp32 matrix; ``settings`` are the constructor's."""
    matrix = torch.empty(shape, dtype=torch.float32, device="meta")
    return row.cls([matrix], **settings).state_tensors(matrix)


def all_state(row: OptimizerSpec) -> list[StateTensor]:
    """State with the defaults, then with each of :data:`STATE_SETTINGS`."""
    found = []
    for settings in ({}, *STATE_SETTINGS.get(row.name, ())):
        found += state_tensors(row, **settings)
    return found


def table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown, whose empty cells are a blank."""
    return markdown(head, list(map(tuple, rows))).replace("  |", " |")


def code(names: Iterable[str]) -> str:
    """Names, each in backticks."""
    return ", ".join(f"`{name}`" for name in names)


def marked(text: str) -> str:
    """Text whose flags are in backticks."""
    return re.sub(r"(?<![\w`-])--[a-z][\w-]*", r"`\g<0>`", text)


def prose(text: str) -> str:
    """Text in lines that a person can read in an editor."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


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


def _bytes(tensors: Iterable[StateTensor]) -> str:
    """Bytes of the state tensors of a matrix of m x n in fp32, as a formula; without those that are a few numbers."""
    counts = Counter[str]()
    for tensor in tensors:
        letters = sorted(side for side in _sides(tensor) if isinstance(side, str))
        if not letters:
            continue
        numbers = prod(side for side in _sides(tensor) if isinstance(side, int))
        size = "".join(letters) if len({*letters}) == len(letters) else f"{letters[0]}²"
        counts[size] += numbers * (tensor.dtype or torch.float32).itemsize
    return " + ".join(f"{count} {size}" for size, count in counts.items())


def support(works: str) -> str:
    """Features that work with every release of Megatron-Core, or that one refuses."""
    rows = []
    for lines in zip(*(support_matrix(release) for release in RELEASES), strict=True):
        line = next((line for line in lines if line.works == "no"), lines[0])
        if line.works == works:
            rows.append((marked(line.feature), marked(line.note)))
    if works == "no":
        return table(("refused", "what to do"), rows)
    every = {marked(f"--optimizer {name}") for name in OPTIMIZERS}
    names = f"`--optimizer` {', '.join(name for name in OPTIMIZERS if (marked(f'--optimizer {name}'), '') in rows)}"
    return table(("works", ""), [(names, ""), *(row for row in rows if row[0] not in every)])


def shown_by() -> dict[str, set[str]]:
    """Feature -> the files of tests that show, in real runs, that it works: what the mark ``shows`` names."""
    found: dict[str, set[str]] = {}
    for path in sorted((DOCS.parent / "tests" / "megatron").glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.shows":
                for feature in map(ast.literal_eval, node.args):
                    for name in OPTIMIZERS if "{name}" in feature else ("",):  # a test of every optimizer
                        found.setdefault(feature.replace("{name}", name), set()).add(path.stem)
    return found


def held() -> str:
    """Bytes that the busiest rank holds."""
    return table(("flags", "momentum", *(f"DP{data}" for data in DATA)), bytes_rows())


def override_settings() -> str:
    """Settings that several optimizers share."""
    rows = []
    for key, meaning in MEANINGS.items():
        having = [name for name in optimizer_names() if key in settings_of(name)]
        default = OF_ALL[key] if key in OF_ALL else settings_of(having[0])[key]
        rows.append((code([key]), kind_of(default), meaning))
    return table(("key", "value", "meaning"), rows)


def override_settings_of_one() -> str:
    """What the daggers of the page of flags do not say: settings without a flag, and flags that set none."""
    rows = dict[str, list[str]]()
    for name in optimizer_names():
        flags_of_groups = {flag.setting for flag in _flags_that_hold(name) if _of_groups(flag)}
        own = settings_of(name).keys() - OF_ALL.keys()
        for key in sorted(own - flags_of_groups):
            rows.setdefault(f"`{key}`", []).append(f"`{name}`")
        for key in sorted(flags_of_groups - own - OF_ALL.keys()):
            rows.setdefault(f"`{key}`", []).append(f"not `{name}`")
    return table(("key", "optimizers"), [(key, ", ".join(names)) for key, names in sorted(rows.items())])


def _flags_that_hold(name: str) -> list[CliFlag]:
    """The flags of a registered optimizer: its own, and Muon's."""
    row = OPTIMIZERS.get(name)
    if row is None:  # Megatron's
        return []
    return [*row.flags, *(flag for flag in OPTIMIZERS["muon"].flags if name != "muon" and _holds_for(flag, row))]


def _of_groups(flag: CliFlag) -> bool:
    """Whether single parameters may have what a flag sets."""
    return flag.setting in (*OF_ALL, *settings_of(flag.optimizer))


def flags_of(flags: Iterable[CliFlag], *alike: Iterable[CliFlag]) -> str:
    """Flags with what they do, their values and defaults; those of other optimizers that are alike share a line."""
    rows = []
    for flag, *others in zip(flags, *alike, strict=True):
        marks = " *" * flag.megatrons + " †" * (bool(flag.optimizer) and not _of_groups(flag))
        rows.append((code(each.name for each in (flag, *others)) + marks, _meaning(flag), _default(flag)))
    return table(("flag", "what it does", "default"), rows)


def _meaning(flag: CliFlag) -> str:
    """The sentence of a flag, and the values that it has not named."""
    named = [value for value in flag.choices if re.search(rf"\b{re.escape(value)}\b", flag.help)]
    said = marked(flag.help)
    return said if len(named) == len(flag.choices) else f"{said} One of {code(flag.choices)}."


def _default(flag: CliFlag) -> str:
    if isinstance(flag.default, bool):
        return "off"
    if flag.default is None:
        return "that of the run" if flag.field else ""
    return code([flag.default]) if isinstance(flag.default, str) else f"{flag.default:g}".replace("e-0", "e-")


GROUPS = {
    "Matrices": ("lr", "min_lr", "weight_decay", "scalar_optimizer", "split", "split_qkv", "share_over_dp"),
    "Momentum": names_of(MOMENTUM),
    "Size of the update": ("preset", *names_of(SCALE)),
    "Newton-Schulz": ("num_ns_steps", "coefficient_type", "fp32_matmul_prec"),
    "Ranks and kernels": ("tp_mode", "symmetric_products", "step_kernels", "cuda_graphs"),
    "Norms of weights": names_of(CAUTION + NORM + RELATIVE),
    "Second moment": names_of(SECOND_MOMENT),
    "From Adam": ("momentum_from_adam",),
}
"""Muon's flags, by what they are for."""


def muons_flags() -> str:
    """Muon's flags by what they are for."""
    own = {flag.setting: flag for flag in OPTIMIZERS["muon"].flags}
    missing = own.keys() - {setting for settings in GROUPS.values() for setting in settings}
    if missing:
        raise ValueError(f"flags of Muon in no group of scripts/tables.py: {', '.join(sorted(missing))}")
    return "\n\n".join(
        f"### {title}\n\n{flags_of(own[setting] for setting in settings)}" for title, settings in GROUPS.items()
    )


def _holds_for(flag: CliFlag, row: OptimizerSpec) -> bool:
    """Whether a flag of Muon holds for another optimizer."""
    if flag.setting in (*MUON, *names_of(SECOND_MOMENT)):
        return flag.setting in row.of_muon
    if flag.setting == "preset":
        return row.name in LIKE_MUON
    if flag.setting == "momentum_from_adam":
        return {tensor.key for tensor in all_state(row)} == {MOMENTUM_BUFFER}
    return flag.shared and row.owns == "matrices"


def flags() -> str:
    """The page of flags: those of a run, Muon's, and the other optimizers' own."""
    text = [FLAGS_HEAD, flags_of(RUN_FLAGS), MUON_HEAD, muons_flags()]
    alike = dict[object, list[OptimizerSpec]]()
    for row in OPTIMIZERS.values():
        own = tuple((flag.setting, flag.help, flag.default) for flag in row.flags)
        same = (own, _flags_of_others(row)) if own else row.name
        alike.setdefault(same, []).append(row)
    for rows in alike.values():
        if rows[0].name != "muon":
            text += [f"## {', '.join(row.name for row in rows)}"]
            text += [prose(" ".join([*map(_first_sentence, rows), _flags_of_others(rows[0])]))]
            text += [flags_of(*(row.flags for row in rows)) if rows[0].flags else ""]
    return "\n\n".join(filter(None, text))


def _first_sentence(row: OptimizerSpec) -> str:
    first, *_ = inspect.cleandoc(row.cls.__doc__ or "").splitlines()
    return re.sub(r" \[1\]", "", first).replace("``", "`")


def _flags_of_others(row: OptimizerSpec) -> str:
    """Flags of other optimizers that hold for it, in a sentence: groups of Muon's, then single ones."""
    groups, single = [], []
    for title, settings in GROUPS.items():
        names = [flag.name for flag in OPTIMIZERS["muon"].flags if flag.setting in settings and _holds_for(flag, row)]
        if len(names) == len(settings):
            groups.append(f"[{title}](#{title.lower().replace(' ', '-')})")
        else:
            single += names
    single += [f"--adam-{setting}" for setting in ("beta1", "beta2", "eps") if row.betas == "adam"]
    found = [f"Muon's of {', '.join(groups)}"] * bool(groups) + [code(single)] * bool(single)
    return f"Further flags: {'; '.join(found)}." if found else ""


FLAGS_HEAD = """---
search:
  boost: 4
---

# Flags

Every flag of this package, with what it does and its default: those of every run, [Muon's](#muon), and those of each
other optimizer. `--optimizer NAME` names the optimizer of a run. Megatron's `--lr`, `--min-lr`, `--weight-decay`,
`--clip-grad` and the schedules hold for every optimizer. [Memory](planning.md#memory) has Megatron's flags of where
state lies. A flag that none of its optimizers reads ends a run at its start.

A star marks a flag that Megatron has itself, a dagger (†) what holds for a whole optimizer. All else single parameters
may have too, in [overrides](overrides.md), by the name without `--`, the optimizer and `no`.

## Every run"""

MUON_HEAD = """## muon

Other optimizers of matrices take some of Muon's flags: each names the groups and flags that hold for it.
[Optimizers](optimizers.md), [logical matrices](logical-matrices.md) and [planning](planning.md) say how to choose."""


def _bytes_of(row: OptimizerSpec) -> str:
    """Bytes by its settings, each formula once."""
    formulas = {}
    for settings in ({}, *STATE_SETTINGS.get(row.name, ())):
        formulas[_bytes(state_tensors(row, MATRIX, **settings))] = None
    return ", ".join(formulas) or "0"


def costs() -> str:
    """What each optimizer keeps, and what was measured of it: the figures of the comparison, beside Adam's."""
    figures = between((DOCS / "benchmarks.md").read_text(encoding="utf-8"), "figures")
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


DEMO_LR = 3e-3  # of Adam, for the demo's model


def begin_flags(name: str, adam_lr: float | None = None) -> str:
    """Flags of what is recommended of an optimizer; those of rates beside an Adam's rate."""
    begin = TO_BEGIN_WITH[name]
    row = OPTIMIZERS.get(name)
    settings = dict(begin.settings)
    words = []
    if "betas" in settings:
        words += [f"--adam-beta{i} {beta:g}" for i, beta in enumerate(settings.pop("betas"), 1)]
    preset = PRESETS[RECOMMENDED].settings
    is_sized = preset.keys() <= settings.keys()
    flags = {flag.setting: flag for flag in _flags_that_hold(name)}
    for setting, value in settings.items():
        if value != flags[setting].default and not (is_sized and setting in preset):
            words.append(flags[setting].name + ("" if value is True else f" {value}"))
    words += ["--muon-preset " + RECOMMENDED] * is_sized + begin.flags.split("  ")
    if adam_lr is not None:
        lr = adam_lr * begin.rate
        least = lr if "constant" in begin.flags else lr / 10
        prefix = "--muon-" if row is not None and row.owns == "matrices" else "--"
        words.append(f"{prefix}lr {lr:.2g} {prefix}min-lr {least:.2g}".replace("e-05", "e-5"))
    return " ".join(filter(None, words))


def settings() -> str:
    """Settings to begin with, and rates in those of AdamW."""
    rows = []
    for name, begin in TO_BEGIN_WITH.items():
        name = "adam" if name == "adamw" else name
        flags = begin_flags("adamw" if name == "adam" else name, DEMO_LR)
        owns = OPTIMIZERS[name].owns if name in OPTIMIZERS else "all"
        has = {"matrices": "matrices", "all": "everything"}[owns]
        rows.append((code([name]), code([flags]), f"{begin.rate:.2g}", has, begin.why))
    return table(("optimizer", "flags, where AdamW takes 0.003", "rate by AdamW's", "updates", ""), rows)


SUPPORT = {"works": "yes", "refused": "no"}

PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "optimizers.md": {"settings": settings, "costs": costs},
    "overrides.md": {"settings": override_settings, "settings of one": override_settings_of_one},
    "planning.md": {"bytes": held},
    "support.md": {name: partial(support, works) for name, works in SUPPORT.items()},
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
        text = replaced(text, name, table_of())
    return text


def main() -> None:
    """Write all pages."""
    for page in ("flags.md", *PAGES):
        (DOCS / page).write_text(made(page), encoding="utf-8")


if __name__ == "__main__":
    main()
