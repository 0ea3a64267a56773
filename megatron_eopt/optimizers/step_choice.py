"""Which form of the elementwise half of a step serves: kernels or torch.

It is chosen once, on all ranks, and kept in the checkpoint, since torch's own kernels may round otherwise.
"""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from megatron_eopt.matrices import declared_split
from megatron_eopt.optimizers.base import STEP_KERNELS
from megatron_eopt.optimizers.modifiers import MOMENT2_BUFFER, RADIUS, by_torch, holds
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.optimizers.second_moment import adaptive_muon
from megatron_eopt.optimizers.state import HAS_PREVIOUS, MOMENTUM_BUFFER, PREVIOUS_GRADIENT
from megatron_eopt.optimizers.step import Batch, Step
from megatron_eopt.optimizers.step_kernels import DTYPES, StepKernels
from megatron_eopt.orthogonalize.kernels import KERNELS
from megatron_eopt.parallel.attributes import is_cut_again, padding_of
from megatron_eopt.parallel.chunks import ParamSpec
from megatron_eopt.parallel.engine import Engine
from megatron_eopt.parallel.layout import on_one_rank
from megatron_eopt.parallel.scheduler import Program, resume

_SHAPE = (40, 72)  # of the matrices of a check: no tile fits
_OF_MOMENT: dict[str, Callable[[tuple[int, int]], tuple[int, ...]]] = {  # shapes
    "none": lambda shape: (),
    "adamuon": lambda shape: shape,
    "normuon": lambda shape: (max(shape),),
    "namo": lambda shape: (),
}
_LIKE = {torch.float32: 2.0**-20, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}  # a few units in the last place


def agreed_form(asked: str | None, kept: str | None, reason: str | None, agree: Callable[[Tensor], Tensor]) -> str:
    """The form of a step, the same on every rank.

    ``asked`` is that of the user, ``kept`` that of the checkpoint; ``reason`` says why kernels cannot serve here.
    ``agree`` takes the minimum over the ranks. Raises ``RuntimeError`` on all if kernels are named and one rank cannot.
    """
    named = asked or kept
    if named == "torch":
        return "torch"
    if bool(agree(torch.tensor([reason is None]).int()).all()):
        return "triton"
    why = reason or "they fail on another rank"
    if named is not None:
        raise RuntimeError(
            f"{STEP_KERNELS}='triton' cannot serve: {why}. {STEP_KERNELS}='torch' serves anywhere, and may round "
            f"otherwise than a checkpoint's kernels did"
        )
    warnings.warn(f"{STEP_KERNELS}: torch serves, since triton cannot: {why}", stacklevel=2)
    return "torch"


def agreed_kernels(optimizer: OrthogonalizedOptimizer, engine: Engine, asked: str | None) -> StepKernels | None:
    """The kernels of Muon's steps, or None for torch; groups keep the choice, ``asked`` is the user's."""
    kept = next(filter(None, (group.get(STEP_KERNELS) for group in optimizer.param_groups)), None)
    if asked is None and kept is None and engine.device.type == "cpu":
        return None
    reason = None if (asked or kept) == "torch" else reason_against(optimizer, engine.device)
    # who named a kernel of products may have ranks that make no optimizer: then the world is not asked either
    agree = partial(engine.lowest, asked=asked or optimizer.symmetric_products, kept=kept)
    form = agreed_form(asked, kept, reason, agree)
    for group in optimizer.param_groups:
        if asked is not None or group.get(STEP_KERNELS) is None:
            group[STEP_KERNELS] = form
    return None if form == "torch" else StepKernels(engine)


def reason_against(optimizer: OrthogonalizedOptimizer, device: torch.device) -> str | None:
    """Why kernels cannot serve Muon's parameters on a device.

    One rank may ask while others wait: neither plans nor layouts, which may need all ranks, are asked for.
    """
    reason = KERNELS["triton"].missing(device) or _modified(optimizer)
    if reason:
        return reason
    of_groups = [optimizer.effective(group) for group in optimizer.param_groups]
    methods = {settings["moment2_method"] for settings in of_groups}
    cautious = {settings["cautious_weight_decay"] for settings in of_groups}
    kinds = dict[tuple[torch.dtype, torch.dtype], None]()
    for name, parameter in zip(optimizer._names(), optimizer._parameters(), strict=True):
        weight = local(parameter)
        split = declared_split(parameter)
        momentum = optimizer.momentum_dtype or weight.dtype
        if not {weight.dtype, momentum} <= set(DTYPES):
            return f"{name} is in {weight.dtype}, its momentum in {momentum}"
        if is_cut_again(parameter) and (padding := padding_of(parameter)):
            return f"{name} has {padding} rows of padding"
        stacked = split is not None and split.stacked is not None
        if weight.ndim > 2 and not stacked and not weight.is_contiguous():
            return f"{name} is read as a matrix, but its strides are {weight.stride()}"
        kinds[weight.dtype, momentum] = None
    held = holds(of_groups[0])  # as all are
    try:
        for (weight_dtype, momentum_dtype), method, waits in product(kinds, methods, cautious):
            program = optimizer.of_step if method == "none" else adaptive_muon
            sized = method == "none" and optimizer.keeps_momenta
            found = fault(program, weight_dtype, momentum_dtype, device, method, waits, held, sized)
            if found:
                return found
        return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _modified(optimizer: OrthogonalizedOptimizer) -> str:
    """What of the groups' modifiers kernels do not do; empty if they serve."""
    of_groups = [optimizer.effective(group) for group in optimizer.param_groups]
    wanted = sorted(filter(None, map(by_torch, of_groups)))
    if wanted:
        return f"groups have {' and '.join(dict.fromkeys(wanted))}"
    differ = [key for key in ("weight_norm", "moment2_method") if len({each[key] for each in of_groups}) > 1]
    return f"groups differ in {' and '.join(differ)}" if differ else ""


def fault(
    program: Callable[[Step], Program],
    weight: torch.dtype,
    momentum: torch.dtype,
    device: torch.device,
    method: str = "none",
    cautious: bool = False,
    held: bool = False,
    sized: bool = False,
) -> str | None:
    """What is wrong with a step of a program by the kernels, beside torch's.

    ``method`` is that of the second moment; ``held`` whether matrices keep their norms; ``sized`` whether momenta size
    updates: kernels read them as they are kept, torch as they were averaged.
    """
    generator = torch.Generator(device).manual_seed(0)
    shapes: list[tuple[int, int]] = [_SHAPE] * 3
    if method == "normuon":
        shapes[2] = shapes[2][::-1]  # whose rows have moments, not its columns
    specs = [ParamSpec(f"matrix {n}", weight, on_one_rank(shape)) for n, shape in enumerate(shapes)]
    engine = Engine(specs, device)

    def drawn(dtype: torch.dtype) -> list[Tensor]:
        return [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]

    weights = drawn(weight)
    momenta = drawn(momentum)
    gradients = drawn(torch.float32)
    factors = drawn(weight)
    moments = [torch.rand(shape, generator=generator, device=device) for shape in map(_OF_MOMENT[method], shapes)]
    previous = drawn(weight)
    settings = {
        "moment2_method": method,
        "beta2": 0.9,
        "eps": 1e-8,
        "align_rms": True,
        "gamma": 0.5,
        "weight_norm": "hold" if held else "none",
        "relative_update": "none",
    }

    def stepped(kernels: StepKernels | None) -> dict[str, list[Tensor]]:
        # momenta in bf16 are rounded at random, which is left out here, and averaged in fp32
        average = momentum if kernels is not None else torch.promote_types(momentum, weight)
        batch = Batch(
            indices=[0, 1, 2],
            parameters=weights,
            weights=[x.clone() for x in weights],
            gradients=[x if kernels is not None else x.to(average) for x in gradients],
            state=[
                {
                    MOMENTUM_BUFFER: m.to(average, copy=True),
                    MOMENT2_BUFFER: v.clone(),
                    PREVIOUS_GRADIENT: g.clone(),
                    HAS_PREVIOUS: torch.ones((), device=device),
                    RADIUS: w.double().norm(),
                }
                for w, m, v, g in zip(weights, momenta, moments, previous, strict=True)
            ],
            settings=settings,
            group_settings={},
            lr=0.02,
            beta=0.9,
            nesterov=True,
            weight_decay=0.0 if held else 0.5,
            decays=not held,
            decay_method="decoupled",
            cautious=cautious,
            measured=held,
            accepted=torch.tensor([True, False, True], device=device),
        )
        step = Step([batch], batch.indices, [0.5] * len(shapes), engine, kernels=kernels)
        running = program(step)
        shards = next(running)
        if callable(shards):
            updates = [torch.empty_like(x) for x in weights]
            shards(updates)
        else:
            updates = [x.clone() for x in shards]
        resume(running, [x.clone() for x in factors])
        moved = {"updates": updates, "weights": batch.weights, "momenta": batch.momenta}
        kept = {"second moments": MOMENT2_BUFFER, "previous gradients": PREVIOUS_GRADIENT}
        return moved | {called: batch.states(key) for called, key in kept.items()}

    expected = stepped(None)
    kernels = StepKernels(engine)
    for _ in range(2):  # a kernel may launch otherwise what it has launched before
        for called, tensors in stepped(kernels).items():
            for x, y in zip(tensors, expected[called], strict=True):
                error = ((x.double() - y.double()).abs() / (1 + y.double().abs())).max().item()
                if not error <= 4 * max(_LIKE[x.dtype], _LIKE[momentum] if sized else 0.0):
                    return f"{called} in {x.dtype} are off by {error:.1e}"
    return None
