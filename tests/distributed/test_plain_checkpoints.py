"""Every optimizer through torch.distributed.checkpoint, as KempnerForge saves: nothing is lost, of AdamW neither."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from megatron_eopt.family import OPTIMIZERS
from tests.contracts.test_hugging_face import Experts, GptOssExperts
from tests.distributed import test_plain
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import message_of, whole
from tests.distributed.test_plain import Model, optimizer_of, sharded
from tests.plain.made import assert_same

pytestmark = pytest.mark.wide

EXPERTS, BF16 = "muon of experts", "muon in bf16"
NAMES = [*test_plain.NAMES, EXPERTS, BF16]
WITH_ADAMW = [EXPERTS, BF16, *(row.name for row in OPTIMIZERS.values() if row.owns == "matrices")]
STEPS = 3
FORMS = {"plain": None, "flat": StateDictOptions(flatten_optimizer_state_dict=True)}


def step(model, optimizer, number):
    """A step of gradients that every number of ranks has, entry by entry."""
    generator = torch.Generator().manual_seed(number)
    for p in model.parameters():
        g = torch.randn(p.shape, generator=generator)
        p.grad = distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else g
    optimizer.step()
    optimizer.zero_grad()


def states_of(model, optimizer):
    """The states of both, by names."""
    names = {p: name for name, p in model.named_parameters()}
    return {names[p]: {key: whole(x) for key, x in of_one.items()} for p, of_one in optimizer.state.items()}


def parameters_of(model):
    return {name: whole(p) for name, p in model.named_parameters()}


class OfExperts(Model):
    """Also three experts, which two ranks cannot halve, and of which four have none."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList([Experts(), GptOssExperts()])


def made(ranks, name):
    model = OfExperts() if name == EXPERTS else Model()
    if ranks > 1:
        sharded(init_device_mesh("cpu", (ranks,)), model)
    settings = {"momentum_dtype": torch.bfloat16} if name == BF16 else {}
    return model, optimizer_of(model, name.split()[0], symmetric_products="torch", **settings)


def template(model, optimizer, form):
    """What is saved, and what is loaded into: the optimizer's own tensors, as in KempnerForge, or copies of them."""
    state = get_optimizer_state_dict(model, optimizer, options=FORMS[form])
    return {"model": get_model_state_dict(model), "optimizer": copy.deepcopy(state) if form == "flat" else state}


def save(rank, ranks, folder, names):
    """Save before the first step and after some; returns the states, and the parameters after a further step."""
    found = {}
    for name in names:
        model, optimizer = made(ranks, name)
        dcp.save(template(model, optimizer, "plain"), checkpoint_id=folder / f"{name}-fresh")
        for number in range(STEPS):
            step(model, optimizer, number)
        for form in FORMS:
            dcp.save(template(model, optimizer, form), checkpoint_id=folder / f"{name}-{form}")
        saved, gathered = states_of(model, optimizer), through_rank_0(model, optimizer, *made(ranks, name))
        step(model, optimizer, STEPS)
        found[name] = saved, gathered, parameters_of(model)
    return found


def through_rank_0(model, optimizer, other, its_optimizer):
    """The states that another optimizer has, when rank 0 has gathered them and has sent them to all."""
    gather = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_optimizer_state_dict(model, optimizer, options=gather)
    send = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, its_optimizer, full, options=send)
    return states_of(other, its_optimizer)


def load(rank, ranks, folder, names):
    """Load into fresh optimizers; returns the states, and the parameters after a further step."""
    found = {}
    for name in names:
        for form in FORMS:
            model, optimizer = made(ranks, name)
            if name in WITH_ADAMW:
                optimizer.adamw.param_groups[0]["adam_lr"] = 7.0  # which a load has to put right
            state = template(model, optimizer, form)
            dcp.load(state, checkpoint_id=folder / f"{name}-{form}")
            set_model_state_dict(model, state["model"])
            set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FORMS[form])
            loaded = states_of(model, optimizer)
            step(model, optimizer, STEPS)
            found[name, form] = loaded, parameters_of(model)
        model, optimizer = made(ranks, name)
        straight, its_optimizer = made(ranks, name)
        state = template(model, optimizer, "plain")
        dcp.load(state, checkpoint_id=folder / f"{name}-fresh")
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        step(model, optimizer, 0)
        step(straight, its_optimizer, 0)
        found[name, "fresh"] = parameters_of(model), parameters_of(straight)
    return found


def load_into_another(rank, ranks):
    """What is said where Shampoo's state, through rank 0, is loaded into KLShampoo."""
    return message_of(lambda: through_rank_0(*made(ranks, "shampoo"), *made(ranks, "kl_shampoo")))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, selected):
    """What two ranks saved, what one process, two and four ranks made of it, and where."""
    folder, names = tmp_path_factory.mktemp("checkpoints"), selected("name")
    saved = run_ranks(save, 2, folder, names)[0]
    loaded = {ranks: run_ranks(load, ranks, folder, names)[0] for ranks in (2, 4)}
    return saved, loaded | {1: load(0, 1, folder, names)}, folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_both_states_go_on_on_another_number_of_ranks(runs, name, ranks):
    """Bit for bit, and so does a checkpoint of before the first step."""
    saved, loaded, _ = runs
    states, _, stepped = saved[name]
    if name in WITH_ADAMW:
        assert {"exp_avg", "exp_avg_sq", "step"} == states["embedding.weight"].keys()
        assert states["embedding.weight"]["exp_avg"].any()
    for form in FORMS:
        found, then = loaded[ranks][name, form]
        assert_same(found, states)
        # products are summed in another order on other ranks, and torch's AdamW rounds the end of a shard otherwise
        torch.testing.assert_close(then, stepped, rtol=0, atol=0 if ranks == 2 else 1e-7)
    if name in WITH_ADAMW:  # for others torch makes a step of zeros, to begin a state, which counts
        assert_same(*loaded[ranks][name, "fresh"])


@pytest.mark.parametrize("name", NAMES)
def test_both_states_go_through_rank_0_and_are_written_once(runs, name):
    states, gathered, _ = runs[0][name]
    assert_same(gathered, states)
    for form in FORMS if name in WITH_ADAMW else ():
        metadata = dcp.FileSystemReader(runs[2] / f"{name}-{form}").read_metadata()
        assert sum("embedding.weight" in key and key.endswith("exp_avg") for key in metadata.state_dict_metadata) == 1


def test_another_optimizer_refuses_both_states_on_each_rank():
    for error in run_ranks(load_into_another, 2):
        assert error.startswith("KLShampoo cannot load a state of Shampoo:")
