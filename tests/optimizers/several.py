"""Parameters of several shapes, gradients that depend on the step alone, and steps with these."""

import torch

SHAPES = [(6, 4), (5,), (), (2, 3, 4), (0, 3)]


def parameters(shapes=SHAPES, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_gradients(params, step, scale=1.0):
    for index, p in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + index)
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(p.dtype)


def run(optimizer, params, steps):
    for step in steps:
        set_gradients(params, step)
        optimizer.step()


def gradients_of(optimizer, params, steps, set_gradients=set_gradients):
    """The gradients that each parameter had in some steps, which do not write to them."""
    seen = [[] for _ in params]
    for step in steps:
        set_gradients(params, step)
        for of_p, p in zip(seen, params, strict=True):
            of_p.append(p.grad.clone())
        optimizer.step()
        assert all(torch.equal(p.grad, of_p[-1]) for of_p, p in zip(seen, params, strict=True))
    return seen
