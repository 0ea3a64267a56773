"""What the table of optimizers says of each: a row with its flags."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any, Literal, get_args, get_origin

from megatron_eopt.optimizers.base import BaseOptimizer

ADAMW_RMS = 0.2
"""RMS of the entries of a typical AdamW update, before the learning rate (arXiv 2502.16982, section 2.2)."""


@dataclass(frozen=True)
class Flag:
    """A flag of the command line, ``--OPTIMIZER-SETTING``, which sets the field ``OPTIMIZER_SETTING`` of the config.

    A flag whose default is True turns its setting off, and is ``--OPTIMIZER-no-SETTING``.

    Attributes:
        setting: the argument of the optimizer's constructor, where there is one for it.
        default: the value without the flag.
        kind: type of a value that has no default.
        choices: the values, where there are few; filled in where the constructor's argument is a ``Literal``.
        field: name of the config's field, where it is another.
        shared: whether it holds for every optimizer of matrices that has such a setting.
        megatrons: whether Megatron has the flag itself, so that it is not added.
        optimizer: name of the optimizer; empty for a flag of the run. Filled in for the flags of a row.
    """

    setting: str
    default: Any
    help: str
    kind: type = str
    choices: tuple[str, ...] = ()
    field: str = ""
    shared: bool = False
    megatrons: bool = False
    metavar: str | None = None
    optimizer: str = ""

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
    """An optimizer.

    Attributes:
        name: for ``--optimizer``, and for the config of plain torch.
        papers: those that it is from, with links.
        owns: the parameters that it is given in Megatron. With ``matrices``, Adam has the rest.
        vectors: whether the class takes parameters of any shape, so that plain torch gives it all; always where it
            owns ``all``.
        plain: whether the builders of plain torch have it.
        of_muon: settings that it takes from Muon's flags.
        betas: prefix of the flags that its betas, and ``eps``, are taken from.
        state: state keys of tensors of the parameter's shape; by default these are a momentum.
        further_state: state keys of other tensors, without the number of the logical matrix.
        state_depends_on: fields of the config that change what is kept.
        keeps: the state in words.
        state_bytes: of a matrix of m x n in fp32, as a formula.
        begin_with: flags of a run of the demo's model, which ``make compare`` takes.
        update_rms: RMS of the entries of an update, before the learning rate, where no matrix has one of its own.
        averages: whether it evaluates and saves an average of the path, so that no rank may lack a parameter.
        refuses: what it refuses beside the runs that none of the optimizers takes.
    """

    name: str
    cls: type[BaseOptimizer]
    sentence: str
    papers: str
    owns: Literal["matrices", "all"] = "matrices"
    vectors: bool = False
    plain: bool = True
    of_muon: tuple[str, ...] = ()
    betas: str = ""
    flags: tuple[Flag, ...] = ()
    state: tuple[str, ...] = ("momentum_buffer",)
    further_state: tuple[str, ...] = ()
    state_depends_on: tuple[str, ...] = ()
    keeps: str = "the momentum"
    state_bytes: str = "4 mn"
    begin_with: str
    begin_why: str = ""
    update_rms: float | None = None
    averages: bool = False
    refuses: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "vectors", self.vectors or self.owns == "all")
        of_row = (
            replace(flag, optimizer=self.name, choices=flag.choices or self._literals(flag.setting))
            for flag in self.flags
        )
        object.__setattr__(self, "flags", tuple(of_row))

    def _literals(self, setting: str) -> tuple[str, ...]:
        """The values of a constructor's argument whose annotation is a ``Literal``; none for any other."""
        annotation = inspect.signature(self.cls).parameters[setting].annotation if self.takes(setting) else None
        return get_args(annotation) if get_origin(annotation) is Literal else ()

    @property
    def takes_adams(self) -> bool:
        """Whether ``--muon-momentum-from-adam`` lets it load Adam's state: it keeps a momentum and nothing else."""
        return (*self.state, *self.further_state) == ("momentum_buffer",)

    @property
    def takes_l2_decay(self) -> bool:
        """Whether its weight decay may be a part of the gradient, as Muon's may."""
        return "use_decoupled_weight_decay" in self.of_muon

    def takes(self, setting: str) -> bool:
        """Whether the constructor has an argument of this name."""
        return setting in inspect.signature(self.cls).parameters

    def config_to_kwargs(self, config: Any, model_chunks: Sequence[Any], pg_collection: Any) -> dict[str, Any]:
        """Arguments of the constructor from Megatron's config: by its own flags, and by those that it shares.

        ``model_chunks`` is the model, one module per virtual pipeline stage.

        Raises:
            ValueError: for weight decay that is not decoupled, where it has no other, and for a workspace of 0 bytes.
        """
        decoupled = getattr(config, "decoupled_weight_decay", True)
        if not decoupled and not self.takes_l2_decay:
            raise ValueError(f"{self.name} has decoupled weight decay only: leave decoupled_weight_decay at True")
        of_muon = kwargs_from_config(self.cls, "muon", config)
        if hasattr(config, "muon_use_nesterov"):  # its name up to Megatron-Core 0.17
            of_muon["nesterov"] = config.muon_use_nesterov
        kwargs = {setting: value for setting, value in of_muon.items() if setting in self.of_muon}
        kwargs |= kwargs_from_config(self.cls, self.name, config)
        kwargs |= workspace_from(config) if self.takes("workspace") else {}
        if self.takes_l2_decay:
            kwargs["use_decoupled_weight_decay"] = decoupled
        if not self.cls.decays_weights:
            kwargs["weight_decay"] = 0.0
        if self.betas and hasattr(config, f"{self.betas}_beta1"):
            kwargs["betas"] = (getattr(config, f"{self.betas}_beta1"), getattr(config, f"{self.betas}_beta2"))
        if self.betas and hasattr(config, f"{self.betas}_eps"):
            kwargs["eps"] = getattr(config, f"{self.betas}_eps")
        if self.owns == "matrices":
            model = model_chunks[0].config
            attention = all((model.num_attention_heads, model.num_query_groups, model.kv_channels))
            kwargs["is_qkv_fn"] = lambda param: getattr(param, "is_qkv", False)
            kwargs["qkv_split_shapes"] = get_qkv_split_shapes(model) if attention else None
            kwargs["pg_collection"] = pg_collection
        return kwargs


def kwargs_from_config(optimizer_cls: type, prefix: str, config: Any) -> dict[str, Any]:
    """Arguments of an optimizer that a config has values for.

    For every named parameter of ``__init__`` but self and params: ``config.{prefix}_{name}``, else ``config.{name}``.
    """
    kwargs = {}
    for name, parameter in inspect.signature(optimizer_cls.__init__).parameters.items():  # type: ignore[misc]
        if name in ("self", "params") or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        for attribute in (f"{prefix}_{name}", name):
            if hasattr(config, attribute):
                kwargs[name] = getattr(config, attribute)
                break
    return kwargs


def workspace_from(config: Any) -> dict[str, int]:
    """The argument ``workspace``, in bytes, from ``--optimizer-workspace`` in GiB; none where a config does not say."""
    gib = getattr(config, "optimizer_workspace", None)
    if gib is not None and not 0 < gib < inf:
        raise ValueError(f"--optimizer-workspace must be a finite number of GiB above 0, got {gib}")
    return {} if gib is None else {"workspace": ceil(gib * 2**30)}


def get_qkv_split_shapes(model_cfg: Any) -> list[int]:
    """Rows of ``[q, k, v]`` in one query group of a fused projection, ``[q, gate, k, v]`` with an output gate."""
    query_rows = model_cfg.num_attention_heads // model_cfg.num_query_groups * model_cfg.kv_channels
    queries = [query_rows, query_rows] if getattr(model_cfg, "attention_output_gate", False) else [query_rows]
    return [*queries, model_cfg.kv_channels, model_cfg.kv_channels]


def arxiv(*numbers: str) -> str:
    """Links to papers."""
    return ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in numbers)
