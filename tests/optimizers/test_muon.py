from megatron_eopt import TensorParallelMuon
from tests.optimizers.field import matrix


def test_defaults_are_those_that_scripts_are_written_against():
    opt = TensorParallelMuon([matrix()])
    group = {key: value for key, value in opt.param_groups[0].items() if key != "params"}
    assert group == {
        "lr": 3e-4,
        "momentum": 0.95,
        "nesterov": True,
        "weight_decay": 0.01,
        "use_decoupled_weight_decay": True,
        "weight_decay_method": None,
        "state_of": "TensorParallelMuon",
    }
    assert (opt.use_nesterov, opt.use_decoupled_weight_decay, opt.split_qkv) == (True, True, False)
    assert (opt.newton_schulz.steps, opt.newton_schulz.coefficient_type) == (5, "quintic")
    assert (opt.newton_schulz.fp32_matmul_prec, opt.tp_mode) == ("medium", "duplicated")
    assert (opt.scale_mode, opt.extra_scale_factor) == ("spectral", 1.0)
