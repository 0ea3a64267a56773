import os
import re
import warnings
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_eopt.orthogonalize.kernels import KERNELS, Kernel, check, choose, made
from megatron_eopt.orthogonalize.products import Blocked, Products
from tests.distributed.ranks import run_ranks

SHAPES = [(24, 40), (40, 24), (3, 16, 20), (1, 1), (0, 5)]


@dataclass(frozen=True)
class Wrong(Products):
    """Products that are wrong in one of the ways a kernel can be."""

    how: str = ""

    def gram(self, x, out=None):
        if self.how == "raises":
            raise RuntimeError("out of resources")
        result = super().gram(x, out=None if self.how == "forgets out" else out)
        if self.how == "an entry":
            result[..., -1, 0] += 1e-2
        if self.how == "a tile":
            result[..., -8:, :8] = torch.nan
        return result

    def addmm(self, c, a, b, *, beta, alpha, out=None):
        match self.how:
            case "swapped factors":
                beta, alpha = alpha, beta
            case "no c":
                c = torch.zeros_like(c)
            case "a squared":
                b = a
            case "sums in the factors' dtype":
                product = (a.float() @ b.float()).to(a.dtype)
                return out.copy_(beta * c.float() + alpha * product.float())
            case "rounded to TF32":
                a = (a.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)
        return super().addmm(c, a, b, beta=beta, alpha=alpha, out=out)


def kernels(how, **more):
    return {"kernel": Kernel(lambda precision: Wrong(how), **more), **KERNELS}


def choose_of(known, *arguments, **settings):
    """A choice among other kernels than the package's."""
    with mock.patch("megatron_eopt.orthogonalize.kernels.KERNELS", known):
        return choose(*arguments, **settings)


def made_of(known, *arguments):
    with mock.patch("megatron_eopt.orthogonalize.kernels.KERNELS", known):
        return made(*arguments)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("products", [Products(), Blocked(1), Blocked(3)])
def test_right_products_pass(products, dtype):
    shapes = SHAPES if dtype != torch.float32 else [*SHAPES, (520, 1030)]
    assert check(products, shapes, dtype, "cpu") is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("how", ["an entry", "a tile", "swapped factors", "no c", "a squared", "forgets out"])
def test_wrong_products_do_not(how, dtype):
    reason = check(Wrong(how), SHAPES, dtype, "cpu")
    assert re.search("not written to out" if how == "forgets out" else "off by", reason)
    assert str(dtype) in reason
    assert "(24, 40)" in reason


def test_what_counts_as_wrong_depends_on_the_precision():
    assert "off by" in check(Wrong("rounded to TF32"), SHAPES, torch.float32, "cpu")
    assert check(Wrong("rounded to TF32"), SHAPES, torch.float32, "cpu", fp32_precision="tf32") is None


def test_sums_that_overflow_fp16_are_found():
    # R^2 of the Gram form reaches 2.7e8 before it is multiplied by 7.6e-9; bf16 ends later than that
    how = "sums in the factors' dtype"
    for shape in [(1, 1), (24, 40), (3, 20, 16)]:
        reason = check(Wrong(how), [shape], torch.float16, "cpu")
        assert re.match(r"beta R \+ alpha R\^2 of .* is off by (inf|nan)", reason)
    with pytest.warns(UserWarning, match="kernel is dropped"):
        assert choose_of(kernels(how), [(24, 40)], torch.float16, "cpu").kernel == "torch"


def test_wrong_norms_do_not_serve():
    class WrongNorms(Products):
        def normalized(self, x, dtype, **more):
            return super().normalized(x, dtype, **more) * 1.02

    for dtype in (torch.float16, torch.bfloat16):
        assert "matrices over their norms, of (2, 24, 40)" in check(WrongNorms(), [(3, 24, 40)], dtype, "cpu")
        assert check(Products(), [(3, 24, 40), (40, 24)], dtype, "cpu") is None


def test_every_shape_is_checked():
    class WrongAbove30(Products):
        def gram(self, x, out=None):
            return super().gram(x, out).mul_(1 if x.size(-1) <= 30 else 1.1)

    assert check(WrongAbove30(), [(8, 30), (30, 8)], torch.float32, "cpu") is None
    assert "(31, 8)" in check(WrongAbove30(), [(8, 30), (31, 8)], torch.float32, "cpu")


def test_a_check_of_large_matrices_takes_few_columns():
    """In fp32 the largest ones take several GiB, which a kernel need not have to be right."""
    taken = []

    class Recorder(Products):
        def gram(self, x, out=None):
            taken.append((x.shape, x.is_contiguous()))
            return super().gram(x, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_eopt.orthogonalize.kernels.MOST_ENTRIES", 2**14)
        for shape in ((64, 1001), (5, 1001, 64), (8, 1001)):
            assert check(Recorder(), [shape], torch.float16, "cpu") is None
    # as many beyond a multiple of 128, by which tiles and alignments are told apart
    expected = [((64, 233), True), ((2, 64, 105), False), ((8, 1001), True)]
    assert [(tuple(shape), contiguous) for shape, contiguous in dict.fromkeys(taken)] == expected


@pytest.mark.parametrize(
    ("shapes", "dtype", "kernel"),
    [
        ([(512, 2048), (4096, 512)], torch.float32, "blocked"),
        ([(512, 2048), (511, 2048)], torch.float32, "blocked"),  # which computes smaller ones whole
        ([(511, 2048)], torch.float32, "torch"),
        ([(512, 512)], torch.bfloat16, "torch"),
        ([], torch.float64, "torch"),
    ],
)
def test_on_a_cpu(shapes, dtype, kernel):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody is told of a GPU that he did not ask for
        choice = choose(shapes, dtype, "cpu")
    assert (choice.kernel, choice.dropped) == (kernel, {})
    assert isinstance(made(choice.kernel, 512), Blocked if kernel == "blocked" else Products)


@pytest.mark.parametrize(
    ("how", "missing", "reason"),
    [
        ("an entry", None, "X X^T of (24, 40) in torch.float32 is off by"),
        ("raises", None, "RuntimeError: out of resources"),
        ("", "compute capability 7.0", "compute capability 7.0"),
    ],
)
def test_a_dropped_kernel_is_told_once(how, missing, reason):
    with pytest.warns(UserWarning, match="kernel is dropped") as caught:
        choice = choose_of(kernels(how, missing=lambda device: missing), SHAPES, torch.float32, "cpu")
    assert [str(each.message) for each in caught] == [
        f"symmetric products: kernel is dropped, torch serves: {choice.dropped['kernel']}"
    ]
    assert caught[0].filename == __file__
    assert reason in choice.dropped["kernel"]
    assert choice.kernel == "torch"


@pytest.mark.skipif(torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ, reason="triton can run here")
def test_triton_without_a_gpu():
    reason = KERNELS["triton"].missing(torch.device("cuda"))
    assert re.search("no GPU|not installed", reason)
    with pytest.raises(RuntimeError, match=r"'triton' .* cannot serve: (no GPU|triton is not installed)"):
        choose(SHAPES, torch.float32, "cpu", kernel="triton")
    with pytest.warns(UserWarning, match="triton is dropped, torch serves") as caught:
        assert choose([], torch.float16, "cuda").dropped == {"triton": reason}
    assert len(caught) == 1


def test_triton_needs_to_be_installed_and_capability_8(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, there in (((7, 5), False), ((8, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, of=capability: of)
        reason = KERNELS["triton"].missing(torch.device("cuda", 0))
        assert reason is None if there else "7.5" in reason
    monkeypatch.setattr("megatron_eopt.orthogonalize.kernels.find_spec", lambda name: None)
    assert KERNELS["triton"].missing(torch.device("cuda")) == "triton is not installed"


def test_a_kernel_can_be_asked_for():
    for name, kind in (("torch", Products), ("blocked", Blocked)):
        choice = choose_of(kernels(""), SHAPES, torch.float32, "cpu", kernel=name)
        assert isinstance(made(choice.kernel, 512), kind)
    assert choose_of(kernels(""), SHAPES, torch.float32, "cpu") == ("kernel", {})
    assert made_of(kernels(""), "kernel", 512) == Wrong("")
    with pytest.raises(RuntimeError, match="'kernel' of symmetric products cannot serve: RuntimeError: out of res"):
        choose_of(kernels("raises"), SHAPES, torch.float32, "cpu", kernel="kernel")
    with pytest.raises(ValueError, match=r"unknown kernel 'cutlass' .* expected one of triton, blocked, torch"):
        choose(SHAPES, torch.float32, "cpu", kernel="cutlass")


def test_the_kernel_of_a_checkpoint_is_taken():
    assert choose_of(kernels(""), SHAPES, torch.float32, "cpu", kept="kernel").kernel == "kernel"
    # the slower one stays where a faster one would serve
    assert choose_of(kernels(""), SHAPES, torch.float32, "cpu", kept="torch").kernel == "torch"
    # what the user names comes first
    assert choose_of(kernels(""), SHAPES, torch.float32, "cpu", kernel="torch", kept="kernel").kernel == "torch"
    with pytest.raises(RuntimeError, match=r"off by .* kernel of the checkpoint, .* resume where it can serve"):
        choose_of(kernels("an entry"), SHAPES, torch.float32, "cpu", kept="kernel")
    with pytest.raises(RuntimeError, match=r"unknown kernel 'kernel' .* kernel of the checkpoint"):
        choose(SHAPES, torch.float32, "cpu", kept="kernel")


def minimum(serves):
    agreed = serves.clone()
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return agreed


def on_rank(rank, world_size, wrong_rank):
    known = {"other": Kernel(lambda precision: Wrong("raises" if rank == 1 - wrong_rank else "")), **KERNELS}
    known = {"kernel": Kernel(lambda precision: Wrong("an entry" if rank == wrong_rank else "")), **known}
    outcome = []
    for name in (None, "kernel", "torch"):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                choice = choose_of(known, SHAPES, torch.float32, "cpu", kernel=name, agree=minimum)
                outcome.append((choice.kernel, dict(choice.dropped), [str(each.message) for each in caught]))
            except RuntimeError as error:
                outcome.append(str(error))
    return outcome


def test_the_ranks_agree():
    # rank 1 cannot use the kernel, rank 0 not the other one: what is left to both is torch
    first, second = run_ranks(on_rank, 2, 1)
    for (kernel, dropped, caught), own, others in ((first[0], "other", "kernel"), (second[0], "kernel", "other")):
        assert kernel == "torch"
        assert dropped.keys() == {own, others}
        assert dropped[others] == "it fails on another rank"
        assert caught == [f"symmetric products: {own} is dropped, torch serves: {dropped[own]}"]
    assert "cannot serve: it fails on another rank" in first[1]
    assert "cannot serve: X X^T of (24, 40)" in second[1]
    assert first[2] == second[2] == ("torch", {}, [])
