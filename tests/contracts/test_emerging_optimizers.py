"""Beside emerging-optimizers 0.3.0: the same steps, states that load, polynomials, hooks that are warned of."""

import copy

import emerging_optimizers.orthogonalized_optimizers as matrices
import emerging_optimizers.orthogonalized_optimizers.muon_utils as muon_utils
import emerging_optimizers.scalar_optimizers as scalars
import emerging_optimizers.soap as soap
import pytest
import torch

import megatron_eopt
from megatron_eopt import orthogonalize
from megatron_eopt.step.users_functions import HOOKS_OF_OTHERS
from tests.optimizers import several

PLAIN = {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "nesterov": False, "fp32_matmul_prec": "highest"}
SCION = {"lr": 0.01, "momentum": 0.9, "fp32_matmul_prec": "highest", "spectral_radius": 2.0}
CURRENT = {"basis_of": "current", "precondition_frequency": 1}
SOAP = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1, "fp32_matmul_prec": "highest", "eps": 1.0}
# theirs, ours, arguments of both, further ones of ours
PAIRS = {
    "muon": (matrices.Muon, megatron_eopt.TensorParallelMuon, PLAIN, {}),
    "adamuon": (matrices.AdaptiveMuon, megatron_eopt.TensorParallelAdaptiveMuon, PLAIN, {"align_rms": False}),
    "polargrad": (matrices.PolarGrad, megatron_eopt.PolarGrad, PLAIN, {}),
    "scion": (matrices.Scion, megatron_eopt.Scion, SCION, {}),
    "hyperball": (matrices.MuonHyperball, megatron_eopt.MuonHyperball, {**PLAIN, "weight_decay": 0.0}, {}),
    "lion": (scalars.Lion, megatron_eopt.Lion, {"lr": 0.01, "weight_decay": 0.1}, {}),
    "soap": (soap.SOAP, megatron_eopt.SOAP, SOAP, CURRENT),  # eps hides the rounding beside the diagonal
}
REFUSED = ("hyperball", "soap")  # states that are other numbers here


def stepped(optimizer, parameters, numbers):
    with torch.compiler.set_stance("force_eager"):
        several.run(optimizer, parameters, numbers)


def made(name):
    theirs, ours, both, own = PAIRS[name]
    shape = (5, 5) if name == "soap" else (6, 4)  # sides that gradients span
    params, copies = (several.parameters([shape] * 2) for _ in range(2))
    more = {"qr_fp32_matmul_prec": "highest"} if name == "soap" else {}
    return theirs(params, **both, **more), params, ours(copies, **both, **own), copies


@pytest.mark.parametrize("name", PAIRS)
def test_equal_settings_make_the_same_steps(name):
    theirs, params, ours, copies = made(name)
    stepped(theirs, params, range(3))
    stepped(ours, copies, range(3))
    torch.testing.assert_close(copies, params, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PAIRS)
def test_a_state_goes_on_here_or_is_refused(name):
    theirs, params, ours, copies = made(name)
    stepped(theirs, params, range(3))
    state = copy.deepcopy(theirs.state_dict())
    if name in REFUSED:
        with pytest.raises(ValueError, match="needs '"):
            ours.load_state_dict(state)
        return
    with torch.no_grad():
        torch._foreach_copy_(copies, params)
    ours.load_state_dict(state)
    if name == "scion":
        ours.param_groups[0]["weight_decay"] = 0  # 1 there
    stepped(theirs, params, range(3, 6))
    stepped(ours, copies, range(3, 6))
    torch.testing.assert_close(copies, params, rtol=1e-5, atol=1e-5)


def test_names_of_arguments_there_are_taken():
    p = torch.nn.Parameter(torch.eye(3))
    assert megatron_eopt.Scion([p], spectral_radius=3.0).param_groups[0]["radius"] == 3.0
    megatron_eopt.SOAP([p], use_eigh=True)


@pytest.mark.parametrize("name", sorted(set(muon_utils._COEFFICIENT_SETS) - {"aol", "cans"}))
def test_polynomials_are_theirs(name):
    published = [tuple(each) for each in muon_utils._COEFFICIENT_SETS[name]]
    assert list(orthogonalize.get_coefficients(name, len(published))) == published


def test_functions_give_the_same():
    for mode in ("spectral", "unit_rms_norm", "shape_scaling"):
        for shape in ((6, 4), (4, 6)):
            assert orthogonalize.muon_scale_factor(*shape, mode) == matrices.get_muon_scale_factor(*shape, mode)
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    expected = muon_utils.newton_schulz(x, 5, "quintic")
    torch.testing.assert_close(orthogonalize.newton_schulz(x, 5, "quintic"), expected, rtol=0, atol=1e-5)


def test_hooks_that_nothing_calls_are_warned_of(caplog):
    cls = type("Own", (megatron_eopt.TensorParallelMuon,), dict.fromkeys(HOOKS_OF_OTHERS, lambda *args: 1 / 0))
    p = torch.nn.Parameter(torch.eye(4))
    optimizer = cls([p])
    (told,) = [message for message in caplog.messages if "no step here calls" in message]
    assert all(hook in told for hook in HOOKS_OF_OTHERS)
    p.grad = torch.eye(4)
    optimizer.step()
