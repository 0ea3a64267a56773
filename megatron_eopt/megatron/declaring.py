"""The manifest of a run at its start: checked, printed, written, and proved in the first step."""

import functools
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_eopt.manifest import problems, table, to_json, warnings
from megatron_eopt.megatron.collecting import Manifest
from megatron_eopt.megatron.held import held
from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.registry import takes_matrices


def declare(manifest: Manifest, name: str, config: Any) -> None:
    """Check a manifest; print and write it on rank 0, as the config says.

    Args:
        manifest: of all ranks.
        name: of the optimizer that the run asks for.
        config: Megatron's ``OptimizerConfig``; ``optimizer_manifest`` is short, full or none, and
            ``optimizer_manifest_file`` a path.

    Raises:
        ValueError: for all that a run must not start with, on every rank.
    """
    found = manifest.families
    wrong = [*problems(found, name, takes_matrices(name)), *manifest.misplaced]
    if wrong:
        raise ValueError("\n".join(["the optimizer does not own what it has to:", *wrong]))
    if dist.get_rank() != 0:
        return
    form = getattr(config, "optimizer_manifest", "short")
    if form != "none":
        print(f"megatron_eopt: the owner of every trainable parameter\n{table(found, full=form == 'full')}", flush=True)
    for each in warnings(found, config.muon_scale_mode):
        print(f"megatron_eopt: warning: {each}", flush=True)
    file = getattr(config, "optimizer_manifest_file", None)
    if file is not None:
        Path(file).write_text(json.dumps(to_json(found), indent=1) + "\n")


def prove_in_first_step(optimizer: Any, matrices: int) -> None:
    """Let the first ``optimizer.step`` count the matrices that it updates: as many as the manifest says.

    A step that Megatron leaves out, since the gradient is not finite, proves nothing; the next one does. So it is with
    too few in a step at a learning rate of zero, as warmups begin with: there may be nothing to compute.

    Args:
        optimizer: Megatron's.
        matrices: that this rank has a part of.
    """
    own = {id(each.optimizer): each.optimizer for each in held(optimizer)}
    counting = [each for each in own.values() if isinstance(each, BaseOptimizer)]
    step = optimizer.step

    @functools.wraps(step)
    def counted_step(*args: Any, **kwargs: Any) -> Any:
        before = sum(each.matrices_updated for each in counting)
        result = step(*args, **kwargs)
        calls = sum(each.matrices_updated for each in counting) - before
        at_rest = any(group["lr"] == 0 for each in counting for group in each.param_groups)
        if result[0] and (calls == matrices or not at_rest):
            optimizer.step = step
            if calls != matrices:
                raise RuntimeError(
                    f"{calls} matrices were updated in the first step on rank {dist.get_rank()}, and the "
                    f"manifest has {matrices}: some parameters got no gradient. Freeze what is not trained before "
                    f"Megatron wraps the model, or exclude it by an override"
                )
        return result

    optimizer.step = counted_step
