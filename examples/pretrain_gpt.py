"""Pretrain a GPT with Megatron-Core 0.19: its arguments, its datasets, its training loop.

This is the script of a Megatron user. It knows nothing of the package it demonstrates: the optimizer is what
``--optimizer`` names.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.training import get_args, get_tokenizer, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split

Batch = dict[str, torch.Tensor]


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> list[GPTDataset | None]:
    """Training, validation and test set from ``--data-path`` or ``--*-data-path``; mock data without them."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,  # the attention is causal and makes its own
    )
    dataset = MockGPTDataset if config.mock else GPTDataset
    return BlendedMegatronDatasetBuilder(dataset, num_samples, reads_data, config).build()


# Megatron is to call it on every rank, not on the first tensor-parallel ones alone: the builder has a barrier for all.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def reads_data() -> bool:
    """Whether this rank reads samples: the first of each tensor-parallel group, on the outer pipeline stages."""
    return mpu.get_tensor_model_parallel_rank() == 0 and needs_batch()


def needs_batch() -> bool:
    """Whether this pipeline stage looks at tokens or labels; those in the middle see hidden states only."""
    return mpu.is_pipeline_first_stage() or mpu.is_pipeline_last_stage()


def next_batch(data_iterator: Iterator[Batch] | None) -> Batch:
    """The next micro-batch on the device, read by the first tensor-parallel rank and broadcast to its group."""
    samples = next(data_iterator) if data_iterator is not None else None
    return {
        **tensor_parallel.broadcast_data(["tokens", "labels", "position_ids"], samples, torch.int64),
        **tensor_parallel.broadcast_data(["loss_mask"], samples, torch.float32),
    }


def masked_loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sum of the token losses that count, their number, and both of them to report."""
    mask = loss_mask.view(-1).float()
    total = (losses.view(-1).float() * mask).sum()
    count = mask.sum()
    report = torch.stack([total.detach(), count])
    return total, count.to(torch.int), {"lm loss": report}


def forward_step(data_iterator: Iterator[Batch] | None, model: GPTModel) -> tuple[torch.Tensor, Any]:
    """Run the model on one micro-batch; its output and the function that makes the loss of it."""
    if not needs_batch():
        return model(None, None, None), None
    batch = next_batch(data_iterator)
    output = model(batch["tokens"], batch["position_ids"], attention_mask=None, labels=batch["labels"])
    return output, partial(masked_loss, batch["loss_mask"])


if __name__ == "__main__":
    arguments = parse_and_validate_args()
    if arguments.context_parallel_size > 1:
        raise SystemExit("--context-parallel-size: this script does not split sequences; leave it at 1")
    container = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    pretrain(container, build_datasets, ModelType.encoder_or_decoder, forward_step)
