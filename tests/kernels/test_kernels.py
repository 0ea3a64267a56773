"""Which kernel serves, and that its products are right."""

import pytest
import torch

from megatron_eopt import SOAP, Execution, TensorParallelMuon
from megatron_eopt.kernels.choice import check_kernel, products_for, rule, triton_missing
from megatron_eopt.kernels.products import Blocked, Products
from megatron_eopt.orthogonalize import newton_schulz

CPU = torch.device("cpu")


@pytest.fixture
def gpu(monkeypatch):
    """Let torch say that there is a GPU of some compute capability."""
    pytest.importorskip("triton")

    def of(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return torch.device("cuda", 0)

    return of


@pytest.mark.parametrize(
    ("capability", "dtype", "kernel"),
    [
        ((9, 0), torch.float16, "triton"),
        ((9, 0), torch.bfloat16, "triton"),
        ((9, 0), torch.float32, "torch"),
        ((8, 0), torch.float16, "torch"),  # where nobody has measured it
        ((7, 5), torch.float16, "torch"),
    ],
)
def test_rule_by_capability_and_dtype(gpu, capability, dtype, kernel):
    device = gpu(capability)
    assert rule(device, dtype)[0] == kernel
    assert products_for(None, device, dtype, "medium").share(4096) == (0.5 if kernel == "triton" else 1.0)


def test_rule_on_a_cpu():
    assert isinstance(products_for(None, CPU, torch.float32, "highest"), Blocked)
    assert isinstance(products_for(None, CPU, torch.bfloat16, "medium"), Blocked)
    assert products_for(None, CPU, torch.float64, "highest") == Products()


def test_a_named_kernel_serves_or_is_refused(gpu):
    assert isinstance(products_for("triton", gpu((8, 0)), torch.float16, "medium"), Products)
    assert triton_missing(gpu((8, 0))) is None
    with pytest.raises(ValueError, match=r"'triton' .* cannot serve: .* capability 7.5, and 8.0 is needed"):
        check_kernel("triton", gpu((7, 5)))
    with pytest.raises(ValueError, match=r"has no fp64: take 'torch'"):
        products_for("triton", CPU, torch.float64, "highest")


@pytest.mark.parametrize("cls", [TensorParallelMuon, SOAP])
def test_kernels_are_no_settings_of_groups(cls):
    """So ranks need not agree, and states of several machines have the same keys."""
    parameter = torch.nn.Parameter(torch.randn(12, 8))
    optimizer = cls([parameter])
    parameter.grad = torch.randn(12, 8)
    optimizer.step()
    assert not {"symmetric_products", "step_kernels"} & optimizer.state_dict()["param_groups"][0].keys()


def test_named_kernels_agree_with_each_other():
    x = torch.randn(520, 1030)
    expected = newton_schulz(x, products="torch")
    torch.testing.assert_close(newton_schulz(x, products="blocked"), expected, rtol=1e-4, atol=1e-6)


def test_explain_names_the_kernels():
    optimizer = TensorParallelMuon([torch.nn.Parameter(torch.ones(12, 8))], fp32_matmul_prec="highest")
    assert "Symmetric products by blocked (fp32 and bf16 on a CPU)" in optimizer.explain()
    named = TensorParallelMuon([torch.nn.Parameter(torch.ones(12, 8))], execution=Execution(symmetric_products="torch"))
    assert "Symmetric products by torch (named)" in named.explain()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("products", [Products(), Blocked(1), Blocked(3)])
@pytest.mark.parametrize("shape", [(24, 40), (3, 16, 20), (1, 1), (0, 5), (520, 1030)])
def test_products_are_those_of_fp64(products, dtype, shape):
    """Where sums are, in the end: up to a few units in the last place of the largest entry."""
    if dtype.itemsize == 2 and shape[0] > 500:
        return  # slow on a CPU
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) / shape[-1] ** 0.5).to(dtype)
    out = torch.full((*shape[:-1], shape[-2]), torch.nan, dtype=dtype)
    assert products.gram(x, out) is out
    assert_close(out, x.double() @ x.double().mT)
    a = out + out.mT
    b = a / 2  # the two commute to the last bit
    out = torch.full_like(a, torch.nan)
    assert products.addmm(a, a, b, beta=-1.5, alpha=0.75, out=out) is out
    assert_close(out, -1.5 * a.double() + 0.75 * a.double() @ b.double())


def assert_close(found, expected):
    largest = expected.abs().max().item() if expected.numel() else 0.0
    units = 4 if found.dtype.itemsize == 2 else 64  # of the sums
    atol = units * torch.finfo(found.dtype).eps * largest
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=atol)


def test_sums_do_not_overflow_fp16():
    """R^2 of the Gram form reaches 2.7e8 before it is multiplied by 7.6e-9."""
    r = torch.full((24, 24), 2.0**14 * 0.5, dtype=torch.float16)
    found = Products().addmm(r, r, r, beta=-4.775 / 2**14, alpha=2.0315 / 2**28, out=torch.empty_like(r))
    assert_close(found, -4.775 / 2**14 * r.double() + 2.0315 / 2**28 * r.double() @ r.double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_matrices_over_their_norms(dtype):
    x = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = Products().normalized(x, dtype, unit=16.0)
    assert_close(found, 16 * x.double() / torch.linalg.matrix_norm(x.double(), keepdim=True))
