"""What is kept of weights of low rank, and which parameters and settings an optimizer of them can have."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_eopt.matrices import declared_split
from megatron_eopt.optimizers.parameters import local
from megatron_eopt.optimizers.checks import check_rates
from megatron_eopt.optimizers.factor_plan import is_tall
from megatron_eopt.optimizers.sharded import ShardedMatrices
from megatron_eopt.optimizers.skipping import names_of_last
from megatron_eopt.optimizers.state import Dim, StateTensor
from megatron_eopt.optimizers.stepping import SteppingOptimizer
from megatron_eopt.orthogonalize.spectral import start_vector

FACTOR_A, FACTOR_B = "factor_A", "factor_B"
MOMENTUM_A, MOMENTUM_B = "momentum_buffer_A", "momentum_buffer_B"
U_A, U_B = "u_A", "u_B"
PROJECTED = "projected"
"""1 where the factors are those of the weight, 0 before the first step."""

MOMENTUM, U = "momentum_buffer", "u"
"""Of a parameter that is a factor itself."""

_OF_OTHERS = ("scale_mode", "extra_scale_factor")


def factor_pairs(pairs: Iterable[Sequence[Any]], **settings: Any) -> dict[str, Any]:
    """A group of parameters that are factors themselves, for a model that computes with them::

        Spectron([factor_pairs([(layer.up, layer.down) for layer in layers], lr=0.01), {"params": dense_weights}])

    Args:
        pairs: the two factors of each weight, in any order and orientation (``A`` and ``B``, or ``A`` and ``B^T`` as
            two linear layers hold them), each a parameter or its name and it.
        **settings: of the group.

    Raises:
        ValueError: for what is not two parameters.
    """
    params = []
    for place, pair in enumerate(pairs):
        if len(pair) != 2:
            raise ValueError(f"a pair has two factors, got {len(pair)} in pair {place}")
        params += list(pair)
    return {"params": params, "pairs": True, **settings}


class LowRankState(SteppingOptimizer, ShardedMatrices):
    """The state of an optimizer whose weights are products of factors, and the checks of its groups."""

    def state_tensors(self, parameter: Tensor) -> list[StateTensor]:
        """Factors, their momenta and singular vectors, for each logical matrix; of a factor what it has of these."""
        dtype, group = wide_dtype(parameter), self.group_of(parameter)
        if group["pairs"]:
            side: Dim = "rows" if is_tall(self.layout(parameter)) else "columns"
            return [StateTensor(MOMENTUM, dtype=dtype), StateTensor(U, (side,), 0, dtype)]
        rank = group["rank"]
        described = [StateTensor(PROJECTED, (), 0, dtype)]
        for part, end in enumerate(self.key_ends(parameter)):
            described += [
                StateTensor(FACTOR_A + end, ("rows", rank), part, dtype),
                StateTensor(FACTOR_B + end, ("columns", rank), part, dtype),
                StateTensor(MOMENTUM_A + end, ("rows", rank), part, dtype),
                StateTensor(MOMENTUM_B + end, ("columns", rank), part, dtype),
                StateTensor(U_A + end, ("rows",), part, dtype),
                StateTensor(U_B + end, ("columns",), part, dtype),
            ]
        return described

    def _check_kept_ranks(self) -> None:
        for parameter, state in self.state.items():
            kept = next((x.shape[1] for key, x in state.items() if key.startswith(FACTOR_A)), None)
            rank = self.group_of(parameter)["rank"]
            if kept not in (None, rank):
                raise ValueError(
                    f"{type(self).__name__} keeps factors of rank {kept} for the parameter of shape "
                    f"{tuple(parameter.shape)}, whose group now has rank {rank}: set it back, the rank cannot change"
                )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state.

        Raises:
            ValueError: if the groups, their ranks or the shapes are others, or if a tensor is missing; nothing is
                changed then.
        """
        for number, (own, saved) in enumerate(zip(self.param_groups, state_dict["param_groups"], strict=False)):
            for key in ("rank", "pairs"):
                if saved.get(key, own[key]) != own[key]:
                    raise ValueError(
                        f"{type(self).__name__}: group {number} has {key}={own[key]}, but the state was saved with "
                        f"{saved[key]}: build the optimizer as it was"
                    )
        super().load_state_dict(state_dict)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state = self.state[parameter]
        if state:
            return state
        state = super()._state_of(parameter)
        layouts = self.matrix_layouts(parameter)
        for tensor in self.state_tensors(parameter):
            if tensor.dims in (("rows",), ("columns",)):
                layout = layouts[tensor.matrix]
                place, dim = layout.piece, 0 if tensor.dims == ("rows",) else 1
                start, end = ((place.top, place.bottom), (place.left, place.right))[dim]
                local(state[tensor.key]).copy_(start_vector(layout.shape[dim])[start:end])
        return state

    def _check_group(self, group: dict[str, Any]) -> None:
        name, number = type(self).__name__, len(self.param_groups) - 1
        check_rates(name, group)
        if not 0 <= group["momentum_beta"] < 1:
            raise ValueError(f"{name}: momentum_beta must lie in [0, 1), got {group['momentum_beta']}")
        check_count(f"{name}: rank", group["rank"])
        for key in _OF_OTHERS:
            if key in group:
                raise ValueError(f"{name}: group {number} has {key}, but the size of an update follows from lr alone")
        names = names_of_last(self.param_groups)
        places = names_of_last(self.param_groups, shapes=False)
        for parameter, called, place in zip(group["params"], names, places, strict=True):
            if not parameter.is_floating_point():
                raise ValueError(f"{name} takes real, floating-point matrices, but {called} is {parameter.dtype}")
            self._check_parameter(parameter, place)
            self._check_ranks(parameter, called)
            self._check_cut(parameter, called)
            if not group["pairs"]:
                self._check_rank(parameter, called, group["rank"])
        if group["pairs"]:
            self._check_pairs(group["params"], names)

    def _check_rank(self, parameter: Tensor, called: str, rank: int) -> None:
        of_matrices = self.split_of(parameter).names(self.layout(parameter).shape[0])
        layouts = self.matrix_layouts(parameter)
        for place, layout in enumerate(layouts):
            if rank > min(layout.shape):
                part = f" ({of_matrices[place]})" if len(layouts) > 1 else ""
                raise ValueError(
                    f"{type(self).__name__}: rank must lie in [1, {min(layout.shape)}] for {called}{part}, a matrix "
                    f"{layout.shape}, got {rank}: give it a group with a rank of its own, or another optimizer"
                )

    def _check_pairs(self, params: Sequence[Tensor], names: Sequence[str]) -> None:
        name = type(self).__name__
        if len(params) % 2:
            raise ValueError(f"{name}: a group of pairs has an even number of factors, got {len(params)}")
        for parameter, called in zip(params, names, strict=True):
            layout = self.layout(parameter)
            if declared_split(parameter) is not None or self._is_split(parameter):
                raise ValueError(f"{name}: {called} is a factor of a pair, and cannot be split into logical matrices")
            if (1 if is_tall(layout) else 0) in layout.cut_dims:
                raise ValueError(
                    f"{name}: {called}, a factor {layout.shape}, is cut along its rank: cut it along its long side "
                    f"(under FSDP2 a shard_placement_fn says so), or keep it whole"
                )
        for a, b, of_a, of_b in zip(params[::2], params[1::2], names[::2], names[1::2], strict=True):
            shapes = self.layout(a).shape, self.layout(b).shape
            if min(shapes[0]) not in shapes[1] or min(shapes[1]) not in shapes[0]:
                raise ValueError(
                    f"{name}: {of_a} and {of_b} are no factors of one weight: {shapes[0]} and {shapes[1]} have no "
                    f"rank in common"
                )

    def _check_cut(self, parameter: Tensor, called: str) -> None:
        layout = self.layout(parameter)
        if len(layout.cut_dims) > 1:
            raise ValueError(
                f"{type(self).__name__} takes matrices that are cut along their rows or along their columns, but "
                f"{called}, a matrix {layout.shape}, is cut along both: shard one dimension of it alone, or give it to "
                f"TensorParallelMuon"
            )
        self._check_placements(parameter, called)


def check_count(what: str, value: object) -> None:
    """Check that a setting is a positive integer.

    Raises:
        ValueError: otherwise.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{what} must be an integer of at least 1, got {value!r}")


def wide_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of what is kept of a parameter: fp32, or fp64 for an fp64 one."""
    return torch.promote_types(parameter.dtype, torch.float32)
