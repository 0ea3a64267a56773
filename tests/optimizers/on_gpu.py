"""Steps as a GPU makes them, on a CPU."""

from dataclasses import replace

import torch

from megatron_eopt.step.momenta.cuda_graph import GraphedUpdate


class OnDevice(torch.Tensor):
    """A flag as a GPU has it, which nobody may look at; what is made of it is on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = torch.device("cuda")

    def tolist(self):
        raise AssertionError("a step waits for the device")

    __bool__ = item = tolist


def masking(optimizer):
    """An optimizer that makes its steps as on a GPU, which is not asked which gradients are finite."""
    inner = getattr(optimizer, "matrices", optimizer)
    judged = inner._judged
    inner._judged = lambda parameters: judged(parameters).as_subclass(OnDevice)
    return optimizer


def captured(optimizer, capture=lambda run: run):
    """An optimizer whose step is captured; by default the capture is a function that is called again."""
    vars(optimizer)["execution"] = replace(optimizer.execution, cuda_graphs=True)
    optimizer.prepare()
    optimizer._session.settled.graphed = GraphedUpdate(optimizer._run, capture)
    return optimizer
