"""Which optimizers there are: name -> what is needed to build one for Megatron, and the builders of plain torch.

The functions have the names and signatures of Megatron-Core's ``core.optimizer.emerging_optimizers``, whose underscored
names are aliases here.
"""

from megatron_eopt.optimizers.adaptive_muon import TensorParallelAdaptiveMuon
from megatron_eopt.optimizers.hyperball import MuonHyperball
from megatron_eopt.optimizers.lion import Lion, Signum
from megatron_eopt.optimizers.muon import TensorParallelMuon
from megatron_eopt.optimizers.polar_grad import PolarGrad
from megatron_eopt.optimizers.schedule_free import ScheduleFreeAdamW
from megatron_eopt.optimizers.scion import Scion
from megatron_eopt.optimizers.soap import SOAP
from megatron_eopt.optimizers.spectron import Spectron
from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types, validate_coefficient_type
from megatron_eopt.registry.configs import (
    adaptive_muon_config_to_kwargs,
    hyperball_config_to_kwargs,
    lion_config_to_kwargs,
    muon_config_to_kwargs,
    polargrad_config_to_kwargs,
    schedule_free_config_to_kwargs,
    scion_config_to_kwargs,
    signum_config_to_kwargs,
    soap_config_to_kwargs,
    spectron_config_to_kwargs,
)
from megatron_eopt.registry.model import get_qkv_split_shapes, is_muon_excluded, is_nonlinear_or_embedding
from megatron_eopt.registry.table import (
    EMERGING_OPTIMIZERS,
    EmergingOptimizerEntry,
    UnknownOptimizerError,
    built_as,
    create_emerging_optimizer,
    decays_weights,
    default_adam_based_eopt_config_to_kwargs,
    default_param_overrides_factory,
    eopt_init_state_fn,
    get_optimizer_builder,
    get_optimizer_entry,
    kwargs_from_config,
    list_optimizer_builders,
    list_optimizers,
    muon_param_overrides_factory,
    pairs_rows,
    register_optimizer,
    takes_matrices,
)

__all__ = [
    "EMERGING_OPTIMIZERS",
    "EmergingOptimizerEntry",
    "UnknownOptimizerError",
    "adaptive_muon_config_to_kwargs",
    "built_as",
    "create_emerging_optimizer",
    "decays_weights",
    "default_adam_based_eopt_config_to_kwargs",
    "default_param_overrides_factory",
    "eopt_init_state_fn",
    "get_optimizer_builder",
    "get_optimizer_entry",
    "get_qkv_split_shapes",
    "get_supported_coefficient_types",
    "is_muon_excluded",
    "is_nonlinear_or_embedding",
    "kwargs_from_config",
    "lion_config_to_kwargs",
    "list_optimizer_builders",
    "list_optimizers",
    "muon_config_to_kwargs",
    "pairs_rows",
    "register_optimizer",
    "takes_matrices",
    "validate_coefficient_type",
]

_FOR_MATRICES = {
    "muon": (TensorParallelMuon, muon_config_to_kwargs),
    "adaptive_muon": (TensorParallelAdaptiveMuon, adaptive_muon_config_to_kwargs),
    "soap": (SOAP, soap_config_to_kwargs),
    "spectron": (Spectron, spectron_config_to_kwargs),
    "muon_hyperball": (MuonHyperball, hyperball_config_to_kwargs),
    "scion": (Scion, scion_config_to_kwargs),
    "polargrad": (PolarGrad, polargrad_config_to_kwargs),
}
_FOR_ALL = {  # parameters of any shape, so they own them all
    "lion": (Lion, lion_config_to_kwargs),
    "signum": (Signum, signum_config_to_kwargs),
    "schedule_free_adamw": (ScheduleFreeAdamW, schedule_free_config_to_kwargs),
}
for _name, (_cls, _kwargs) in _FOR_MATRICES.items():
    register_optimizer(
        _name,
        EmergingOptimizerEntry(_cls, config_to_kwargs=_kwargs, default_param_overrides=muon_param_overrides_factory),
    )
for _name, (_cls, _kwargs) in _FOR_ALL.items():
    register_optimizer(_name, EmergingOptimizerEntry(_cls, config_to_kwargs=_kwargs, default_param_overrides={}))

# The names that Megatron-Core gives them.
_EMERGING_OPTIMIZERS = EMERGING_OPTIMIZERS
_adaptive_muon_config_to_kwargs = adaptive_muon_config_to_kwargs
_create_emerging_optimizer = create_emerging_optimizer
_default_adam_based_eopt_config_to_kwargs = default_adam_based_eopt_config_to_kwargs
_default_param_overrides_factory = default_param_overrides_factory
_eopt_init_state_fn = eopt_init_state_fn
_get_qkv_split_shapes = get_qkv_split_shapes
_is_muon_excluded = is_muon_excluded
_is_nonlinear_or_embedding = is_nonlinear_or_embedding
_kwargs_from_config = kwargs_from_config
_muon_config_to_kwargs = muon_config_to_kwargs
