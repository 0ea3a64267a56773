"""build_optimizer: what decays, what is counted, which optimizer gets which parameter, and what is refused."""

import copy
import logging
import pickle
import re
import sys
from dataclasses import make_dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_eopt import Execution, Lion
from megatron_eopt.family import OPTIMIZERS
from megatron_eopt.matrices import concatenated, declare, undeclare
from megatron_eopt.plain import OptimizerConfig, build_optimizer
from megatron_eopt.step.adamw import AdamW
from tests.optimizers.family import decays, options

NAMES = ["adamw", *(row.name for row in OPTIMIZERS.values())]
MATRIX_OPTIMIZERS = [row.name for row in OPTIMIZERS.values() if row.owns == "matrices"]
LAYERS = ["layers.0.output.weight", "layers.1.output.weight"]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.ModuleDict({"output": nn.Linear(8, 8)}) for _ in range(2))
        self.position_bias = nn.Parameter(torch.zeros(11, 8))
        self.lm_head = nn.Linear(8, 11, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position_bias
        for layer in self.layers:
            x = x + layer["output"](self.norm(x)).relu()
        return self.lm_head(x)

    def loss(self):
        tokens = torch.arange(11)
        return cross_entropy(self(tokens), tokens.roll(1))


def train(model, optimizer, steps=8):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model.loss()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def names_of(model, group):
    names = {p: name for name, p in model.named_parameters()}
    return [names[p] for p in group["params"]]


def build(model, name, **fields):
    return build_optimizer(model, OptimizerConfig(**{"name": name, "options": options(name), "lr": 1e-2, **fields}))


def taken(model, name="muon"):
    """Names of the parameters that the optimizer of matrices has."""
    return names_of(model, build(model, name).param_groups[0])


def test_decay_is_for_matrices_without_bias_in_their_name(caplog):
    model = Model()
    model.layers[1].requires_grad_(False)
    with caplog.at_level(logging.INFO):
        decayed, others = build(model, "adamw", weight_decay=0.3).param_groups
    assert names_of(model, decayed) == ["embedding.weight", "layers.0.output.weight", "lm_head.weight"]
    assert names_of(model, others) == ["position_bias", "norm.weight", "norm.bias", "layers.0.output.bias"]
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0)
    assert [line.split() for line in caplog.text.splitlines()[-3:]] == [
        ["matrices", "3", "240", "AdamW", "0.01", "0.3", "embedding.weight"],
        ["vectors", "and", "scalars,", "biases", "4", "112", "AdamW", "0.01", "0", "position_bias"],
        ["2", "parameters", "frozen"],
    ]


@pytest.mark.parametrize("name", MATRIX_OPTIMIZERS)
def test_a_model_of_vectors_alone_is_adamws(name, caplog):
    optimizer = build(nn.LayerNorm(4), name, muon_adam_lr=3e-3, betas=(0.7, 0.8))
    assert type(optimizer) is AdamW
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (3e-3, (0.7, 0.8), 0.0)
    assert f"{name} is for hidden matrices, and the model has none" in caplog.text


@pytest.mark.parametrize("name", MATRIX_OPTIMIZERS)
def test_embeddings_and_output_layers_are_adamws(name):
    model = Model()
    optimizer = build(model, name, muon_adam_lr=1e-3)
    matrices, embeddings, rest = optimizer.param_groups
    # a layer called output within a numbered one is none
    assert names_of(model, matrices) == LAYERS
    assert names_of(model, embeddings) == ["embedding.weight", "lm_head.weight"]
    assert names_of(model, rest)[0] == "position_bias"
    assert [group["lr"] for group in (matrices, embeddings, rest)] == [1e-2, 1e-3, 1e-3]
    keeps_norm = not decays(name)
    assert [group["weight_decay"] for group in (matrices, embeddings, rest)] == [0.0 if keeps_norm else 0.1, 0.1, 0.0]
    lines = [re.split("  +", line) for line in optimizer.explain().splitlines()[2:]]
    cls = "Muon" if name == "muon" else OPTIMIZERS[name].cls.__name__
    assert [line[:4] for line in lines] == [
        ["hidden matrices", "2", "128", cls],
        ["embeddings", "1", "88", "AdamW"],
        ["output layers", "1", "88", "AdamW"],
        ["biases", "1", "88", "AdamW"],
        ["vectors and scalars", "4", "32", "AdamW"],
    ]
    assert [line[4] for line in lines] == ["0.01", *["0.001"] * 4]


def test_what_is_far_longer_than_wide_is_adamws():
    model = nn.ParameterDict(
        {
            f"{rows}x{columns}": nn.Parameter(torch.ones(rows, columns))
            for rows, columns in ((10, 100), (10, 101), (101, 10), (0, 4), (44, 4))
        }
    )
    model["fused"] = nn.Parameter(torch.ones(44, 4))
    model["fused"].logical_matrices = concatenated(gate=22, up=22)
    assert taken(model) == ["10x100", "fused"]
    scion = build(nn.Sequential(nn.Linear(3, 40)), "scion")
    assert [tuple(p.shape) for p in scion.param_groups[0]["params"]] == [(40, 3)]


class Wrapper(nn.Module):
    """It holds a layer and a frozen original, as PEFT's modules_to_save does."""

    def __init__(self, layer):
        super().__init__()
        self.original_module = copy.deepcopy(layer).requires_grad_(False)
        self.modules_to_save = nn.ModuleDict({"default": layer})


class Head(nn.Module):
    """Several layers, of which the last one is the output layer, as of RoBERTa."""

    def __init__(self, layer):
        super().__init__()
        self.dense = nn.Linear(8, 8)
        self.decoder = layer


WRAPPED = {
    "as it is": lambda layer: layer,
    "compiled": lambda layer: torch.compile(layer, backend="eager"),
    "checkpointed": checkpoint_wrapper,
    "saved": Wrapper,
    "compiled and saved": lambda layer: torch.compile(Wrapper(layer), backend="eager"),
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "in a sequence": lambda layer: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), layer),
    "in a head": Head,
}


@pytest.mark.parametrize("name", ["muon", "shampoo"])
@pytest.mark.parametrize("way", WRAPPED)
def test_an_output_layer_is_found_however_it_is_wrapped(way, name):
    model = Model()
    model.embedding = WRAPPED[way](model.embedding)
    model.lm_head = WRAPPED[way](model.lm_head)
    in_front = [n for n in taken(model, name) if n not in LAYERS]
    hidden = {"in a sequence": "0", "in a head": "dense"}.get(way)
    assert in_front == ([f"{outer}.{hidden}.weight" for outer in ("embedding", "lm_head")] if hidden else [])


@pytest.mark.parametrize("getter", ["get_output_embeddings", "get_classifier"])
def test_output_layers_that_a_model_says_are_adamws(getter):
    model = Model()
    model.first, model.second = nn.Linear(8, 8), nn.Linear(8, 8)
    own = type("Own", (Model,), {getter: lambda self: (self.first, torch.compile(self.second), None)})
    asks = type("Asks", (Model,), {getter: lambda self, name: getattr(self, name)})
    for cls, expected in ((own, LAYERS), (asks, [*LAYERS, "first.weight", "second.weight"])):
        its = copy.deepcopy(model)
        its.__class__ = cls
        for whole in (its, nn.ModuleDict({"inner": its})):
            assert names_of(its, build(whole, "muon").param_groups[0]) == expected


def test_a_mark_says_what_names_do_not():
    model = Model()
    model.lm_head.weight.is_embedding_or_output_parameter = False
    model.layers[0]["output"].weight.is_embedding_or_output_parameter = True
    assert taken(model) == ["layers.1.output.weight", "lm_head.weight"]


def test_declared_matrices_are_split():
    pattern = "layers.*.output.weight"
    declare(pattern, concatenated(first=3, second=5))
    try:
        optimizer = build(Model(), "muon")
    finally:
        undeclare(pattern)
    assert "layers.0.output.weight[second]" in str(optimizer.matrices.proposed().plan.matrices)


def test_tied_embeddings_are_adamws():
    model = Model()
    model.lm_head.weight = model.embedding.weight
    assert taken(model) == LAYERS


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_what_multiplies_no_vectors_is_adamws():
    model = Model()
    model.mixer = nn.ParameterDict({"A_log": torch.zeros(8, 8), "temperature_of_each_head": torch.ones(4, 1, 1)})
    model.mixer.conv1d = nn.Conv1d(8, 8, 4, groups=8)
    assert taken(model) == LAYERS


def test_what_is_fused_by_its_name_is_warned_of(caplog):
    attention = nn.ModuleDict({"qkv_proj": nn.Linear(8, 24, bias=False)})
    model = nn.ModuleDict({"attention": attention, "head": nn.Linear(8, 24)})
    build(model, "muon")
    assert any(message.startswith("attention.qkv_proj.weight: fused projections") for message in warnings_of(caplog))
    caplog.clear()
    model["attention"]["qkv_proj"].weight.logical_matrices = concatenated(q=8, k=8, v=8)
    build(model, "muon")
    assert not warnings_of(caplog)


class Pictures(nn.Module):
    """Convolutions from pictures to pictures."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(6, 8, 3, padding=1)
        self.hidden = nn.Conv2d(8, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 8, 2, 2)
        self.to_pixels = nn.Conv2d(8, 3, 1)
        self.positions = nn.Parameter(torch.zeros(1, 8, 4, 4))

    def loss(self):
        x = self.stem(torch.ones(2, 6, 4, 4)).relu() + self.positions
        return (self.to_pixels(self.up(self.grouped(self.hidden(x).relu()) + x)) - 1).square().mean()


@pytest.mark.parametrize("name", MATRIX_OPTIMIZERS)
def test_convolutions_between_the_ends_are_matrices(name):
    model = Pictures()
    optimizer = build(model, name)
    assert names_of(model, optimizer.param_groups[0]) == ["hidden.weight", "up.weight"]
    shapes = [[each.shape for each in found] for found in optimizer.matrices.described_matrices(False).values()]
    assert shapes == [[(8, 72)], [(32, 8)]]  # outputs x inputs
    assert "first or last convolutions        2" in optimizer.explain()
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]


def test_parameters_that_were_on_the_meta_device_are_refused():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = build(model, "muon")
    model.to_empty(device="cpu")
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="had on the meta device: build it after"):
        optimizer.step()


def test_torchs_fused_attention_is_three_matrices():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    weight = layer.self_attn.in_proj_weight
    optimizer = build(layer, "muon", lr=1.0, weight_decay=0.0, options={"coefficient_type": "polar_express"})
    before = weight.detach().clone()
    layer(torch.randn(4, 8, 32)).square().mean().backward()
    optimizer.step()
    for update in (weight.detach() - before).split(32):
        values = torch.linalg.svdvals(update)
        assert 0.9 < values.median() < 1.1


def test_a_last_linear_map_that_may_be_the_output_is_warned_of(caplog):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 24))
    build(model, "muon")
    assert any("so that 2, the last linear map, is a hidden matrix" in message for message in warnings_of(caplog))
    for output, matrices in ((True, 1), (False, 2)):
        caplog.clear()
        model[2].weight.is_embedding_or_output_parameter = output
        assert build(model, "muon").matrices.matrices_per_step == matrices
        assert not warnings_of(caplog)


def test_a_decoder_that_is_one_linear_map_is_an_output_layer():
    model = nn.ModuleDict({"encoder": nn.Linear(8, 8), "decoder": nn.Linear(8, 24)})
    assert taken(model, "soap") == ["encoder.weight"]


def test_what_is_no_model_and_what_trains_nothing_is_refused():
    model = nn.Linear(8, 8)
    with pytest.raises(TypeError, match="takes the model, whose layers say"):
        build_optimizer(model.parameters(), "muon")
    with pytest.raises(ValueError, match="muon: lr must be a number"):
        build_optimizer(model, "muon", lr="3e-4")
    with pytest.raises(ValueError, match="all 2 are frozen"):
        build_optimizer(model.requires_grad_(False), "muon")


@pytest.mark.parametrize(
    ("layer", "matrices"),
    [(nn.LSTM(8, 8, 2, bidirectional=True), 32), (nn.GRU(8, 8), 6), (nn.RNN(8, 8), 2), (nn.LSTMCell(8, 8), 8)],
)
def test_gates_of_recurrent_layers_are_matrices(layer, matrices):
    assert build(layer, "muon").matrices.matrices_per_step == matrices


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_trains_and_its_copies_go_on_bit_for_bit(name):
    model = Model()
    optimizer = build(model, name)
    losses = train(model, optimizer)
    assert losses[-1] < losses[0]
    copies = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    expected = train(model, optimizer, 3)
    for its_model, its_optimizer in copies:
        assert train(its_model, its_optimizer, 3) == expected


@pytest.mark.parametrize("name", NAMES)
def test_messages_name_parameters_as_the_model_does(name):
    model = Model()
    optimizer = build(torch.compile(model), name)
    called = {"adamw": "AdamW", "muon": "Muon"}.get(name) or OPTIMIZERS[name].cls.__name__
    assert repr(optimizer).startswith(f"{called} (\nParameter Group 0")
    for parameter_name in ("layers.1.output.weight", "norm.bias"):
        parameter = model.get_parameter(parameter_name)
        assert parameter.name_in_model == parameter_name
        if name != "adamw":
            parameter.grad = torch.ones_like(parameter).to_sparse()
            with pytest.raises(ValueError, match=f"{parameter_name} is sparse"):
                optimizer.step()
        parameter.grad = None
    assert not any("param_names" in group for group in optimizer.param_groups)


def test_fields_reach_the_optimizer():
    betas = (0.7, 0.8)
    assert build(Model(), "adamw", betas=betas, eps=1e-5).defaults["betas"] == betas
    assert build(Model(), "adamw").defaults["betas"] == (0.9, 0.95)
    assert build(Model(), "lion").defaults["betas"] == (0.9, 0.99)
    assert build(Model(), "lion", betas=betas).defaults["betas"] == betas
    schedule_free = build(Model(), "schedule_free_adamw", schedule_free_warmup_steps=5, eps=1e-5)
    assert (schedule_free.defaults["warmup_steps"], schedule_free.defaults["eps"]) == (5, 1e-5)
    muon = build(Model(), "muon", muon_momentum=0.8, betas=betas, eps=1e-5, muon_ns_steps=3)
    matrices, rest, _ = muon.param_groups
    assert (matrices["momentum"], matrices["ns_steps"]) == (0.8, 3)
    assert (rest["betas"], rest["eps"], rest["lr"]) == (betas, 1e-5, 1e-2)


def test_fused_is_torchs_where_it_has_one():
    assert build(Model(), "adamw").defaults["fused"] is True
    assert build(Model(), "adamw", fused=False).defaults["fused"] is None
    assert build(Model(), "muon").adamw.param_groups[0]["fused"] is True
    assert build(Model().to("meta"), "adamw").defaults["fused"] is None


@pytest.mark.parametrize(
    ("package", "module"),
    [("transformer_engine", "transformer_engine.pytorch.optimizers"), ("apex", "apex.optimizers")],
)
def test_fused_adam_of_a_package_is_built_where_it_is_installed(monkeypatch, package, module):
    found = {}

    class FusedAdam(torch.optim.AdamW):
        def __init__(self, params, adam_w_mode, **settings):
            found.update(settings, adam_w_mode=adam_w_mode)
            super().__init__(params, **settings)

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=module):
        build(Model(), "adamw", fused=package)
    stand_in = ModuleType(module)
    stand_in.FusedAdam = FusedAdam
    parts = module.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    monkeypatch.setitem(sys.modules, module, stand_in)
    assert isinstance(build(Model(), "adamw", fused=package, weight_decay=0.2), FusedAdam)
    assert found == {"lr": 1e-2, "weight_decay": 0.2, "betas": (0.9, 0.95), "eps": 1e-8, "adam_w_mode": True}
    with pytest.raises(ValueError, match=f"fused='{package}' is for adamw, and the AdamW beside muon is torch's"):
        build(Model(), "muon", fused=package)


def test_eps_is_that_of_adamw_beside_matrices_and_of_soap():
    for name, own in (("adaptive_muon", 1e-8), ("muon_hyperball", 1e-8), ("soap", 1e-3)):
        built = build(Model(), name, eps=1e-3)
        assert (built.matrices.param_groups[0]["eps"], built.adamw.param_groups[0]["eps"]) == (own, 1e-3)


def test_options_cannot_say_what_fields_say():
    for name, key, field in (("lion", "lr", "lr"), ("muon", "adam_lr", "lr"), ("muon", "momentum", "muon_momentum")):
        with pytest.raises(TypeError, match=f"options has {key}, which the config says by a field"):
            build(Model(), name, options={key: 0.5}, **{field: 0.5})
    scion = build(Model(), "scion", options={"radius": 1.0, "num_ns_steps": 3, "workspace": 2**20})
    assert scion.param_groups[0]["num_ns_steps"] == 3
    assert scion.matrices.execution == Execution(workspace=2**20)


@pytest.mark.parametrize(
    ("name", "fields", "without"),
    [
        ("scion", {"muon_momentum": 0.95, "muon_ns_steps": 5}, "muon_momentum=0.95, muon_ns_steps=5"),
        ("lion", {"eps": 1e-8, "fused": True}, "eps=1e-08, fused=True"),
        ("signum", {"betas": (0.5, 0.6)}, "betas=(0.5, 0.6)"),
        ("muon", {"schedule_free_warmup_steps": 0}, "schedule_free_warmup_steps=0"),
        ("adamw", {"muon_embeddings": True}, "muon_embeddings=True"),
    ],
)
def test_a_field_without_effect_is_refused(name, fields, without, caplog):
    message = f"fields of the config have no effect on {name}: {without};"
    for kind in (OptimizerConfig, dict):
        with pytest.raises(ValueError, match=re.escape(message)):
            build_optimizer(Model(), kind(name=name, **fields))
    build_optimizer(Model(), SimpleNamespace(name=name, **fields))  # as a parser's, which has all fields
    assert message in caplog.text


def test_sharing_of_factors_of_dtensors_is_refused():
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = fully_shard(Model(), mesh=init_device_mesh("cpu", (2,)))
        with pytest.raises(ValueError, match="share_over_dp=True has no effect on DTensors"):
            build_optimizer(model, "soap", options={"share_over_dp": True})
        build_optimizer(model, "soap", options={"share_over_dp": False})
    finally:
        dist.destroy_process_group()


def test_defaults_of_a_dataclass_of_ones_own_are_not_set():
    own = make_dataclass("Own", [("name", str, "lion"), ("muon_momentum", float, 0.95)])
    assert isinstance(build_optimizer(Model(), own()), Lion)
    with pytest.raises(ValueError, match=r"no effect on lion: muon_momentum=0.9;"):
        build_optimizer(Model(), own(muon_momentum=0.9))


def test_spectron_without_a_rank_says_what_to_write():
    with pytest.raises(ValueError, match=r"options=\{'rank': \.\.\.\}"):
        build_optimizer(Model(), OptimizerConfig(name="spectron"))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_state_loads_into_weights_of_another_memory_format(name):
    """torch's fused AdamW takes its state to lie as its parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 6, 3), nn.Conv2d(6, 6, 2, groups=3))
    turned = copy.deepcopy(model).to(memory_format=torch.channels_last)
    optimizer, other = (build(each, name, fused=True) for each in (model, turned))
    x = torch.randn(2, 4, 6, 6)
    for step in range(2):
        for each, its in ((model, optimizer), (turned, other))[: step + 1]:
            its.zero_grad()
            each(x).square().mean().backward()
            its.step()
        if step == 0:
            turned.load_state_dict(model.state_dict())
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(model.parameters(), turned.parameters(), strict=True):
        torch.testing.assert_close(p, q)
