"""Which releases of Megatron-Core are supported, and what differs between them."""

import re

import megatron.core

SUPPORTED = "0.19"
MAIN, MAIN_AS_OF = "0.20", "22 August 2026"  # what Megatron's main branch was to become, and when it was tried


def caveat(release: str) -> str | None:
    """What was not tried of a release; None for :data:`SUPPORTED`."""
    if number(release) <= number(SUPPORTED):
        return None
    if number(release) == number(MAIN):
        return (
            f"megatron-core {release} is supported as Megatron's main branch was on {MAIN_AS_OF}: what has changed "
            f"since then is untried"
        )
    return f"megatron-core {release} is newer than {MAIN}, the latest that was tried"


def number(release: str) -> tuple[int, int]:
    """The first two numbers of a release; zeros where missing."""
    major, minor, *_ = *re.findall(r"\d+", release), "0", "0"
    return int(major), int(minor)


def lays_out_containers(release: str) -> bool:
    """Whether ``pretrain`` with a config container lays gradient buffers out for whole matrices, unless told not to."""
    return number(release) > number(SUPPORTED)


def version() -> str:
    """The imported release, without a commit after ``+``."""
    return str(megatron.core.__version__).partition("+")[0]


def check_supported() -> None:
    """Raise an ImportError for a release before :data:`SUPPORTED`."""
    if number(version()) < number(SUPPORTED):
        raise ImportError(f"megatron_eopt needs megatron-core {SUPPORTED} or later, found {version()}: upgrade it")
