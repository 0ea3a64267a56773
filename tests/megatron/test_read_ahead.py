"""What is read of a checkpoint before the optimizer is built: what its run had decided, or nothing."""

from types import SimpleNamespace

import pytest
import torch

from megatron_eopt.megatron.checkpoints.decided import decided_before
from megatron_eopt.megatron.checkpoints.loading import checked_load
from megatron_eopt.megatron.checkpoints.stored import contents_of, read_stored
from megatron_eopt.megatron.checkpoints.whole import damage_of_resumed
from tests.checkpoints.made import block, common, save

SAVED = {"symmetric_products": "torch", "step_kernels": "triton"}


def saved(folder, *blocks):
    """A folder of ``--save`` with one checkpoint, of optimizers with such blocks."""
    optimizer = {number: {"megatron_eopt": each} for number, each in enumerate(blocks)}
    save(folder / "iter_0000005", state={**common(), "optimizer": optimizer})
    (folder / "latest_checkpointed_iteration.txt").write_text("5")
    return folder


def of_group(optimizer, settings):
    """The block of an optimizer with one group."""
    found = block(optimizer, [f"of.{id(settings)}"])
    found["groups"][0]["settings"] |= settings
    return found


def decided(folder, **flags):
    return decided_before(SimpleNamespace(load=folder, **flags), megatron_fsdp=False)


OTHER = {**SAVED, "step_kernels": "torch"}


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        # of each optimizer its own, of groups that differ the first that says something
        ([of_group("A", SAVED), of_group("B", OTHER)], {"A": SAVED, "B": OTHER}),
        ([of_group("A", {}), of_group("A", SAVED), of_group("A", OTHER)], {"A": SAVED}),
    ],
)
def test_what_the_run_had_decided(tmp_path, blocks, expected):
    assert decided(saved(tmp_path, *blocks)) == expected
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert decided(tmp_path) == {}  # Megatron starts anew
    assert decided(tmp_path, ckpt_step=5) == expected


def test_the_metadata_are_read_once_for_a_run_and_then_forgotten(tmp_path, monkeypatch):
    checkpoint = saved(tmp_path, of_group("A", SAVED)) / "iter_0000005"
    contents_of.cache_clear()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert decided(tmp_path) == {"A": SAVED}
    assert damage_of_resumed(tmp_path, None) is None
    assert read_stored(checkpoint).damage is None
    assert contents_of.cache_info()[:2] == (2, 1)  # hits, misses
    checked_load(lambda state, folder: None)({}, str(checkpoint))
    assert contents_of.cache_info().currsize == 0


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
    folder = saved(tmp_path, of_group("A", SAVED))
    assert decided_before(SimpleNamespace(**{"load": folder, **flags}), megatron_fsdp=False) == {}


@pytest.mark.parametrize("file", [".metadata", "metadata.json", "__0_0.distcp"])
def test_what_cannot_be_read_is_left_to_the_load(tmp_path, file):
    (saved(tmp_path, of_group("A", SAVED)) / "iter_0000005" / file).write_bytes(b"\x80")
    assert decided(tmp_path) == {}


def test_a_folder_without_a_checkpoint(tmp_path):
    assert decided(tmp_path) == decided(tmp_path / "nothing") == {}
    assert decided_before(None, megatron_fsdp=False) == {}
