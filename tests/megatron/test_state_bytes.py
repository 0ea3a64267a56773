"""The bytes of docs/planning.md are those that ranks of real runs in bf16 hold."""

import json
import sys

import pytest

from tests.megatron.runs import HERE, LAUNCHER, MUON, ROOT, SMALL_GPT, start

sys.path.insert(0, str(ROOT / "scripts"))
import state_bytes

RANKS = 2
ENTRIES, OF_MATRICES = 78144, 61440  # of SMALL_GPT with two layers


def flags_of(way):
    """The flags of a run of this way: those of its name, and what goes with them."""
    first, _, strategy = (each.strip("`") for each in way.flags.partition(", "))
    if first == "none":
        return []
    if not strategy:
        return [first]
    fsdp = ["--use-distributed-optimizer", "--ckpt-format", "fsdp_dtensor", "--no-gradient-reduce-div-fusion"]
    return [first, "--data-parallel-sharding-strategy", strategy, *fsdp]


@pytest.mark.wide
@pytest.mark.parametrize("way", state_bytes.WAYS, ids=lambda way: way.flags.replace("`", ""))
def test_ranks_hold_what_the_docs_say(tmp_path, way):
    run = [*SMALL_GPT, *MUON, "--num-layers", 2, "--train-iters", 2, "--bf16", "--optimizer-momentum-dtype", "bf16"]
    done = start(RANKS, *run, *flags_of(way), program=[*LAUNCHER[:-1], str(HERE / "counted.py")], record=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    copies = RANKS if way.share is state_bytes.everything else 1
    beside = (RANKS * way.whole + copies * way.shared) * ENTRIES
    assert sum(each["beside"] for each in found) == pytest.approx(beside, rel=0.01)  # padding of buffers
    assert sum(each["momenta"] for each in found) == copies * 2 * OF_MATRICES
