"""Settings of every optimizer, from one table: which values are refused, at which door, and what is told."""

import copy
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from megatron_eopt import (
    SOAP,
    DistributedMuon,
    Muon,
    OrthogonalizedOptimizer,
    Scion,
    Spectron,
    TensorParallelMuon,
)
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.matrices import GATE_UP, experts
from megatron_eopt.optimizers.spectron import factor_pairs
from megatron_eopt.settings import records
from megatron_eopt.settings.of_class import settings_of
from tests.optimizers.family import (
    ELEMENTWISE,
    FOR_VECTORS,
    RECORDS,
    build,
    decays,
    every,
    every_class,
    having,
    keeps_state,
    matrices,
    take,
)
from tests.optimizers.field import matrix, run

NO_NUMBER = "{key} must be a number, or a tensor of one entry, got "
TWO = torch.full((2,), 0.1)


def refused(message, *values):
    return [(value, message) for value in values]


def number(message, *values):
    """What is no number is refused, and what is out of its range by ``message``."""
    return refused(NO_NUMBER, "0.1", None, True, TWO) + refused("{key} must " + message, *values)


def count(least, *values):
    return refused(f"{{key}} must be a whole number of at least {least}, got", least - 1, 2.5, True, *values)


def choice(*values):
    return refused("unknown {key} ", "nonsense", ["spectral"], *values)


AT_LEAST_0 = number("be a finite number of at least 0, got", -0.1, math.nan, math.inf)
ABOVE_0 = number("be a finite number above 0, got", 0, -1e-8, math.nan, math.inf)
BELOW_1 = number("lie in [0, 1), got", 1.0, -0.1, math.nan)
UP_TO_1 = number("lie in [0, 1], got", 1.5, -0.1, math.nan)
ABOVE_0_UP_TO_1 = number("lie in (0, 1], got", 0.0, 1.5, -0.5, math.nan)
FLAG = refused("{key} must be True or False, got", "False", 1)
NS_STEPS = refused("steps must be a whole number of at least 1 and at most 100, got", 0, 2.5, None, 101, 10**9)

# Setting -> values that it cannot have, each with what is said then.
TABLE = {
    **dict.fromkeys(["lr", "weight_decay", "alpha", "damping_noise_scale", "gamma", "max_update_rms"], AT_LEAST_0),
    **dict.fromkeys(["min_precond_lr", "weight_lr_power"], AT_LEAST_0),
    **dict.fromkeys(["eps", "extra_scale_factor", "update_ratio", "radius", "precond_init_scale"], ABOVE_0),
    **dict.fromkeys(["momentum", "momentum_beta", "beta2", "beta3", "beta_lip", "shampoo_beta"], BELOW_1),
    **dict.fromkeys(["brake_outward", "brake_inward"], UP_TO_1),
    **dict.fromkeys(["rank_fraction", "fraction", "precond_lr"], ABOVE_0_UP_TO_1),
    "damping": number("be above 0 and below 1, got", 0.0, 1.0, math.nan),
    "r": number("be a finite number, got", math.nan, -math.inf),
    "betas": [
        *refused("{key} must be two numbers in [0, 1), got", (0.9, 1.0), (-0.1, 0.9), (math.nan, 0.9)),
        *refused("{key} must be two numbers in [0, 1), got", (0.9,), 0.9, (0.9, 0.99, 0.999)),
        *refused(NO_NUMBER, (0.9, TWO), (0.9, "0.9")),
    ],
    **dict.fromkeys(["alpha_warmup", "beta3_warmup", "warmup_steps", "max_dim"], count(0)),
    **dict.fromkeys(
        ["rank", "num_power_iterations", "iterations", "precond_decay_steps", "precondition_frequency"], count(1)
    ),
    "workspace": count(1, "2GiB", None),
    "num_ns_steps": [*NS_STEPS, (7, "cannot be served in 7 Newton-Schulz steps")],
    "ns_steps": NS_STEPS,
    "coefficient_type": [
        ("quintc", "unknown coefficient type 'quintc'"),
        *refused("a coefficient set is a non-empty list of (a, b, c)", 3, None, [(1.0, 2.0)], (3.0, -4.0, 2.0)),
        *refused("finite and not zero", [(0, 0, 0)], [(math.nan, 1, 1)]),
    ],
    **dict.fromkeys(["align_rms", "cautious_weight_decay", "constrained", "correct_bias", "cuda_graphs"], FLAG),
    **dict.fromkeys(["maximize", "nesterov", "use_nesterov", "use_decoupled_weight_decay", "orthogonalize"], FLAG),
    **dict.fromkeys(["share_over_dp", "split_qkv", "use_kl_shampoo", "collective_state_dict"], FLAG),
    **dict.fromkeys(["basis_method", "basis_of", "sort_bases", "variant", "moment2_method"], choice()),
    **dict.fromkeys(["relative_update", "scale_mode", "weight_norm", "weight_decay_method", "tp_mode"], choice()),
    **dict.fromkeys(["symmetric_products", "step_kernels", "fp32_matmul_prec"], choice()),
    "offload_fraction": number("lie in [0, 1], got", -0.1, 1.5, math.nan),
    "momentum_dtype": refused("{key} is None, for that of each", torch.float16, torch.float32, torch.int8, "bf16"),
}
# Functions, groups of ranks, and shapes that only splits read.
UNCHECKED = {"is_qkv_fn", "qkv_split_shapes", "pg_collection", "data_parallel_group", "process_group"}
UNCHECKED |= {"orthogonalize_fn", "scale_factor_fn"}
EXECUTION = {setting.name for setting in records.EXECUTION}
CLASSES = {name: row.cls for name, row in OPTIMIZERS.items()}
CLASSES |= {"users_own": OrthogonalizedOptimizer, "distributed_muon": DistributedMuon}


def text(message, key, value):
    """What an error says: numbers and names are repeated as they are."""
    message = message.replace("{key}", key)
    return message + (f"{value!r}" if message.startswith("unknown ") and message.endswith(" ") else "")


def assert_refused(door, message, *what):
    with pytest.raises((TypeError, ValueError)) as raised:
        door()
    assert message in str(raised.value), what


def test_every_setting_is_in_the_table():
    settings = {key for cls in CLASSES.values() for key in settings_of(cls)} - {"execution"}
    assert settings | EXECUTION == TABLE.keys() | UNCHECKED


@pytest.mark.parametrize("key", TABLE)
def test_a_value_that_a_setting_cannot_have_is_refused_at_every_door_before_anything_changes(key):
    """By constructors, of new groups, of states that are loaded, and in a step where a loop has set it."""
    for name, cls in CLASSES.items():
        setting = OPTIMIZERS[name].settings.get(key) if name in OPTIMIZERS else settings_of(cls).get(key)
        for value, message in TABLE[key] if setting is not None else ():
            expected = text(message, key, value), name, key, value
            if name not in OPTIMIZERS or OPTIMIZERS[name].takes(key):
                assert_refused(lambda: build(name, matrices(), **{key: value}), *expected)  # noqa: B023
            if setting.whole:
                continue
            (p, q), (before, _) = matrices(), matrices()
            optimizer = build(name, [p])
            assert_refused(lambda: optimizer.add_param_group({"params": [q], key: value}), *expected)  # noqa: B023
            assert len(optimizer.param_groups) == 1
            if key != "rank":  # of which a state has one alone
                saved, group = copy.deepcopy(optimizer.state_dict()), dict(optimizer.param_groups[0])
                saved["param_groups"][0][key] = value
                assert_refused(lambda: optimizer.load_state_dict(saved), *expected)  # noqa: B023
                assert optimizer.param_groups[0] == group
            optimizer.param_groups[0][key] = value
            p.grad = torch.ones_like(p)
            state = copy.deepcopy(optimizer.state[p])
            assert_refused(optimizer.step, *expected)
            assert torch.equal(p, before), expected
            torch.testing.assert_close(optimizer.state[p], state, rtol=0, atol=0)


HOLD = {"weight_norm": "hold"}
NO_DECAY = [name for name in OPTIMIZERS if not decays(name)]
L2 = {"weight_decay_method": "l2", "use_decoupled_weight_decay": False}
# Settings, each of which is valid, that have no place in an optimizer, or no effect beside one another.
TOGETHER = [
    ("muon", {"coefficient_type": "cubic5", "num_ns_steps": 4}, "cubic5 has 5 polynomials that were fitted together"),
    ("muon", {"weight_decay_method": "palm", "use_decoupled_weight_decay": False}, "contradicts use_decoupled"),
    ("muon", {**HOLD, "relative_update": "match"}, "and cautious_weight_decay have no effect"),
    ("muon", {**HOLD, "cautious_weight_decay": True}, "which has no weight decay"),
    ("muon", {**HOLD, "weight_decay": 0.1}, "'hold' has no weight decay, got 0.1: it keeps"),
    ("muon", {"relative_update": "match", "max_update_rms": 0.1}, "max_update_rms has no effect with relative_update"),
    ("muon", {**HOLD, "max_update_rms": 0.1}, "have no effect with weight_norm 'hold'"),
    ("muon", {"cautious_weight_decay": True, **L2}, "of which l2 decay is a part"),
    ("muon", {"moment2_method": "namo", **L2}, "L2 decay would add to: take use_decoupled_weight_decay=True"),
    ("adaptive_muon", {"moment2_method": "none"}, "unknown moment2_method 'none': expected one of adamuon, normuon"),
    ("scion", HOLD, "Scion: unknown weight_norm 'hold': expected one of none, brake"),
    ("scion", {"lr": 1.5}, "Scion: lr must lie in [0, 1], since a constrained step"),
    ("muon_hyperball", {"weight_norm": "none"}, "MuonHyperball: unknown weight_norm 'none': expected one of hold"),
    *((name, {"weight_decay": 0.1}, "has no weight decay, got 0.1: ") for name in NO_DECAY),
    ("psgd_kron", {"precond_lr": 0.001}, "min_precond_lr must be at most precond_lr, got 0.01 and 0.001"),
]
# The same, which only a constructor and a new group have to refuse: they follow from parameters, or from defaults.
OF_GROUPS = [
    ("muon", {"update_ratio": 2.0}, "update_ratio has no effect with relative_update 'none', got 2.0"),
    ("muon", {**HOLD, "weight_decay": 0, "brake_inward": 0.5}, "brake_inward has no effect with weight_norm 'hold'"),
    ("muon", {"beta2": 0.9}, "beta2 has no effect with moment2_method 'none'"),
    (
        "muon",
        {"moment2_method": "normuon", "align_rms": False},
        "align_rms has no effect with moment2_method 'normuon'",
    ),
    (
        "adaptive_muon",
        {"moment2_method": "namo", "align_rms": False},
        "align_rms has no effect with moment2_method 'namo'",
    ),
    ("spectron", {"rank": 5}, "rank must lie in [1, 4] for "),
    ("schedule_free_adamw", {"r": 1.0}, "r has no effect with variant 'kempnerforge'"),
    ("soap", {"scale_mode": "spectral"}, "scale_mode has no effect with orthogonalize False"),
    ("soap", {"orthogonalize": True, "max_dim": 3}, "SOAP with orthogonalize needs a factor of every matrix, and "),
    ("shampoo", {"max_dim": 3}, "Shampoo needs a factor of every matrix, and parameter 0"),
    ("kl_shampoo", {"max_dim": 3}, "KLShampoo needs a factor of every matrix, and parameter 0"),
    ("muon", {"relative_update": "match", "scale_mode": "unit_rms_norm"}, "by relative_update 'match'; set lr, take"),
]


@pytest.mark.parametrize(("name", "settings", "message"), [*TOGETHER, *OF_GROUPS], ids=str)
def test_settings_that_do_not_go_together_are_refused_before_anything_changes(name, settings, message):
    if name not in OPTIMIZERS or all(map(OPTIMIZERS[name].takes, settings)):
        assert_refused(lambda: build(name, matrices(), **settings), message)
    (p, q), (before, _) = matrices(), matrices()
    optimizer = build(name, [p], **({"weight_decay": 0.0} if settings.get("weight_norm") == "hold" else {}))
    assert_refused(lambda: optimizer.add_param_group({"params": [q], **settings}), message)
    assert len(optimizer.param_groups) == 1
    if (name, settings, message) in TOGETHER:
        optimizer.param_groups[0].update(settings)
        p.grad = torch.ones_like(p)
        assert_refused(optimizer.step, message)
        assert torch.equal(p, before)


SIZED = ("scion", "polargrad", "muon_hyperball")
LACKED = {
    "cautious_weight_decay": ("scion", "muon_hyperball"),
    "nesterov": ("scion",),
    "relative_update": SIZED,
    "moment2_method": ("scion", "polargrad", "mars_muon"),
    "weight_decay_method": NO_DECAY,
    "use_decoupled_weight_decay": NO_DECAY,
    "scale_mode": SIZED,
    "extra_scale_factor": SIZED,
}


@pytest.mark.parametrize("key", LACKED)
def test_what_an_optimizer_lacks_is_refused_and_in_a_group_warned_of(key, caplog):
    for name in LACKED[key]:
        assert_refused(lambda: build(name, matrices(1), **{key: 1}), f"unexpected keyword argument '{key}'")  # noqa: B023
        build(name, [{"params": matrices(1), key: 1}])
        assert f"'{key}' is no setting of its groups, so it has no effect" in caplog.text
        caplog.clear()


@pytest.mark.parametrize("name", ["sinkgd", "dion", "dion2", "psgd_kron", "distributed_muon"])
def test_a_key_that_is_no_setting_of_an_optimizer_changes_nothing(name):
    weights = []
    for foreign in ({}, {"maximize": True, "weight_decay_method": "independent", "weight_norm": "hold"}):
        foreign = {key: x for key, x in foreign.items() if key not in settings_of(CLASSES[name])}
        (p,) = matrices(1)
        optimizer = build(name, [{"params": [p], **foreign}], weight_decay=0.1)
        take(optimizer, 3)
        weights.append(p.detach())
    assert torch.equal(*weights)


def test_other_names_of_settings_count_in_groups_too():
    scion = build("scion", [{"params": matrices(1), "spectral_radius": 3.0}])
    soap = build("soap", [{"params": matrices(1), "use_eigh": True}])
    assert (scion.param_groups[0]["radius"], soap.param_groups[0]["basis_method"]) == (3.0, "eigh")
    with pytest.raises(ValueError, match="two names of one setting: leave 'spectral_radius' out"):
        build("scion", [{"params": matrices(1), "radius": 3.0, "spectral_radius": 7.0}])


def test_another_second_moment_is_refused_beside_the_state_of_the_first():
    (p,) = matrices(1)
    optimizer = build("adaptive_muon", [p], moment2_method="adamuon")
    take(optimizer, 1)
    optimizer.param_groups[0]["moment2_method"] = "namo"
    before = p.detach().clone()
    with pytest.raises(ValueError, match=r"'moment2_buffer' of .* now need \(\): set them back, or remove it"):
        take(optimizer, 1)
    assert torch.equal(p, before)
    del optimizer.state[p]["moment2_buffer"]
    take(optimizer, 1)


def test_blockwise_and_statistics_are_refused_however_they_come_together():
    (p,) = matrices(1)
    optimizer = build("muon", [p], tp_mode="blockwise")
    optimizer.param_groups[0]["moment2_method"] = "normuon"
    with pytest.raises(ValueError, match="with tp_mode blockwise the statistics of normuon"):
        take(optimizer, 1)


def test_execution_is_an_object_of_its_class():
    with pytest.raises(TypeError, match=r"TensorParallelMuon: execution is an Execution\(\.\.\.\), got"):
        build("muon", matrices(1), execution={"workspace": 5})


NO_QKV = {"split_qkv": True, "is_qkv_fn": lambda p: True}
NO_SPLIT = {"split_qkv": True, "qkv_split_shapes": [2, 2, 2]}


@pytest.mark.parametrize(
    ("names", "settings", "message"),
    [
        (having("is_qkv_fn"), NO_SPLIT, "split_qkv needs is_qkv_fn"),
        ([*having("is_qkv_fn"), "users_own"], NO_QKV | {"qkv_split_shapes": [1, 1]}, "positive integers, got [1, 1]"),
        ([*having("is_qkv_fn"), "users_own"], NO_QKV | {"qkv_split_shapes": [4, 1, 1.0]}, "positive integers"),
        ([*having("is_qkv_fn"), "users_own"], NO_QKV | {"qkv_split_shapes": [6, 1, -1]}, "positive integers"),
        (having("is_qkv_fn"), NO_QKV | {"qkv_split_shapes": [2, 1, 1]}, "6 rows over all ranks are not a multiple of"),
        (
            ["users_own"],
            NO_QKV | {"qkv_split_shapes": [2, 1, 1]},
            "of 6 rows cannot be split into [2, 1, 1], which are",
        ),
        (["users_own"], NO_QKV, "split_qkv needs qkv_split_shapes"),
        (["spectron"], NO_QKV | {"qkv_split_shapes": [2, 2, 2]}, "rank must lie in [1, 2] for "),
        (["spectron"], {"tp_mode": "blockwise"}, "with tp_mode blockwise the singular values of factors"),
        (["muon"], {"offload_fraction": 0.5, "cuda_graphs": True}, "cuda_graphs cannot work with offload_fraction"),
        (["muon"], {"momentum_dtype": torch.bfloat16, "cuda_graphs": True}, "cuda_graphs cannot work with offload_"),
        (["muon"], {"spectral_radius": 1.0}, "spectral_radius"),
        (["scion"], {"radius": 5.0, "spectral_radius": 1.0}, "two names of one setting"),
        (["spectron"], {"num_power_iterations": 2, "num_power_iter": 1}, "num_power_iterations"),
        (["soap"], {"use_eigh": True, "basis_method": "qr"}, "two names of one setting"),
        (["soap"], {"use_eigh": "yes"}, "SOAP: unknown basis_method 'yes'"),
        ([*CLASSES][:-2], {"weight_deca": 0.1}, "got an unexpected keyword argument 'weight_deca'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_a_constructor_alone_refuses(names, settings, message):
    for name in names:
        assert_refused(lambda: build(name, matrices(1), **settings), message, name)  # noqa: B023


def stack(rows=6, split=None):
    """A matrix; of 2 rows a stack without a mark, of 5 a vector."""
    p = torch.nn.Parameter(torch.ones({2: (2, 3, 4), 5: (5,)}.get(rows, (rows, 4))))
    if split is not None:
        p.logical_matrices = split
    return p


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        *((name, [stack(5)], "has shape (5,): give it to another") for name in OPTIMIZERS if name not in FOR_VECTORS),
        *((name, [stack(2)], "or declare a stack of 2 matrices") for name in OPTIMIZERS if name not in ELEMENTWISE),
        (
            "soap",
            [stack(), stack(2)],
            "SOAP takes matrices and vectors, but parameter 1 of group 0 has shape (2, 3, 4): give",
        ),
        ("soap", [stack(9, GATE_UP)], "a parameter of shape (9, 4) is not what was declared of it"),
        ("soap", [stack(9, experts(3))], "has shape (9, 4)"),
        (
            "soap",
            [("experts.weight", stack(2))],
            "but experts.weight has shape (2, 3, 4): give it to another optimizer",
        ),
        ("muon", [torch.nn.Parameter(torch.zeros(()))], "has shape (): give it to another"),
        ("spectron", [{"params": [stack(), stack(), stack()], "pairs": True}], "an even number of factors, got 3"),
        (
            "spectron",
            [factor_pairs([(stack(9), torch.nn.Parameter(torch.ones(8, 5)))])],
            "(9, 4) and (8, 5) have no rank",
        ),
    ],
    ids=str,
)
def test_parameters_that_an_optimizer_cannot_have_are_refused_with_their_shape(name, params, message):
    assert_refused(lambda: build(name, params), message)


@every
def test_an_error_of_one_of_several_groups_names_it(name):
    params = [torch.nn.Parameter(torch.randn(8, 4)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"group 1: .*lr must"):
        build(name, [{"params": params[:1]}, {"params": params[1:], "lr": -1.0}])
    optimizer = build(name, [{"params": params[:1]}, {"params": params[1:]}])
    optimizer.param_groups[1]["lr"] = math.nan
    params[0].grad = torch.zeros_like(params[0])
    with pytest.raises(ValueError, match=r"group 1: .*lr must"):
        optimizer.step()


def test_blockwise_is_refused_at_every_number_of_ranks_where_whole_matrices_are_measured():
    cases = [(name, {}, "norms") for name in ("mars_muon", "polargrad", "muon_hyperball")]
    cases += [("muon", {"weight_norm": "brake"}, "norms"), ("muon", {"relative_update": "match"}, "norms")]
    cases += [("muon", {"moment2_method": "normuon"}, "statistics of normuon")]
    cases += [("adaptive_muon", {"moment2_method": "namo"}, "statistics of namo")]
    for name, settings, measured in cases:
        message = f"with tp_mode blockwise the {measured} would be those of shards, "
        assert_refused(lambda: build(name, matrices(1), tp_mode="blockwise", **settings), message)  # noqa: B023
    build("muon", matrices(1), tp_mode="blockwise")


@pytest.mark.parametrize("name", ["muon", "adaptive_muon"])
def test_the_order_of_torch_is_refused_where_a_flag_follows_the_momentum(name):
    with pytest.raises(TypeError, match=r"nesterov must be True or False, got 0\.95"):
        OPTIMIZERS[name].cls(matrices(1), 0.02, 0.1, 0.95)


def test_soaps_scale_belongs_to_the_groups_that_orthogonalize():
    message = "scale_mode has no effect with orthogonalize False"
    scaled = {"params": matrices(1), "scale_mode": "spectral"}
    for groups, settings in (
        ([{"params": matrices(1)}, scaled], {}),
        ([{**scaled, "orthogonalize": False}], {"orthogonalize": True, "scale_mode": "shape_scaling"}),
    ):
        assert_refused(lambda: SOAP(groups, **settings), message)  # noqa: B023
    SOAP([{**scaled, "orthogonalize": True}])
    apart = [{"params": matrices(1), "orthogonalize": False}, {"params": matrices(1)}]
    SOAP(apart, orthogonalize=True, scale_mode="spectral")


@pytest.mark.parametrize("made", [TensorParallelMuon, torch.optim.AdamW])
def test_a_rate_of_several_entries_is_a_value_error_as_in_torch(made):
    with pytest.raises(ValueError, match=r"\blr\b"):
        made(matrices(1), lr=TWO)


@every
def test_numbers_of_numpy_and_tensors_of_one_entry_make_the_steps_of_pythons(name):
    results = []
    for kind in (float, np.float32, np.array, torch.tensor, lambda x: torch.tensor([x])):
        (p,) = matrices(1)
        optimizer = build(name, [p], lr=kind(0.25), weight_decay=kind(0.0))
        own = {"momentum", "momentum_beta", "eps", "beta2", "shampoo_beta"} & optimizer.param_groups[0].keys()
        optimizer.param_groups[0].update({key: kind(0.5) for key in own})
        for _ in range(2):
            p.grad = p.detach() + 1
            optimizer.step()
        results.append(p.detach())
    for other in results[1:3]:
        assert torch.equal(other, results[0])
    for other in results[3:]:
        torch.testing.assert_close(other, results[0], rtol=1e-5, atol=1e-6)


# What has no effect, or is nobody's: said once, or nothing is said.


@pytest.mark.parametrize(
    ("name", "group", "said"),
    [
        (
            "lion",
            {"weigth_decay": 1},
            "'weigth_decay' is no setting of its groups, so it has no effect, did you mean 'w",
        ),
        ("with_adamw", {"nestrov": 1}, "did you mean 'nesterov'?"),
        ("muon", {"num_ns_step": 1}, "did you mean 'num_ns_steps'?"),
        ("soap", {"basis_methd": 1}, "did you mean 'basis_method'?"),
        ("muon", {"fp32_matmul_prec": 1}, "'fp32_matmul_prec' is no setting of its groups, so it has no effect"),
        ("muon", {"tp_mode": 1}, "'tp_mode' is no setting of its groups, so it has no effect"),
        ("muon", {"betas": 1}, "'betas' is no setting of its groups, so it has no effect"),
        ("soap", {"wd": 1}, "'wd' is no setting of its groups, so it has no effect, did you mean 'weight_decay'?"),
    ],
    ids=str,
)
def test_a_setting_without_an_effect_in_a_group_is_named(name, group, said, caplog):
    build(name, [{"params": matrices(1), **group}])
    [message] = caplog.messages
    assert said in message


def test_a_key_that_nobody_reads_is_named_once_when_a_step_finds_it(caplog):
    optimizer = build("muon", matrices(1))
    take(optimizer, 1)
    optimizer.param_groups[0] |= {"initial_lr": 1.0, "learning_rate": 0.5}
    take(optimizer, 2)
    [message] = caplog.messages
    assert "'learning_rate' is no setting of its groups, so it has no effect, did you mean 'lr'?" in message


NAMES_OF_OTHERS = [
    ("muon", "betas", r"did you mean 'momentum'\? betas are AdamW's"),
    ("muon", "adjust_lr_fn", "did you mean 'scale_mode'.* 'match_rms_adamw' is 'spectral' with extra_scale_factor=0.2"),
    ("dion", "mu", "did you mean 'momentum'"),
    ("soap", "max_preconditioner_dim", "did you mean 'max_dim'"),
    ("lion", "wd", "did you mean 'weight_decay'"),
    ("dion2", "distributed_mesh", "DTensors know their mesh"),
]


@pytest.mark.parametrize(("name", "other", "said"), NAMES_OF_OTHERS)
def test_an_argument_by_another_librarys_name_is_answered_with_ours(name, other, said):
    with pytest.raises(TypeError, match=rf"got an unexpected keyword argument '{other}'.*{said}"):
        build(name, matrices(1), **{other: 1})


def test_a_misspelt_setting_among_users_own_is_named(caplog):
    build("users_own", matrices(1), momentum_bta=0.3, beta2=1)
    [message] = caplog.messages
    assert "'momentum_bta' is no setting of its groups, so it has no effect, did you mean 'mom" in message


KEYS_OF_OTHERS = (
    "is_expert_parallel wd_mult pre_wd_mult lr_mult pre_lr_mult max_lr min_lr start_wd end_wd default_config optimizer "
    "is_decoupled_lr is_embedding name names layer initial_lr initial_momentum max_momentum base_momentum base_lr "
    "lr_scale warmup_frac step bias_correction param_names foreach fused capturable amsgrad"
)


@every_class
def test_keys_of_megatron_and_of_schedulers_in_groups_are_nobodys_business(name, caplog):
    build(name, [{"params": matrices(1), **dict.fromkeys(KEYS_OF_OTHERS.split(), 1), "param_names": ["w"]}])
    assert not [message for message in caplog.messages if "no setting" in message]


@pytest.mark.parametrize("name", having("is_qkv_fn"))
def test_shapes_of_fused_projections_that_nothing_splits_are_named(name, caplog):
    fused = {"is_qkv_fn": lambda p: True, "qkv_split_shapes": (4, 4, 4)}
    build(name, matrices(1, (12, 4)), **fused)
    assert "is_qkv_fn and qkv_split_shapes have no effect without split_qkv=True" in caplog.text
    caplog.clear()
    build(name, matrices(1, (12, 4)), **fused, split_qkv=True)
    build(name, matrices(1, (12, 4)), is_qkv_fn=None)
    assert "no effect" not in caplog.text


@pytest.mark.parametrize("name", ["soap", "lion", "schedule_free_adamw", "spectron", "distributed_muon"])
def test_a_method_that_no_step_would_call_is_warned_of(name, caplog):
    base = type(build(name, matrices(1)))
    for method in ("orthogonalize", "orthogonalize_fn", "scaled_orthogonalize_fn", "scale_factor_fn"):
        own = {method: lambda self, *args, **settings: args[-1]}
        type("Own", (base,), own)(matrices(1), **RECORDS[name].settings)
        assert f"Own: no step here calls {method}, " in caplog.text
        caplog.clear()
        calling = own | {"step": lambda self, closure=None: None}
        type("Own", (base,), calling)(matrices(1), **RECORDS[name].settings)
        type("Own", (OPTIMIZERS["muon"].cls,), own)(matrices(1))
        assert "no step here calls" not in caplog.text


def test_shorter_schedules_than_were_fitted_together_are_noted(caplog):
    build("muon", [{"params": matrices(1), "num_ns_steps": 5}, {"params": matrices(1), "num_ns_steps": 3}])
    build("muon", matrices(1), coefficient_type="polar_express", num_ns_steps=3)
    first, second = caplog.messages
    assert first.startswith("3 Newton-Schulz steps of quintic are fewer than were fitted together")
    assert "become 0.19 to 1.87 instead of 1" in second
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
def test_an_update_by_hand_takes_the_settings_of_a_group_and_no_others(name):
    params = matrices(1)
    optimizer = build(name, params)
    with pytest.raises(TypeError, match=r"\.orthogonalize\(\) has no setting momentun"):
        optimizer.orthogonalize(params[0], torch.ones(6, 4), momentun=3)
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
            assert name in ("spectron", "users_own") or not keeps_state(name)
            return
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10, cycle_momentum=cycle)
        for step in range(5):
            take(optimizer, 1, step)
            schedule.step()
        weights.append(params[0].detach())
    assert not torch.equal(*weights)


OTHER_NAMES = [
    (Scion, {"spectral_radius": 3.0}, {"radius": 3.0}),
    (Spectron, {"num_power_iter": 3, "rank": 2}, {"num_power_iterations": 3, "rank": 2}),
    (SOAP, {"use_eigh": True, "precondition_frequency": 1}, {"basis_method": "eigh", "precondition_frequency": 1}),
    (SOAP, {"use_eigh": False, "precondition_frequency": 1}, {"basis_method": "qr", "precondition_frequency": 1}),
    (SOAP, {"max_precond_dim": 4}, {"max_dim": 4}),
]


@pytest.mark.parametrize(("kind", "other", "own"), OTHER_NAMES)
def test_both_names_make_the_same_steps_and_the_default_others(kind, other, own):
    weights = []
    for settings in (other, own, {key: value for key, value in own.items() if key in other}):
        p = matrix()
        run(kind([p], lr=0.01, **settings), p, range(5))
        weights.append(p)
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[2], weights[1]) == (own.get("basis_method") == "qr")


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


DTYPES = [torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@every_class
def test_a_parameter_of_no_real_numbers_is_refused_at_construction_and_in_a_new_group(name):
    for dtype in DTYPES:
        p = torch.nn.Parameter(torch.ones(6, 4).to(dtype), requires_grad=dtype.is_complex)
        p.name_in_model = "layer.codes"
        message = f", but layer.codes is {dtype}: leave it out"
        assert_refused(lambda: build(name, [*matrices(1), p]), message)  # noqa: B023
        optimizer = build(name, matrices(1))
        groups = len(optimizer.param_groups)
        assert_refused(lambda: optimizer.add_param_group({"params": [p]}), message)  # noqa: B023
        assert len(optimizer.param_groups) == groups
        if name == "with_adamw":
            assert_refused(lambda: Muon(matrices(1), [p]), f"layer.codes is {dtype}: leave")  # noqa: B023
