"""pretrain.py, each rank of which leaves in RECORD how many bytes it held at the end of the last step.

Run by test_state_bytes.py. Each storage counts once, whole, however many tensors are views of it.
"""

import json
import os
from pathlib import Path

import torch
from megatron.core.optimizer import ChainedOptimizer

from tests.megatron import pretrain as run


def held(models, optimizers):
    """Bytes of parameters, gradients and main parameters together, and of momenta.

    Parameters that Megatron-FSDP has gathered after the step do not count.
    """
    stepped = [p for each in optimizers for group in each.param_groups for p in group["params"]]
    tensors = [*stepped, *(p.grad for p in stepped)]
    for model in models:
        if found := list(buffers(model)):
            tensors += [buffer.data for buffer in found]
            continue
        for parameter in model.parameters():
            tensors += [parameter, parameter.grad, getattr(parameter, "main_grad", None)]
    momenta = (state.get("momentum_buffer") for each in optimizers for state in each.state.values())
    return {"beside": stored(tensors), "momenta": stored(momenta)}


def buffers(model):
    """The flat buffers of Megatron-FSDP, which keeps what it computes with and what is updated apart."""
    for module in model.modules():
        for group in getattr(getattr(module, "param_and_grad_buffer", None), "parameter_groups", []):
            yield from (group.model_weight_buffer, group.main_weight_buffer, group.main_grad_buffer)


def stored(tensors):
    """Bytes of the storages of tensors, of DTensors on this rank; None is none."""
    local = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    storages = [tensor.untyped_storage() for tensor in local if torch.is_tensor(tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def counted(step):
    def then_count(optimizer, *args, **kwargs):
        result = step(optimizer, *args, **kwargs)
        found = held(list(run.record.models.values()), run.record.optimizers())
        Path(os.environ["RECORD"], f"{os.environ['RANK']}.json").write_text(json.dumps(found))
        return result

    return then_count


if __name__ == "__main__":
    ChainedOptimizer.step = counted(ChainedOptimizer.step)
    run.main()
