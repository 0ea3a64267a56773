"""Arguments under the names of other packages, and unknown ones: the same optimizer, or a message that names both."""

import pytest
import torch

from megatron_eopt import SOAP, DistributedMuon, Scion, Spectron, TensorParallelMuon
from megatron_eopt.family import OPTIMIZERS
from tests.optimizers.test_lion import parameters, run

CASES = [
    (Scion, {"spectral_radius": 3.0}, {"radius": 3.0}),
    (Spectron, {"num_power_iter": 3, "rank": 2}, {"num_power_iterations": 3, "rank": 2}),
    (SOAP, {"use_eigh": True, "precondition_frequency": 1}, {"basis_method": "eigh", "precondition_frequency": 1}),
    (SOAP, {"use_eigh": False, "precondition_frequency": 1}, {"basis_method": "qr", "precondition_frequency": 1}),
    (SOAP, {"max_precond_dim": 4}, {"max_dim": 4}),
]


@pytest.mark.parametrize(("optimizer", "other", "own"), CASES)
def test_both_names_make_the_same_steps_and_the_default_others(optimizer, other, own):
    steps = {}
    neither = {key: value for key, value in own.items() if key in other}
    settings = {"other": other, "own": own, "both": other | own, "neither": neither}
    for which, kwargs in settings.items():
        steps[which] = parameters([(6, 4)])
        run(optimizer(steps[which], lr=0.01, **kwargs), steps[which], range(5))
    assert torch.equal(steps["other"][0], steps["own"][0])
    assert torch.equal(steps["both"][0], steps["own"][0])
    is_default = own.get("basis_method") == "qr"
    assert torch.equal(steps["neither"][0], steps["own"][0]) == is_default


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p: Scion(p, radius=50.0, spectral_radius=1.0), ValueError, r"spectral_radius=1\.0 .* radius=50\.0 was"),
        (lambda p: Spectron(p, 1e-3, 2, 0.9, 0.0, 2, num_power_iter=1), ValueError, "num_power_iterations=2 was given"),
        (lambda p: SOAP(p, use_eigh=True, basis_method="qr"), ValueError, "use_eigh=True is another name for"),
        (lambda p: SOAP(p, use_eigh="yes"), ValueError, "use_eigh must be one of False, True, got 'yes'"),
        (lambda p: SOAP(p, use_eigen=True), TypeError, "use_eigen"),
        (lambda p: TensorParallelMuon(p, spectral_radius=1.0), TypeError, "spectral_radius"),
    ],
)
def test_two_names_with_two_values_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(parameters([(6, 4)]))


@pytest.mark.parametrize(
    "kind", [*(row.cls for row in OPTIMIZERS.values()), DistributedMuon], ids=lambda kind: kind.__name__
)
def test_an_unknown_argument_is_refused_with_the_nearest(kind):
    message = rf"^{kind.__name__}\(\) got an unexpected keyword argument 'weight_deca', did you mean 'weight_decay'\?$"
    with pytest.raises(TypeError, match=message):
        kind(parameters([(6, 4)]), weight_deca=0.1)
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) got .* 'xyz': expected params, lr, .* or "):
        kind(parameters([(6, 4)]), xyz=1)
