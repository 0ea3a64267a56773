"""What the cost model predicts for steps of Muon, for docs/gpu.md: ``python benchmarks/gpu_predictions.py --docs``.

Nothing is measured. The rates are those that the planner assumes of every rank; what is not orthogonalization
(momentum, weights, launches) is left out.
"""

import sys
from pathlib import Path

from compare_figures import replaced

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from gpu_optimizers import GPTS  # noqa: E402
from gpu_products import WORK  # noqa: E402

from megatron_eopt.parallel.cost import DEFAULT_RATES, plan_cost  # noqa: E402
from megatron_eopt.parallel.plan import make_plan  # noqa: E402
from megatron_eopt.parallel.records import TpMode  # noqa: E402
from megatron_eopt.plan.models import MODELS, Parallel, dealt_matrices  # noqa: E402

PAGE = ROOT / "docs" / "gpu.md"
LLAMAS = ("llama3-8b", "llama3-70b")
CASES = {name: (model, 1) for name, model in GPTS.items()} | {name: (MODELS[name], 8) for name in LLAMAS}
MODES: tuple[TpMode, ...] = ("auto", "duplicated")
HEAD = ("model", "TP", "mode", "ms", "TFLOP of a rank", "GB that it sends", "collectives")


def table() -> str:
    """The predictions in Markdown, with what they assume."""
    rows: list[tuple[object, ...]] = [HEAD, ("---",) * len(HEAD)]
    for name, (model, ranks) in CASES.items():
        matrices = dealt_matrices(model, Parallel(tensor=ranks), WORK)[0]
        for mode in MODES if ranks > 1 else MODES[:1]:
            cost = plan_cost(make_plan(matrices, mode, WORK), WORK)
            amounts = (f"{each:.3g}" for each in (cost.seconds * 1e3, cost.flops / 1e12, cost.bytes / 1e9))
            rows.append((name, ranks, mode if ranks > 1 else "any", *amounts, cost.collectives))
    assumed = (
        f"Assumed: a rank computes {DEFAULT_RATES.flops / 1e12:.0f} TFLOP/s and sends {DEFAULT_RATES.bytes / 1e9:.0f} "
        f"GB/s, a collective takes {DEFAULT_RATES.latency * 1e6:.0f} us or more,\nand an entry of an update has "
        f"{matrices[0].itemsize} bytes on the wire."
    )
    return "\n".join([*(f"| {' | '.join(map(str, row))} |" for row in rows), "", assumed])


if __name__ == "__main__":
    print(table())
    if "--docs" in sys.argv[1:]:
        PAGE.write_text(replaced(PAGE.read_text(encoding="utf-8"), "predictions", table()), encoding="utf-8")
