"""Matrices in, orthogonal factors out: one process, torch only."""

from megatron_eopt.kernels.precision import MatmulPrecision as MatmulPrecision
from megatron_eopt.orthogonalize.coefficients import Coefficients as Coefficients
from megatron_eopt.orthogonalize.coefficients import NSCoeffT as NSCoeffT
from megatron_eopt.orthogonalize.coefficients import composite_range as composite_range
from megatron_eopt.orthogonalize.coefficients import get_coefficients as get_coefficients
from megatron_eopt.orthogonalize.coefficients import get_supported_coefficient_types as get_supported_coefficient_types
from megatron_eopt.orthogonalize.coefficients import optimal_quintic as optimal_quintic
from megatron_eopt.orthogonalize.coefficients import validate_coefficient_type as validate_coefficient_type
from megatron_eopt.orthogonalize.forms import Iteration as Iteration
from megatron_eopt.orthogonalize.forms import Preset as Preset
from megatron_eopt.orthogonalize.newton_schulz import Form as Form
from megatron_eopt.orthogonalize.newton_schulz import NewtonSchulz as NewtonSchulz
from megatron_eopt.orthogonalize.newton_schulz import newton_schulz as newton_schulz
from megatron_eopt.orthogonalize.scale import ScaleMode as ScaleMode
from megatron_eopt.orthogonalize.scale import muon_scale_factor as muon_scale_factor
from megatron_eopt.orthogonalize.scale import predicted_update_rms as predicted_update_rms
from megatron_eopt.orthogonalize.spectral import power_iteration as power_iteration
from megatron_eopt.orthogonalize.spectral import rayleigh_quotient as rayleigh_quotient
