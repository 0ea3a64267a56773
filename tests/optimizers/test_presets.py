import argparse
from types import SimpleNamespace

import pytest
import torch

from megatron_eopt import TensorParallelMuon
from megatron_eopt.megatron.command_line import amend
from megatron_eopt.megatron.config import with_preset
from megatron_eopt.orthogonalize import predicted_update_rms
from megatron_eopt.settings.presets import PRESETS
from tests.plain.made import newton_schulz

SIZES = {"megatron": 1.0, "match_adamw": 0.2, "eo-0.5": 0.2, "kimi-k2": 0.2, "deepseek-v4": 0.18}


@pytest.mark.parametrize(
    ("preset", "tall", "wide"),
    [
        *((name, rms, rms) for name, rms in SIZES.items()),
        ("keller", 2 / 4, 1 / 4),
        ("unit_rms", 2 / 4, 0.5 / 4),
        ("modded-nanogpt", 2 / 4, 1 / 4),
    ],
)
def test_updates_of_a_preset_have_its_size(preset, tall, wide):
    settings = PRESETS[preset].settings
    size = settings["scale_mode"], settings["extra_scale_factor"]
    assert predicted_update_rms(16, 4, *size) == pytest.approx(tall)
    assert predicted_update_rms(4, 16, *size) == pytest.approx(wide)


JORDAN, HALLEY = (3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)
# momentum, look-ahead, polynomials and scale of a 24 x 40 matrix, as the publications write them
PUBLISHED = {
    "kimi-k2": (0.95, False, [JORDAN] * 5, 0.2 * 40**0.5),
    "deepseek-v4": (0.95, True, [JORDAN] * 8 + [HALLEY] * 2, 0.18 * 40**0.5),
    "modded-nanogpt": (0.95, True, [HALLEY] * 12, 1.0),
}


@pytest.mark.parametrize("preset", PUBLISHED)
def test_two_steps_are_those_of_the_publication(preset):
    beta, nesterov, coefficients, scale = PUBLISHED[preset]
    generator = torch.Generator().manual_seed(0)
    weight, *gradients = torch.randn(3, 24, 40, generator=generator, dtype=torch.float64)
    matrix = torch.nn.Parameter(weight.clone())
    optimizer = TensorParallelMuon(
        [matrix], 0.01, weight_decay=0.1, fp32_matmul_prec="highest", **PRESETS[preset].settings
    )
    momentum = torch.zeros_like(weight)
    for gradient in gradients:
        matrix.grad = gradient.clone()
        optimizer.step()
        momentum = beta * momentum + gradient  # a sum: its size has no effect on the orthogonal factor
        u = gradient + beta * momentum if nesterov else momentum
        weight = weight - 0.01 * (0.1 * weight + scale * newton_schulz(u, coefficients))
    torch.testing.assert_close(matrix.detach(), weight, rtol=1e-9, atol=1e-9)


class Config(SimpleNamespace):
    muon_momentum = 0.95  # Megatron's default of the field; that of its flag is 0.9


def config(preset, **fields):
    given = {"muon_nesterov": False, "muon_scale_mode": "spectral", "muon_extra_scale_factor": 1.0} | fields
    rest = {"muon_coefficient_type": "quintic", "muon_num_ns_steps": 5}
    return Config(optimizer="muon", muon_preset=preset, **rest, **given)


def test_the_default_of_a_config_is_no_contradiction():
    assert with_preset(config("eo-0.5")).muon_momentum == 0.9
    assert with_preset(config("eo-0.5", muon_momentum=0.9), SimpleNamespace()).muon_num_ns_steps == 16


def test_another_value_than_the_default_is_a_contradiction():
    with pytest.raises(ValueError, match=r"but the run also says momentum 0\.95: keep the preset"):
        with_preset(config("eo-0.5", muon_momentum=0.95), SimpleNamespace())
    with pytest.raises(ValueError, match=r"but the run also says extra_scale_factor 0\.5, nesterov True: keep"):
        with_preset(config("kimi-k2", muon_nesterov=True, muon_extra_scale_factor=0.5))


@pytest.mark.parametrize(
    ("preset", "flags", "refused"),
    [
        ("modded-nanogpt", "--muon-momentum 0.9 --muon-num-ns-steps=5", "momentum 0.9, num_ns_steps 5"),
        ("keller", "--muon-scale-mode spectral", "scale_mode spectral"),
        ("match_adamw", "--muon-extra-scale-factor 1", "extra_scale_factor 1"),
        ("kimi-k2", "--muon-coefficient-type quintic", "coefficient_type quintic"),
        ("eo-0.5", "--muon-momentum 0.9", None),  # as the preset has it
        ("match_adamw", "--muon-momentum 0.9", None),  # which this preset does not set
        ("eo-0.5", "", None),
    ],
)
def test_a_flag_that_is_given_at_its_default_is_a_contradiction(preset, flags, refused):
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer")
    parser.add_argument("--muon-momentum", type=float, default=0.9)
    parser.add_argument("--muon-scale-mode", default="spectral")
    parser.add_argument("--muon-extra-scale-factor", type=float, default=1.0)
    parser.add_argument("--muon-coefficient-type", default="quintic")
    parser.add_argument("--muon-num-ns-steps", type=int, default=5)
    parser.add_argument("--muon-nesterov", action="store_true")
    for others in ("--muon-fp32-matmul-prec", "--muon-tp-mode"):
        parser.add_argument(others)
    args = amend(parser).parse_args(["--optimizer", "muon", "--muon-preset", preset, *flags.split()])
    given = Config(**vars(args))
    if refused is None:
        assert with_preset(given, args).muon_momentum == PRESETS[preset].settings.get("momentum", 0.9)
    else:
        with pytest.raises(ValueError, match=f"but the run also says {refused}: keep the preset"):
            with_preset(given, args)
