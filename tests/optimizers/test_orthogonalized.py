import copy
import logging

import pytest
import torch

from megatron_eopt import OrthogonalizedOptimizer, TensorParallelMuon
from megatron_eopt.orthogonalize import newton_schulz
from tests.optimizers.family import build, every, matrices, take
from tests.optimizers.field import gradient, matrix


def optimizer(params, **settings):
    defaults = {
        "lr": 0.1,
        "momentum_beta": 0.9,
        "use_nesterov": False,
        "weight_decay": 0.0,
        "use_decoupled_weight_decay": True,
        "split_qkv": False,
        "is_qkv_fn": None,
        "qkv_split_shapes": None,
        "fp32_matmul_prec": "highest",
        "orthogonalize_fn": newton_schulz,
        "scale_factor_fn": lambda rows, cols: 1.0,
    }
    return OrthogonalizedOptimizer(params, **{**defaults, **settings})


def without_functions(params):
    return optimizer(params, orthogonalize_fn=None, scale_factor_fn=None)


def reference_steps(p, gradients, lr, beta, nesterov, weight_decay, decoupled, scale):
    """The algorithm, written out for one matrix in fp64."""
    p, m = p.detach().double().clone(), torch.zeros_like(p, dtype=torch.float64)
    for g in gradients:
        g = g.double()
        if decoupled:
            p = p - lr * weight_decay * p
        else:
            g = g + weight_decay * p
        m = beta * m + (1 - beta) * g
        u = (1 - beta) * g + beta * m if nesterov else m
        p = p - lr * scale * newton_schulz(u)
    return p, m


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.0, True), (0.3, True), (0.3, False)])
def test_steps_follow_the_formula(nesterov, weight_decay, decoupled):
    p = matrix()
    expected, momentum = reference_steps(
        p, [gradient(p, seed) for seed in (1, 2, 3)], 0.1, 0.9, nesterov, weight_decay, decoupled, 3.0
    )
    opt = optimizer(
        [p],
        use_nesterov=nesterov,
        weight_decay=weight_decay,
        use_decoupled_weight_decay=decoupled,
        scale_factor_fn=lambda rows, cols: rows / (cols - 2),
    )
    for seed in (1, 2, 3):
        p.grad = gradient(p, seed)
        opt.step()
    torch.testing.assert_close(p.double(), expected, rtol=1e-5, atol=1e-5)
    assert list(opt.state[p]) == ["momentum_buffer"]
    torch.testing.assert_close(opt.state[p]["momentum_buffer"].double(), momentum, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decoupled", [True, False])
def test_gradients_are_not_written_to(decoupled):
    p = matrix()
    opt = optimizer([p], weight_decay=0.5, use_decoupled_weight_decay=decoupled, use_nesterov=True)
    p.grad = gradient(p, 1)
    before, storage = p.grad.clone(), p.grad.data_ptr()
    opt.step()
    assert torch.equal(p.grad, before)
    assert p.grad.data_ptr() == storage


@pytest.mark.filterwarnings("ignore:OrthogonalizedOptimizer has no")
@pytest.mark.parametrize(
    ("cls", "shape"),
    [
        *((optimizer, shape) for shape in [(5,), ()]),
        *((without_functions, shape) for shape in [(5,), (2, 3, 4), ()]),
        *((TensorParallelMuon, shape) for shape in [(5,), (2, 3, 4), ()]),
    ],
)
def test_what_is_no_matrix_is_refused_at_construction(cls, shape):
    name = "TensorParallelMuon" if cls is TensorParallelMuon else "OrthogonalizedOptimizer"
    with pytest.raises(ValueError, match=f"{name} orthogonalizes matrices, but parameter 1 of group 0 has shape"):
        cls([matrix(), torch.nn.Parameter(torch.ones(shape))])


def test_a_refused_group_is_not_kept():
    opt = optimizer([matrix()])
    with pytest.raises(ValueError, match="parameter 0 of group 1"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number of at least 0, got -1.0"),
        ({"weight_decay": -0.1}, "weight_decay must be a finite number of at least 0"),
        ({"momentum_beta": 1.0}, r"momentum_beta must lie in \[0, 1\), got 1.0"),
        ({"momentum_beta": -0.5}, r"momentum_beta must lie in \[0, 1\)"),
        ({"fp32_matmul_prec": "max"}, "unknown fp32_matmul_prec 'max'"),
        ({"split_qkv": True, "qkv_split_shapes": [2, 2, 2]}, "split_qkv needs is_qkv_fn"),
        ({"split_qkv": True, "is_qkv_fn": bool}, "split_qkv needs qkv_split_shapes"),
        ({"split_qkv": True, "is_qkv_fn": lambda p: True, "qkv_split_shapes": [3, 3]}, "3 positive integers, got .3"),
        ({"split_qkv": True, "is_qkv_fn": lambda p: True, "qkv_split_shapes": [4, 1, 1.0]}, "positive integers"),
        ({"split_qkv": True, "is_qkv_fn": lambda p: True, "qkv_split_shapes": [6, 1, -1]}, "positive integers"),
        (
            {"split_qkv": True, "is_qkv_fn": lambda p: True, "qkv_split_shapes": [2, 1, 1]},
            r"of 6 rows cannot be split into \[2, 1, 1\], which are 4",
        ),
    ],
)
def test_wrong_settings_are_refused_at_construction(settings, message):
    with pytest.raises(ValueError, match=message):
        optimizer([matrix()], **settings)


def test_qkv_parts_are_orthogonalized_and_scaled_by_themselves():
    p, q = matrix(), matrix(seed=1)
    q.fused = True
    opt = optimizer(
        [p, q],
        split_qkv=True,
        is_qkv_fn=lambda x: hasattr(x, "fused"),
        qkv_split_shapes=[3, 2, 1],
        scale_factor_fn=lambda rows, cols: float(rows),
    )
    update = gradient(q, 1)
    expected = torch.cat([len(part) * newton_schulz(part) for part in update.split([3, 2, 1])])
    torch.testing.assert_close(opt.orthogonalize(q, update), expected)
    torch.testing.assert_close(opt.orthogonalize(p, update), 6 * newton_schulz(update))


def test_missing_functions_mean_identity_and_scale_one_with_a_warning():
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


def test_further_settings_become_defaults_of_groups_and_reach_orthogonalize():
    seen = []

    class Subclass(OrthogonalizedOptimizer):
        def orthogonalize(self, p, grad, **group_settings):
            seen.append((group_settings["rank"], group_settings["lr"]))
            return grad

    p, q = matrix(), matrix(seed=1)
    groups = [{"params": [p]}, {"params": [q], "rank": 7, "lr": 0.5}]
    opt = Subclass(
        groups, 0.1, 0.9, False, 0.0, True, False, None, None, "highest", lambda x: x, lambda rows, cols: 1.0, rank=3
    )
    p.grad, q.grad = gradient(p, 1), gradient(q, 1)
    opt.step()
    assert seen == [(3, 0.1), (7, 0.5)]


def test_further_settings_of_users_may_be_tensors_also_in_a_copy():
    class Subclass(OrthogonalizedOptimizer):
        def orthogonalize(self, p, grad, mine):
            return grad * mine

    p, mine = matrix(), torch.rand(6, 4)
    split = {"split_qkv": False, "is_qkv_fn": None, "qkv_split_shapes": None, "fp32_matmul_prec": "highest"}
    functions = {"orthogonalize_fn": torch.sign, "scale_factor_fn": lambda rows, cols: 1.0}
    opt = Subclass([p], 0.1, 0.9, False, 0.0, True, **split, **functions, mine=mine)
    for each in (opt, copy.deepcopy(opt)):
        (q,) = each.param_groups[0]["params"]
        before = q.detach().clone()
        q.grad = gradient(q, 1)
        each.step()
        torch.testing.assert_close(q.detach(), before - 0.1 * 0.1 * q.grad * mine)


@pytest.mark.parametrize("precision", ["low", "medium", "high", "highest"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_step_leaves_torchs_precision_as_it_was(precision, fails):
    before = torch.get_float32_matmul_precision()

    def orthogonalize_fn(x):
        if fails:
            raise RuntimeError("in the step")
        return newton_schulz(x)

    try:
        for process_wide in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(process_wide)
            p = matrix()
            p.grad = gradient(p, 1)
            opt = optimizer([p], fp32_matmul_prec=precision, orthogonalize_fn=orthogonalize_fn)
            if fails:
                with pytest.raises(RuntimeError, match="in the step"):
                    opt.step()
            else:
                opt.step()
            assert torch.get_float32_matmul_precision() == process_wide
    finally:
        torch.set_float32_matmul_precision(before)


def test_init_state_covers_parameters_without_gradient():
    p, q = matrix(), matrix(seed=1)
    opt = optimizer([p, q])
    p.grad = gradient(p, 1)
    opt.step()
    momentum = opt.state[p]["momentum_buffer"].clone()
    opt.init_state()
    assert torch.equal(opt.state[p]["momentum_buffer"], momentum)
    assert torch.equal(opt.state[q]["momentum_buffer"], torch.zeros_like(q))


def test_momentum_has_the_dtype_of_the_parameter():
    p = matrix(dtype=torch.bfloat16)
    opt = optimizer([p])
    p.grad = gradient(p, 1)
    opt.step()
    assert opt.state[p]["momentum_buffer"].dtype == torch.bfloat16
    assert p.dtype == torch.bfloat16


def times_five(grad):
    return 5 * grad


def three(rows, cols):
    return 3.0


def moved(opt, p):
    """What a step with a gradient of ones subtracts, without momentum, at a rate of 1."""
    before = p.detach().clone()
    p.grad = torch.ones_like(p)
    opt.step()
    return before - p.detach()


@pytest.mark.parametrize("cls", [OrthogonalizedOptimizer, TensorParallelMuon])
def test_functions_that_are_set_as_attributes_take_effect_without_a_warning(cls, caplog):
    p = torch.nn.Parameter(torch.zeros(2, 2))
    if cls is TensorParallelMuon:
        opt = TensorParallelMuon([p], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0)
    else:
        opt = optimizer([p], lr=1.0, momentum_beta=0.0, use_nesterov=False, weight_decay=0.0)
    with caplog.at_level(logging.WARNING):
        opt.orthogonalize_fn = times_five
        opt.scale_factor_fn = three
    assert torch.equal(moved(opt, p), torch.full((2, 2), 15.0))
    with caplog.at_level(logging.WARNING):
        opt.scaled_orthogonalize_fn = times_five  # which decides for both
    assert torch.equal(moved(opt, p), torch.full((2, 2), 5.0))
    assert not caplog.messages


@every
@pytest.mark.parametrize(("key", "function"), [("orthogonalize_fn", times_five), ("scale_factor_fn", three)])
def test_a_function_set_as_an_attribute_has_an_effect_or_there_is_a_word(name, key, function, caplog):
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
def test_no_size_is_stated_of_updates_that_a_users_function_makes(method, how):
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


def test_no_size_is_stated_of_updates_by_a_program_of_the_users():
    class Own(TensorParallelMuon):
        def program(self, step):
            return super().program(step)

    assert Own([matrix()]).predicted_rms(6, 4) is None
