"""What groups of parameters say: names, values, and errors that name the group."""

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_eopt.orthogonalize.choices import MISSPELT
from megatron_eopt.settings.other_names import meant, renamed

logger = logging.getLogger(__name__)

DECOUPLED = "use_decoupled_weight_decay"
METHOD = "weight_decay_method"
MOMENTUM_STEPS = "momentum_steps"  # how many steps the momenta of a group have made, where that is counted


def rename(name: str, group: dict[str, Any], known: Mapping[str, Any]) -> None:
    """Rename a group's settings as an optimizer has them; complete its decay by ``known``, its defaults."""
    settings = renamed(f"{name}: a group", group, known)
    group.clear()
    group |= settings
    if DECOUPLED not in known:
        return
    method = group.get(METHOD, known[METHOD])
    if method is not None and group.get(METHOD) == method:
        group.setdefault(DECOUPLED, method != "l2")
    elif method is not None and group.get(DECOUPLED, method != "l2") != (method != "l2"):
        group.setdefault(METHOD, None)  # the group's flag says otherwise


@contextlib.contextmanager
def named(number: int, groups: Sequence[object]) -> Iterator[None]:
    """Name the group in errors, where there are several."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if len(groups) > 1 and f"group {number}" not in str(error):
            error.args = (f"group {number}: {error}",)
        raise


def warn(message: str) -> None:
    """Warn on the first rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(message)


def warn_of_idle(owner: str, group: Iterable[str], known: Collection[str], of_all: Collection[str] = ()) -> None:
    """Warn of keys of a group that nobody reads: settings ``of_all``, and names like those that are known."""
    for key in group:
        hint = "" if key in known else meant(key, known, MISSPELT)
        if hint or (key in of_all and key not in known):
            warn(f"{owner}: {key!r} is no setting of its groups, so it has no effect{hint}")


def check_decay_method(name: str, group: Mapping[str, Any]) -> None:
    """Refuse a ``weight_decay_method`` that contradicts the flag."""
    method = group[METHOD]
    decoupled = group[DECOUPLED]
    if method is not None and decoupled != (method != "l2"):
        raise ValueError(
            f"{name}: {METHOD} {method!r} contradicts {DECOUPLED} {decoupled}, which is False for 'l2' and True for "
            f"every other method: set both, or {DECOUPLED} alone"
        )


def plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that ranks can compare; scalar tensors become numbers."""
    numbers = {k: x.item() if isinstance(x, Tensor) and x.numel() == 1 else x for k, x in settings.items()}
    return {key: value for key, value in numbers.items() if is_plain(value)}


def by_parameter(
    groups: Sequence[Mapping[str, Any]], keys: Iterable[str], of_all: Mapping[str, Any], users: Collection[str]
) -> dict[Tensor, dict[str, Any]]:
    """Plain settings of each parameter, for ranks to compare.

    Those of its group under ``keys`` win over those ``of_all``. What users added, ``users``, may differ between ranks.
    """
    settings_of: dict[Tensor, dict[str, Any]] = {}
    for group in groups:
        settings = {**of_all, **{key: group[key] for key in sorted(keys) if key in group}}
        compared = plain({key: x for key, x in settings.items() if key not in users})
        settings_of |= dict.fromkeys(group["params"], compared)
    return settings_of


def differs(a: Any, b: Any) -> bool:
    """Whether two values of a setting differ; a list comes back from a file where a tuple went in."""
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) != len(b) or any(map(differs, a, b))
    return bool(a != b)


def is_plain(value: Any) -> bool:
    """Whether a value is plain: scalars, None, lists thereof."""
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, str | int | float | None)
