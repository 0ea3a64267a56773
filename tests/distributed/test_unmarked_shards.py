"""A parameter with a ``partition_dim`` of which nothing says whether it is a shard counts as whole, with a warning."""

import logging
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron_eopt import SOAP, Lion, Spectron, TensorParallelMuon
from tests.distributed.ranks import run_ranks
from tests.distributed.shards import groups_of, marked, sharded


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


CASES = {
    "unmarked": {"partition_dim": 0},
    "shard": sharded(0),
    "replicated": {"partition_dim": 0, "tensor_model_parallel": False},  # as Megatron marks Transformer Engine's
    "default": {"partition_dim": -1, "tensor_model_parallel": False},
    "expert": {"partition_dim": 0, "allreduce": False},
    "plain": {},
}


def named(case):
    p = marked(torch.ones(4, 6), **CASES[case])
    p.grad = torch.arange(24.0).view(4, 6)
    return case, p


def _messages(rank, _):
    handler = Kept()
    logging.getLogger("megatron_eopt").addHandler(handler)
    groups = groups_of()
    alone = SimpleNamespace(tp=dist.new_group([rank], use_local_synchronization=True), expt_tp=None)

    def said(cls, cases, **settings):
        handler.messages.clear()
        opt = cls(list(map(named, cases)), **settings)
        vars(opt).setdefault("pg_collection", groups)
        for _ in range(2):
            opt.step()
        opt.add_param_group({"params": [("later", named("unmarked")[1])]})
        opt.step()
        return [each for each in handler.messages if "partition_dim" in each]

    return {
        "all": said(TensorParallelMuon, CASES, pg_collection=groups),
        "soap": said(SOAP, ["unmarked"], pg_collection=groups),
        "spectron": said(Spectron, ["unmarked"], rank=2, pg_collection=groups),
        "by themselves": said(TensorParallelMuon, ["unmarked"], pg_collection=groups, tp_mode="blockwise"),
        "one rank": said(TensorParallelMuon, ["unmarked"], pg_collection=alone),
        "entries": said(Lion, ["unmarked"]),
    }


def test_what_counts_as_whole_and_may_be_a_shard_is_named_once():
    first, second = run_ranks(_messages, 2)
    for key, name in (("all", "TensorParallelMuon"), ("soap", "SOAP"), ("spectron", "Spectron")):
        assert first[key] == [
            f"{name}: unmarked have a partition_dim and no tensor_model_parallel, so each of the 2 tensor-parallel "
            f"ranks takes its own for a whole matrix: set tensor_model_parallel = True on a shard, False on what is "
            f"whole"
        ]
    assert not any(first[key] for key in ("by themselves", "one rank", "entries"))
    assert not any(second.values())
