"""Published sizes of models and GPUs, and numbers of ranks."""

from dataclasses import dataclass, replace

from megatron_eopt.parallel.rates import Rates


@dataclass(frozen=True, kw_only=True)
class Model:
    """A transformer of equal layers, by names of Megatron's flags."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None  # None for as many as heads
    kv_channels: int | None = None  # columns of one head; None for hidden_size / num_attention_heads
    swiglu: bool = False  # whether linear_fc1 has gate and up, fused
    split_gate_up: bool = False  # whether these are two matrices; Megatron has one
    num_experts: int | None = None  # None for a dense model
    moe_ffn_hidden_size: int | None = None  # of one expert; None for ffn_hidden_size
    moe_shared_expert_intermediate_size: int | None = None  # of what every token passes beside experts; None for none
    first_dense_layers: int = 0  # without experts, as by --moe-layer-freq
    kv_lora_rank: int | None = None  # of latent attention; None for another attention
    q_lora_rank: int | None = None
    qk_head_dim: int = 128  # of latent attention, as the next two
    qk_pos_emb_head_dim: int = 64
    v_head_dim: int = 128


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """Numbers of ranks."""

    tensor: int = 1
    expert_tensor: int = 1  # tensor-parallel ranks of experts
    expert: int = 1
    pipeline: int = 1
    data: int = 1  # over which the layer-wise optimizer deals whole parameters


@dataclass(frozen=True)
class Gpu:
    """What a GPU's maker publishes of it."""

    flops: float  # operations per second with bf16 and without sparsity
    link: float  # bytes per second that it sends over NVLink

    @property
    def rates(self) -> Rates:
        """Half of the operations and two thirds of the link, as products and collectives reach about."""
        return Rates(flops=self.flops / 2, bytes=self.link * 2 / 3)


# Data sheets of NVIDIA: H100 SXM, and GB300 NVL72 (of 72 GPUs).
GPUS = {"h100": Gpu(989e12, 450e9), "gb300": Gpu(2500e12, 900e9)}

# DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv 2412.19437, and the published configuration.
_DEEPSEEK_V3 = Model(
    num_layers=61,
    hidden_size=7168,
    ffn_hidden_size=18432,
    num_attention_heads=128,
    swiglu=True,
    num_experts=256,
    moe_ffn_hidden_size=2048,
    moe_shared_expert_intermediate_size=2048,
    first_dense_layers=3,
    kv_lora_rank=512,
    q_lora_rank=1536,
)

MODELS = {
    # Grattafiori et al., The Llama 3 Herd of Models, arXiv 2407.21783, table 3.
    "llama3-8b": Model(
        num_layers=32, hidden_size=4096, ffn_hidden_size=14336, num_attention_heads=32, num_query_groups=8, swiglu=True
    ),
    "llama3-70b": Model(
        num_layers=80, hidden_size=8192, ffn_hidden_size=28672, num_attention_heads=64, num_query_groups=8, swiglu=True
    ),
    "llama3.1-405b": Model(
        num_layers=126,
        hidden_size=16384,
        ffn_hidden_size=53248,
        num_attention_heads=128,
        num_query_groups=8,
        swiglu=True,
    ),
    "deepseek-v3": _DEEPSEEK_V3,
    # Kimi Team, Kimi K2, arXiv 2507.20534, and the published configuration.
    "kimi-k2": replace(_DEEPSEEK_V3, num_attention_heads=64, num_experts=384, first_dense_layers=1),
    # Qwen Team, Qwen3 Technical Report, arXiv 2505.09388, and the published configuration.
    "qwen3-30b-a3b": Model(
        num_layers=48,
        hidden_size=2048,
        ffn_hidden_size=6144,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        swiglu=True,
        num_experts=128,
        moe_ffn_hidden_size=768,
    ),
}
