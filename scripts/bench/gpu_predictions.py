"""What the cost model predicts for steps on experts: ``python scripts/bench/gpu_predictions.py --docs``.

Nothing is measured: the rates are assumed of an H200.
"""

import sys
from pathlib import Path

from pages import put

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

import torch  # noqa: E402
from gpu_optimizers import ENTRY_BYTES  # noqa: E402

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz  # noqa: E402
from megatron_eopt.parallel.chunks import ParamSpec  # noqa: E402
from megatron_eopt.parallel.cost import plan_cost, step_bytes  # noqa: E402
from megatron_eopt.parallel.engine import Engine  # noqa: E402
from megatron_eopt.parallel.layout import on_one_rank  # noqa: E402

PAGE = ROOT / "docs" / "measured.md"
EXPERTS = ((384, (2048, 7168)), (128, (768, 2048)))
H200 = 788e12, 4.3e12  # FLOP/s and bytes/s, assumed
ADAM_BYTES = 28  # of an entry: the gradient 4, the weight 8, two moments 16


def experts() -> str:
    """Steps of stacks of experts in Markdown, by Adam and by Muon, in milliseconds."""
    head = "experts|chunks|MiB at most|Adam|Muon's bytes|products, quintic|products, `fast`|Muon beside Adam"
    rows: list[list[str]] = [head.split("|"), ["---"] * 8]
    flops, bandwidth = H200
    for count, shape in EXPERTS:
        adam, own = (count * shape[0] * shape[1] * each / bandwidth * 1e3 for each in (ADAM_BYTES, ENTRY_BYTES))
        products, plans = [], []
        for name in ("quintic", "cubic5"):
            iteration = NewtonSchulz(coefficient_type=name, products="triton")
            specs = [ParamSpec(f"{n}", torch.float32, on_one_rank(shape), iteration=iteration) for n in range(count)]
            engine = Engine(specs, torch.device("cuda"))
            products.append(plan_cost(engine.plan, engine.works).flops / flops * 1e3)
            plans.append((len(engine.plan.buckets), step_bytes(engine.plan, engine.works, engine.workspace) / 2**20))
        (chunks, most), *_ = plans
        times = (f"{x:.3g} ms" for x in (adam, own, *products))
        slower = " or ".join(f"{(own + x) / adam:.1f}" for x in products)
        rows.append([f"{count} of {shape[0]} x {shape[1]}", f"{chunks}", f"{most:,.0f}", *times, f"{slower} times"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


# mark on the page -> what it shows
TABLES = {"experts": experts}

if __name__ == "__main__":
    for mark, made in TABLES.items():
        print(made(), end="\n\n")
        if "--docs" in sys.argv[1:]:
            put(PAGE, mark, made())
