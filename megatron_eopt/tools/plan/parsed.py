"""Parse a pretrain command's flags by Megatron's parser, without running."""

from argparse import Namespace
from typing import Any

# What a description needs set, as it has no GPU and no Transformer Engine. No shape depends on any.
_SET: dict[str, Any] = {
    "load": None,  # nothing is read here, and the folder may be on another machine
    "transformer_impl": "local",
    "use_cpu_initialization": True,  # on the meta device
    "moe_token_dispatcher_type": "alltoall",
    "cpu_offloading_num_layers": 0,
    "cuda_graph_impl": "none",
    "no_persist_layer_norm": True,
    **dict.fromkeys("recompute_granularity fp8 fp4 te_precision_config_file non_persistent_ckpt_type".split()),
    **dict.fromkeys(
        """apply_layernorm_1p memory_efficient_layer_norm gradient_accumulation_fusion apply_rope_fusion
        moe_permute_fusion moe_router_padding_for_fp8 moe_router_padding_for_quantization moe_enable_deepep
        overlap_moe_expert_parallel_comm use_transformer_engine_op_fuser use_te_activation_func tp_comm_overlap
        delay_wgrad_compute fine_grained_activation_offloading distribute_saved_activations enable_cuda_graph
        fp8_param_gather fp4_param_gather""".split(),
        False,
    ),
}
# What Megatron's checks and its model are not told, and the checks of the optimizer are.
READ_LATER = ("load", "transformer_impl", "fp8_param_gather", "fp4_param_gather")
# Flags that take a model from a file, or make one of Transformer Engine's layers or of shards of another kind.
_ELSEWHERE = "use_checkpoint_args yaml_cfg hybrid_layer_pattern hybrid_override_pattern use_megatron_fsdp".split()


def parsed(rank: int, world_size: int) -> tuple[Namespace, Namespace]:
    """Parse and validate the flags in ``sys.argv`` for one rank.

    Returned are Megatron's arguments, changed where a GPU would be needed, and those that were typed. A ValueError is
    for models that cannot be described.
    """
    from megatron.training import arguments

    args = arguments.parse_args()
    for name in _ELSEWHERE:
        if getattr(args, name, None):
            raise ValueError(f"a run with --{name.replace('_', '-')} cannot be described without a GPU")
    typed = Namespace(**vars(args))
    vars(args).update(_SET, rank=rank, world_size=world_size)
    arguments.validate_args(args)
    return args, typed
