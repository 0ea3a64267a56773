"""Which kernel serves, and the check of products that ``make gpu`` makes."""

import re
from dataclasses import dataclass

import pytest
import torch
from kernel_checks import check

from megatron_eopt import SOAP, Execution, TensorParallelMuon
from megatron_eopt.kernels.choice import check_kernel, products_for, rule, triton_missing
from megatron_eopt.kernels.products import Blocked, Products
from megatron_eopt.orthogonalize import newton_schulz

SHAPES = [(24, 40), (40, 24), (3, 16, 20), (1, 1), (0, 5)]
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
    assert products_for(None, CPU, torch.bfloat16, "medium") == Products()


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
    assert "Symmetric products by blocked (fp32 on a CPU)" in optimizer.explain()
    named = TensorParallelMuon([torch.nn.Parameter(torch.ones(12, 8))], execution=Execution(symmetric_products="torch"))
    assert "Symmetric products by torch (named)" in named.explain()


@dataclass(frozen=True)
class Wrong(Products):
    """Products that are wrong in one of the ways a kernel can be."""

    how: str = ""

    def gram(self, x, out=None):
        result = super().gram(x, out=None if self.how == "forgets out" else out)
        if self.how == "an entry":
            result[..., -1, 0] += 1e-2
        return result

    def addmm(self, c, a, b, *, beta, alpha, out=None):
        match self.how:
            case "swapped factors":
                beta, alpha = alpha, beta
            case "no c":
                c = torch.zeros_like(c)
            case "sums in the factors' dtype":
                product = (a.float() @ b.float()).to(a.dtype)
                return out.copy_(beta * c.float() + alpha * product.float())
        return super().addmm(c, a, b, beta=beta, alpha=alpha, out=out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("products", [Products(), Blocked(1), Blocked(3)])
def test_right_products_pass(products, dtype):
    shapes = SHAPES if dtype != torch.float32 else [*SHAPES, (520, 1030)]
    assert check(products, shapes, dtype, "cpu") is None


@pytest.mark.parametrize("how", ["an entry", "swapped factors", "no c", "forgets out"])
def test_wrong_products_do_not(how):
    reason = check(Wrong(how), SHAPES, torch.float16, "cpu")
    assert re.search("not written to out" if how == "forgets out" else "off by", reason)


def test_sums_that_overflow_fp16_are_found():
    # R^2 of the Gram form reaches 2.7e8 before it is multiplied by 7.6e-9; bf16 ends later than that
    reason = check(Wrong("sums in the factors' dtype"), [(24, 40)], torch.float16, "cpu")
    assert re.match(r"beta R \+ alpha R\^2 of .* is off by (inf|nan)", reason)
