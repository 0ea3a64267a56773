import subprocess
import sys

import pytest
import torch

from megatron_eopt.orthogonalize.precision import fp32_products


def settings():
    return torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision


@pytest.fixture(autouse=True)
def _restore():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


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
