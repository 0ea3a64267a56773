"""What is read of a checkpoint before the optimizer is built: what its run had decided, or nothing."""

from types import SimpleNamespace

import pytest
import torch

from megatron_eopt.megatron.checkpoints.decided import Decided, decided_before
from megatron_eopt.megatron.checkpoints.loading import checked_load
from megatron_eopt.megatron.checkpoints.stored import contents_of, read_stored
from megatron_eopt.megatron.checkpoints.whole import damage_of_resumed
from megatron_eopt.optimizers.base import KERNEL
from tests.checkpoints.made import block, common, save

RATES = {"flops": 1e15, "bytes": 1e11, "latency": 1e-5}
SAVED = {"symmetric_products": "torch", "plan_rates": RATES, "step_kernels": "triton"}


def saved(folder, mode="distributed", of_groups=(SAVED, SAVED)):
    """A folder of ``--save`` with one checkpoint, in which each optimizer has one group with these settings."""
    blocks = [block(f"Optimizer{i}", [f"mlp.fc{i}"], settings={"tp_mode": mode}) for i, _ in enumerate(of_groups)]
    for each, settings in zip(blocks, of_groups, strict=True):
        each["groups"][0]["settings"] |= settings
    optimizer = {i: {"megatron_eopt": each} for i, each in enumerate(blocks)}
    save(folder / "iter_0000005", state={**common(), "optimizer": optimizer})
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return folder


def decided(folder, **flags):
    return decided_before(SimpleNamespace(load=folder, **flags), megatron_fsdp=False)


def test_what_the_run_had_decided(tmp_path):
    expected = Decided("distributed", {"Optimizer0": SAVED, "Optimizer1": SAVED})
    assert decided(saved(tmp_path)) == expected
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert decided(tmp_path) == Decided()  # Megatron starts anew
    assert decided(tmp_path, ckpt_step=5) == expected


def test_the_metadata_are_read_once_for_a_run_and_then_forgotten(tmp_path, monkeypatch):
    checkpoint = saved(tmp_path) / "iter_0000005"
    contents_of.cache_clear()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert decided(tmp_path).tp_mode == "distributed"
    assert damage_of_resumed(tmp_path, None) is None
    assert read_stored(checkpoint).damage is None
    assert contents_of.cache_info()[:2] == (2, 1)  # hits, misses
    checked_load(lambda state, folder: None)({}, str(checkpoint))
    assert contents_of.cache_info().currsize == 0


def test_the_kernel_of_soap_is_its_own(tmp_path):
    blocks = [block(names=["a"]), block("SOAP", names=["b"])]
    for each, kernel in zip(blocks, ("blocked", "torch"), strict=True):
        each["groups"][0]["settings"]["symmetric_products"] = kernel
    save(
        tmp_path / "iter_0000005",
        state={**common(), "optimizer": {i: {"megatron_eopt": x} for i, x in enumerate(blocks)}},
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    kernels = {"TensorParallelMuon": {KERNEL: "blocked"}, "SOAP": {KERNEL: "torch"}}
    assert decided(tmp_path) == Decided(None, kernels)


def test_of_groups_that_differ_the_first_that_says_something_counts_until_the_load(tmp_path):
    blocks = [block(names=[name]) for name in "abc"]
    settings = [{}, SAVED, {**SAVED, "plan_rates": {**RATES, "flops": 1e14}}]
    for each, own in zip(blocks, settings, strict=True):
        each["groups"][0]["settings"] |= own
    save(
        tmp_path / "iter_0000005",
        state={**common(), "optimizer": {i: {"megatron_eopt": x} for i, x in enumerate(blocks)}},
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert decided(tmp_path) == Decided(None, {"TensorParallelMuon": SAVED})


@pytest.mark.parametrize(
    "flags",
    [
        {"load": None},
        {"finetune": True},
        {"no_load_optim": True},
        {"ckpt_step": 4},
        {"non_persistent_ckpt_type": "local"},
    ],
)
def test_where_no_state_of_this_checkpoint_is_loaded_nothing_is_known(tmp_path, flags):
    args = SimpleNamespace(**{"load": saved(tmp_path), **flags})
    assert decided_before(args, megatron_fsdp=False) == Decided()


@pytest.mark.parametrize("file", [".metadata", "metadata.json", "__0_0.distcp"])
def test_what_cannot_be_read_is_left_to_the_load(tmp_path, file):
    (saved(tmp_path) / "iter_0000005" / file).write_bytes(b"\x80")
    assert decided(tmp_path) == Decided()


def test_a_mode_of_no_kind_is_left_to_the_load(tmp_path):
    assert decided(saved(tmp_path, "no mode", [SAVED])).tp_mode is None


def test_a_folder_without_a_checkpoint(tmp_path):
    assert decided(tmp_path) == decided(tmp_path / "nothing") == Decided()
    assert decided_before(None, megatron_fsdp=False) == Decided()
