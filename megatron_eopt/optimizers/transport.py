"""What optimizers share that take Muon's orthogonal factors, and have a rule of their own for the size of updates."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_eopt.optimizers.group_settings import EXTRA_SCALE, SCALE_MODE, UpdateSettings
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.sharded import TensorParallelGroups
from megatron_eopt.orthogonalize.coefficients import Coefficients
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.parallel.cost import Rates
from megatron_eopt.parallel.plan import TpMode


class Transport(TypedDict, total=False):
    """How matrices are found, orthogonalized and exchanged: arguments of :class:`TensorParallelMuon`, as it has them.

    Its constructor says what they mean, and what they are where they are not given.
    """

    split_qkv: bool
    is_qkv_fn: Callable[[Tensor], bool] | None
    qkv_split_shapes: Sequence[int] | None
    fp32_matmul_prec: MatmulPrecision
    coefficient_type: str | Sequence[Coefficients]
    num_ns_steps: int
    pg_collection: TensorParallelGroups | None
    tp_mode: TpMode
    cuda_graphs: bool
    data_parallel_group: ProcessGroup | None
    plan_rates: Rates | Literal["measure"]
    symmetric_products: str | None


def spelled_out[**P](init: Callable[P, None]) -> Callable[P, None]:
    """Name what ``**transport: Unpack[Transport]`` takes in the signature of a constructor, with the defaults.

    So ``help`` shows it, whoever reads signatures finds it (as ``kwargs_from_config`` does), and a call with any other
    name is a ``TypeError``, though :class:`TensorParallelMuon` may know it.
    """
    signature = inspect.signature(init)
    of_muon = inspect.signature(TensorParallelMuon.__init__).parameters
    own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
    passed_on = [of_muon[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in Transport.__annotations__]
    spelled = signature.replace(parameters=[*own, *passed_on])

    @functools.wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        spelled.bind(*args, **kwargs)
        init(*args, **kwargs)

    checked.__signature__ = spelled  # type: ignore[attr-defined]
    return checked


_WAYS_TO_DECAY = {"use_decoupled_weight_decay", "weight_decay_method"}


class RuledMuon(TensorParallelMuon):
    """Muon but for the size of updates, which follows a rule instead of the scale settings.

    Raises:
        ValueError: also for a group with scale settings.
    """

    size_rule: str
    """What the size of an update is, for messages."""

    decays_weights: bool = True
    """Whether there is a weight decay; where there is none, what fills settings from a run's leaves it at 0."""

    no_settings: frozenset[str] = frozenset({SCALE_MODE, EXTRA_SCALE})
    """Settings of Muon's groups that the rule has no room for."""

    def settings_of_groups(self) -> dict[str, Any]:
        """Those of Muon's that the rule has room for; without a weight decay none that says how it is done."""
        out = self.no_settings if self.decays_weights else self.no_settings | _WAYS_TO_DECAY
        return {key: value for key, value in super().settings_of_groups().items() if key not in out}

    def update_settings(self, group: Mapping[str, Any]) -> UpdateSettings:
        """The iteration of the matrices of a group, and what multiplies their orthogonal factors.

        Raises:
            ValueError: also for scale settings.
        """
        for key in (SCALE_MODE, EXTRA_SCALE):
            if key in group:
                raise ValueError(
                    f"{key} has no effect here, got {group[key]!r}: the size of an update is {self.size_rule}; take "
                    f"the setting away, and set lr"
                )
        return super().update_settings(group)

    def settings(self) -> dict[str, Any]:
        """What a checkpoint says of this optimizer to those who read it."""
        return {key: value for key, value in super().settings().items() if key not in (SCALE_MODE, EXTRA_SCALE)}

    def _refuse_weight_decay(self, instead: str) -> None:
        """Refuse a weight decay, which a scheduler may set in any step.

        Args:
            instead: what there is in its place.

        Raises:
            ValueError: for a group that has one.
        """
        for number, group in enumerate(self.param_groups):
            if group["weight_decay"]:
                raise ValueError(
                    f"{type(self).__name__} has no weight decay, got {group['weight_decay']} for group {number}: "
                    f"{instead}; set the weight_decay of its matrices to 0"
                )


class Unscaled(UpdateSettings):
    """Settings of updates that begin with the orthogonal factor itself."""

    @property
    def name(self) -> str:
        """Those of equal iterations are one."""
        return self.iteration_name

    def scale(self, rows: int, cols: int) -> float:
        """1, whatever the shape."""
        return 1.0


class MeasuredMuon(RuledMuon):
    """One whose updates have a size by what is measured of each global matrix, in every step."""

    def update_settings(self, group: Mapping[str, Any]) -> UpdateSettings:
        """The iteration of the matrices of a group.

        Raises:
            ValueError: for what the optimizer would refuse, and for scale settings.
        """
        of_group = super().update_settings(group)
        return Unscaled(of_group.newton_schulz, of_group.scale_mode, of_group.extra_scale_factor)

    def predicted_rms(self, rows: int, cols: int, group: Mapping[str, Any] | None = None) -> None:
        """None: the size of updates does not follow from shapes."""

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        for parameter in group["params"]:
            if self.tp_mode == "blockwise" and self._is_cut(parameter):
                raise ValueError(
                    f"{type(self).__name__}: with tp_mode blockwise the norms would be those of shards, which belong "
                    f"to no matrix of the model and to no other number of ranks, for a sharded parameter of shape "
                    f"{tuple(parameter.shape)}: take an exact tp_mode (auto, duplicated, ...)"
                )


def there(x: Tensor | None) -> Tensor:
    """A statistic that was asked for."""
    assert x is not None
    return x
