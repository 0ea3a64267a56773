"""Settings of every optimizer: which values are refused, at which door, and what is told."""

import copy
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_eopt import SOAP, DistributedMuon, Muon, OrthogonalizedOptimizer, TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.matrices import GATE_UP, experts
from megatron_eopt.optimizers.spectron import factor_pairs
from megatron_eopt.settings.of_class import settings_of
from megatron_eopt.settings.records import EXECUTION
from tests.optimizers.family import (
    ELEMENTWISE,
    FOR_VECTORS,
    build,
    decays,
    every,
    every_class,
    having,
    matrices,
    take,
)

TWO = torch.full((2,), 0.1)
NO_NUMBER = ("0.1", None, True, TWO)
AT_LEAST_0 = (*NO_NUMBER, -0.1, math.nan, math.inf)
ABOVE_0 = (*AT_LEAST_0, 0)
BELOW_1 = (*NO_NUMBER, 1.0, -0.1, math.nan)
UP_TO_1 = (*NO_NUMBER, 1.5, -0.1, math.nan)
COUNT = (-1, 2.5, True)
FLAG = ("False", 1)
CHOICE = ("nonsense", ["spectral"])
NS_STEPS = (0, 2.5, None, 101)
# Setting -> values that it cannot have.
TABLE = {
    **dict.fromkeys("lr weight_decay alpha damping_noise_scale gamma max_update_rms".split(), AT_LEAST_0),
    **dict.fromkeys("min_precond_lr weight_lr_power".split(), AT_LEAST_0),
    **dict.fromkeys("eps extra_scale_factor update_ratio radius precond_init_scale".split(), ABOVE_0),
    **dict.fromkeys("momentum momentum_beta beta2 beta3 beta_lip shampoo_beta".split(), BELOW_1),
    **dict.fromkeys("brake_outward brake_inward offload_fraction".split(), UP_TO_1),
    **dict.fromkeys("rank_fraction fraction precond_lr".split(), (*UP_TO_1, 0.0)),
    "damping": (*BELOW_1, 0.0),
    "r": (*NO_NUMBER, math.nan, -math.inf),
    "betas": ((0.9, 1.0), (-0.1, 0.9), (math.nan, 0.9), (0.9,), 0.9, (0.9, 0.99, 0.999), (0.9, TWO), (0.9, "0.9")),
    **dict.fromkeys("alpha_warmup beta3_warmup warmup_steps max_dim".split(), COUNT),
    **dict.fromkeys("rank num_power_iterations iterations precond_decay_steps".split(), (*COUNT, 0)),
    **dict.fromkeys("precondition_frequency workspace".split(), (*COUNT, 0)),
    "num_ns_steps": (*NS_STEPS, 7),  # quintic has no seventh
    "ns_steps": NS_STEPS,
    "coefficient_type": ("quintc", 3, None, [(1.0, 2.0)], (3.0, -4.0, 2.0), [(0, 0, 0)], [(math.nan, 1, 1)]),
    **dict.fromkeys("align_rms cautious_weight_decay constrained correct_bias cuda_graphs maximize".split(), FLAG),
    **dict.fromkeys("nesterov use_nesterov use_decoupled_weight_decay orthogonalize share_over_dp".split(), FLAG),
    **dict.fromkeys("split_qkv use_kl_shampoo collective_state_dict".split(), FLAG),
    **dict.fromkeys("basis_method basis_of sort_bases variant moment2_method relative_update".split(), CHOICE),
    **dict.fromkeys("scale_mode weight_norm weight_decay_method tp_mode symmetric_products".split(), CHOICE),
    **dict.fromkeys("step_kernels fp32_matmul_prec".split(), CHOICE),
    "momentum_dtype": (torch.float16, torch.float32, "bf16"),
}
# Functions, groups of ranks, and shapes that only splits read.
UNCHECKED = {"is_qkv_fn", "qkv_split_shapes", "pg_collection", "data_parallel_group", "process_group", "execution"}
UNCHECKED |= {"orthogonalize_fn", "scale_factor_fn"}
CLASSES = {name: row.cls for name, row in OPTIMIZERS.items()}
CLASSES |= {"users_own": OrthogonalizedOptimizer, "distributed_muon": DistributedMuon}


def refuses(said, door, *given, **settings):
    """A door refuses something, and says what helps."""
    with pytest.raises((TypeError, ValueError)) as raised:
        door(*given, **settings)
    assert said in str(raised.value), (given, settings)


def test_every_setting_is_in_the_table():
    settings = {key for cls in CLASSES.values() for key in settings_of(cls)}
    assert settings | {setting.name for setting in EXECUTION} == TABLE.keys() | UNCHECKED


@pytest.mark.parametrize("key", TABLE)
def test_a_value_out_of_range_is_refused_at_every_door(key):
    """By constructors, of new groups, of states that are loaded, and in a step where a loop has set it."""
    said = {"num_ns_steps": "steps", "ns_steps": "steps", "coefficient_type": "coefficient"}.get(key, key)
    names = [name for name in CLASSES if name in having(key) or key in settings_of(CLASSES[name])]
    assert names
    for name, value in ((name, value) for name in names for value in TABLE[key]):
        refuses(said, build, name, matrices(), **{key: value})
        if (name in OPTIMIZERS and OPTIMIZERS[name].settings[key].whole) or settings_of(CLASSES[name])[key].whole:
            continue
        (p, q), (before, _) = matrices(), matrices()
        optimizer = build(name, [p])
        refuses(said, optimizer.add_param_group, {"params": [q], key: value})
        assert len(optimizer.param_groups) == 1
        if key != "rank":  # of which a state has one alone
            saved, group = copy.deepcopy(optimizer.state_dict()), dict(optimizer.param_groups[0])
            saved["param_groups"][0][key] = value
            refuses(said, optimizer.load_state_dict, saved)
            assert optimizer.param_groups[0] == group
        optimizer.param_groups[0][key] = value
        p.grad = torch.ones_like(p)
        state = copy.deepcopy(optimizer.state[p])
        refuses(said, optimizer.step)
        assert torch.equal(p, before)
        torch.testing.assert_close(optimizer.state[p], state, rtol=0, atol=0)


HOLD = {"weight_norm": "hold"}
L2 = {"weight_decay_method": "l2", "use_decoupled_weight_decay": False}
MATCH = {"relative_update": "match"}
# Settings, each of which is valid, that have no place in an optimizer, or no effect beside one another.
TOGETHER = [
    ("muon", {"coefficient_type": "cubic5", "num_ns_steps": 4}, "5 polynomials"),
    ("muon", {"weight_decay_method": "palm", "use_decoupled_weight_decay": False}, "contradicts"),
    ("muon", {**HOLD, **MATCH}, "no effect"),
    ("muon", {**HOLD, "cautious_weight_decay": True}, "no weight decay"),
    ("muon", {**HOLD, "weight_decay": 0.1}, "no weight decay"),
    ("muon", {**MATCH, "max_update_rms": 0.1}, "no effect with relative_update"),
    ("muon", {**HOLD, "max_update_rms": 0.1}, "no effect with weight_norm"),
    ("muon", {"cautious_weight_decay": True, **L2}, "l2"),
    ("muon", {"moment2_method": "namo", **L2}, "use_decoupled_weight_decay=True"),
    ("adaptive_muon", {"moment2_method": "none"}, "expected one of adamuon, normuon"),
    ("scion", HOLD, "expected one of none, brake"),
    ("scion", {"lr": 1.5}, "lr must lie in [0, 1]"),
    ("muon_hyperball", {"weight_norm": "none"}, "expected one of hold"),
    *((name, {"weight_decay": 0.1}, "no weight decay") for name in OPTIMIZERS if not decays(name)),
    ("psgd_kron", {"precond_lr": 0.001}, "at most precond_lr"),
]
# The same, which only a constructor and a new group have to refuse: they follow from parameters, or from defaults.
AT_START = [
    ("muon", {"update_ratio": 2.0}, "no effect with relative_update 'none'"),
    ("muon", {**HOLD, "weight_decay": 0, "brake_inward": 0.5}, "no effect with weight_norm 'hold'"),
    ("muon", {"beta2": 0.9}, "no effect with moment2_method 'none'"),
    ("muon", {"moment2_method": "normuon", "align_rms": False}, "no effect with moment2_method 'normuon'"),
    ("muon", {**MATCH, "scale_mode": "unit_rms_norm"}, "by relative_update 'match'"),
    ("spectron", {"rank": 5}, "rank must lie in [1, 4] for "),
    ("schedule_free_adamw", {"r": 1.0}, "no effect with variant 'kempnerforge'"),
    ("soap", {"scale_mode": "spectral"}, "no effect with orthogonalize False"),
    ("soap", {"orthogonalize": True, "max_dim": 3}, "needs a factor of every matrix"),
    ("shampoo", {"max_dim": 3}, "needs a factor of every matrix"),
    ("kl_shampoo", {"max_dim": 3}, "needs a factor of every matrix"),
]


@pytest.mark.parametrize(("name", "settings", "said"), [*TOGETHER, *AT_START], ids=str)
def test_settings_that_do_not_go_together_are_refused(name, settings, said):
    if all(map(OPTIMIZERS[name].takes, settings)):
        refuses(said, build, name, matrices(), **settings)
    (p, q), (before, _) = matrices(), matrices()
    optimizer = build(name, [p], **({"weight_decay": 0.0} if settings.get("weight_norm") == "hold" else {}))
    refuses(said, optimizer.add_param_group, {"params": [q], **settings})
    assert len(optimizer.param_groups) == 1
    if (name, settings, said) in TOGETHER:
        optimizer.param_groups[0].update(settings)
        p.grad = torch.ones_like(p)
        refuses(said, optimizer.step)
        assert torch.equal(p, before)


BLOCKWISE = {"tp_mode": "blockwise"}
QKV = {"split_qkv": True, "is_qkv_fn": lambda p: True}
OF_QKV = [*having("is_qkv_fn"), "users_own"]
# What a constructor alone refuses.
WRONG = [
    (having("is_qkv_fn"), {"split_qkv": True, "qkv_split_shapes": [2, 2, 2]}, "needs is_qkv_fn"),
    *((OF_QKV, QKV | {"qkv_split_shapes": shapes}, "positive int") for shapes in ([1, 1], [4, 1, 1.0], [6, 1, -1])),
    (having("is_qkv_fn"), QKV | {"qkv_split_shapes": [2, 1, 1]}, "are not a multiple of"),
    (["users_own"], QKV | {"qkv_split_shapes": [2, 1, 1]}, "cannot be split into [2, 1, 1]"),
    (["users_own"], QKV, "needs qkv_split_shapes"),
    (["spectron"], QKV | {"qkv_split_shapes": [2, 2, 2]}, "rank must lie in [1, 2] for "),
    (["spectron"], BLOCKWISE, "blockwise the singular values"),
    (["mars_muon", "polargrad", "muon_hyperball"], BLOCKWISE, "blockwise the norms"),
    (["muon"], {**BLOCKWISE, "weight_norm": "brake"}, "blockwise the norms"),
    (["muon"], {**BLOCKWISE, **MATCH}, "blockwise the norms"),
    (["muon", "adaptive_muon"], {**BLOCKWISE, "moment2_method": "normuon"}, "blockwise the statistics of normuon"),
    (["muon"], {"offload_fraction": 0.5, "cuda_graphs": True}, "cuda_graphs cannot work with"),
    (["muon"], {"momentum_dtype": torch.bfloat16, "cuda_graphs": True}, "cuda_graphs cannot work with"),
    (["muon"], {"execution": {"workspace": 5}}, "execution is an Execution(...)"),
    (["scion"], {"radius": 5.0, "spectral_radius": 1.0}, "two names of one setting"),
    (["soap"], {"use_eigh": True, "basis_method": "qr"}, "two names of one setting"),
    (["soap"], {"use_eigh": "yes"}, "unknown basis_method 'yes'"),
    (OPTIMIZERS, {"weight_deca": 0.1}, "unexpected keyword argument 'weight_deca'"),
    (["scion", "muon_hyperball"], {"cautious_weight_decay": True}, "unexpected keyword argument"),
    # names of other libraries
    (["muon"], {"betas": 1}, "did you mean 'momentum'? betas are AdamW's"),
    (["muon"], {"adjust_lr_fn": 1}, "did you mean 'scale_mode'"),
    (["soap"], {"max_preconditioner_dim": 1}, "did you mean 'max_dim'"),
    (["lion"], {"wd": 1}, "did you mean 'weight_decay'"),
    (["dion2"], {"distributed_mesh": 1}, "DTensors know their mesh"),
]


@pytest.mark.parametrize(("names", "settings", "said"), WRONG, ids=lambda x: x if isinstance(x, str) else None)
def test_what_a_constructor_alone_refuses(names, settings, said):
    for name in names:
        refuses(said, build, name, matrices(1), **settings)


def stack(rows=6, split=None):
    """A matrix; of 2 rows a stack without a mark, of 5 a vector."""
    p = torch.nn.Parameter(torch.ones({2: (2, 3, 4), 5: (5,)}.get(rows, (rows, 4))))
    if split is not None:
        p.logical_matrices = split
    return p


SHAPES = [
    *((name, [stack(5)], "has shape (5,): give it to another") for name in OPTIMIZERS if name not in FOR_VECTORS),
    *((name, [stack(2)], "or declare a stack of 2 matrices") for name in OPTIMIZERS if name not in ELEMENTWISE),
    ("soap", [stack(9, GATE_UP)], "(9, 4) is not what was declared of it"),
    ("soap", [stack(9, experts(3))], "has shape (9, 4)"),
    ("soap", [("experts.weight", stack(2))], "experts.weight has shape (2, 3, 4)"),
    ("muon", [torch.nn.Parameter(torch.zeros(()))], "has shape ()"),
    ("spectron", [{"params": [stack(), stack(), stack()], "pairs": True}], "an even number of factors, got 3"),
    ("spectron", [factor_pairs([(stack(9), torch.nn.Parameter(torch.ones(8, 5)))])], "(9, 4) and (8, 5) have no rank"),
]


@pytest.mark.parametrize(("name", "params", "said"), SHAPES, ids=str)
def test_parameters_that_an_optimizer_cannot_have_are_refused(name, params, said):
    refuses(said, build, name, params)


@every_class
def test_a_parameter_of_no_real_numbers_is_refused(name):
    for dtype in (torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn):
        p = torch.nn.Parameter(torch.ones(6, 4).to(dtype), requires_grad=dtype.is_complex)
        p.name_in_model = "layer.codes"
        said = f"layer.codes is {dtype}: leave it out"
        refuses(said, build, name, [*matrices(1), p])
        optimizer = build(name, matrices(1))
        groups = len(optimizer.param_groups)
        refuses(said, optimizer.add_param_group, {"params": [p]})
        assert len(optimizer.param_groups) == groups
        refuses(said, Muon, matrices(1), [p])


@every
def test_an_error_of_one_of_several_groups_names_it(name):
    p, q = matrices(shape=(8, 4))
    refuses("group 1: ", build, name, [{"params": [p]}, {"params": [q], "lr": -1.0}])
    optimizer = build(name, [{"params": [p]}, {"params": [q]}])
    optimizer.param_groups[1]["lr"] = math.nan
    p.grad = torch.zeros_like(p)
    refuses("group 1: ", optimizer.step)


def test_a_setting_that_a_state_or_plan_cannot_have_is_refused():
    (p,) = matrices(1)
    optimizer = build("adaptive_muon", [p], moment2_method="adamuon")
    take(optimizer, 1)
    optimizer.param_groups[0]["moment2_method"] = "namo"
    before = p.detach().clone()
    refuses("'moment2_buffer' of ", take, optimizer, 1)
    assert torch.equal(p, before)
    del optimizer.state[p]["moment2_buffer"]
    take(optimizer, 1)
    optimizer = build("muon", [p], **BLOCKWISE)
    optimizer.param_groups[0]["moment2_method"] = "normuon"
    refuses("with tp_mode blockwise the statistics of normuon", take, optimizer, 1)


def test_soaps_scale_belongs_to_the_groups_that_orthogonalize():
    scaled = {"params": matrices(1), "scale_mode": "spectral"}
    refuses("no effect", SOAP, [{"params": matrices(1)}, scaled])
    SOAP([{**scaled, "orthogonalize": True}])
    SOAP([{"params": matrices(1), "orthogonalize": False}, {"params": matrices(1)}], orthogonalize=True)


def test_arguments_in_the_order_of_torchs_muon_are_refused():
    refuses("nesterov must be True or False, got 0.95", TensorParallelMuon, matrices(1), 0.02, 0.1, 0.95)


@every
def test_numbers_of_numpy_and_tensors_make_the_same_steps(name):
    results = []
    for kind in (float, np.float32, np.array, torch.tensor, lambda x: torch.tensor([x])):
        (p,) = matrices(1)
        optimizer = build(name, [p], lr=kind(0.25), weight_decay=kind(0.0))
        own = {"momentum", "momentum_beta", "eps", "beta2", "shampoo_beta"} & optimizer.param_groups[0].keys()
        optimizer.param_groups[0].update({key: kind(0.5) for key in own})
        take(optimizer, 2)
        results.append(p.detach())
    assert all(torch.equal(other, results[0]) for other in results[1:3])
    for other in results[3:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-6)


# What has no effect, or is nobody's: said once, or nothing is said.


@pytest.mark.parametrize(
    ("name", "group", "said"),
    [
        ("lion", {"weigth_decay": 1}, "did you mean 'weight_decay'?"),
        ("with_adamw", {"nestrov": 1}, "did you mean 'nesterov'?"),
        ("users_own", {"momentum_bta": 1}, "did you mean 'momentum_beta'?"),
        ("scion", {"nesterov": True}, "'nesterov' is no setting of its groups, so it has no effect"),
        ("muon", {"tp_mode": 1}, "'tp_mode' is no setting of its groups, so it has no effect"),
        ("soap", {"wd": 1}, "did you mean 'weight_decay'?"),
    ],
    ids=str,
)
def test_a_setting_without_an_effect_in_a_group_is_named_once(name, group, said, caplog):
    optimizer = build(name, [{"params": matrices(1), **group}])
    take(optimizer, 2)
    [message] = caplog.messages
    assert said in message
    optimizer.param_groups[0]["learning_rate"] = 0.5
    take(optimizer, 2)
    [_, message] = caplog.messages
    assert "'learning_rate' is no setting of its groups" in message


KEYS_OF_OTHERS = (
    "is_expert_parallel wd_mult pre_wd_mult lr_mult pre_lr_mult max_lr min_lr start_wd end_wd default_config optimizer "
    "is_decoupled_lr is_embedding name names layer initial_lr initial_momentum max_momentum base_momentum base_lr "
    "lr_scale warmup_frac step bias_correction param_names foreach fused capturable amsgrad"
)


@every_class
def test_keys_of_megatron_and_of_schedulers_are_nobodys_business(name, caplog):
    build(name, [{"params": matrices(1), **dict.fromkeys(KEYS_OF_OTHERS.split(), 1), "param_names": ["w"]}])
    assert not [message for message in caplog.messages if "no setting" in message]


@pytest.mark.parametrize("name", having("is_qkv_fn"))
def test_shapes_of_projections_that_nothing_splits_are_named(name, caplog):
    fused = {"is_qkv_fn": lambda p: True, "qkv_split_shapes": (4, 4, 4)}
    build(name, matrices(1, (12, 4)), **fused)
    assert "is_qkv_fn and qkv_split_shapes have no effect without split_qkv=True" in caplog.text
    caplog.clear()
    build(name, matrices(1, (12, 4)), **fused, split_qkv=True)
    assert "no effect" not in caplog.text


@pytest.mark.parametrize("name", ["soap", "lion", "distributed_muon"])
def test_a_method_that_no_step_would_call_is_warned_of(name, caplog):
    base = type(build(name, matrices(1)))
    for method in ("orthogonalize", "orthogonalize_fn", "scaled_orthogonalize_fn", "scale_factor_fn"):
        own = {method: lambda self, *args, **settings: args[-1]}
        type("Own", (base,), own)(matrices(1))
        assert f"Own: no step here calls {method}, " in caplog.text
        caplog.clear()
        type("Own", (base,), own | {"step": lambda self, closure=None: None})(matrices(1))
        type("Own", (TensorParallelMuon,), own)(matrices(1))
        assert "no step here calls" not in caplog.text


def test_shorter_schedules_than_were_fitted_together_are_noted(caplog):
    build("muon", [{"params": matrices(1), "num_ns_steps": 5}, {"params": matrices(1), "num_ns_steps": 3}])
    [message] = caplog.messages
    assert message.startswith("3 Newton-Schulz steps of quintic are fewer than were fitted together")
    caplog.clear()
    # s -> 1.5 s - 0.5 s^3 has its fixed point at 1, and the last of 20 steps change nothing that two digits show
    build("muon", matrices(1), coefficient_type=[(1.5, -0.5, 0.0)] * 20, num_ns_steps=19)
    assert not caplog.messages
    build("muon", matrices(1), coefficient_type=[(1.5, -0.5, 0.0)] * 20, num_ns_steps=12)
    low = 0.01
    for _ in range(12):
        low = 1.5 * low - 0.5 * low**3
    assert f"become {low:.2f} to 1.00 instead of 1" in caplog.text


@pytest.mark.parametrize("name", [*having("workspace"), "users_own"])
def test_an_update_by_hand_takes_the_settings_of_a_group_alone(name):
    params = matrices(1)
    optimizer = build(name, params)
    refuses("no setting momentun", optimizer.orthogonalize, params[0], torch.ones(6, 4), momentun=3)
    settings = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    optimizer.orthogonalize(params[0], torch.ones(6, 4), **settings)


@every_class
def test_a_cycle_of_the_momentum_is_in_force_or_refused(name):
    weights = []
    for cycle in (True, False):
        params = matrices(1)
        optimizer = build(name, params)
        if cycle and not optimizer.defaults.keys() & {"momentum", "betas"}:  # torch knows these two names
            with pytest.raises(ValueError, match="must support momentum or beta1"):
                torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
            return
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10, cycle_momentum=cycle)
        for step in range(5):
            take(optimizer, 1, step)
            schedule.step()
        weights.append(params[0].detach())
    assert not torch.equal(*weights)


@pytest.mark.parametrize(
    ("name", "other", "own"),
    [
        ("scion", {"spectral_radius": 3.0}, {"radius": 3.0}),
        ("spectron", {"num_power_iter": 3, "rank": 2}, {"num_power_iterations": 3, "rank": 2}),
        ("soap", {"use_eigh": True}, {"basis_method": "eigh"}),
        ("soap", {"use_eigh": False}, {"basis_method": "qr"}),
        ("soap", {"max_precond_dim": 4}, {"max_dim": 4}),
    ],
)
def test_both_names_of_a_setting_make_the_same_steps(name, other, own):
    weights = []
    for settings in (other, own):
        (p,) = matrices(1)
        optimizer = OPTIMIZERS[name].cls([p], lr=0.05, **settings)
        assert name == "spectron" or own.items() <= optimizer.param_groups[0].items()
        take(optimizer, 3)
        weights.append(p)
    assert torch.equal(*weights)
    if name != "spectron":  # whose steps are those of all groups
        assert own.items() <= OPTIMIZERS[name].cls([{"params": matrices(1), **other}]).param_groups[0].items()


ORDERS = """
import torch
from megatron_eopt.family import OPTIMIZERS
for row in OPTIMIZERS.values():
    optimizer = row.cls([torch.nn.Parameter(torch.ones(128, 128))])
    print(optimizer.settings(), list(optimizer.param_groups[0]))
"""


def test_settings_have_one_order_in_every_process():
    """Ranks compare them by a hash of what is printed."""
    printed = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run([sys.executable, "-c", ORDERS], env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        printed.add(ran.stdout)
    assert len(printed) == 1
