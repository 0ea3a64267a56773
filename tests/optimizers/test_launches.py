"""How many operations one step takes: as many as there are kinds of matrices, however many matrices there are."""

from collections import Counter

import pytest
import torch
from counting import HOST_READ, Launches, Operations, launches, launches_of_step
from models import SETS

from megatron_eopt.matrices import GATE_UP, experts
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.optimizers.spectron import factor_pairs
from megatron_eopt.step import stacked_optimizer
from megatron_eopt.step.nonfinite import NonFinite
from tests.optimizers.family import build, every, having
from tests.optimizers.on_gpu import masking
from tests.optimizers.several import run as run_all
from tests.optimizers.several import set_gradients
from tests.optimizers.spectrons import parameters, spectron

SHAPES = [(12, 12), (18, 12), (12, 18), (24, 12), (12, 24)]
EXACT = {"symmetric_products": "torch"}  # as many products as there are steps, on every machine


def many(count, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return params


def operations_of(name, of_each, flagged):
    """Of the fourth step of so many matrices of each shape."""
    params = many(of_each)
    optimizer = build(name, params, **(EXACT if name in having("symmetric_products") else {}))
    optimizer = masking(optimizer) if flagged else optimizer
    for _ in range(3):
        optimizer.step()
    with Operations() as counted:
        optimizer.step()
    return counted.counts


@pytest.mark.parametrize("flagged", [False, True], ids=["on a CPU", "with a flag"])
@every
def test_a_step_of_more_matrices_takes_no_more_operations(name, flagged):
    few, many = (operations_of(name, of_each, flagged) for of_each in (2, 5))
    assert many == few
    assert many[HOST_READ] <= 2  # of gradients that are not finite, which a GPU does not ask


def test_a_step_of_muon_takes_few_operations():
    assert operations_of("muon", 5, False).total() <= 150
    assert operations_of("muon", 5, True).total() <= 220  # a flag costs a few for each shape


def test_the_first_step_reads_back_the_norms_of_all_matrices_at_once():
    optimizer = build("muon_hyperball", many(4))
    with Operations() as counted:
        optimizer.step()
    assert counted.counts[HOST_READ] <= 2  # of gradients that are not finite


class Sizes(Operations):
    """Has also the most bytes that each operation makes, or changes, and those of the largest tensor that one makes."""

    def __init__(self):
        super().__init__()
        self.largest, self.tensor = Counter(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(func, types, args, kwargs)
        changed = made if made is not None else args[0]
        tensors = changed if isinstance(changed, list | tuple) else [changed]
        nbytes = sum(each.nbytes for each in tensors if isinstance(each, torch.Tensor))
        name = func.overloadpacket.__name__
        self.largest[name] = max(self.largest[name], nbytes)
        if made is not None and launches(func):
            self.tensor = max([self.tensor, *(each.nbytes for each in tensors if isinstance(each, torch.Tensor))])
        return made


# Spectron's.


def operations(optimizer):
    """Of one step, without the check of the gradients, which reads its result on a CPU alone."""
    with Sizes() as found, torch.no_grad():
        optimizer._take(torch.ones((), dtype=torch.bool))
    return found


def test_a_step_of_many_pairs_takes_few_operations():
    params = parameters([(64, 16), (16, 96)] * 160)
    optimizer = spectron([factor_pairs(list(zip(params[::2], params[1::2], strict=True)))], lr=0.05)
    run_all(optimizer, params, [0])
    assert operations(optimizer).counts.total() <= 1500


def mixed():
    """Equal parameters, and others between them: weights, weights of several matrices, and pairs of factors."""
    weights = parameters([(24, 16), (16, 24), (24, 16), (3, 24, 16), (48, 16), (24, 16), (48, 16), (16, 24)])
    A, B, C, D, E, F = parameters([(24, 4), (4, 16), (24, 4), (16, 4), (24, 4), (4, 16)])
    weights[3].logical_matrices = experts(3)
    weights[4].logical_matrices = weights[6].logical_matrices = GATE_UP
    return weights, [(A, B), (C, D), (E, F)]


def spectrons(weights, pairs, **settings):
    groups = [{"params": weights}] * bool(weights) + [factor_pairs(pairs, weight_decay=0.3)] * bool(pairs)
    return spectron(groups, lr=0.05, **settings)


def state_of(optimizer, p):
    return {"p": p.detach().clone(), **{key: value.clone() for key, value in optimizer.state[p].items()}}


@pytest.mark.parametrize("most", [2**28, 2**12, 1])
def test_equal_matrices_step_as_each_by_itself(most, monkeypatch):
    (weights, pairs), (alone, pairs_alone) = mixed(), mixed()
    params, each = [*weights, *sum(pairs, ())], [*alone, *sum(pairs_alone, ())]
    apart = [spectrons([p], []) for p in alone] + [spectrons([], [pair]) for pair in pairs_alone]
    monkeypatch.setattr(stacked_optimizer, "MOST_STACK_BYTES", most)
    together = spectrons(weights, pairs)
    for step in range(3):
        set_gradients(params, step)
        set_gradients(each, step)
        for optimizer in (together, *apart):
            optimizer.step()
    kept = {p: optimizer.state[p] for optimizer in apart for p in optimizer.state}
    for p, q in zip(params, each, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
        for key, value in together.state[p].items():
            torch.testing.assert_close(value, kept[q][key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "most"),
    [
        ("spectron", {"rank": 16}, 280),
        ("polargrad", {}, 134),
        ("muon_hyperball", {}, 163),
        ("mars_muon", {}, 150),
        ("dion", {}, 325),
        ("dion2", {}, 201),
    ],
)
def test_a_step_launches_no_kernel_for_each_of_48_matrices(name, settings, most):
    kernels = launches_of_step(name, SETS["124M"], **settings).kernels
    assert kernels.total() < most + 48, kernels


@pytest.mark.parametrize(
    ("operation", "of_entry"),
    [
        (lambda xs, ys: torch._foreach_mul_(xs, 2.0), 4 + 4),
        (torch._foreach_add_, 4 + 2 + 4),
        (torch._foreach_add, 4 + 2 + 4),
        (torch._foreach_copy_, 2 + 4),
        (lambda xs, ys: [x.copy_(y) for x, y in zip(xs, ys, strict=True)], 2 + 4),
    ],
)
def test_what_changes_in_place_is_counted_as_written(operation, of_entry):
    xs = [torch.ones(5, 3), torch.ones(4)]
    ys = [torch.ones_like(x, dtype=torch.bfloat16) for x in xs]
    with Launches() as counted:
        operation(xs, ys)
    assert counted.bytes.total() == of_entry * 19


@pytest.mark.parametrize(
    ("name", "of_entry"),
    [
        ("polargrad", 2 + 4),  # factors in bf16, and momenta in fp32
        ("muon_hyperball", 2 + 4),
        ("mars_muon", 4 + 4 + 4 + 4),  # gradients once more, those of the last step twice, which are written
    ],
)
def test_norms_and_products_read_their_matrices_once_and_copy_none(name, of_entry):
    muon = launches_of_step("muon", SETS["124M"]).bytes
    moved = launches_of_step(name, SETS["124M"]).bytes
    entries = sum(rows * cols for rows, cols in SETS["124M"])
    assert moved.total() - muon.total() < (of_entry + 0.1) * entries, moved.most_common()


def test_a_step_of_psgd_moves_little_beside_its_products():
    """Factors of a GPT of 124M have four times the entries of its matrices, and products read and write those most."""
    moved = launches_of_step("psgd_kron", SETS["124M"]).bytes
    products = moved["bmm"] + moved["baddbmm_"]
    assert moved.total() < 2.55 * products, moved.most_common()  # writes of multi-tensor calls among them


@pytest.mark.parametrize("as_one", [False, True])
def test_stacks_of_spectron_are_of_bounded_size(as_one, monkeypatch):
    one = 4 * 96 * 64
    for most in (8, 3):
        monkeypatch.setattr(stacked_optimizer, "MOST_STACK_BYTES", most * one)
        params = parameters([(8, 96, 64)] if as_one else [(96, 64)] * 8)
        if as_one:
            params[0].logical_matrices = experts(8)
        optimizer = spectron(params, lr=0.05)
        run_all(optimizer, params, [0])
        set_gradients(params, 1)
        found = operations(optimizer)
        assert found.largest["bmm"] == most * one
        # nor are more of them there at a time
        assert max(found.largest["stack"], found.largest["_foreach_copy_"]) <= most * one


# SOAP's.


@pytest.mark.parametrize("settings", [{}, {"use_kl_shampoo": True, "basis_of": "current", "nesterov": True}], ids=str)
def test_a_device_of_soap_is_asked_once_in_the_first_step_and_not_again(monkeypatch, settings):
    monkeypatch.setattr(NonFinite, "_report", lambda self, *args: None)  # which on a GPU reads what is there already
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x.shape) or tolist(x))
    params = many(2, [(6, 4), (4, 6), (5,)])
    optimizer = masking(SOAP(params, precondition_frequency=1, **settings))
    late = torch.nn.Parameter(params[0].detach().clone())
    optimizer.add_param_group({"params": [late]})
    for step, expected in enumerate((1, 1, 2, 2, 2)):
        late.grad = None if step < 2 else torch.ones_like(late)  # its first step is the third
        with Sizes() as watched:
            optimizer.step()
        assert len(reads) == expected
        assert not watched.counts.keys() & {"nonzero", "is_nonzero", "masked_select"}
        assert watched.counts[HOST_READ] == watched.counts["_linalg_eigh"]  # at whose result a CPU alone looks


@pytest.mark.parametrize("settings", [{}, {"max_dim": 80}], ids=str)
def test_stacks_of_soap_are_bounded_and_their_size_changes_nothing(monkeypatch, settings):
    shapes = [(64, 64), (96, 64), (64, 96), (128, 64), (64, 128)]
    whole, params = many(12, shapes), many(12, shapes)
    most = 3 * 4 * 128 * 64 * 4  # of four of the largest matrices
    a, b = (SOAP(each, precondition_frequency=2, **settings) for each in (whole, params))
    for _ in range(4):
        a.step()
    monkeypatch.setattr(stacked_optimizer, "MOST_STACK_BYTES", most)
    with Sizes() as watched:
        for _ in range(4):
            b.step()
    assert 128 * 128 * 4 < watched.tensor <= most
    for p, q in zip(params, whole, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
