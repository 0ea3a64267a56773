"""Write the tables of docs/measured.md from the figures of a GPU: ``python scripts/bench/gpu_page.py``.

``docs/h200.json`` has what ``make gpu`` found there: verdicts and figures of each part, and the machine.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pages

FOUND = Path(pages.DOCS, "h200.json")
PAGE = "measured.md"
STATES = ("passed", "failed", "skipped", "measured")
COLUMNS = ("ms", "host ms", "GiB of state", "GiB at the peak of a step")
PEERS = ("AdamW, fused", "torch.optim.Muon", "emerging-optimizers, Muon")


def parts(found: Mapping[str, Any]) -> str:
    """How many checks of each part came to what, and seconds."""
    rows = []
    for name, part in found.items():
        states = [each["status"] for each in part["verdicts"]]
        rows.append((f"`{name}`", *(str(states.count(state)) for state in STATES), f"{part['seconds']:.0f}"))
    return pages.markdown(("part", *STATES, "seconds"), rows)


def missed(found: Mapping[str, Any]) -> str:
    """Checks that failed, with what was expected and found."""
    rows = []
    for name, part in found.items():
        for each in part["verdicts"]:
            if each["status"] == "failed":
                value = f"{each['value']:.3g}" if isinstance(each["value"], float | int) else "-"
                rows.append((f"`{name}`", each["name"], value, each["bound"], each["reason"]))
    return pages.markdown(("part", "check", "found", "expected", "reason"), rows)


def family(found: Mapping[str, Any]) -> str:
    """Steps of optimizers for the matrices of 124M."""
    rows = []
    for label, figures in found["family"]["figures"].items():
        model, _, name = label.partition(": ")
        name = name if name in PEERS else f"**{name.removeprefix('ours, ')}**"
        rows.append((name, *(f"{figures[column]:.3g}" for column in COLUMNS)))
    return pages.markdown((model, *COLUMNS), rows)


# mark on the page -> what it shows
TABLES = {"parts": parts, "missed": missed, "family": family}


def tables() -> dict[str, str]:
    """Each table of the page by its mark."""
    found = json.loads(FOUND.read_text())["parts"]
    return {mark: made(found) for mark, made in TABLES.items()}


if __name__ == "__main__":
    for mark, table in tables().items():
        pages.put(PAGE, mark, table)
