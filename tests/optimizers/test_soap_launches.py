"""Many small matrices cost SOAP as few launches and host reads as one of each shape, and memory within a bound."""

import pytest
import torch
from counting import HOST_READ, Operations, launches

from megatron_eopt.optimizers import whole_matrices
from megatron_eopt.optimizers.nonfinite import NonFinite
from megatron_eopt.optimizers.soap import SOAP

SHAPES = [(64, 64), (96, 64), (64, 96), (128, 64), (64, 128)]


class Watched(Operations):
    """Has also the bytes of the largest result."""

    def __init__(self):
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if launches(func):
            tensors = found if isinstance(found, tuple | list) else [found]
            self.largest = max([self.largest, *(x.nbytes for x in tensors if isinstance(x, torch.Tensor))])
        return found


def many(count, shapes=SHAPES):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(count) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    return params


@pytest.mark.parametrize("frequency", [10, 1])
def test_a_step_of_320_matrices_in_five_shapes_costs_at_most_1500_operations(frequency):
    optimizer = SOAP(many(64), precondition_frequency=frequency)
    for _ in range(3):
        optimizer.step()
    with Watched() as watched:
        optimizer.step()
    assert watched.counts["linalg_qr"] == (10 if frequency == 1 else 0)  # of each shape the rows and the columns
    assert watched.counts.total() <= 1500, watched.counts


@pytest.mark.parametrize("settings", [{}, {"use_kl_shampoo": True, "basis_of": "current", "nesterov": True}], ids=str)
def test_a_device_is_asked_once_in_the_first_step_and_not_again(monkeypatch, settings):
    monkeypatch.setattr(NonFinite, "_report", lambda self: None)  # which on a GPU reads what is there already
    reads, tolist = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x.shape) or tolist(x))
    params = many(2, [(6, 4), (4, 6), (5,)])
    optimizer = SOAP(params, precondition_frequency=1, **settings)
    late = torch.nn.Parameter(params[0].detach().clone())
    optimizer.add_param_group({"params": [late]})
    for step, expected in enumerate((1, 1, 2, 2, 2)):
        late.grad = None if step < 2 else torch.ones_like(late)  # its first step is the third
        with Watched() as watched:
            optimizer.step()
        assert len(reads) == expected
        assert not watched.counts.keys() & {HOST_READ, "nonzero", "is_nonzero", "masked_select"}


@pytest.mark.parametrize("settings", [{}, {"max_dim": 80}], ids=str)
def test_stacks_are_bounded_and_their_size_changes_nothing(monkeypatch, settings):
    whole, params = many(12), many(12)
    most = 3 * 4 * 128 * 64 * 4  # of four of the largest matrices
    a, b = (SOAP(each, precondition_frequency=2, **settings) for each in (whole, params))
    for _ in range(4):
        a.step()
    monkeypatch.setattr(whole_matrices, "MOST_BYTES", most)
    with Watched() as watched:
        for _ in range(4):
            b.step()
    assert 128 * 128 * 4 < watched.largest <= most
    for p, q in zip(params, whole, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
