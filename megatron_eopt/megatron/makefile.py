"""A Megatron whose Makefile is missing, as in its wheel."""

import inspect
from pathlib import Path
from typing import Any

from megatron_eopt.redirect import Redirection, around


def without_makefile() -> Redirection:
    """Where Megatron has no Makefile, a start builds no helpers."""

    def build(real: Any) -> None:
        if Path(inspect.unwrap(real).__code__.co_filename).with_name("Makefile").exists():
            real()

    built = "Megatron's wheel has helpers built, but not the Makefile that a start runs, and so ends"
    return Redirection("megatron.core.datasets.utils", "compile_helpers", around(build), built)
