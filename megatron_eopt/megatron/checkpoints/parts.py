"""The parts of a state dict that are optimizers of ours, loaded apart from Megatron's own bookkeeping.

Megatron merges what it loads into the common state by position: the third optimizer of a chain into the third, the
second group into the second. At another expert-parallel size, after another optimizer, or where the first stage of a
pipeline has no parameter of a group, these are not the same. So each part is loaded under a name of its own, and the
common state of the whole checkpoint is given to each, which finds its groups by the names of their parameters.
"""

from collections.abc import Iterator
from typing import Any

from megatron_eopt.checkpoints.states import BLOCK, blocks_of, parts_of
from megatron_eopt.optimizers.base import BaseOptimizer as BaseOptimizer
from megatron_eopt.registry import EMERGING_OPTIMIZERS

PARTS = "optimizers of megatron_eopt"  # no name of Megatron's, so nothing is merged into it

GROUPS = "param_groups"
MAIN_PARAMETERS = "fp32_from_fp16_params"


def torch_part(state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict of the torch optimizer; for bf16 Megatron puts it beside the fp32 copies of the parameters."""
    part: dict[str, Any] = state_dict.get("optimizer", state_dict)
    return part


def taken_out(asked: dict[Any, Any]) -> dict[Any, Any]:
    """What is asked for, with our parts under :data:`PARTS`, by their number, instead of in their places."""
    return _without(asked) | {PARTS: dict(enumerate(parts_of(asked)))}


def _without(asked: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: _without(value) if isinstance(value, dict) and any(parts_of(value)) else value
        for key, value in asked.items()
        if not (isinstance(value, dict) and BLOCK in value)
    }


def put_back(asked: dict[Any, Any], loaded: dict[Any, Any], common: Any) -> None:
    """Bring what was loaded for :func:`taken_out` into the form that was asked for.

    Args:
        asked: the state dict that was asked for.
        loaded: changed in place.
        common: the common state of all optimizers in the checkpoint.
    """
    found = loaded.pop(PARTS, {})
    parts = iter([_completed(part, found.get(number, {}), common) for number, part in enumerate(parts_of(asked))])
    for key, value in asked.items():
        if any(parts_of(value)):
            loaded[key] = _placed(value, loaded.get(key), parts)


def _placed(asked: Any, loaded: Any, parts: Iterator[dict[Any, Any]]) -> Any:
    if BLOCK in asked:
        return next(parts)
    rest = loaded if isinstance(loaded, dict) else {}
    return {
        key: _placed(value, rest.get(key), parts) if any(parts_of(value)) else rest.get(key)
        for key, value in asked.items()
    }


def _completed(asked: dict[Any, Any], loaded: dict[Any, Any], common: Any) -> dict[Any, Any]:
    """One part, with what is the checkpoint's: what is empty on this rank was not asked for, and is not there."""
    inner: dict[Any, Any] = {"state": dict(torch_part(loaded).get("state", {}))}
    saved = list(_torch_states(common))
    inner[GROUPS] = [group for each in saved for group in each[GROUPS]]
    blocks = blocks_of(common)
    name = asked[BLOCK]["optimizer"]
    counted = [(block["optimizer"], block["common_step"]) for block in blocks] or [
        ("Adam", part.get("state", {}).get("common_step")) for part in saved
    ]
    steps = [step for of, step in counted if step is not None and (of == name or (_is_adam(of) and _is_adam(name)))]
    if steps:
        inner["state"]["common_step"] = steps[0]
    groups = [group for block in blocks for group in block["groups"]]
    block = {"state": loaded.get(BLOCK, {}).get("state", {})} | ({"groups": groups} if groups else {})
    block |= next(({"manifest": each["manifest"]} for each in blocks if "manifest" in each), {})
    if "optimizer" not in asked:
        return inner | {BLOCK: block}
    main = loaded.get(MAIN_PARAMETERS, [])
    if isinstance(main, list):
        filled = iter(main)
        main = [next(filled) if group else [] for group in asked[MAIN_PARAMETERS]]
    return {"optimizer": inner, MAIN_PARAMETERS: main, BLOCK: block}


def _is_adam(name: str) -> bool:
    """Whether an optimizer is one of the Adams that Megatron builds, of which each machine may have another."""
    described = (each.optimizer_cls for each in EMERGING_OPTIMIZERS.values())
    return "Adam" in name and name not in {each.__name__ for each in described if issubclass(each, BaseOptimizer)}


def _torch_states(common: Any) -> Iterator[dict[Any, Any]]:
    """What the common state has of torch optimizers."""
    if isinstance(common, dict):
        if GROUPS in common:
            yield common
        else:
            for key, value in common.items():
                yield from (_torch_states(value) if key != BLOCK else ())
