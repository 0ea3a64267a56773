"""Orthonormal bases by products: those of QR decompositions, orthonormal whatever comes, without a wait."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_eopt.kernels.precision import fp32_products
from megatron_eopt.orthogonalize import bases
from megatron_eopt.orthogonalize.bases import by_products, eigenvectors, orthonormal_columns
from tests.optimizers.field import drawn

DTYPES = [torch.float32, torch.float64]
ROUNDING = {torch.float32: 3e-6, torch.float64: 1e-13}


def off_orthonormal(Q):
    wide = Q.double()
    return (wide.mT @ wide - torch.eye(Q.size(-1), dtype=torch.float64)).abs().max().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1, 1), (2, 5, 5), (2, 128, 128), (2, 129, 129), (1, 400, 300), (2, 300, 7)])
def test_full_columns_have_the_bases_of_lapack(shape, dtype):
    x = torch.eye(*shape[1:], dtype=dtype) + drawn(shape, 0, dtype) / (4 * shape[1] ** 0.5)
    x *= torch.logspace(-12, 12, shape[2]).to(dtype)
    Q, diagonal = by_products(x)
    expected, lengths = orthonormal_columns(x)
    signs = lengths.sign()[:, None]  # of which LAPACK leaves the choice
    torch.testing.assert_close(Q, expected * signs, rtol=0, atol=300 * torch.finfo(dtype).eps)
    torch.testing.assert_close(diagonal, lengths.abs(), rtol={torch.float32: 1e-5, torch.float64: 1e-12}[dtype], atol=0)
    assert off_orthonormal(Q) < ROUNDING[dtype]


def gradients_of_kind(kind, rows, generator):
    """Gradients whose factors lack directions, or have eigenvalues far apart."""
    x = torch.randn(rows, 6, generator=generator)
    match kind:
        case "dead rows":
            x[torch.rand(rows, generator=generator) < 0.5] = 0
        case "equal rows":
            x[1::2] = x[: rows - 1 : 2].clone()
        case "rows far apart":
            x *= 10 ** (-22 * torch.rand(rows, 1, generator=generator))
        case "ones":
            x = torch.ones(rows, 6)
        case "another row each time":
            alive = torch.randint(rows, (1,), generator=generator)
            x = torch.zeros(rows, 6).index_fill_(0, alive, 1.0)
        case "large":
            x *= 1e9
        case "small":
            x *= 1e-19
    return x


KINDS = ["low rank", "dead rows", "equal rows", "rows far apart", "ones", "another row each time", "large", "small"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", [False, True], ids=["exact", "TF32"])
@pytest.mark.parametrize("kind", KINDS)
def test_iterated_bases_are_orthonormal_whatever_factors_lack(kind, rounded, dtype, monkeypatch):
    monkeypatch.setattr(bases, "PANEL", 8)
    for rows in (3, 17, 40, 64):
        generator = torch.Generator().manual_seed(rows)
        F = torch.zeros(1, rows, rows, dtype=dtype)
        Q = torch.eye(rows, dtype=dtype)[None]
        for step in range(5):
            x = gradients_of_kind(kind, rows, generator).to(dtype)
            F = F.lerp(x @ x.mT, 0.4)
            images = in_tf32(F) @ in_tf32(Q) if rounded else F @ Q
            if step == 0:
                _, Q = eigenvectors(F)
            else:
                Q, _ = by_products(images, near=Q)
            assert off_orthonormal(Q) < ROUNDING[dtype], (rows, step)


def in_tf32(x):
    """Numbers with 10 bits behind the first, as tensor cores read them."""
    return ((x.float().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32).to(x.dtype)


def test_columns_of_zeros_stay_as_they_are():
    near = torch.linalg.qr(drawn((2, 9, 9), 1, torch.float32)).Q
    Q, _ = by_products(torch.zeros(2, 9, 9), near)
    torch.testing.assert_close(Q, near)
    Q, diagonal = by_products(torch.zeros(2, 9, 4))
    assert not Q.any()
    assert not diagonal.any()


def test_products_are_exact_whatever_is_set():
    precisions = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.overloadpacket.__name__ in ("bmm", "baddbmm_"):
                precisions.add(torch.get_float32_matmul_precision())
            return func(*args, **(kwargs or {}))

    with fp32_products("high"), Seen():
        by_products(drawn((1, 200, 200), 0, torch.float32))
    assert precisions == {"highest"}


def factors_with_rows_of_zeros(dtype):
    """As embeddings have them, of which LAPACK decomposes more than half with an error."""
    factors = []
    for seed in range(12):
        x = torch.zeros(128, 8, dtype=dtype)
        alive = torch.randperm(128, generator=torch.Generator().manual_seed(seed))[:16]
        x[alive] = drawn((16, 8), seed, dtype)
        factors.append(x @ x.mT)
    return torch.stack(factors)


@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1.0, 1e30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_have_eigenvectors(dtype, scale):
    factors = factors_with_rows_of_zeros(dtype)
    values, vectors = eigenvectors(factors * scale)
    exact = torch.linalg.eigvalsh(factors.double() + 1e-20 * torch.eye(128)).flip(-1) * scale
    assert off_orthonormal(vectors) < ROUNDING[dtype]
    tolerance = 1e-5 if scale == 1e-40 else 10 * ROUNDING[dtype]  # fp32 has five digits there
    torch.testing.assert_close(values.double() / scale, exact / scale, rtol=0, atol=tolerance * 100)
    torch.testing.assert_close((factors @ vectors), vectors * (values / scale)[:, None], rtol=0, atol=tolerance * 100)


def test_eigenvectors_have_the_bits_of_lapack():
    x = drawn((3, 20, 30), 0, torch.float32)
    factors = x @ x.mT
    expected = torch.linalg.eigh(factors)
    for ours, theirs in zip(eigenvectors(factors), expected, strict=True):
        assert torch.equal(ours, theirs.flip(-1))


@pytest.mark.parametrize("silent", [False, True])
def test_eigenvectors_that_fail_in_fp32_are_found_in_fp64(silent, monkeypatch):
    eigh = torch.linalg.eigh

    def failing(x):
        if x.dtype == torch.float64:
            return eigh(x)
        if silent:
            return eigh(torch.eye(x.size(-1)).expand_as(x))[0], torch.full_like(x, torch.nan)
        raise torch.linalg.LinAlgError("the algorithm failed to converge")

    factors = factors_with_rows_of_zeros(torch.float32)
    expected = eigh(factors.double()).eigenvalues.flip(-1).float()
    monkeypatch.setattr(torch.linalg, "eigh", failing)
    values, vectors = eigenvectors(factors)
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
    assert vectors.dtype == torch.float32
    assert off_orthonormal(vectors) < ROUNDING[torch.float32]
