"""What the table of optimizers says of each: a row with its flags."""

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from inspect import Parameter
from math import ceil, inf
from typing import Any, Literal, get_args, get_origin

import torch

from megatron_eopt.optimizers.base import BaseOptimizer
from megatron_eopt.optimizers.group_settings import DECOUPLED
from megatron_eopt.optimizers.orthogonalized import MOMENTUM_BUFFER
from megatron_eopt.optimizers.state import StateTensor

MEGATRONS_DECOUPLED = "decoupled_weight_decay"  # field of Megatron's config
ADAMW_RMS = 0.2  # of the entries of a typical AdamW update, before the learning rate (arXiv 2502.16982, section 2.2)


@dataclass(frozen=True)
class Flag:
    """A flag of the command line, ``--OPTIMIZER-SETTING``, which sets the field ``OPTIMIZER_SETTING`` of the config.

    A flag whose default is True turns its setting off, and is ``--OPTIMIZER-no-SETTING``.
    """

    setting: str  # the argument of the optimizer's constructor, where there is one for it
    help: str
    # The value without the flag: that of the constructor, unless it is given here. It is, where the constructor has no
    # such argument, where Megatron's flag has another default, and where a run of Megatron's knows more.
    default: Any = Parameter.empty
    kind: type = str  # of a value that has no default
    choices: tuple[str, ...] = ()  # where they are few; filled in where the constructor's argument is a ``Literal``
    field: str = ""  # of the config, where it has another name
    shared: bool = False  # whether it holds for every optimizer of matrices that has such a setting
    megatrons: bool = False  # whether Megatron has the flag itself, so that it is not added
    metavar: str | None = None
    optimizer: str = ""  # its name, filled in for the flags of a row; empty for a flag of the run

    @property
    def name(self) -> str:
        """As it is typed."""
        words = (self.optimizer, "no" if self.default is True else "", self.setting)
        return "--" + "-".join(filter(None, words)).replace("_", "-")

    @property
    def dest(self) -> str:
        """The field of the config, and of the parsed arguments."""
        return self.field or "_".join(filter(None, (self.optimizer, self.setting)))

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``add_argument`` beside the name, the destination and the help."""
        if isinstance(self.default, bool):
            return {"action": f"store_{not self.default}".lower()}
        kind = self.kind if self.default is None else type(self.default)
        options: dict[str, Any] = {"type": kind, "default": self.default, "metavar": self.metavar}
        return options | ({"choices": self.choices} if self.choices else {})


@dataclass(frozen=True, kw_only=True)
class Row:
    """An optimizer."""

    name: str  # for ``--optimizer``, and for the config of plain torch
    cls: type[BaseOptimizer]
    owns: Literal["matrices", "all"] = "matrices"  # what it is given in Megatron; Adam has what is no matrix
    vectors: bool = False  # whether it takes any shape, so that plain torch gives it all; always where it owns all
    plain: bool = True  # whether the builders of plain torch have it
    of_muon: tuple[str, ...] = ()  # settings that it takes from Muon's flags
    betas: str = ""  # prefix of the flags that its betas, and ``eps``, are taken from
    flags: tuple[Flag, ...] = ()
    state_settings: tuple[dict[str, Any], ...] = ()  # arguments of the constructor with which other state is kept
    state_depends_on: tuple[str, ...] = ()  # fields of the config that change what is kept
    update_rms: float | None = None  # of the entries, before the rate, where no matrix has one of its own

    def __post_init__(self) -> None:
        object.__setattr__(self, "vectors", self.vectors or self.owns == "all")
        object.__setattr__(self, "flags", tuple(map(self._completed, self.flags)))

    def _completed(self, flag: Flag) -> Flag:
        """With the optimizer's name, and the default and the values of a ``Literal`` that its constructor says."""
        argument = inspect.signature(self.cls).parameters.get(flag.setting)
        annotation = None if argument is None else argument.annotation
        choices = flag.choices or (get_args(annotation) if get_origin(annotation) is Literal else ())
        default = self.default(flag.setting) if flag.default is Parameter.empty else flag.default
        return replace(flag, optimizer=self.name, choices=choices, default=default)

    def state_tensors(self, shape: tuple[int, int] = (128, 128), **settings: Any) -> list[StateTensor]:
        """State of a matrix in fp32, with these arguments of the constructor."""
        matrix = torch.empty(shape, dtype=torch.float32, device="meta")
        return self.cls([matrix], **settings).state_tensors(matrix)

    @cached_property
    def state(self) -> tuple[StateTensor, ...]:
        """State of a matrix with the defaults, then with each of :attr:`state_settings`."""
        return tuple(tensor for settings in ({}, *self.state_settings) for tensor in self.state_tensors(**settings))

    @property
    def state_keys(self) -> set[str]:
        """Keys of all of :attr:`state`; those of a fused parameter end with the number of the matrix."""
        return {tensor.key for tensor in self.state}

    @property
    def takes_adams(self) -> bool:
        """Whether ``--muon-momentum-from-adam`` lets it load Adam's state: it keeps a momentum and nothing else."""
        return self.state_keys == {MOMENTUM_BUFFER}

    def default(self, setting: str) -> Any:
        """The default of an argument of the constructor."""
        return inspect.signature(self.cls).parameters[setting].default

    def takes(self, setting: str) -> bool:
        """Whether the constructor has an argument of this name."""
        return setting in inspect.signature(self.cls).parameters

    def config_to_kwargs(self, config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
        """Arguments of the constructor from Megatron's config: by its own flags, and by those that it shares.

        A ``ValueError`` refuses weight decay that is not decoupled, unless it takes that from Muon.
        """
        takes_l2_decay = DECOUPLED in self.of_muon
        for field in () if takes_l2_decay else (f"{self.name}_{DECOUPLED}", DECOUPLED, MEGATRONS_DECOUPLED):
            if not getattr(config, field, True):
                raise ValueError(f"{self.name} has decoupled weight decay only: leave {field} at True")
        of_muon = kwargs_from_config(self.cls, "muon", config)
        if hasattr(config, "muon_use_nesterov"):  # its name up to Megatron-Core 0.17
            of_muon["nesterov"] = config.muon_use_nesterov
        kwargs = {setting: value for setting, value in of_muon.items() if setting in self.of_muon}
        kwargs |= kwargs_from_config(self.cls, self.name, config)
        kwargs |= workspace_from(config) if self.takes("workspace") else {}
        kwargs |= momentum_dtype_from(config) if self.takes("momentum_dtype") else {}
        if takes_l2_decay:  # the optimizer's own fields win over Megatron's, which is for Adam, too
            kwargs.setdefault(DECOUPLED, getattr(config, MEGATRONS_DECOUPLED, True))
        if not self.cls.decays_weights:
            kwargs["weight_decay"] = 0.0
        if self.betas and hasattr(config, f"{self.betas}_beta1"):
            kwargs["betas"] = (getattr(config, f"{self.betas}_beta1"), getattr(config, f"{self.betas}_beta2"))
        if self.betas and hasattr(config, f"{self.betas}_eps"):
            kwargs["eps"] = getattr(config, f"{self.betas}_eps")
        if self.owns == "matrices":
            model = model_chunks[0].config
            attention = all((model.num_attention_heads, model.num_query_groups, model.kv_channels))
            kwargs.setdefault("split_qkv", False)  # what has no flag for it, splits what is declared
            kwargs["is_qkv_fn"] = lambda param: getattr(param, "is_qkv", False)
            kwargs["qkv_split_shapes"] = get_qkv_split_shapes(model) if attention else None
            kwargs["pg_collection"] = pg_collection
            if getattr(config, "muon_share_over_dp", False) and self.takes("data_parallel_group"):
                kwargs["data_parallel_group"] = pg_collection.dp_cp
        return kwargs


def kwargs_from_config(optimizer_cls: Callable[..., Any], prefix: str, config: Any) -> dict[str, Any]:
    """The named arguments of an optimizer that a config has: ``config.{prefix}_{name}``, else ``config.{name}``."""
    kwargs = {}
    for name, argument in inspect.signature(optimizer_cls).parameters.items():
        fields = [field for field in (f"{prefix}_{name}", name) if hasattr(config, field)]
        named = argument.kind not in (argument.VAR_POSITIONAL, argument.VAR_KEYWORD)
        if fields and named and name not in ("params", *getattr(optimizer_cls, "keywords", ())):  # of a partial
            kwargs[name] = getattr(config, fields[0])
    return kwargs


def with_fields(config: Any, **values: Any) -> Any:
    """A copy of a config, or of a field of one, with other values; nothing is computed anew from them."""
    found = copy.copy(config)
    for name, value in values.items():
        setattr(found, name, value)
    return found


def workspace_from(config: Any) -> dict[str, int]:
    """The argument ``workspace``, in bytes, from ``--optimizer-workspace`` in GiB; none where a config does not say."""
    gib = getattr(config, "optimizer_workspace", None)
    if gib is not None and not 0 < gib < inf:
        raise ValueError(f"--optimizer-workspace must be a finite number of GiB above 0, got {gib}")
    return {} if gib is None else {"workspace": ceil(gib * 2**30)}


def momentum_dtype_from(config: Any) -> dict[str, torch.dtype]:
    """The argument ``momentum_dtype``, from ``--optimizer-momentum-dtype``; none where that is ``fp32``, the default.

    fp32 means the dtype of the parameters that the optimizer has, which in Megatron is fp32.
    """
    name = getattr(config, "optimizer_momentum_dtype", "fp32")
    if name not in ("fp32", "bf16"):
        raise ValueError(f"--optimizer-momentum-dtype is fp32 or bf16, got {name!r}")
    return {} if name == "fp32" else {"momentum_dtype": torch.bfloat16}


def get_qkv_split_shapes(model_cfg: Any) -> list[int]:
    """Rows of ``[q, k, v]`` in one query group of a fused projection, ``[q, gate, k, v]`` with an output gate."""
    query_rows = model_cfg.num_attention_heads // model_cfg.num_query_groups * model_cfg.kv_channels
    queries = [query_rows, query_rows] if getattr(model_cfg, "attention_output_gate", False) else [query_rows]
    return [*queries, model_cfg.kv_channels, model_cfg.kv_channels]
