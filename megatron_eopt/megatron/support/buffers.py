"""Whether Megatron is to lay gradient buffers out for whole matrices."""

from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

from megatron_eopt import registry
from megatron_eopt.megatron import releases
from megatron_eopt.megatron.support.facts import Run, on, primary_of
from megatron_eopt.megatron.support.rules import unsupported
from megatron_eopt.routing import OverrideError, read_overrides


def without_layout(run: Run) -> Run:
    """The same run, whose ranks have whole gradients."""
    ddp = SimpleNamespace(**vars(run.ddp) | {"use_distributed_optimizer": False})
    return replace(run, ddp=ddp, whole_matrices=False)


def against_layout(run: Run) -> str | None:
    """Why a run would be refused for its layout alone."""
    left = unsupported(without_layout(run))
    for rule in unsupported(run):
        if rule not in left:
            return rule.what.format(run=run)
    return None


def clear_where_refused(args: Namespace) -> None:
    """Clear Megatron's flag of the layout where a run would be refused for it.

    Megatron lays buffers out while it wraps the model, when no optimizer is known. ``args`` are validated.
    """
    if not on(args, "use_layer_wise_distributed_optimizer") or not on(args, "use_layer_wise_param_layout"):
        return
    if _routes(args):
        why: str | None = "overrides give parameters another optimizer, or exclude them"
    else:
        why = against_layout(_of(args))
    if why is None:
        return
    args.use_layer_wise_param_layout = False
    if getattr(args, "rank", 0) == 0:
        as_with = "as with --no-use-layer-wise-param-layout"
        print(f"megatron_eopt: gradient buffers are not laid out for whole matrices, {as_with}: {why}", flush=True)


def _of(args: Namespace) -> Run:
    """The run as its arguments tell it, laid out."""
    name = primary_of(args)
    biases = args.num_experts and args.add_bias_linear and args.expert_model_parallel_size > 1
    return Run(
        optimizer=name,
        release=releases.version(),
        config=args,
        ddp=SimpleNamespace(use_distributed_optimizer=True),
        args=args,
        layer_wise=True,
        leaves_scalars=bool(registry.get_optimizer_entry(name).default_param_overrides),
        data_parallel=args.data_parallel_size * args.context_parallel_size,
        whole_matrices=True,
        expert_vector="a bias" if biases else None,
    )


def _routes(args: Namespace) -> bool:
    file = getattr(args, "optimizer_overrides", None)
    if file is None:
        return False
    try:
        entries = read_overrides(file)
    except OverrideError:  # which the builder raises
        return False
    return any(entry.settings.keys() & {"optimizer", "exclude"} for entry in entries)
