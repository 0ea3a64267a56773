import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field

import pytest
import torch

from megatron_eopt import OrthogonalizedOptimizer
from megatron_eopt.kernels.precision import fp32_products
from megatron_eopt.kernels.products import Products
from megatron_eopt.orthogonalize import newton_schulz
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz

CUDA = torch.backends.cuda.matmul
SUMS = "allow_fp16_reduced_precision_reduction"
NEWER = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul


def settings():
    return tuple(backend.fp32_precision for backend in NEWER)


def fp16_settings():
    return getattr(CUDA, SUMS), getattr(CUDA, f"{SUMS}_split_k", None), CUDA.allow_fp16_accumulation


@dataclass(frozen=True)
class Watched(Products):
    """Products that note in which settings they are computed."""

    case: tuple = ()  # since what is compiled with equal products is kept
    seen: list = field(default_factory=list, compare=False)

    def gram(self, x, out=None):
        self.seen.append((*fp16_settings(), *settings()))
        return super().gram(x, out)

    def addmm(self, c, a, b, *, beta, alpha, out=None):
        self.seen.append((*fp16_settings(), *settings()))
        return super().addmm(c, a, b, beta=beta, alpha=alpha, out=out)


def everything():
    """The newer settings, the older one by both of its names, and where torch refuses to read it, that it does."""

    def older(read):
        try:
            return read()
        except RuntimeError as error:
            return str(error).partition(". ")[0]

    return settings(), older(torch.get_float32_matmul_precision), older(lambda: torch.backends.cuda.matmul.allow_tf32)


@pytest.fixture(autouse=True)
def _restore():
    sums = fp16_settings()
    yield
    setattr(CUDA, SUMS, sums[0] if sums[1] is None else sums[:2])
    CUDA.allow_fp16_accumulation = sums[2]
    torch.backends.fp32_precision = "none"
    torch.set_float32_matmul_precision("highest")
    for backend in NEWER:
        backend.fp32_precision = "none"


def by(name, value):
    def assign():
        *path, last = name.split(".")
        target = torch.backends
        for each in path:
            target = getattr(target, each)
        setattr(target, last, value)

    return assign


USERS = {
    "nothing": lambda: None,
    "older medium": lambda: torch.set_float32_matmul_precision("medium"),
    "older high": lambda: torch.set_float32_matmul_precision("high"),
    "older flag": by("cuda.matmul.allow_tf32", True),
    "newer tf32": by("cuda.matmul.fp32_precision", "tf32"),
    "newer ieee": by("cuda.matmul.fp32_precision", "ieee"),
    "newer of the CPU": by("mkldnn.matmul.fp32_precision", "bf16"),
    "newer of all": by("fp32_precision", "tf32"),
    "both": lambda: (torch.set_float32_matmul_precision("high"), by("cuda.matmul.fp32_precision", "ieee")()),
}


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("inside", ["low", "medium", "high", "highest"])
@pytest.mark.parametrize("fails", [False, True])
def test_torchs_settings_can_be_read_and_are_as_before_after_it(user, inside, fails):
    seen = []

    def orthogonalize(x):
        seen.append(everything())
        if fails:
            raise KeyError
        return x

    USERS[user]()
    before = everything()
    p = torch.nn.Parameter(torch.ones(2, 3))
    p.grad = torch.ones(2, 3)
    optimizer = OrthogonalizedOptimizer(
        [p], 0.1, 0.9, False, 0.0, True, False, None, None, inside, orthogonalize, lambda rows, cols: 1.0
    )
    with pytest.raises(KeyError) if fails else nullcontext():
        optimizer.step()
    tf32, named = inside != "highest", "medium" if inside == "low" else inside
    on_cpu = {"highest": "ieee", "high": "tf32", "medium": "bf16"}[named]
    assert seen == [(("tf32" if tf32 else "ieee", on_cpu), named, tf32)]
    assert everything() == before
    if user == "newer of all":  # what followed the setting of all backends still does
        torch.backends.fp32_precision = "ieee"
        assert settings() == ("ieee", "ieee")


@pytest.mark.parametrize("inside", ["low", "medium", "high", "highest"])
def test_torchs_setting_is_as_before_even_after_an_error(inside):
    torch.set_float32_matmul_precision("medium")
    before = settings()
    for error in (nullcontext(), pytest.raises(KeyError)):
        with error, fp32_products(inside):
            assert settings() == (("ieee",) * 2 if inside == "highest" else ("tf32",) * 2)
            if not isinstance(error, nullcontext):
                raise KeyError
        assert settings() == before


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


def test_it_is_left_alone_where_no_product_is_in_fp32(monkeypatch):
    def refuse(precision):
        raise AssertionError(f"set to {precision}")

    monkeypatch.setattr(torch, "set_float32_matmul_precision", refuse)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    for form in ("standard", "auto"):
        newton_schulz(x, fp32_matmul_prec="medium", form=form)  # in bf16
        newton_schulz(x.double(), fp32_matmul_prec="high", form=form)
    with pytest.raises(AssertionError, match="set to high"):
        newton_schulz(x, fp32_matmul_prec="high")
    monkeypatch.undo()


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
