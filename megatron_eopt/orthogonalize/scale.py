"""How large the update made of an orthogonal factor is."""

from math import sqrt
from typing import Literal, get_args

from megatron_eopt.orthogonalize.choices import check_choice

ScaleMode = Literal["spectral", "unit_rms_norm", "shape_scaling"]


def muon_scale_factor(rows: int, cols: int, mode: str = "spectral") -> float:
    """Factor from an orthogonal factor to a Muon update.

    The RMS of the entries of ``s * O``, ``O`` (rows x cols) orthogonal, is ``s / sqrt(max(rows, cols))``:

    - ``spectral``: ``sqrt(max(rows, cols))``, RMS 1; times 0.2 it matches AdamW's [1].
    - ``unit_rms_norm``: ``sqrt(rows / cols)``, independent of width under muP [2].
    - ``shape_scaling``: ``sqrt(max(1, rows / cols))`` [3].

    Args:
        rows: rows of the *global logical* matrix (outputs), not of a shard or a fused parameter.
        cols: its columns (inputs).
        mode: one of the above.

    Returns:
        The factor; 1 for a matrix without entries.

    Raises:
        ValueError: for an unknown mode, naming the known ones.

    [1] Liu et al., Muon is Scalable for LLM Training, arXiv 2502.16982.
    [2] Bernstein, Deriving Muon (2025), https://jeremybernste.in/writing/deriving-muon.
    [3] Jordan et al., Muon (2024), https://kellerjordan.github.io/posts/muon/.
    """
    check_choice("scale mode", mode, get_args(ScaleMode))
    if 0 in (rows, cols):
        return 1.0
    if mode == "spectral":
        return sqrt(max(rows, cols))
    ratio = rows / cols
    return sqrt(ratio if mode == "unit_rms_norm" else max(1.0, ratio))


def predicted_update_rms(
    rows: int,
    cols: int,
    mode: str = "spectral",
    extra_scale_factor: float = 1.0,
) -> float:
    """RMS of a full-rank Muon update, before the learning rate.

    AdamW's is near 0.2 (arXiv 2502.16982, section 2.2). It is 0 for an update without entries.
    """
    scale = extra_scale_factor * muon_scale_factor(rows, cols, mode)
    return 0.0 if 0 in (rows, cols) else scale / sqrt(max(rows, cols))
