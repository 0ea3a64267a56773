"""A checkpoint in a format that a later release wrote is refused, with what to do, before anything is loaded."""

import json

import pytest

from megatron_eopt.checkpoints.contents import CheckpointError
from megatron_eopt.checkpoints.states import BLOCK
from megatron_eopt.megatron.checkpoints.fsdp_dtensor import SavedShards
from megatron_eopt.megatron.checkpoints.refusals import FORMAT, problem_of
from megatron_eopt.megatron.checkpoints.stored import Stored

LATER = (
    f"it was written by a later release of megatron_eopt (format {FORMAT + 1}; this one reads up to {FORMAT}): "
    "update the package"
)


def test_in_torch_dist_and_one_of_this_format_is_read():
    def found(*formats):
        blocks = {number: {BLOCK: {"format": each}} for number, each in enumerate(formats)}
        return problem_of([], Stored(None, {}, {}, blocks, {}))

    assert found(FORMAT, FORMAT + 1) == LATER
    assert "later release" not in found(FORMAT)


def test_in_fsdp_dtensor():
    written = {"format": FORMAT + 1, "anything": "else"}
    with pytest.raises(CheckpointError) as raised:
        SavedShards.load_state_dict(None, {"state": {}, "settings": {}, BLOCK: {"run": json.dumps(written)}})
    assert str(raised.value) == f"the checkpoint cannot serve this run: {LATER}"
