"""Matrices in, orthogonal factors out: one process, torch only."""

from megatron_eopt.orthogonalize.coefficients import (
    Coefficients,
    NSCoeffT,
    composite_range,
    get_coefficients,
    get_supported_coefficient_types,
    optimal_quintic,
    validate_coefficient_type,
)
from megatron_eopt.orthogonalize.forms import Preset
from megatron_eopt.orthogonalize.iteration import Health, Iteration
from megatron_eopt.orthogonalize.newton_schulz import Form, NewtonSchulz, newton_schulz
from megatron_eopt.orthogonalize.precision import MatmulPrecision
from megatron_eopt.orthogonalize.scale import ScaleMode, muon_scale_factor, predicted_update_rms
from megatron_eopt.orthogonalize.spectral import power_iteration, rayleigh_quotient

__all__ = [
    "Coefficients",
    "Form",
    "Health",
    "Iteration",
    "MatmulPrecision",
    "NSCoeffT",
    "NewtonSchulz",
    "Preset",
    "ScaleMode",
    "composite_range",
    "get_coefficients",
    "get_supported_coefficient_types",
    "muon_scale_factor",
    "newton_schulz",
    "optimal_quintic",
    "power_iteration",
    "predicted_update_rms",
    "rayleigh_quotient",
    "validate_coefficient_type",
]
