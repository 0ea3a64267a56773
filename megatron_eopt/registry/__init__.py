"""Which optimizers there are: name -> what is needed to build one for Megatron, and the builders of plain torch.

The functions have the names and signatures of Megatron-Core's ``core.optimizer.emerging_optimizers``, whose underscored
names are aliases here. The optimizers of the package are registered from its table, :mod:`megatron_eopt.family`.
"""

from functools import partial

from megatron_eopt.family import FAMILY, TensorParallelAdaptiveMuon, TensorParallelMuon
from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types, validate_coefficient_type
from megatron_eopt.registry.configs import (
    adaptive_muon_config_to_kwargs,
    config_to_kwargs,
    get_qkv_split_shapes,
    is_muon_excluded,
    is_nonlinear_or_embedding,
    kwargs_from_config,
    muon_config_to_kwargs,
)
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
    "TensorParallelAdaptiveMuon",
    "TensorParallelMuon",
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
    "list_optimizer_builders",
    "list_optimizers",
    "muon_config_to_kwargs",
    "pairs_rows",
    "register_optimizer",
    "takes_matrices",
    "validate_coefficient_type",
]

for _row in FAMILY:
    _entry = EmergingOptimizerEntry(_row.cls, config_to_kwargs=partial(config_to_kwargs, _row.name))
    _entry.default_param_overrides = muon_param_overrides_factory if _row.owns == "matrices" else {}
    register_optimizer(_row.name, _entry)

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
