import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import torch

from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz
from megatron_eopt.orthogonalize.precision import fp32_products
from megatron_eopt.orthogonalize.products import Dense

CUDA = torch.backends.cuda.matmul
SUMS = "allow_fp16_reduced_precision_reduction"


def settings():
    return CUDA.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


def fp16_settings():
    return getattr(CUDA, SUMS), getattr(CUDA, f"{SUMS}_split_k", None), CUDA.allow_fp16_accumulation


@dataclass(frozen=True)
class Watched(Dense):
    """Products that note in which settings they are computed."""

    case: tuple = ()  # since what is compiled with equal products is kept
    seen: list = field(default_factory=list, compare=False)

    def gram(self, x, out=None):
        self.seen.append((*fp16_settings(), *settings()))
        return super().gram(x, out)

    def addmm(self, c, a, b, *, beta, alpha, out=None):
        self.seen.append((*fp16_settings(), *settings()))
        return super().addmm(c, a, b, beta=beta, alpha=alpha, out=out)


@pytest.fixture(autouse=True)
def _restore():
    before, sums = torch.get_float32_matmul_precision(), fp16_settings()
    yield
    torch.set_float32_matmul_precision(before)
    setattr(CUDA, SUMS, sums[0] if sums[1] is None else sums[:2])
    CUDA.allow_fp16_accumulation = sums[2]


@pytest.mark.parametrize("before", ["highest", "high", "medium"])
@pytest.mark.parametrize("inside", ["low", "medium", "high", "highest"])
def test_torchs_setting_is_the_same_after_as_before(before, inside):
    torch.set_float32_matmul_precision(before)
    seen = settings()
    with fp32_products(inside):
        assert settings() == (("ieee",) * 2 if inside == "highest" else ("tf32",) * 2)
    assert settings() == seen
    assert torch.get_float32_matmul_precision() == before


def test_also_after_an_exception():
    torch.set_float32_matmul_precision("medium")
    seen = settings()
    with pytest.raises(KeyError), fp32_products("highest"):
        raise KeyError
    assert settings() == seen


def test_highest_is_highest_in_a_process_that_set_medium():
    # on CPUs with bf16 units torch's medium rounds products of fp32 tensors to bf16
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    torch.set_float32_matmul_precision("medium")
    with fp32_products("highest"):
        product = x @ x
    assert (product - x.double() @ x.double()).abs().max() < 1e-3


def test_a_process_that_uses_the_newer_setting_is_served():
    # there the older one can no longer be read; in a process of its own, since it cannot be unset
    code = (
        "import torch; torch.backends.cuda.matmul.fp32_precision = 'tf32'\n"
        "from megatron_eopt.orthogonalize import newton_schulz\n"
        "newton_schulz(torch.eye(4), fp32_matmul_prec='highest')\n"
        "print(torch.backends.cuda.matmul.fp32_precision)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "tf32\n"


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize(("dtype", "form"), [(torch.float16, "gram"), (torch.bfloat16, "standard")])
def test_sums_of_fp16_products_are_in_fp32(dtype, form, allowed):
    """As they come from a GPU: nothing else is set, and nothing where products are in bf16; all is as before after."""
    # where sums may not be reduced in fp16, newer releases can also forbid to split them
    setattr(CUDA, SUMS, (allowed, allowed) if hasattr(CUDA, f"{SUMS}_split_k") else allowed)
    CUDA.allow_fp16_accumulation = allowed
    before, watched = (*fp16_settings(), *settings()), Watched((dtype, allowed))
    iteration = NewtonSchulz(products=watched).compile((8, 24), torch.float32, "cuda", form)
    assert iteration.dtype == dtype
    factor = iteration(torch.randn(8, 24, generator=torch.Generator().manual_seed(0)))
    assert factor.isfinite().all()
    inside = (False, before[1], False, *settings()) if dtype == torch.float16 else before
    assert set(watched.seen) == {inside}
    assert (*fp16_settings(), *settings()) == before
