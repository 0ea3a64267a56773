"""How fast a rank is taken to work; without torch, as commands say it in their help."""

import math
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a rank works; fixed, so that plans agree."""

    flops: float = 500e12  # operations per second
    bytes: float = 300e9  # per second that a rank sends
    latency: float = 20e-6  # seconds that a collective takes however little it carries

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            number = type(value) in (int, float) and math.isfinite(value)
            if not number or value < 0 or (value == 0 and name != "latency"):
                raise ValueError(f"rate {name!r} must be a positive number (a latency may be 0), got {value!r}")


DEFAULT_RATES = Rates()
