"""The line about each optimizer's parameters and orthogonalization."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch.optim.optimizer import Optimizer

from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.base import KERNEL, STEP_KERNELS
from megatron_eopt.optimizers.parameters import local, parameters_in
from megatron_eopt.optimizers.spectron import Spectron
from megatron_eopt.optimizers.tensor_parallel_muon import TensorParallelMuon
from megatron_eopt.optimizers.weight_average import average_of
from megatron_eopt.screen import megabytes
from megatron_eopt.settings.groups import iteration_of


def summary(optimizers: Sequence[Optimizer]) -> str:
    """One line on what each class of optimizers updates here."""
    of_classes: dict[str, list[Optimizer]] = {}
    for optimizer in optimizers:
        of_classes.setdefault(type(optimizer).__name__, []).append(optimizer)
    parts = [", ".join(_updated(name, of_class)) for name, of_class in of_classes.items()]
    for optimizer in optimizers:
        average = average_of(optimizer)
        evaluated = f"weights are averaged by {average}, and evaluated at it"
        if average is not None and evaluated not in parts:
            parts.append(evaluated)
    return "; ".join(parts)


def _updated(name: str, of_class: Sequence[Optimizer]) -> Iterator[str]:
    parameters = [parameter for optimizer in of_class for parameter in parameters_in(optimizer.param_groups)]
    elements = sum(local(parameter).numel() for parameter in parameters)
    yield f"{name} owns {len(parameters)} parameters with {elements:,} elements on this rank"
    having = [optimizer for optimizer in of_class if parameters_in(optimizer.param_groups)]
    muons = [optimizer for optimizer in having if isinstance(optimizer, TensorParallelMuon)]
    factored = [optimizer for optimizer in having if isinstance(optimizer, Spectron)]
    for mode in dict.fromkeys(optimizer.tp_mode for optimizer in (*muons, *factored)):
        yield f"tp_mode {mode}"
    if muons:
        offloaded = sum(sum(muon.prepare().offloaded()) for muon in muons)
        if offloaded:
            yield f"{megabytes(offloaded)} MB of their state in host memory"
        yield from _orthogonalized(muons)
    if factored:
        matrices = sum(optimizer.matrices_per_step for optimizer in factored)
        ranks = {group["rank"] for optimizer in factored for group in optimizer.param_groups if group["params"]}
        listed = " or ".join(map(str, sorted(ranks)))
        # for those who did not ask for low rank
        yield f"{matrices} matrices, each the product of two factors of rank {listed} from the first step on"


def _orthogonalized(muons: Sequence[TensorParallelMuon]) -> Iterator[str]:
    iterations = Counter[str]()
    schemes = Counter[str]()
    sizes = set[float]()
    ranks = 1
    for muon in muons:
        described = muon.described_matrices()
        for group in muon.param_groups:
            settings = iteration_of(muon.effective(group))
            coefficients = settings.coefficient_type if isinstance(settings.coefficient_type, str) else "custom"
            for parameter in group["params"]:
                for matrix, layout in zip(described[parameter], muon.matrix_layouts(parameter), strict=True):
                    iterations[f"{settings.steps} steps of {coefficients}"] += 1
                    schemes[matrix.scheme] += 1
                    if matrix.scheme != "local":
                        ranks = max(ranks, layout.ranks)
                    if matrix.rms is not None:
                        sizes.add(round(matrix.rms, 3))
    first = muons[0]
    kernels = first.param_groups[0]
    how = [f"{count} by {name}" for name, count in sorted(iterations.items())]
    how.append(f"{first.newton_schulz.fp32_matmul_prec} precision")
    how.append(f"symmetric products by {kernels[KERNEL]}")
    if STEP_KERNELS in kernels:  # chosen on a GPU
        how.append(f"elementwise work by {kernels[STEP_KERNELS]}")
    yield f"{schemes.total()} matrices orthogonalized ({', '.join(how)})"
    where = " and ".join(f"{count} {scheme}" for scheme, count in sorted(schemes.items()))
    if ranks > 1:
        where += f" over {ranks} ranks"
    yield f"{where} ({'an approximation' if 'blockwise' in schemes else 'exact'})"
    for key, value in first.given_modifiers().items():
        yield f"{key} {value}"
    if isinstance(first, TensorParallelAdaptiveMuon):
        yield f"second moment by {first.moment2_method}"
    size = "not known before the steps"
    if sizes:
        size = " to ".join(f"{size:g}" for size in sorted({min(sizes), max(sizes)}))
    yield f"first update RMS {size} (AdamW's is near 0.2)"
