"""Settings and gradients that no optimizer of the family can take: each a ValueError that names value and range."""

import math
import re

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from megatron_eopt import DistributedMuon, OrthogonalizedOptimizer
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.optimizers.with_adamw import Muon
from megatron_eopt.settings.of_class import settings_of
from tests.distributed.ranks import run_ranks
from tests.optimizers.family import FOR_VECTORS, SETTINGS, build, decays, every_class, having, matrices, take

every = pytest.mark.parametrize("name", [*OPTIMIZERS, "hybrid"])

AT_LEAST_0 = "must be a finite number of at least 0"
ABOVE_0 = "must be a finite number above 0"
BELOW_1 = r"must lie in \[0, 1\)"
TWO_BELOW_1 = r"must be two numbers in \[0, 1\)"

RATES = [(key, value, AT_LEAST_0) for key in ("lr", "weight_decay") for value in (-0.1, math.nan, math.inf)]
MOMENTA = {
    "momentum": [*having("momentum"), "hybrid"],
    **{key: having(key) for key in ("momentum_beta", "beta2", "shampoo_beta")},
}
BETAS = {"betas": having("betas"), "adam_betas": ["hybrid"]}
EPS = {"eps": having("eps"), "adam_eps": ["hybrid"]}

CASES = [
    *((name, *rate) for name in [*OPTIMIZERS, "hybrid"] for rate in RATES),
    *(
        (name, key, value, BELOW_1)
        for key, names in MOMENTA.items()
        for name in names
        for value in (1.0, -0.1, math.nan)
    ),
    *(
        (name, key, value, TWO_BELOW_1)
        for key, names in BETAS.items()
        for name in names
        for value in ((0.9, 1.0), (-0.1, 0.9), (math.nan, 0.9), (0.9,), 0.9)
    ),
    *(
        (name, key, value, ABOVE_0)
        for key, names in EPS.items()
        for name in names
        for value in (0.0, -1e-8, math.nan, math.inf)
    ),
    *(("spectron", "rank", value, "must be a whole number of at least 1") for value in (0, -1, 2.0, True)),
    ("spectron", "rank", 5, r"must lie in \[1, 4\]"),
    *(("scion", "radius", value, ABOVE_0) for value in (0.0, -1.0, math.nan, math.inf)),
]


def made(name, params, **settings):
    return Muon(params, matrices(1, (5,)), **settings) if name == "hybrid" else build(name, params, **settings)


@pytest.mark.parametrize(("name", "key", "value", "wanted"), CASES)
def test_a_setting_is_refused_at_construction_and_in_a_new_group(name, key, value, wanted):
    in_group = key.removeprefix("adam_")
    message = rf"\w: {in_group} {wanted}.*, got {re.escape(str(value))}"
    p, q = matrices()
    with pytest.raises(ValueError, match=message):
        made(name, [p], **{key: value})
    optimizer = made(name, [p])
    groups = len(optimizer.param_groups)
    group = {"params": [q], in_group: value}
    of_adamw = in_group != key  # whose groups the constructor is given
    with pytest.raises(ValueError, match=message):
        Muon([p], [group]) if of_adamw else optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == groups


@pytest.mark.parametrize("steps", [101, 10**9])
@pytest.mark.parametrize("name", [*having("num_ns_steps"), "hybrid"])
def test_more_newton_schulz_steps_than_any_run_needs_are_refused_before_they_are_counted_out(name, steps):
    p, q = matrices()
    key = "ns_steps" if name == "hybrid" else "num_ns_steps"
    message = rf"the number of Newton-Schulz steps must be at most 100, got {steps}"
    with pytest.raises(ValueError, match=message):
        made(name, [p], **{key: steps})
    optimizer = made(name, [p])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [q], key: steps})
    optimizer.param_groups[0][key] = steps
    p.grad = torch.ones(6, 4)
    before = p.detach().clone()
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(p, before)


SCALARS = [
    *((name, key) for name in [*OPTIMIZERS, "hybrid"] for key in ("lr", "weight_decay")),
    *((name, key) for key, names in (MOMENTA | EPS).items() for name in names if key != "adam_eps"),
    *((name, "betas") for name in BETAS["betas"]),
    ("scion", "radius"),
]


@pytest.mark.parametrize(("name", "key"), SCALARS)
def test_a_tensor_of_several_entries_is_refused_where_a_number_is_wanted(name, key):
    two = torch.full((2,), 0.1)
    value = (0.9, two) if key == "betas" else two
    p, q = matrices()
    # the part of the hybrid that has the matrices says so
    message = rf"\w: {key} must be a number, or a tensor of one entry, got "
    with pytest.raises(TypeError, match=message):
        made(name, [p], **{key: value})
    optimizer = made(name, [p, q])
    with pytest.raises(TypeError, match=message):
        optimizer.add_param_group({"params": matrices(1), key: value})
    optimizer.param_groups[0][key] = value
    before = [x.detach().clone() for x in (p, q)]
    p.grad, q.grad = torch.ones(6, 4), torch.ones(6, 4)
    with pytest.raises(TypeError, match=message):
        optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip((p, q), before, strict=True))
    assert not getattr(optimizer, "matrices", optimizer).state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_group_that_fails_otherwise_is_not_kept(name):
    p, q = matrices()
    optimizer = build(name, [p])
    with pytest.raises(TypeError):
        optimizer.add_param_group({"params": [q], "lr": "0.1"})
    assert len(optimizer.param_groups) == 1


@every
def test_a_sparse_gradient_is_refused_before_anything_changes(name):
    first, second = matrices()
    optimizer = made(name, [first, second])
    before = first.detach().clone()
    first.grad, second.grad = torch.ones(6, 4), torch.ones(6, 4).to_sparse()
    message = r"takes dense gradients, but that of parameter 1 .* is sparse \(torch\.sparse_coo\)"
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(first, before)
    assert not getattr(optimizer, "matrices", optimizer).state


DTYPES = [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


def of_dtype(dtype):
    p = torch.nn.Parameter(torch.ones(6, 4).to(dtype), requires_grad=dtype.is_complex)
    p.name_in_model = "layer.codes"
    return p


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_class
def test_a_parameter_of_no_real_numbers_is_refused_at_construction_and_in_a_new_group(name, dtype):
    message = rf"\w takes parameters .*, but layer\.codes is {dtype}: leave it out"
    p, q = matrices()
    with pytest.raises(ValueError, match=message):
        build(name, [p, of_dtype(dtype)])
    optimizer = build(name, [q])
    groups = len(optimizer.param_groups)
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [of_dtype(dtype)]})
    assert len(optimizer.param_groups) == groups


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchs_adamw_beside_the_matrices_gets_real_numbers_too(dtype):
    with pytest.raises(ValueError, match=rf"AdamW in Muon takes parameters .*, but layer\.codes is {dtype}: leave"):
        Muon(matrices(1), [of_dtype(dtype)])


def test_a_gradient_that_torchs_adamw_cannot_take_leaves_the_matrices_too():
    (matrix,) = matrices(1)
    embedding = torch.nn.Parameter(torch.ones(5, 3))
    optimizer = Muon([("layer.weight", matrix)], [("embedding.weight", embedding)])
    before = matrix.detach().clone()
    matrix.grad, embedding.grad = torch.ones(6, 4), torch.ones(5, 3).to_sparse()
    with pytest.raises(
        ValueError, match=r"AdamW in Muon takes dense gradients, but that of embedding\.weight is sparse"
    ):
        optimizer.step()
    assert torch.equal(matrix, before)
    assert not getattr(optimizer, "matrices", optimizer).state


MATRICES_ALONE = [name for name in OPTIMIZERS if name not in FOR_VECTORS]


@pytest.mark.parametrize("shape", [(4,), (), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("name", MATRICES_ALONE)
def test_what_is_no_matrix_is_refused_with_its_shape(name, shape):
    with pytest.raises(ValueError, match=rf"matrices, but .* has shape {re.escape(str(shape))}: give it to another"):
        build(name, [torch.nn.Parameter(torch.zeros(shape))])


def _gradients_that_lie_otherwise(rank, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    norm = parallelize_module(torch.nn.LayerNorm(4), mesh, SequenceParallel())
    x = distribute_tensor(torch.arange(24.0).view(1, 6, 4) % 5, mesh, [Shard(1)])
    norm(x).redistribute(placements=[Replicate()]).to_local().square().sum().backward()
    found = {}
    for name in OPTIMIZERS:
        vector = norm.weight if name in FOR_VECTORS else None
        whole = torch.nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Replicate()]))
        whole.grad = DTensor.from_local(torch.ones(6, 4), mesh, [Partial()])
        cut = torch.nn.Parameter(distribute_tensor(torch.ones(6, 4), mesh, [Shard(0)]))
        cut.grad = distribute_tensor(torch.ones(6, 4), mesh, [Shard(1)])
        for parameter in (each for each in (vector, whole, cut) if each is not None):
            before = parameter.to_local().detach().clone()
            optimizer = build(name, [("weight", parameter)])
            with pytest.raises(ValueError, match="lie as their parameters") as caught:
                optimizer.step()
            assert torch.equal(parameter.to_local(), before)
            assert not getattr(optimizer, "matrices", optimizer).state
            found.setdefault(name, []).append(str(caught.value))
    optimizer = build("lion", norm.parameters(), weight_decay=0.0)
    for p in norm.parameters():
        p.grad = p.grad.redistribute(placements=p.placements)
    optimizer.step()
    return found, norm.weight.to_local().detach()


def test_gradients_that_lie_otherwise_than_their_parameters_are_refused_on_all_ranks():
    (found, weight), (others, same) = run_ranks(_gradients_that_lie_otherwise, 2)
    assert found == others
    assert torch.equal(weight, same)
    for name, messages in found.items():
        assert len(messages) == (3 if name in FOR_VECTORS else 2)
        for message in messages[:-1]:
            assert "that of weight has placements (Partial(sum),), and the parameter (" in message
            assert "parameter.grad.redistribute(placements=parameter.placements)" in message


@pytest.mark.parametrize(
    ("name", "settings", "measured"),
    [
        *((name, {}, "norms") for name in ("muown", "mars_muon", "polargrad", "muon_hyperball")),
        ("muon", {"weight_norm": "brake"}, "norms"),
        ("muon", {"relative_update": "bound"}, "norms"),
        ("muon", {"moment2_method": "normuon"}, "statistics of normuon"),
        ("adaptive_muon", {"moment2_method": "namo"}, "statistics of namo"),
    ],
)
def test_blockwise_is_refused_at_every_number_of_ranks_where_whole_matrices_are_measured(name, settings, measured):
    message = f"with tp_mode blockwise the {measured} would be those of shards, .*: take an exact tp_mode"
    with pytest.raises(ValueError, match=message):
        build(name, matrices(1), tp_mode="blockwise", **settings)
    optimizer = build(name, matrices(1), **settings)
    with pytest.raises(ValueError, match=message):
        optimizer.take_tp_mode("blockwise")
    build("muon", matrices(1), tp_mode="blockwise")


FLAGS = [
    (name, key)
    for name, row in OPTIMIZERS.items()
    for key, setting in settings_of(row.cls).items()
    if setting.annotation is bool and row.takes(key)
]


@pytest.mark.parametrize(("name", "key"), [*FLAGS, ("distributed", "collective_state_dict")])
def test_a_flag_given_as_text_is_refused(name, key):
    (p,) = matrices(1)
    with pytest.raises(TypeError, match=f": {key} must be True or False, got 'False'$"):
        DistributedMuon([p], **{key: "False"}) if name == "distributed" else made(name, [p], **{key: "False"})


@pytest.mark.parametrize(
    "name", ["lion", "signum", "soap", "schedule_free_adamw", "distributed_muon", "spectron", "muon"]
)
def test_settings_that_a_loop_makes_wrong_later_leave_the_parameter_as_it_is(name):
    p, before = matrices(1)[0], matrices(1)[0].detach()
    optimizer = build(name, [p])
    for value in (-1.0, math.nan, math.inf, "0.1", None):
        p.grad, optimizer.param_groups[0]["lr"] = torch.ones(6, 4), value
        with pytest.raises((ValueError, TypeError), match=r": lr must be a .*number"):
            optimizer.step()
        assert torch.equal(p, before)
    for key in sorted({"maximize", "nesterov"} & optimizer.param_groups[0].keys())[:1]:
        optimizer.param_groups[0].update({"lr": 0.1, key: "False"})
        with pytest.raises(TypeError, match=f"{key} must be True or False, got 'False'"):
            optimizer.step()
        assert torch.equal(p, before)


@pytest.mark.parametrize(("name", "key"), [each for each in SCALARS if each[1] != "betas"])
@pytest.mark.parametrize("value", ["1e-3", None])
def test_what_is_no_number_is_refused_by_its_name(name, key, value):
    if (name, key, value) == ("hybrid", "lr", None):
        value = "1e-3"
    with pytest.raises(TypeError, match=rf": {key} must be a number, or a tensor of one entry, got {value!r}"):
        made(name, matrices(1), **{key: value})


@pytest.mark.parametrize("name", [name for name, key in SCALARS if key == "lr"])
def test_numbers_of_numpy_make_the_steps_of_pythons(name):
    results = []
    for kind in (float, np.float32, np.array):
        (p,) = matrices(1)
        optimizer = made(name, [p], lr=kind(0.25), weight_decay=kind(0.0))
        own = {"momentum", "momentum_beta", "eps", "beta2"} & optimizer.param_groups[0].keys()
        optimizer.param_groups[0].update(dict.fromkeys(own, kind(0.5)))
        for _ in range(2):
            p.grad = p.detach() + 1
            optimizer.step()
        results.append(p.detach())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("factor", [0, -1.0])
@pytest.mark.parametrize("name", having("extra_scale_factor"))
def test_a_scale_that_goes_uphill_or_nowhere_is_refused(name, factor):
    message = f"extra_scale_factor must be a finite number above 0, got {factor}"
    with pytest.raises(ValueError, match=message):
        build(name, matrices(1), extra_scale_factor=factor)
    with pytest.raises(ValueError, match=message):
        build(name, [{"params": matrices(1), "extra_scale_factor": factor}])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, r"non-empty list of \(a, b, c\), such as \[\(3.4445, -4.775, 2.0315\)\], or the name of one, got None"),
        ((3.0, -4.0, 2.0), r"non-empty list of \(a, b, c\), such as .*, got \(3.0, -4.0, 2.0\)"),
        ([(0, 0, 0)], "finite and not zero"),
        ([(math.nan, 1, 1)], "finite and not zero"),
    ],
)
def test_coefficients_that_make_no_iteration_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        build("muon", matrices(1), coefficient_type=value)


def test_soap_says_the_shape_of_what_it_cannot_take_once():
    with pytest.raises(ValueError, match=r"but parameter 0 of group 0 has shape \(3, 8, 8\): give it"):
        build("soap", [torch.nn.Parameter(torch.ones(3, 8, 8))])


@pytest.mark.parametrize(
    ("name", "key", "meant"),
    [
        ("lion", "weigth_decay", "weight_decay"),
        ("with_adamw", "nestrov", "nesterov"),
        ("muon", "num_ns_step", "num_ns_steps"),
        ("soap", "basis_methd", "basis_method"),
    ],
)
def test_a_misspelt_setting_of_a_group_is_named(name, key, meant, caplog):
    build(name, [{"params": matrices(1), key: 1}])
    assert [r.getMessage().split(": ", 1)[1] for r in caplog.records] == [
        f"{key!r} is no setting of its groups, so it has no effect, did you mean {meant!r}?"
    ]


KEYS_OF_OTHERS = (
    "is_expert_parallel wd_mult pre_wd_mult lr_mult pre_lr_mult max_lr min_lr start_wd end_wd default_config optimizer "
    "is_decoupled_lr is_embedding name names layer initial_lr initial_momentum max_momentum base_momentum base_lr "
    "lr_scale warmup_frac step bias_correction param_names foreach fused capturable amsgrad"
)


@pytest.mark.parametrize("name", [*OPTIMIZERS, "with_adamw", "distributed_muon", "users_own"])
def test_keys_of_megatron_and_of_schedulers_in_groups_are_nobodys_business(name, caplog):
    build(name, [{"params": matrices(1), **dict.fromkeys(KEYS_OF_OTHERS.split(), 1), "param_names": ["w"]}])
    assert not [r for r in caplog.records if "no setting" in r.getMessage()]


@pytest.mark.parametrize("key", ["fp32_matmul_prec", "tp_mode", "betas", "momentum_warmup"])
def test_a_setting_that_groups_cannot_have_is_named(key, caplog):
    build("muon", [{"params": matrices(1), key: 1}])
    assert f"groups have no {key} of their own, so it has no effect in one" in caplog.text


def test_a_misspelt_setting_among_users_own_is_named(caplog):
    given = {"lr": 0.1, "momentum_beta": 0.9, "use_nesterov": True, "weight_decay": 0.1, "fp32_matmul_prec": "high"}
    rest = {"use_decoupled_weight_decay": True, "split_qkv": False, "is_qkv_fn": None, "qkv_split_shapes": None}
    functions = {"orthogonalize_fn": torch.sign, "scale_factor_fn": lambda rows, cols: 1.0}
    OrthogonalizedOptimizer(matrices(1), **given, **rest, **functions, momentum_bta=0.3, beta2=1)
    [record] = caplog.records
    assert "'momentum_bta' is no setting of its groups, so it has no effect, did you mean 'mom" in record.getMessage()


@pytest.mark.parametrize("name", having("is_qkv_fn"))
def test_shapes_of_fused_projections_that_nothing_splits_are_named(name, caplog):
    fused = {"is_qkv_fn": lambda p: True, "qkv_split_shapes": (4, 4, 4)}
    build(name, matrices(1, (12, 4)), **fused)
    assert "is_qkv_fn and qkv_split_shapes have no effect without split_qkv=True" in caplog.text
    caplog.clear()
    build(name, matrices(1, (12, 4)), **fused, split_qkv=True)
    build(name, matrices(1, (12, 4)), is_qkv_fn=None)
    assert "no effect" not in caplog.text


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_error_of_one_of_several_groups_names_it(name):
    params = [torch.nn.Parameter(torch.randn(8, 4)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"group 1: .*lr must"):
        build(name, [{"params": params[:1]}, {"params": params[1:], "lr": -1.0}])
    optimizer = build(name, [{"params": params[:1]}, {"params": params[1:]}])
    optimizer.param_groups[1]["lr"] = math.nan
    params[0].grad = torch.zeros_like(params[0])
    with pytest.raises(ValueError, match=r"group 1: .*lr must"):
        optimizer.step()


NO_DECAY = [name for name in OPTIMIZERS if not decays(name)]


@pytest.mark.parametrize("setting", [{"weight_decay_method": "independent"}, {"use_decoupled_weight_decay": False}])
@pytest.mark.parametrize("name", NO_DECAY)
def test_a_kind_of_weight_decay_is_refused_where_there_is_none(name, setting):
    """Scion shrinks its matrices as a decay of 1: by another rule a step would leave nothing of them."""
    with pytest.raises(ValueError, match="has no weight decay, but its weight_decay_method is"):
        build(name, [{"params": matrices(1), **setting}])
    params = matrices(1)
    optimizer = build(name, params)
    optimizer.param_groups[0].update(setting)
    params[0].grad = torch.ones_like(params[0])
    before = params[0].detach().clone()
    with pytest.raises(ValueError, match="has no weight decay, but its weight_decay_method is"):
        optimizer.step()
    assert torch.equal(params[0], before)


def test_scion_has_no_look_ahead():
    with pytest.raises(ValueError, match="Scion has no nesterov True, only False: take the setting away"):
        build("scion", [{"params": matrices(1), "nesterov": True}])


@pytest.mark.parametrize("key", ["lr", "weight_decay"])
def test_a_bool_is_no_number(key):
    with pytest.raises(TypeError, match=f"{key} must be a number"):
        build("muon", matrices(1), **{key: True})


def test_a_program_that_yields_nothing_is_named():
    class Wrong(OPTIMIZERS["muon"].cls):
        def program(self, step):
            return None

    params = matrices(1)
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(TypeError, match="a program is a generator, which yields the updates of its matrices once"):
        Wrong(params).step()


@pytest.mark.parametrize("name", ["muon", "adaptive_muon"])
def test_the_order_of_torch_is_refused_where_a_flag_follows_the_momentum(name):
    with pytest.raises(TypeError, match=r"nesterov must be True or False, got 0\.95"):
        OPTIMIZERS[name].cls(matrices(1), 0.02, 0.1, 0.95)


UNCALLED = ["soap", "lion", "signum", "schedule_free_adamw", "spectron", "distributed_muon"]


@pytest.mark.parametrize("method", ["orthogonalize", "orthogonalize_fn", "scaled_orthogonalize_fn", "scale_factor_fn"])
@pytest.mark.parametrize("name", UNCALLED)
def test_a_method_that_no_step_would_call_is_warned_of(name, method, caplog):
    base = type(build(name, matrices(1)))
    own = {method: lambda self, *args, **settings: args[-1]}
    type("Own", (base,), own)(matrices(1), **SETTINGS.get(name, {}))
    assert f"Own: no step here calls {method}, " in caplog.text
    caplog.clear()
    type("Own", (base,), own | {"step": lambda self, closure=None: None})(
        matrices(1), **SETTINGS.get(name, {})
    )  # calls it
    type("Own", (OPTIMIZERS["muon"].cls,), own)(matrices(1))
    assert "no step here calls" not in caplog.text


@pytest.mark.parametrize("name", [*having("workspace"), "users_own"])
def test_a_setting_of_an_update_that_no_group_has_is_refused(name):
    params = matrices(1)
    optimizer = build(name, params)
    message = r"\.orthogonalize\(\) has no setting momentun"
    with pytest.raises(TypeError, match=message):
        optimizer.orthogonalize(params[0], torch.ones(6, 4), momentun=3)
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    optimizer.orthogonalize(params[0], torch.ones(6, 4), **settings)


def test_the_settings_of_an_update_are_those_of_any_group_and_users_own():
    p, q = matrices()
    muon = build("muon", [{"params": [p], "wd_mult": 2.0}, {"params": [q]}])
    three, five = (muon.orthogonalize(q, torch.eye(6, 4), num_ns_steps=steps, wd_mult=1.0) for steps in (3, 5))
    assert not torch.equal(three, five)
    with pytest.raises(TypeError, match=r"orthogonalize\(\) has no setting num_ns_step$"):
        muon.orthogonalize(q, torch.eye(6, 4), num_ns_step=3)

    seen = []

    class Own(OrthogonalizedOptimizer):
        def orthogonalize(self, p, grad, **settings):
            seen.append(settings["strength"])
            return super().orthogonalize(p, grad, **settings)

    functions = {"orthogonalize_fn": torch.sign, "scale_factor_fn": lambda rows, cols: 1.0}
    own = Own([p], 0.1, 0.9, True, 0.0, True, False, None, None, "highest", **functions, strength=0.5)
    p.grad = torch.ones_like(p)
    own.step()
    own.param_groups[0]["added"] = 1  # as a scheduler does
    own.step()
    assert seen == [0.5, 0.5]


# Settings of groups that are names, counts or exponents, each with one that there is not.
CHOICES = {
    "weight_decay_method": ("cosine", ["muon", "soap", "lion", "signum"]),
    "basis_method": ("svd", ["soap"]),
    "basis_of": ("next", ["soap"]),
    "fp32_matmul_prec": ("best", ["soap"]),
    "precondition_frequency": (0, ["soap"]),
    "max_dim": (-1, ["soap"]),
    "variant": ("mine", ["schedule_free_adamw"]),
    "warmup_steps": (-1, ["schedule_free_adamw"]),
    "r": (math.nan, ["schedule_free_adamw"]),
    "ns_steps": (101, ["distributed_muon"]),
    "scale_mode": ("mine", ["muon", "adaptive_muon"]),
    "coefficient_type": ("mine", ["muon", "spectron"]),
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for key, (_, names) in CHOICES.items() for name in names])
def test_an_unknown_choice_is_refused_between_steps_too(name, key):
    (p,), (before,) = matrices(1), matrices(1)
    wrong = CHOICES[key][0]
    with pytest.raises((TypeError, ValueError), match=re.escape(str(wrong))):
        build(name, [{"params": matrices(1), key: wrong}])
    optimizer = build(name, [p])
    optimizer.param_groups[0][key] = wrong
    p.grad = torch.ones_like(p)
    with pytest.raises((TypeError, ValueError), match=re.escape(str(wrong))):
        optimizer.step()
    assert torch.equal(p, before)
    assert not optimizer.state[p]


@pytest.mark.parametrize("method", ["adamuon", "normuon", "namo"])
def test_an_alignment_that_no_step_would_leave_out_is_named(method, caplog):
    build("adaptive_muon", matrices(1), moment2_method=method)
    assert "align_rms" not in caplog.text
    build("adaptive_muon", matrices(1), moment2_method=method, align_rms=False)
    assert (f"align_rms=False has no effect with {method}" in caplog.text) == (method != "adamuon")


@pytest.mark.parametrize("name", [*OPTIMIZERS, "users_own", "distributed_muon", "with_adamw"])
def test_a_cycle_of_the_momentum_is_in_force_or_refused(name):
    weights = []
    for cycle in (True, False):
        params = matrices(1)
        optimizer = build(name, params)
        if cycle and not optimizer.defaults.keys() & {"momentum", "betas"}:  # torch knows these two names
            with pytest.raises(ValueError, match="must support momentum or beta1"):
                torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
            assert name in ("spectron", "users_own")
            return
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10, cycle_momentum=cycle)
        for step in range(5):
            take(optimizer, 1, step)
            schedule.step()
        weights.append(params[0].detach())
    assert not torch.equal(*weights)
