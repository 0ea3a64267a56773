"""States that are loaded: whose they are, whole and finite, what they lack. Else they are refused, or it is said."""

import copy
import io
import logging
import math

import pytest
import torch
import torch.distributed.checkpoint as dcp
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
    matrices,
    take,
)
from tests.plain.made import assert_same


def tensors_of(state_dict):
    """Parameter and key of the tensors with more than one entry, and those tensors."""
    found = []
    for index, state in state_dict["state"].items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and value.numel() > 1:
                found.append((index, key, value))
    return found


def keys_of(name):
    """Each key of a parameter's state, but those of further logical matrices."""
    optimizer = build(name, matrices())
    take(optimizer, 2)
    return sorted({key for _, key, _ in tensors_of(optimizer.state_dict())})


def saved_and_other(name):
    """The state of an optimizer after some steps, and another one that has made others."""
    first, second = build(name, matrices()), build(name, matrices(seed=3))
    take(first, 3)
    take(second, 2, start=7)
    return copy.deepcopy(first.state_dict()), second


def snapshot(optimizer):
    return copy.deepcopy((optimizer.state_dict(), optimizer.param_groups))


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def assert_refused(optimizer, state_dict, *words, error=ValueError):
    before = snapshot(optimizer)
    with pytest.raises(error) as raised:
        optimizer.load_state_dict(state_dict)
    for word in words:
        assert word in str(raised.value)
    assert same(before, snapshot(optimizer))
    optimizer.load_state_dict(before[0])
    take(optimizer, 1, start=20)


@every_class
def test_values_that_are_not_finite_are_refused_by_name_whatever_the_key(name):
    for key in keys_of(name):
        for value in (math.nan, -math.inf):
            saved, optimizer = saved_and_other(name)
            index = [index for index, known, _ in tensors_of(saved) if known == key][-1]
            saved["state"][index][key].view(-1)[-1] = value
            of_adamw = name == "with_adamw" and key != "momentum_buffer"
            called = "parameter 0 of group 1" if of_adamw else f"parameter {index} of group 0"
            assert_refused(optimizer, saved, "not finite", repr(key), called)


@every_class_with_state
def test_what_a_state_cannot_have_is_refused_by_name(name):
    """No tensor, a value that only a wider dtype can hold, and nothing beside others."""
    for found in (None, [[0.0, 1.0]]):
        saved, optimizer = saved_and_other(name)
        index, key, value = tensors_of(saved)[0]
        saved["state"][index][key] = found
        assert_refused(optimizer, saved, repr(key), "in the state", error=TypeError)
    saved, optimizer = saved_and_other(name)
    saved["state"][index][key] = torch.full(value.shape, 1e200, dtype=torch.float64)
    assert_refused(optimizer, saved, "not finite", repr(key))
    keys = required(name) if name in OPTIMIZERS else ()
    for key in keys if len(keys) > 1 else ():
        saved, optimizer = saved_and_other(name)
        del saved["state"][1][key]
        assert_refused(optimizer, saved, repr(key))


def required(name):
    """Keys that a state needs: those of the second moment of a run without one are no others."""
    optimizer = build(name, matrices())
    take(optimizer, 1)
    p = optimizer.param_groups[0]["params"][1]
    return [tensor.key for tensor in optimizer.state_tensors(p) if not tensor.optional]


@every_with_state
@pytest.mark.parametrize("left", ["no entry", "an empty one"])
def test_a_parameter_without_state_beside_others_is_named(name, left, caplog):
    """As a parameter is that never had a gradient, which a state dict leaves out."""
    saved, optimizer = saved_and_other(name)
    if left == "no entry":
        del saved["state"][1]
    else:
        saved["state"][1] = {}
    with caplog.at_level(logging.WARNING):
        optimizer.load_state_dict(saved)
    told = [record.getMessage() for record in caplog.records if "begins anew" in record.getMessage()]
    assert len(told) == 1, told
    assert "parameter 1 of group 0" in told[0]
    assert "parameter 0" not in told[0]
    take(optimizer, 1, start=5)


@every
def test_a_parameter_that_never_had_a_gradient_loads_and_goes_on_alike(name):
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
def test_states_that_say_all_there_is_are_loaded_without_a_word(name, caplog):
    """Of a run that made no step, of frozen parameters, and with every state there."""
    saved, optimizer = saved_and_other(name)
    fresh = build(name, matrices()).state_dict()
    p, q = matrices()
    q.requires_grad_(False)
    frozen = build(name, [p, q])
    p.grad = torch.ones_like(p)
    frozen.step()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        optimizer.load_state_dict(saved)
        optimizer.load_state_dict(fresh)
        frozen.load_state_dict(copy.deepcopy(frozen.state_dict()))
    assert not [record.getMessage() for record in caplog.records if "anew" in record.getMessage()]


@every_with_state
def test_a_state_of_groups_alone_is_told(name, caplog):
    """As torch's optimizers save it before their first step, and as a lost one looks."""
    saved, optimizer = saved_and_other(name)
    with caplog.at_level(logging.WARNING):
        optimizer.load_state_dict({**saved, "state": {}})
    told = [record.getMessage() for record in caplog.records if "begins anew" in record.getMessage()]
    assert [("parameter 0" in message, "parameter 1" in message) for message in told] == [(True, True)]
    take(optimizer, 1, start=5)


@every_class
def test_what_belongs_to_no_parameter_stays_and_changes_no_step(name):
    """As torch keeps it, which has no other place for what belongs to a whole optimizer."""
    saved, optimizer = saved_and_other(name)
    reference = build(name, [torch.nn.Parameter(p.detach().clone()) for p in optimizer.param_groups[0]["params"]])
    reference.load_state_dict(copy.deepcopy(saved))
    optimizer.load_state_dict({**saved, "state": {**saved["state"], "mine": {"momentum_buffer": torch.ones(3)}}})
    for each in (optimizer, reference):
        take(each, 2, start=3)
    for p, q in zip(optimizer.param_groups[0]["params"], reference.param_groups[0]["params"], strict=True):
        assert torch.equal(p, q)


@every_class_with_state
def test_names_of_the_model_are_in_the_message(name):
    if name == "with_adamw":
        return
    first, second = (build(name, [("layer.weight", p) for p in matrices(1)]) for _ in range(2))
    take(first, 2)
    saved = copy.deepcopy(first.state_dict())
    _, key, value = tensors_of(saved)[0]
    value.view(-1)[0] = math.nan
    assert_refused(second, saved, f"{key!r} of layer.weight")


# What groups of a state lack.


@every
def test_settings_that_a_state_lacks_are_those_that_the_optimizer_was_built_with(name):
    straight, first = build(name, matrices()), build(name, matrices())
    take(straight, 4)
    take(first, 2)
    carried = type(first).persistent_group_keys  # what the optimizer itself has counted or chosen
    for keys in ([key for key in first.param_groups[0] if key not in ("params", *carried)], carried):
        saved = copy.deepcopy(first.state_dict())
        for key in keys:
            saved["param_groups"][0].pop(key, None)
        params = [torch.nn.Parameter(p.detach().clone()) for p in first.param_groups[0]["params"]]
        second = build(name, params)
        second.load_state_dict(saved)
        assert second.param_groups[0].keys() >= first.defaults.keys()
        take(second, 2, start=2)
        if keys is carried:
            continue
        for p, q in zip(params, straight.param_groups[0]["params"], strict=True):
            assert torch.equal(p, q)


@every
def test_a_groups_own_setting_stays_where_a_state_lacks_it(name):
    p, q = matrices()
    optimizer = build(name, [{"params": [p]}, {"params": [q], "weight_decay": 0.0, "lr": 0.5}])
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["lr"], group["weight_decay"]
    optimizer.load_state_dict(saved)
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.5]
    assert optimizer.param_groups[1]["weight_decay"] == 0.0


@every
def test_another_number_of_groups_is_refused(name):
    saved = build(name, [{"params": [p]} for p in matrices()]).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        build(name, matrices()).load_state_dict(saved)


@every_class
def test_a_group_without_its_parameters_is_refused(name):
    saved, optimizer = saved_and_other(name)
    del saved["param_groups"][-1]["params"]
    assert_refused(optimizer, saved, f"group {len(saved['param_groups']) - 1} of the state has no 'params'")


@every
def test_the_state_of_a_group_can_be_made_by_the_contract_of_others(name):
    p, q, r = matrices(3)
    optimizer = build(name, [{"params": [p, q]}, {"params": [r]}])
    q.grad = torch.ones(6, 4)
    optimizer._init_group(optimizer.param_groups[0], skip_non_grad_params=True)
    assert list(optimizer.state) == [q]
    optimizer._init_group(optimizer.param_groups[0])
    assert set(optimizer.state) == {p, q}
    whole = build(name, matrices(3))
    whole.init_state()
    kept = [{key: value.shape for key, value in state.items()} for state in optimizer.state.values()]
    expected = list(whole.state.values())[:2]
    assert kept == [{key: value.shape for key, value in state.items()} for state in expected]


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


@pytest.fixture(scope="module")
def of_each():
    """The state of each optimizer, as it comes back from a file."""
    states = {}
    for name in BUILDERS:
        file = io.BytesIO()
        torch.save(stepped(name)[1].state_dict(), file)
        states[name] = file
    return states


def read(file):
    file.seek(0)
    return torch.load(file, weights_only=True)


def without_mark(state):
    """A state as a release wrote it that did not say whose it is."""
    groups = [{key: x for key, x in group.items() if key != "state_of"} for group in state["param_groups"]]
    assert all("state_of" in group for group in state["param_groups"])
    return {**state, "param_groups": groups}


@pytest.mark.parametrize("other", BUILDERS)
def test_the_state_of_every_other_optimizer_is_refused_and_nothing_is_changed(of_each, other):
    model, optimizer = stepped(other, seed=1)
    before = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    for name in BUILDERS.keys() - {other}:
        with pytest.raises(ValueError, match=rf"^{other} cannot load a state of {name}: .*build {name}, or"):
            optimizer.load_state_dict(read(of_each[name]))
        assert_same((optimizer.state_dict(), model.state_dict()), before)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_own_state_loads_with_its_mark_and_without(of_each, name):
    found = []
    for change in (lambda state: state, without_mark):
        _, optimizer = stepped(name, seed=1)
        optimizer.load_state_dict(change(read(of_each[name])))
        found.append(optimizer.state_dict())
    assert_same(found[0]["state"], stepped(name)[1].state_dict()["state"])
    assert_same(*found)  # it is marked again


def test_a_user_who_means_it_takes_the_mark_away(of_each):
    _, optimizer = stepped("PolarGrad", seed=1)
    optimizer.load_state_dict(without_mark(read(of_each["TensorParallelMuon"])))
    expected = stepped("TensorParallelMuon")[1].state_dict()["state"]
    assert_same(optimizer.state_dict()["state"], expected)
    assert {group["state_of"] for group in optimizer.param_groups} == {"PolarGrad"}


def test_a_group_that_is_added_says_whose_it_is():
    _, theirs = stepped("Lion")
    optimizer = TensorParallelMuon([nn.Parameter(torch.zeros(6, 6))])
    optimizer.add_param_group(theirs.param_groups[0])
    assert [group["state_of"] for group in optimizer.param_groups] == ["TensorParallelMuon"] * 2


def test_a_subclass_of_a_user_and_its_base_load_each_other(of_each):
    class Own(TensorParallelMuon):
        pass

    class OwnTemplate(OrthogonalizedOptimizer):
        def orthogonalize(self, p, grad, **kwargs):
            return grad

    _, own = stepped(Own, seed=1)
    own.load_state_dict(read(of_each["TensorParallelMuon"]))
    _, base = stepped("TensorParallelMuon", seed=2)
    base.load_state_dict(own.state_dict())
    assert_same(base.state_dict()["state"], stepped("TensorParallelMuon")[1].state_dict()["state"])
    with pytest.raises(ValueError, match=r"^Own cannot load a state of PolarGrad"):
        own.load_state_dict(read(of_each["PolarGrad"]))
    with pytest.raises(ValueError, match=r"^TensorParallelMuon cannot load a state of OrthogonalizedOptimizer"):
        base.load_state_dict(
            stepped(lambda params: OwnTemplate(params, 0.1, 0.9, False, 0.0, True, False, None, None, "highest"))[
                1
            ].state_dict()
        )


def test_one_group_of_another_optimizer_is_enough():
    _, optimizer = stepped(lambda params: Lion([{"params": params[:1]}, {"params": params[1:]}]))
    state = optimizer.state_dict()
    state["param_groups"][1]["state_of"] = "Signum"
    with pytest.raises(ValueError, match=r"^Lion cannot load a state of Signum"):
        optimizer.load_state_dict(state)


# They have the same keys, in their groups too, so that torch's functions take the state of one for the other's.
PAIRS = [("Shampoo", "KLShampoo"), ("KLShampoo", "Shampoo")]


@pytest.mark.parametrize("options", [None, FLAT, FULL], ids=["nested", "flat", "full"])
@pytest.mark.parametrize(("name", "other"), PAIRS)
def test_the_functions_of_torch_carry_the_mark(name, other, options):
    of_writer = get_optimizer_state_dict(*stepped(name), options=options)
    model, optimizer = stepped(other, seed=1)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match=f"^{other} cannot load a state of {name}"):
        set_optimizer_state_dict(model, optimizer, copy.deepcopy(of_writer), options=options)
    assert_same(optimizer.state_dict(), before)
    model, optimizer = stepped(name, seed=1)
    set_optimizer_state_dict(model, optimizer, of_writer, options=options)
    assert_same(optimizer.state_dict(), stepped(name)[1].state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("options", [None, FLAT], ids=["nested", "flat"])
def test_a_distributed_checkpoint_of_an_earlier_release_loads_as_a_partial_one(options, tmp_path):
    model, optimizer = stepped("Lion")
    state = get_optimizer_state_dict(model, optimizer, options=options)
    state = without_mark(state) if options is None else {k: x for k, x in state.items() if not k.endswith(".state_of")}
    dcp.save({"optimizer": state}, checkpoint_id=tmp_path)
    other, its_optimizer = stepped("Lion", seed=1)
    template = {"optimizer": get_optimizer_state_dict(other, its_optimizer, options=options)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(template, checkpoint_id=tmp_path, planner=planner)
    set_optimizer_state_dict(other, its_optimizer, template["optimizer"], options=options)
    assert_same(its_optimizer.state_dict(), optimizer.state_dict())


def test_a_state_without_a_mark_is_warned_of_once_where_it_has_tensors(of_each, caplog):
    for name in ("Muon", "TensorParallelMuon", "Lion"):
        _, optimizer = stepped(name, seed=1)
        optimizer.load_state_dict(read(of_each[name]))
        unmarked = without_mark(read(of_each[name]))
        optimizer.load_state_dict({**unmarked, "state": {}} if name == "Lion" else unmarked)
    assert [message.split(":")[0] for message in caplog.messages if "begins anew" not in message] == [
        f"{name} loads a state that does not say which optimizer wrote it, and takes it for one of its own"
        for name in ("Muon", "TensorParallelMuon")
    ]


NO_STATES = {
    "NoneType": None,
    "list": [],
    "[]": {},
    "['state']": {"state": {}},
    "['param_groups']": {"param_groups": []},
}


@pytest.mark.parametrize("name", BUILDERS)
def test_what_is_no_state_is_refused_by_what_it_lacks(name):
    model, optimizer = stepped(name)
    before = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    for found, wrong in NO_STATES.items():
        with pytest.raises(ValueError, match=r"^\w+\.load_state_dict takes what state_dict\(\) returned, ") as raised:
            optimizer.load_state_dict(wrong)
        assert f"got {found}" in str(raised.value)
        assert_same((optimizer.state_dict(), model.state_dict()), before)


@pytest.mark.parametrize("name", ["soap", "shampoo", "kl_shampoo", "psgd_kron"])
def test_the_longest_side_with_a_factor_is_that_of_the_state(name):
    def stepped(**settings):
        [p] = matrices(1)
        optimizer = build(name, [p], **settings)
        take(optimizer, 1)
        return optimizer, p

    (other, q), (optimizer, p) = stepped(max_dim=5), stepped()
    before = p.detach().clone(), q.detach().clone()
    with pytest.raises(ValueError, match=r"has max_dim=\d+, but its state was made with 5"):
        optimizer.load_state_dict(other.state_dict())
    other.param_groups[0]["max_dim"] = 6
    with pytest.raises(ValueError, match="has max_dim=6, but its state was made with 5"):
        take(other, 1)
    assert torch.equal(before[0], p)
    assert torch.equal(before[1], q)
    other.param_groups[0]["max_dim"] = 5
    take(other, 1)
    assert not torch.equal(before[1], q)


@every
def test_a_load_adds_no_setting(name):
    """A resumed run would save it, and the next one print it as a change."""
    saved, optimizer = saved_and_other(name)
    before = optimizer.settings()
    optimizer.load_state_dict(saved)
    assert optimizer.settings() == before


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hooks_of_a_load_are_called_in_torchs_order(name, dtype):
    """First with the dict as it was given, whatever that is; last with the state that steps use."""
    source, expected, before, in_place, anew = optimizers = [build(name, of(dtype)) for _ in range(5)]
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
        assert all(map(torch.equal, *(x.param_groups[0]["params"] for x in (each, expected))))


def of(dtype):
    return [torch.nn.Parameter(p.detach().to(dtype)) for p in matrices()]


@pytest.mark.parametrize("hook", [halved_in_place, halved_anew])
def test_a_hook_of_a_load_meets_state_in_host_memory(hook):
    source, expected, other = (build("muon", matrices(), offload_fraction=1.0) for _ in range(3))
    take(source, 3)
    expected.load_state_dict(with_halves(source.state_dict()))
    other.register_load_state_dict_post_hook(hook)
    other.load_state_dict(copy.deepcopy(source.state_dict()))
    for each in (expected, other):
        take(each, 2, start=3)
    assert all(map(torch.equal, other.param_groups[0]["params"], expected.param_groups[0]["params"]))


@every_class
def test_hooks_of_a_state_dict_change_what_is_saved(name):
    optimizer, other = (build(name, matrices()) for _ in range(2))
    take(optimizer, 2)
    expected = with_halves(optimizer.state_dict())["state"]
    optimizer.register_state_dict_pre_hook(halved_anew)
    optimizer.register_state_dict_post_hook(lambda _, state_dict: {"wrapped": state_dict})
    other.register_load_state_dict_pre_hook(lambda _, found: found["wrapped"])
    found = optimizer.state_dict()
    assert all(torch.equal(x, expected[index][key]) for index, key, x in tensors_of(found["wrapped"]))
    other.load_state_dict(found)
    take(other, 1)


# The one check of what a state has for a parameter.

NEVER_BELOW_0 = ("exp_avg_sq", "moment2_buffer", "radius", "step", "schedule", "bounds", "projected", "has_previous")


@every_variant
def test_squares_norms_and_counts_below_0_are_refused(name):
    saved, _ = saved_and_other(name)
    for key in [key for key in saved["state"][1] if key.startswith(NEVER_BELOW_0)]:
        saved, optimizer = saved_and_other(name)
        saved["state"][1][key].view(-1)[-1] = -1
        assert_refused(optimizer, saved, "below 0", repr(key), "parameter 1 of group 0")


@every_class_with_state
def test_sparse_and_complex_tensors_are_refused(name):
    for made in (torch.Tensor.to_sparse, lambda x: torch.complex(x, x)):
        saved, optimizer = saved_and_other(name)
        index, key, value = next(each for each in tensors_of(saved) if each[2].ndim == 2)
        saved["state"][index][key] = made(value.float())
        assert_refused(optimizer, saved, "dense tensor of real numbers", repr(key))


@pytest.mark.parametrize("found", ["5", -1, 2.0, True])
@pytest.mark.parametrize("name", ["soap", "shampoo", "psgd_kron", "schedule_free_adamw", "muon in bf16"])
def test_a_count_of_a_group_is_a_whole_number(name, found):
    saved, optimizer = saved_and_other(name)
    [key] = optimizer.counters
    saved["param_groups"][0][key] = found
    assert_refused(optimizer, saved, f"{key} must be a whole number", repr(found))


@every_class
def test_tensors_of_a_state_that_share_memory_step_apart(name):
    """One tensor for several parameters, or a single entry that is expanded."""
    saved, optimizer = saved_and_other(name)
    _, other = saved_and_other(name)
    saved["state"][1] = saved["state"][0]
    for key in {"momentum_buffer", "exp_avg", "exp_avg_fast", "z"} & saved["state"][0].keys():
        saved["state"][0][key] = torch.tensor(0.5).expand(6, 4)
    apart = {**saved, "state": {i: copy.deepcopy(state) for i, state in saved["state"].items()}}
    for state in apart["state"].values():
        state.update({key: x.contiguous() for key, x in state.items()})
    for each, state_dict in ((optimizer, saved), (other, apart)):
        each.load_state_dict(state_dict)
        take(each, 2, start=9)
    assert all(map(torch.equal, optimizer.param_groups[0]["params"], other.param_groups[0]["params"]))
