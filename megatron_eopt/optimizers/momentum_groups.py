"""What a group says of momentum and weight decay: under which names, of which types, and which values contradict."""

from collections.abc import Mapping
from typing import Any, get_args

from megatron_eopt.optimizers.bulk import DecayMethod
from megatron_eopt.orthogonalize.choices import check_choice

DECOUPLED, METHOD = "use_decoupled_weight_decay", "weight_decay_method"

MOMENTUM_KEYS = frozenset({"momentum", "momentum_beta"})
NESTEROV_KEYS = frozenset({"nesterov", "use_nesterov"})

Group = dict[str, Any]


def check_flag(name: str, key: str, value: object) -> None:
    """Check a setting that is on or off.

    Args:
        name: of the optimizer, for messages.
        key: of the setting.
        value: what was given for it.

    Raises:
        TypeError: for anything but a bool. A number here mostly comes from a call by position.
    """
    if not isinstance(value, bool):
        raise TypeError(
            f"{name}: {key} must be True or False, got {value!r}: the positional order of emerging-optimizers is "
            f"(params, lr, momentum, weight_decay), here it is another; give all but params by name"
        )


def decay_method(name: str, group: Mapping[str, Any]) -> DecayMethod:
    """How the weight decay of a group is applied: its ``weight_decay_method``, or what the contract's flag makes of it.

    Args:
        name: of the optimizer, for messages.
        group: its settings.

    Raises:
        ValueError: for an unknown method, and for one that the flag contradicts.
    """
    method, decoupled = group[METHOD], group[DECOUPLED]
    if method is None:
        return "decoupled" if decoupled else "l2"
    check_choice(f"{METHOD} of {name}", method, get_args(DecayMethod))
    if decoupled != (method != "l2"):
        raise ValueError(
            f"{name}: {METHOD} {method!r} contradicts {DECOUPLED} {decoupled}, which is False for 'l2' and True for "
            f"every other method: set both, or {DECOUPLED} alone"
        )
    found: DecayMethod = method
    return found


def in_own_words(name: str, given: Mapping[str, Any], known: Mapping[str, Any], keys: tuple[str, str]) -> Group:
    """What a group gives, under the names that the class reads.

    A momentum or a look-ahead under the other of its two names is taken over. Where a group gives one of the two
    settings of weight decay, the other one follows from it, not from the optimizer's own.

    Args:
        name: of the optimizer, for messages.
        given: settings of the group.
        known: what the group gets where it gives nothing.
        keys: names of the momentum and of the look-ahead in this class.

    Raises:
        ValueError: where both names are there with different values.
    """
    own = dict(given)
    for key, both in zip(keys, (MOMENTUM_KEYS, NESTEROV_KEYS), strict=True):
        (other,) = both - {key}
        if other in own:
            value = own.pop(other)
            if own.setdefault(key, value) != value:
                raise ValueError(
                    f"{name} reads {key!r}, of which {other!r} is another name, but a group has {key}={own[key]!r} and "
                    f"{other}={value!r}: leave {other!r} out"
                )
    method, decoupled = own.get(METHOD, known.get(METHOD)), own.get(DECOUPLED)
    if own.get(METHOD) is not None and decoupled is None:
        own[DECOUPLED] = method != "l2"
    if METHOD not in own and None not in (method, decoupled) and decoupled != (method != "l2"):
        own[METHOD] = None
    return own
