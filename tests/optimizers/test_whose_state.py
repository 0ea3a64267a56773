"""A state says which optimizer wrote it: another one refuses it, whatever keys and shapes the two share."""

import copy
import io

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

from megatron_eopt import DistributedMuon, Lion, TensorParallelMuon
from megatron_eopt.optimizers.orthogonalized import OrthogonalizedOptimizer
from megatron_eopt.optimizers.with_adamw import Muon
from tests.optimizers.family import OPTIMIZERS, build
from tests.plain.made import assert_same

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
def saved():
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
def test_the_state_of_every_other_optimizer_is_refused_and_nothing_is_changed(saved, other):
    model, optimizer = stepped(other, seed=1)
    before = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    for name in BUILDERS.keys() - {other}:
        with pytest.raises(ValueError, match=rf"^{other} cannot load a state of {name}: .*build {name}, or"):
            optimizer.load_state_dict(read(saved[name]))
        assert_same((optimizer.state_dict(), model.state_dict()), before)


@pytest.mark.parametrize("name", BUILDERS)
def test_the_own_state_loads_with_its_mark_and_without(saved, name):
    found = []
    for change in (lambda state: state, without_mark):
        _, optimizer = stepped(name, seed=1)
        optimizer.load_state_dict(change(read(saved[name])))
        found.append(optimizer.state_dict())
    assert_same(found[0]["state"], stepped(name)[1].state_dict()["state"])
    assert_same(*found)  # it is marked again


def test_a_user_who_means_it_takes_the_mark_away(saved):
    _, optimizer = stepped("PolarGrad", seed=1)
    optimizer.load_state_dict(without_mark(read(saved["TensorParallelMuon"])))
    expected = stepped("TensorParallelMuon")[1].state_dict()["state"]
    assert_same(optimizer.state_dict()["state"], expected)
    assert {group["state_of"] for group in optimizer.param_groups} == {"PolarGrad"}


def test_a_group_that_is_added_says_whose_it_is():
    _, theirs = stepped("Lion")
    optimizer = TensorParallelMuon([nn.Parameter(torch.zeros(6, 6))])
    optimizer.add_param_group(theirs.param_groups[0])
    assert [group["state_of"] for group in optimizer.param_groups] == ["TensorParallelMuon"] * 2


def test_a_subclass_of_a_user_and_its_base_load_each_other(saved):
    class Own(TensorParallelMuon):
        pass

    class OwnTemplate(OrthogonalizedOptimizer):
        def orthogonalize(self, p, grad, **kwargs):
            return grad

    _, own = stepped(Own, seed=1)
    own.load_state_dict(read(saved["TensorParallelMuon"]))
    _, base = stepped("TensorParallelMuon", seed=2)
    base.load_state_dict(own.state_dict())
    assert_same(base.state_dict()["state"], stepped("TensorParallelMuon")[1].state_dict()["state"])
    with pytest.raises(ValueError, match=r"^Own cannot load a state of PolarGrad"):
        own.load_state_dict(read(saved["PolarGrad"]))
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
PAIRS = [("TensorParallelMuon", "PolarGrad"), ("PolarGrad", "TensorParallelMuon")]


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


def test_a_state_without_a_mark_is_warned_of_once_where_it_has_tensors(saved, caplog):
    for name in ("Muon", "TensorParallelMuon", "Lion"):
        _, optimizer = stepped(name, seed=1)
        optimizer.load_state_dict(read(saved[name]))
        unmarked = without_mark(read(saved[name]))
        optimizer.load_state_dict({**unmarked, "state": {}} if name == "Lion" else unmarked)
    assert [message.split(":")[0] for message in caplog.messages] == [
        f"{name} loads a state that does not say which optimizer wrote it, and takes it for one of its own"
        for name in ("Muon", "TensorParallelMuon")
    ]


def test_a_state_without_a_mark_that_lacks_the_momentum_is_refused(saved):
    _, optimizer = stepped("TensorParallelMuon")
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(
        ValueError, match=r"TensorParallelMuon needs 'momentum_buffer' .* but the state has \['exp_avg'\]"
    ):
        optimizer.load_state_dict(without_mark(read(saved["Lion"])))
    assert_same(optimizer.state_dict(), before)


NO_STATES = [
    (None, "got NoneType"),
    ([], "got list"),
    ({}, r"got \[\]"),
    ({"state": {}}, r"got \['state'\]"),
    ({"param_groups": []}, r"got \['param_groups'\]"),
]


@pytest.mark.parametrize(("wrong", "found"), NO_STATES, ids=lambda x: str(x) if isinstance(x, dict) else None)
@pytest.mark.parametrize("name", BUILDERS)
def test_what_is_no_state_is_refused_by_what_it_lacks(name, wrong, found):
    model, optimizer = stepped(name)
    before = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    with pytest.raises(ValueError, match=rf"^\w+\.load_state_dict takes what state_dict\(\) returned, .*{found}"):
        optimizer.load_state_dict(wrong)
    assert_same((optimizer.state_dict(), model.state_dict()), before)
