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
        "coefficient_type": "quintic",
        "num_ns_steps": 5,
        "scale_mode": "spectral",
        "extra_scale_factor": 1.0,
        "cautious_weight_decay": False,
        "weight_norm": "none",
        "brake_outward": 0.5,
        "brake_inward": 1.0,
        "relative_update": "none",
        "update_ratio": 1.0,
        "max_update_rms": 0.0,
        "moment2_method": "none",
        "beta2": 0.95,
        "eps": 1e-8,
        "align_rms": True,
        "state_of": "TensorParallelMuon",
    }
    assert (opt.use_nesterov, opt.use_decoupled_weight_decay, opt.split_qkv) == (True, True, False)
    assert (opt.fp32_matmul_prec, opt.tp_mode) == ("medium", "duplicated")
