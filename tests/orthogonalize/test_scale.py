import pytest
import torch

from megatron_eopt.orthogonalize import muon_scale_factor, newton_schulz, predicted_update_rms


@pytest.mark.parametrize(
    ("mode", "tall", "wide"), [("spectral", 4.0, 4.0), ("unit_rms_norm", 2.0, 0.5), ("shape_scaling", 2.0, 1.0)]
)
def test_factor_of_a_tall_and_a_wide_matrix(mode, tall, wide):
    assert muon_scale_factor(16, 4, mode) == tall
    assert muon_scale_factor(4, 16, mode) == wide


def test_an_unknown_mode_names_the_known_ones():
    with pytest.raises(ValueError, match="'spectal': expected one of spectral, unit_rms_norm, shape_scaling"):
        muon_scale_factor(4, 4, "spectal")


@pytest.mark.parametrize("mode", ["spectral", "unit_rms_norm", "shape_scaling"])
@pytest.mark.parametrize("shape", [(32, 96), (96, 32)])
def test_the_predicted_rms_is_that_of_an_update(mode, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    update = 0.2 * muon_scale_factor(*shape, mode) * newton_schulz(x, 8, "polar_express")
    assert update.square().mean().sqrt().item() == pytest.approx(predicted_update_rms(*shape, mode, 0.2), rel=1e-3)
