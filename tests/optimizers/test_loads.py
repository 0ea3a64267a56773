"""States that are loaded: whose they are, whole and finite, what they lack. Else they are refused, or it is said."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from megatron_eopt import DistributedMuon, Lion, TensorParallelMuon
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer
from megatron_eopt.optimizers.with_adamw import Muon
from tests.optimizers.family import (
    OPTIMIZERS,
    build,
    every,
    every_class,
    every_class_with_state,
    every_variant,
    every_with_state,
    having,
    matrices,
    take,
)
from tests.plain.made import assert_same


def tensors_of(state_dict):
    """Parameter and key of the tensors with more than one entry, and those tensors."""
    return [
        (index, key, value)
        for index, state in state_dict["state"].items()
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1
    ]


def saved_and_other(name):
    """The state of an optimizer after some steps, and another one that has made others."""
    first, second = build(name, matrices()), build(name, matrices(seed=3))
    take(first, 3)
    take(second, 2, start=7)
    return copy.deepcopy(first.state_dict()), second


def weights(optimizer):
    return [p.detach() for p in optimizer.param_groups[0]["params"]]


def assert_refused(optimizer, state_dict, *words, error=ValueError):
    before = copy.deepcopy((optimizer.state_dict(), optimizer.param_groups))
    with pytest.raises(error) as raised:
        optimizer.load_state_dict(state_dict)
    assert all(word in str(raised.value) for word in words), raised.value
    assert_same((optimizer.state_dict(), [dict(group) for group in optimizer.param_groups]), (before[0], [*before[1]]))
    optimizer.load_state_dict(before[0])
    take(optimizer, 1, start=20)


# What no tensor of a state can be, and what is said.
UNFIT = [
    (lambda x: x.index_fill(0, torch.tensor(0), math.nan), "not finite"),
    (lambda x: x.index_fill(0, torch.tensor(0), -math.inf), "not finite"),
    (lambda x: torch.full(x.shape, 1e200, dtype=torch.float64), "not finite"),  # in fp32
    (lambda x: None, "in the state"),
    (lambda x: [[0.0, 1.0]], "in the state"),
    (lambda x: x.float().to_sparse(), "dense tensor of real numbers"),
    (lambda x: torch.complex(x.float(), x.float()), "dense tensor of real numbers"),
]


@every_class_with_state
def test_what_a_state_cannot_have_is_refused_by_name(name):
    saved, optimizer = saved_and_other(name)
    keys = {key: index for index, key, _ in tensors_of(saved)}
    for key, index in keys.items():
        for change, said in UNFIT if key == next(iter(keys)) else UNFIT[:1]:
            state = copy.deepcopy(saved)
            state["state"][index][key] = change(state["state"][index][key])
            of_adamw = name == "with_adamw" and key != "momentum_buffer"
            called = "parameter 0 of group 1" if of_adamw else f"parameter {index} of group 0"
            assert_refused(optimizer, state, said, repr(key), called, error=(TypeError, ValueError))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_key_that_a_state_needs_is_named(name):
    saved, optimizer = saved_and_other(name)
    p = optimizer.param_groups[0]["params"][1]
    keys = [tensor.key for tensor in optimizer.state_tensors(p) if not tensor.optional]
    for key in keys if len(keys) > 1 else ():
        state = copy.deepcopy(saved)
        del state["state"][1][key]
        assert_refused(optimizer, state, repr(key))


NEVER_BELOW_0 = ("exp_avg_sq", "moment2_buffer", "radius", "step", "schedule", "bounds", "projected", "has_previous")


@every_variant
def test_squares_norms_and_counts_below_0_are_refused(name):
    saved, optimizer = saved_and_other(name)
    for key in [key for key in saved["state"].get(1, ()) if key.startswith(NEVER_BELOW_0)]:
        state = copy.deepcopy(saved)
        state["state"][1][key].view(-1)[-1] = -1
        assert_refused(optimizer, state, "below 0", repr(key), "parameter 1 of group 0")


@pytest.mark.parametrize("name", [*OPTIMIZERS, "muon in bf16"])
def test_a_count_of_a_group_is_a_whole_number(name):
    saved, optimizer = saved_and_other(name)
    for key in optimizer.counters & saved["param_groups"][0].keys():
        for found in ("5", -1, 2.0, True):
            saved["param_groups"][0][key] = found
            assert_refused(optimizer, saved, f"{key} must be a whole number", repr(found))


@every_with_state
def test_a_parameter_whose_state_is_not_there_is_named(name, caplog):
    """One that never had a gradient is left out by a state dict; one of a lost state is, too."""
    saved, optimizer = saved_and_other(name)
    for states, named in (
        ({0: saved["state"][0]}, [False, True]),
        ({0: saved["state"][0], 1: {}}, [False, True]),
        ({}, [True, True]),
        (saved["state"], None),
    ):
        caplog.clear()
        optimizer.load_state_dict(copy.deepcopy({**saved, "state": states}))
        told = [message for message in caplog.messages if "begins anew" in message]
        assert len(told) == (named is not None)
        assert not told or [f"parameter {n}" in told[0] for n in range(2)] == named
        take(optimizer, 1, start=5)
    caplog.clear()
    optimizer.load_state_dict(build(name, matrices()).state_dict())  # of a run that made no step
    assert not [message for message in caplog.messages if "anew" in message]


@every
def test_a_parameter_that_never_had_a_gradient_goes_on_alike(name):
    pairs = [matrices(), matrices()]
    first, second = (build(name, each) for each in pairs)
    for step in range(2):
        pairs[0][0].grad = matrices(1, seed=step)[0].detach()
        first.step()
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for p, q in zip(*pairs, strict=True):
        q.data.copy_(p.data)
    for each in (first, second):
        take(each, 2, start=2)
    assert all(map(torch.equal, *pairs))


@every
def test_settings_that_a_state_lacks_are_those_of_the_optimizer(name):
    """Also a group's own; and what an optimizer itself has counted or chosen may be missing."""
    straight, first = build(name, matrices()), build(name, matrices())
    take(straight, 4)
    take(first, 2)
    carried = type(first).persistent_group_keys
    for keys in ([key for key in first.param_groups[0] if key not in ("params", *carried)], carried):
        saved = copy.deepcopy(first.state_dict())
        for key in keys:
            saved["param_groups"][0].pop(key, None)
        second = build(name, [nn.Parameter(p.clone()) for p in weights(first)])
        settings = second.settings()
        second.load_state_dict(saved)
        assert second.settings() == settings
        take(second, 2, start=2)
        assert keys is carried or all(map(torch.equal, weights(second), weights(straight)))
    p, q = matrices()
    optimizer = build(name, [{"params": [p]}, {"params": [q], "lr": 0.5}])
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["lr"]
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]


@every
def test_the_state_of_a_group_can_be_made_by_init_group(name):
    p, q, r = matrices(3)
    optimizer = build(name, [{"params": [p, q]}, {"params": [r]}])
    q.grad = torch.ones(6, 4)
    optimizer._init_group(optimizer.param_groups[0], skip_non_grad_params=True)
    assert list(optimizer.state) == [q]
    optimizer._init_group(optimizer.param_groups[0])
    assert set(optimizer.state) == {p, q}
    whole = build(name, matrices(3))
    whole.init_state()
    kept, expected = (
        [{key: x.shape for key, x in state.items()} for state in each.state.values()] for each in (optimizer, whole)
    )
    assert kept == expected[:2]


# Whose a state is.


BUILDERS = {
    **{row.cls.__name__: lambda params, name=name: build(name, params) for name, row in OPTIMIZERS.items()},
    "Muon": lambda params: Muon(params[:-1], params[-1:]),
    "DistributedMuon": DistributedMuon,
}
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def stepped(name, seed=0):
    """A model, and an optimizer of its weights that has made two steps."""
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator)
    optimizer = (BUILDERS[name] if isinstance(name, str) else name)(list(model.parameters()))
    for _ in range(2):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
    return model, optimizer


def state_of(name):
    """The state of an optimizer, as it comes back from a file."""
    file = io.BytesIO()
    torch.save(stepped(name)[1].state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def without_mark(state):
    """A state that does not say whose it is."""
    groups = [{key: x for key, x in group.items() if key != "state_of"} for group in state["param_groups"]]
    return {**state, "param_groups": groups}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_state_loads_into_its_own_optimizer_alone(name, caplog):
    """With its mark or without, of which there is a word; that of the next class is refused."""
    _, optimizer = stepped(name, seed=1)
    other = [*BUILDERS][[*BUILDERS].index(name) - 1]
    assert_foreign(optimizer, state_of(other), name, other)
    state, found = state_of(name), []
    for each in (state, without_mark(state)):
        _, optimizer = stepped(name, seed=1)
        caplog.clear()
        optimizer.load_state_dict(copy.deepcopy(each))
        said = [message for message in caplog.messages if "does not say which optimizer wrote it" in message]
        assert len(said) == (each is not state and any(state["state"].values()))
        found.append(optimizer.state_dict())
    assert_same(found[0]["state"], stepped(name)[1].state_dict()["state"])
    assert_same(*found)  # it is marked again


def assert_foreign(optimizer, state, name, other):
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=rf"^{name} cannot load a state of {other}: .*build {other}, or"):
        optimizer.load_state_dict(state)
    assert_same(optimizer.state_dict(), before)


def test_a_mark_is_of_a_group_and_of_the_nearest_class_of_ours():
    class Own(TensorParallelMuon):
        pass

    class OwnTemplate(OrthogonalizedOptimizer):
        def orthogonalize(self, p, grad, **kwargs):
            return grad

    def template(params):
        return OwnTemplate(params, 0.1, 0.9, False, 0.0, True, False, None, None, "highest")

    _, own = stepped(Own, seed=1)
    own.load_state_dict(state_of("TensorParallelMuon"))
    _, base = stepped("TensorParallelMuon", seed=2)
    base.load_state_dict(own.state_dict())
    assert_same(base.state_dict()["state"], state_of("TensorParallelMuon")["state"])
    assert_foreign(own, state_of("PolarGrad"), "Own", "PolarGrad")
    assert_foreign(base, stepped(template)[1].state_dict(), "TensorParallelMuon", "OrthogonalizedOptimizer")
    _, lion = stepped(lambda params: Lion([{"params": params[:1]}, {"params": params[1:]}]))
    state = lion.state_dict()
    state["param_groups"][1]["state_of"] = "Signum"
    assert_foreign(lion, state, "Lion", "Signum")
    base.add_param_group(lion.param_groups[0])
    assert [group["state_of"] for group in base.param_groups] == ["TensorParallelMuon"] * 2


@pytest.mark.parametrize("options", [None, FLAT, FULL], ids=["nested", "flat", "full"])
def test_the_functions_of_torch_carry_the_mark(options):
    """Shampoo and KL-Shampoo have the same keys, so that torch takes the state of one for the other's."""
    of_writer = get_optimizer_state_dict(*stepped("Shampoo"), options=options)
    model, optimizer = stepped("KLShampoo", seed=1)
    with pytest.raises(ValueError, match=r"^KLShampoo cannot load a state of Shampoo"):
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(of_writer), options=options)
    model, optimizer = stepped("Shampoo", seed=1)
    set_optimizer_state_dict(model, optimizer, of_writer, options=options)
    assert_same(optimizer.state_dict(), stepped("Shampoo")[1].state_dict())


@every_class
def test_what_is_no_state_is_refused_by_what_it_lacks(name):
    saved, optimizer = saved_and_other(name)
    for wrong in (None, [], {}, {"state": {}}, {"param_groups": []}):
        assert_refused(optimizer, wrong, "takes what state_dict() returned")
    del saved["param_groups"][-1]["params"]
    assert_refused(optimizer, saved, "has no 'params'")


OF_SIZES = [
    *((name, "max_dim", 5, 6, "was made with 5") for name in having("max_dim")),
    ("spectron", "rank", 4, 2, "was made with 4"),
    ("dion", "rank_fraction", 0.25, 0.75, "'Q'"),
]


@pytest.mark.parametrize(("name", "key", "was", "now", "said"), OF_SIZES)
def test_a_setting_that_sizes_a_state_is_that_of_the_state(name, key, was, now, said):
    (p,), (q,) = matrices(1), matrices(1)
    other, optimizer = build(name, [p], **{key: was}), build(name, [q], **{key: now})
    for each in (other, optimizer):
        take(each, 1)
    assert_refused(optimizer, other.state_dict(), said)
    other.param_groups[0][key] = now
    before = p.detach().clone()
    for _ in range(2):  # it is not forgotten
        with pytest.raises(ValueError, match=said):
            take(other, 1)
    assert torch.equal(before, p)


# Hooks.


def with_halves(saved):
    """The same state with half of each value but counts."""
    saved = copy.deepcopy(saved)
    for index, key, value in tensors_of(saved):
        saved["state"][index][key] = value / 2
    return saved


def halved_in_place(optimizer):
    for state in optimizer.state.values():
        for x in state.values():
            x.mul_(0.5 if x.numel() > 1 else 1)


def halved_anew(optimizer):
    for state in optimizer.state.values():
        state.update({key: x / 2 if x.numel() > 1 else x for key, x in state.items()})


@every_variant
@pytest.mark.parametrize("settings", [{}, {"offload_fraction": 1.0}], ids=str)
def test_hooks_of_a_load_are_called_in_torchs_order(name, settings):
    """First with the dict as it was given, whatever that is; last with the state that steps use."""
    if settings and name != "muon":
        return
    source, expected, before, in_place, anew = optimizers = [build(name, matrices(), **settings) for _ in range(5)]
    take(source, 3)
    saved = source.state_dict()
    expected.load_state_dict(with_halves(saved))
    before.register_load_state_dict_pre_hook(lambda _, found: with_halves(found["of another program"]))
    before.load_state_dict({"of another program": saved})
    for each, hook in ((in_place, halved_in_place), (anew, halved_anew)):
        each.register_load_state_dict_post_hook(hook)
        each.load_state_dict(copy.deepcopy(saved))
    for each in optimizers[1:]:
        take(each, 2, start=3)
        assert all(map(torch.equal, weights(each), weights(expected)))


@every_class
def test_hooks_of_a_state_dict_change_what_is_saved(name):
    optimizer = build(name, matrices())
    take(optimizer, 2)
    expected = with_halves(optimizer.state_dict())["state"]
    optimizer.register_state_dict_pre_hook(halved_anew)
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {"wrapped": state_dict})
    found = optimizer.state_dict()["wrapped"]
    assert all(torch.equal(x, expected[index][key]) for index, key, x in tensors_of(found))


@every_class_with_state
def test_tensors_of_a_state_that_share_memory_step_apart(name):
    """One tensor for several parameters, or a single entry that is expanded; and a key of nobody's stays."""
    saved, optimizer = saved_and_other(name)
    _, other = saved_and_other(name)
    saved["state"][1] = saved["state"][0]
    for key in {"momentum_buffer", "exp_avg", "exp_avg_fast", "z"} & saved["state"][0].keys():
        saved["state"][0][key] = torch.tensor(0.5).expand(6, 4)
    apart = {**saved, "state": {i: copy.deepcopy(state) for i, state in saved["state"].items()}}
    for state in apart["state"].values():
        state.update({key: x.contiguous() for key, x in state.items()})
    saved["state"]["mine"] = {"momentum_buffer": torch.ones(3)}
    for each, state_dict in ((optimizer, saved), (other, apart)):
        each.load_state_dict(state_dict)
        take(each, 2, start=9)
    assert all(map(torch.equal, weights(optimizer), weights(other)))
