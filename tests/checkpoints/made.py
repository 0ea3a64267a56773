"""Small checkpoints in Megatron's layout, made by torch's own distributed checkpointing on one process."""

import argparse
import io
import json
import pickle
import zlib
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner

from megatron_eopt.checkpoints.contents import read_contents

ARGS = {
    "num_layers": 2,
    "hidden_size": 8,
    "ffn_hidden_size": 12,
    "num_attention_heads": 2,
    "num_query_groups": None,
    "group_query_attention": False,
    "kv_channels": 4,
    "swiglu": True,
    "optimizer": "muon",
    "muon_scalar_optimizer": "adam",
    "muon_momentum": 0.95,
    "bf16": False,
    "fp16": False,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "params_dtype": torch.float32,
    "vocab_size": None,
}
SCHEDULE = {"max_lr": 0.01, "min_lr": 0.001, "lr_decay_style": "cosine", "lr_decay_steps": 40, "end_wd": 0.01}


def tensors(states=("momentum_buffer",), matrices=("mlp.fc1", "mlp.fc2"), dtype=torch.float32):
    """Two matrices with an optimizer's states, and a norm with Adam's."""
    model = {**{key: torch.randn(2, 6, 8) for key in matrices}, "norm": torch.randn(8)}
    kept = {}
    for key, value in model.items():
        kept[key] = value.to(dtype)
        of = ["exp_avg", "exp_avg_sq"] if key == "norm" else list(states)
        for state in [*of, *(["fp32_param"] if dtype != torch.float32 else [])]:
            kept[f"optimizer.state.{state}.{key}"] = torch.rand_like(value) + 1
    return kept


def common(**changed):
    return {
        "args": argparse.Namespace(**{**ARGS, **changed}),
        "iteration": 5,
        "optimizer": {0: {"param_groups": [{"lr": 0.01, "momentum": 0.95}]}, 1: {"param_groups": [{"lr": 0.01}]}},
        "opt_param_scheduler": SCHEDULE,
    }


def block(optimizer="TensorParallelMuon", names=("mlp.fc1", "mlp.fc2"), **more):
    """What this package writes into the state of one of Megatron's optimizers."""
    groups = [{"names": {name: [0, 1] for name in names}, "settings": {"lr": 0.01}}]
    return {"format": 1, "optimizer": optimizer, "settings": {"lr": 0.01, "c": [[1.0, 2.0]]}, "groups": groups, **more}


def save(folder, values=None, state=None):
    """Write a checkpoint as 0.19 does; its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {**(tensors() if values is None else values), "rng_state/shard_0_1": {"seed": 1}}
    values["common_state/shard_0_1"] = [common() if state is None else state]
    planner = DefaultSavePlanner(flatten_state_dict=False)  # objects as they are, as Megatron saves them
    dcp.save(values, checkpoint_id=folder, planner=planner, no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    return folder


def sums(values):
    """The checksums that a run writes down, by their definition, in Python's integers."""
    found = {}
    for key, value in values.items():
        size = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
        bits = value.contiguous().view(-1).view(size).tolist()
        total = sum(bit * (index * 0x1E3779B97F4A7C14 + 1) for index, bit in enumerate(bits))
        found[key] = (total % 2**64, len(bits))
    return found


def change_layout(folder, change):
    """Change ``.metadata`` of a checkpoint."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def read_common(folder):
    """The common state of a checkpoint, with all its classes: of one that the test has made."""
    chunk = read_contents(folder).blobs["common_state/shard_0_1"]
    archive = (folder / chunk.file).read_bytes()[chunk.start : chunk.start + chunk.length]
    return torch.load(io.BytesIO(archive), weights_only=False)[0]


def change_common(folder, change):
    """Change the common state of a checkpoint."""
    common = read_common(folder)
    change(common)
    put_object(folder, "common_state", [common])


def put_object(folder, key, value):
    """Put a value in the place of an object whose key begins so."""
    archive = io.BytesIO()
    torch.save(value, archive)
    put_archive(folder, key, archive.getvalue())


def put_archive(folder, key, archive):
    """Put the bytes of an archive in the place of an object whose key begins so."""

    def replace(metadata):
        (stored,) = (each for index, each in metadata.storage_data.items() if index.fqn.startswith(key))
        with (folder / stored.relative_path).open("ab") as file:
            stored.offset, stored.length = file.tell(), len(archive)
            file.write(archive)

    change_layout(folder, replace)


def exchange(folder, one, other):
    """Let two chunks, each a key and its offsets, have one another's data."""

    def swapped(metadata):
        stored = metadata.storage_data
        first, second = (
            next(index for index in stored if (index.fqn, tuple(index.offset or ())) == (key, tuple(offsets)))
            for key, offsets in (one, other)
        )
        stored[first], stored[second] = stored[second], stored[first]

    change_layout(folder, swapped)


def archive_of(folder, key, chunk=0) -> tuple[Path, int, int]:
    """File, start and length of a stored tensor's archive."""
    chunk = read_contents(folder).tensors[key].chunks[chunk]
    return folder / chunk.file, chunk.start, chunk.length


def overwrite(folder, key, old: torch.Tensor, new: torch.Tensor, fix_checksum=False):
    """Write other bytes over a stored tensor's data; with the checksum that belongs to them, if asked for."""
    file, start, length = archive_of(folder, key)
    raw = bytearray(file.read_bytes())
    before, after = old.contiguous().numpy().tobytes(), new.contiguous().numpy().tobytes()
    at = raw.index(before, start, start + length)
    raw[at : at + len(after)] = after
    if fix_checksum:
        checksums = [zlib.crc32(data).to_bytes(4, "little") for data in (before, after)]
        archive = raw[start : start + length]
        assert checksums[0] in archive
        raw[start : start + length] = archive.replace(*checksums)
    file.write_bytes(raw)
