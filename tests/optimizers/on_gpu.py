"""Steps as a GPU makes them, on a CPU."""

import torch

from megatron_eopt.optimizers.cuda_graph import GraphedUpdate


class OnDevice:
    """Flags as a GPU has them, which nobody may look at."""

    def __init__(self, flags):
        self.device, self.unbind = torch.device("cuda"), flags.unbind


def masking(optimizer):
    """An optimizer that makes its steps as on a GPU, which is not asked which gradients are finite."""
    take = optimizer._take
    optimizer._take = lambda accepted: take(OnDevice(accepted))
    return optimizer


def captured(optimizer, capture=lambda run: run):
    """An optimizer whose step is captured; by default the capture is a function that is called again."""
    vars(optimizer)["cuda_graphs"] = True
    optimizer._session.graphed = GraphedUpdate(optimizer._run, capture)
    return optimizer
