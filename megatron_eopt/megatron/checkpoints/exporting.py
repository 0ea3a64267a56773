"""Checkpoints whose model is what is evaluated, of optimizers that train something else."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from megatron_eopt.megatron.parameters import model_parameters
from megatron_eopt.optimizers.state import DescribedState


class Exporting:
    """What is saved and loaded in the places of the parameters of one of Megatron's optimizers.

    Where its torch optimizer evaluates and exports what it trains, nothing is done.

    Args:
        optimizer: Megatron's, of one torch optimizer that holds whole parameters.
    """

    def __init__(self, optimizer: Any) -> None:
        self._megatron = optimizer
        own = optimizer.optimizer
        self._torch = own if isinstance(own, DescribedState) and own.live_key is not None else None

    def put_into(self, model_sharded_state_dict: Any) -> None:
        """Let the model's part of a checkpoint hold what is evaluated, in tensors of their own."""
        if self._torch is None:
            return
        pairs = self._pairs()
        exported = {id(parameter): self._torch.exported(own).to(parameter.dtype) for own, parameter in pairs}
        for tensor in nested_values(model_sharded_state_dict):
            if isinstance(tensor, ShardedTensor | ShardedTensorFactory) and id(tensor.data) in exported:
                tensor.data = exported[id(tensor.data)]

    def trained(self) -> dict[int, tuple[str, Tensor]]:
        """The parameters that have to be saved as state, by their places, and under which key.

        Where there is an fp32 copy of a parameter, Megatron saves that.
        """
        if self._torch is None or self._torch.live_key is None:
            return {}
        pairs = enumerate(self._pairs())
        return {index: (self._torch.live_key, own.detach()) for index, (own, parameter) in pairs if own is parameter}

    @contextmanager
    def taken_out(self, state: dict[int, dict[str, Any]]) -> Iterator[None]:
        """While it is open, a loaded state is without :meth:`trained`; after it the parameters are what is trained."""
        live = {index: state[index].pop(key) for index, (key, _) in self.trained().items()}
        yield
        if self._torch is None:
            return
        with torch.no_grad():
            for index, (own, parameter) in enumerate(self._pairs()):
                if index in live:
                    own.copy_(live[index])
                else:
                    parameter.copy_(own)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """What the torch optimizer trains, and the parameter of the model."""
        own = [p for group in self._megatron.optimizer.param_groups for p in group["params"]]
        return list(zip(own, model_parameters(self._megatron), strict=True))
