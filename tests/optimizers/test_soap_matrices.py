"""A parameter of several logical matrices takes the steps that these would take by themselves."""

import pytest
import torch

from megatron_eopt.optimizers.soap import SOAP
from tests.optimizers.several import parameters, run, set_gradients
from tests.optimizers.soap_reference import SETTINGS

STEPS = 7


def by_group(shapes):
    def parts(x):
        return [part.reshape(-1, x.size(1)) for part in x.view(-1, sum(shapes), x.size(1)).split(shapes, 1)]

    return parts


def assert_steps_as(p, parts, optimizer, **settings):
    alone = [torch.nn.Parameter(part.clone()) for part in parts(p.detach())]
    separate = SOAP(alone, max_dim=8, **SETTINGS)
    for step in range(STEPS):
        set_gradients([p], step)
        for each, gradient in zip(alone, parts(p.grad), strict=True):
            each.grad = gradient.clone()
        optimizer.step()
        separate.step()
    for each, part in zip(alone, parts(p.detach()), strict=True):
        assert torch.equal(each, part)


@pytest.mark.parametrize("shapes", [[4, 2, 2], [4, 4, 2, 2]])
def test_fused_projections_are_split_where_that_is_asked_for(shapes):
    p, q, bias = parameters([(2 * sum(shapes), 6), (2 * sum(shapes), 6), (2 * sum(shapes),)])
    q.qkv_split_shapes = [1, 1, 2 * sum(shapes) - 2]
    settings = {"split_qkv": True, "is_qkv_fn": lambda p: True, "qkv_split_shapes": shapes, "max_dim": 8, **SETTINGS}
    assert_steps_as(p, by_group(shapes), SOAP([p, q, bias], **settings))
    assert_steps_as(q, by_group(q.qkv_split_shapes), SOAP([q, bias], **settings))
    optimizer = SOAP([p, bias], **{**settings, "split_qkv": False})
    run(optimizer, [p, bias], range(2))
    assert {key for key in optimizer.state[p] if key.startswith("Q")} == {"Q_R"}
    assert set(optimizer.state[bias]) == {"exp_avg", "exp_avg_sq", "steps"}
