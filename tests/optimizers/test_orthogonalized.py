import pytest
import torch

from megatron_eopt import TensorParallelMuon
from megatron_eopt.orthogonalize import newton_schulz
from tests.optimizers.family import build, every, matrices, take
from tests.optimizers.field import gradient, matrix


def optimizer(params, **settings):
    given = {"lr": 0.1, "use_nesterov": False, "weight_decay": 0.0, "orthogonalize_fn": newton_schulz}
    given["scale_factor_fn"] = lambda rows, cols: 1.0
    return build("users_own", params, **{**given, **settings})


def test_a_name_of_another_class_is_no_setting_of_the_users():
    with pytest.raises(TypeError, match="has no scaled_orthogonalize_fn"):
        optimizer([matrix()], scaled_orthogonalize_fn=newton_schulz)
    with pytest.raises(ValueError, match=r"momentum_beta=0\.9 and momentum=0\.5 are two names of one setting"):
        optimizer([matrix()], momentum=0.5)


def test_missing_functions_mean_identity_and_are_warned_of():
    p = matrix()
    with pytest.warns(UserWarning, match="OrthogonalizedOptimizer has no") as caught:
        opt = optimizer([p], orthogonalize_fn=None, scale_factor_fn=None)
    assert [str(each.message) for each in caught] == [
        "OrthogonalizedOptimizer has no orthogonalize_fn: updates are not orthogonalized",
        "OrthogonalizedOptimizer has no scale_factor_fn: updates are not scaled",
    ]
    p.grad = gradient(p, 1)
    expected = p.detach() - 0.1 * 0.1 * p.grad
    opt.step()
    torch.testing.assert_close(p.detach(), expected)


def times_five(grad):
    return 5 * grad


def three(rows, cols):
    return 3.0


@every
@pytest.mark.parametrize(("key", "function"), [("orthogonalize_fn", times_five), ("scale_factor_fn", three)])
def test_a_function_that_is_set_has_an_effect_or_there_is_a_word(name, key, function, caplog):
    plain, own = matrices(), matrices()
    optimizers = build(name, plain), build(name, own)
    said = ""
    setattr(optimizers[1], key, function)
    take(optimizers[0], 3)
    try:
        take(optimizers[1], 3)
    except (TypeError, ValueError) as error:
        said = str(error)
    has_effect = not said and not all(map(torch.equal, plain, own))
    told = said or any("no effect" in message for message in caplog.messages)
    known = hasattr(type(optimizers[1]), key)  # of others an attribute is the user's own business
    assert has_effect != bool(told) or (not known and not has_effect)


@pytest.mark.parametrize("method", ["orthogonalize", "scaled_orthogonalize_fn", "orthogonalize_fn", "scale_factor_fn"])
@pytest.mark.parametrize("how", ["overridden", "set"])
def test_no_size_is_stated_of_what_a_users_function_makes(method, how):
    def function(*args, **settings):
        return 0.5 if method == "scale_factor_fn" else 0.5 * args[-1]

    p = matrix()
    if how == "overridden":
        opt = type("Own", (TensorParallelMuon,), {method: function})([p])
    else:
        opt = TensorParallelMuon([p])
        setattr(opt, method, function)
    assert TensorParallelMuon([matrix()]).predicted_rms(*p.shape) is not None
    assert opt.predicted_rms(*p.shape, opt.param_groups[0]) is None
    assert [each.rms for each in opt.described_matrices()[p]] == [None]


def test_no_size_is_stated_of_updates_by_a_rule_of_the_users():
    class Own(TensorParallelMuon):
        def update(self, stack):
            return super().update(stack)

    assert Own([matrix()]).predicted_rms(6, 4) is None
