"""Muon for parameters of more than two dimensions, such as the weights of convolutions."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_eopt.matrices import declared_split
from megatron_eopt.optimizers.batch import Batch
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.parallel.layout import Layout


class FlatteningMuon(TensorParallelMuon):
    """Muon that reads a parameter of more than two dimensions as a matrix: the first dimension times the rest.

    A declared stack of matrices stays one. Everything else is as in
    :class:`~megatron_eopt.optimizers.muon.TensorParallelMuon`; momenta keep the shape of the parameter.

    Raises:
        ValueError: at construction also for a DTensor that is cut such that a rank holds several parts of the matrix.
    """

    def layout(self, parameter: Tensor) -> Layout:
        """Where a parameter lies, as the matrix that it is read as."""
        if _is_flattened(parameter) and not isinstance(parameter, DTensor):
            parameter = parameter.detach().flatten(1)
        return super().layout(parameter)

    def _orthogonalize(
        self, batches: Sequence[Batch], updates: list[Tensor], accepted: Sequence[Tensor]
    ) -> list[Tensor]:
        shapes = [update.shape for update in updates]
        parameters = [parameter for batch in batches for parameter in batch.parameters]
        updates[:] = [x.flatten(1) if _is_flattened(p) else x for p, x in zip(parameters, updates, strict=True)]
        factors = super()._orthogonalize(batches, updates, accepted)
        return [factor.view(shape) for factor, shape in zip(factors, shapes, strict=True)]

    def _check_parameter(self, parameter: Tensor, place: str) -> None:
        if _is_flattened(parameter):
            self.layout(parameter)  # refuses one that cannot be laid out
        else:
            super()._check_parameter(parameter, place)


def _is_flattened(parameter: Tensor) -> bool:
    return parameter.ndim > 2 and declared_split(parameter) is None
