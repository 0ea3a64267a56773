"""Refuse figures of time that are taken while the machine does something else; and say how far rounds lie apart."""

import argparse
import math
import os
import statistics
import time
from collections.abc import Sequence

ALLOWED = 0.5  # processes of others that run at a time; with one more on each core, times double
_MEAN = 60.0  # seconds that the load average goes back


class Load:
    """The load of others before and after measurements.

    Args:
        own: processes or threads that measure at a time; after a while the load average has these, too.
        anyway: whether figures are printed at any load; :attr:`words` then says so.

    Raises:
        SystemExit: others already are more than :data:`ALLOWED`.
    """

    def __init__(self, own: float, anyway: bool = False) -> None:
        self.own = own
        self.anyway = anyway
        self.before = os.getloadavg()[0]
        self.most = self.before
        self._start = time.monotonic()
        self._refuse(self.before, "before the first figure")

    def check(self) -> None:
        """Raise ``SystemExit`` if others were more than :data:`ALLOWED` while it was measured."""
        known = 1 - math.exp((self._start - time.monotonic()) / _MEAN)
        others = max(0.0, os.getloadavg()[0] - self.own * known)
        self.most = max(self.most, others)
        self._refuse(others, "while it was measured")

    @property
    def words(self) -> str:
        """What the load was, for the line about the machine."""
        said = f"load of others {self.before:.2f} before, {self.most:.2f} at most"
        return f"{said}, taken with --any-load" if self.most > ALLOWED else said

    def _refuse(self, found: float, when: str) -> None:
        if found > ALLOWED and not self.anyway:
            raise SystemExit(
                f"no figures: other processes were a load of {found:.2f} {when}, and at most {ALLOWED:.2f} is allowed. "
                "End what else runs and wait a minute, or pass --any-load, which the output then says"
            )


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add ``--any-load``."""
    parser.add_argument("--any-load", action="store_true", help="print figures also while the machine does other work")


def spread(values: Sequence[float], form: str = ".3g") -> str:
    """The median of rounds, and the least and the most of them."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"
