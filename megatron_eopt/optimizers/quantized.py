"""Numbers in 8 bits, in blocks of 128 columns with a scale each.

An entry is a whole number of scales, from -127 to 127: the linear map of [1]. A block begins at a multiple of 128
columns of its logical matrix, so that shards of rows have whole blocks, and so have shards of columns that are cut at
such multiples.

[1] Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv 2110.02861.
"""

from math import ceil, inf, prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_eopt.matrices import Split
from megatron_eopt.parallel.layout import Layout

BLOCK = 128  # columns that share a scale
_MOST = 127
# A smaller scale has lost digits, and some devices would flush it to zero: the entries of such a block become zero.
_SMALLEST = torch.finfo(torch.float32).tiny
_LARGEST = 2.0**120  # of which 127 are finite


def quantized(x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of rows in fp32, rounded by ``noise``, 0 to 65535.

    A magnitude that is ``d`` of the way from one number of scales to the next is rounded up for ``65536 d`` of all
    noises, but for one of them. The largest of a block stays, up to the rounding of fp32. What is above 127 x 2^120,
    such as an infinity, becomes that, and a NaN makes its block one.
    """
    blocks, thresholds = _blocks(x), _blocks((noise + 0.5) / 65536)
    scales = (blocks.abs().amax(-1) / _MOST).clamp_(max=_LARGEST)
    scales *= scales >= _SMALLEST  # NaN stays
    counts = (blocks / torch.where(scales > 0, scales, inf)[..., None]).abs_().clamp_(max=_MOST)
    # exact from 64 scales on: of the largest nothing is lost, and nothing is carried beyond it
    codes = (counts + thresholds).floor_().copysign_(blocks).to(torch.int8)
    return codes.flatten(-2)[..., : x.shape[-1]], scales


def widened(codes: Tensor, scales: Tensor) -> Tensor:
    """What codes and scales stand for, in fp32."""
    return codes * scales.repeat_interleave(BLOCK, -1)[..., : codes.shape[-1]]


def shape_in_blocks(shape: torch.Size, split: Split, block: int) -> tuple[int, ...]:
    """Shape of the scales of a parameter, or of its shard."""
    if split.transposed:
        return ceil(shape[0] / block), shape[1]
    sides = shape if split.stacked is not None else (shape[0], prod(shape[1:]))
    return *sides[:-1], ceil(sides[-1] / block)


def check_blocks(called: str, layout: Layout) -> None:
    """Refuse shards of a matrix that end inside a block."""
    edges = {edge for held in layout.rectangles if held.numel for edge in (held.left, held.right)} - {layout.shape[1]}
    if cut := sorted(edge for edge in edges if edge % BLOCK):
        raise ValueError(
            f"{called}, a matrix {layout.shape}, is cut at column {cut[0]}, and a momentum in int8 has one scale for "
            f"every {BLOCK} columns, on one rank: cut its {layout.shape[1]} columns over fewer ranks, at multiples of "
            f"{BLOCK}, or take momentum_dtype bf16"
        )


def _blocks(x: Tensor) -> Tensor:
    columns = x.shape[-1]
    return pad(x, (0, -columns % BLOCK)).unflatten(-1, (ceil(columns / BLOCK), BLOCK))
