"""A small GPT on synthetic sequences through ``megatron.training.pretrain``, and a record of what became of it.

Run by the tests on one or more ranks, with Megatron's arguments. Where RECORD names a folder, every rank leaves
``RANK.pt`` there: losses, gradient norms, its bytes of state, parameters and optimizer state
as they were before the first step and after the last, settings of the optimizers' groups before each step and after the
last, and how many matrices were orthogonalized by the end of each step.
ON_ONE_RANK has a rank, and flags that only this rank gets. Where FROM_PROVIDER is set, 0.19 builds the model from a
provider, too: only then it lays gradient buffers out for whole matrices, as later releases do in either way.
"""

import os
import re
import sys
from functools import partial
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.optimizer import ChainedOptimizer
from megatron.training import get_args, pretrain
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor import DTensor


class Sequences(torch.utils.data.Dataset):
    """Counts by threes from a random start, modulo 100: every next token can be learned."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        seq_length = get_args().seq_length
        start = torch.randint(0, 100, (1,), generator=torch.Generator().manual_seed(index))
        tokens = (start + 3 * torch.arange(seq_length + 1)) % 100
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(seq_length),
            "position_ids": torch.arange(seq_length),
        }


class Validation(Sequences):
    """The same four again and again: every evaluation sees the same."""

    def __getitem__(self, index):
        return super().__getitem__(index % 4)


def datasets(num_samples, vp_stage=None):
    train, valid, _ = num_samples
    return Sequences(train), Validation(valid) if valid else None, None


datasets.is_distributed = True


class Record:
    """What one rank saw; installs itself around Megatron's optimizer step."""

    def __init__(self):
        self.losses, self.grad_norms, self.before, self.after = [], [], None, None
        self.models, self.optimizer, self.groups_of_steps, self.groups, self.calls = {}, None, [], [], []
        step = ChainedOptimizer.step

        def recorded_step(optimizer, *args, **kwargs):
            if self.optimizer is None:
                self.optimizer = optimizer
                self.before = self.snapshot()
            self.groups_of_steps.append(self.settings())
            result = step(optimizer, *args, **kwargs)
            self.grad_norms.append(float(result[1]))
            self.calls.append(sum(getattr(each, "newton_schulz_calls", 0) for each in self.optimizers()))
            return result

        ChainedOptimizer.step = recorded_step

    def wrappers(self):
        """Megatron's wrappers of a torch optimizer on this rank."""
        chained = [
            inner for each in self.optimizer.chained_optimizers for inner in getattr(each, "chained_optimizers", [each])
        ]
        return [each for each in chained if getattr(each, "optimizer", None) is not None]

    def optimizers(self):
        """The torch optimizers on this rank."""
        return [each.optimizer for each in self.wrappers()]

    def snapshot(self):
        """Name in the whole model -> {"parameter", "main" in bf16 where this rank updates it, state keys, "cut"}.

        Tensors are copies, of FSDP's shards together. "cut" is the dimension along which tensor parallelism cuts the
        parameter and which of the parts this is; (-1, 0) where it does not.
        """
        states = {parameter: state for each in self.optimizers() for parameter, state in each.state.items()}
        for each in self.wrappers():  # whose optimizer may have a shard of a parameter
            for parameter, (group, index) in getattr(each, "model_param_group_index_map", {}).items():
                states[parameter] = states.get(each.optimizer.param_groups[group]["params"][index], {})
        tensors = {}
        for model in self.models.values():
            if hasattr(model, "megatron_fsdp_dist_index"):
                model.state_dict()  # lets the model have the parameters of the optimizer
            for name, parameter in model.named_parameters():
                main = getattr(parameter, "main_param", None)
                state = states.get(parameter if main is None else main, {})
                found = {"parameter": parameter, "main": main, **state}
                kept = {key: unsharded(value, parameter) for key, value in found.items() if torch.is_tensor(value)}
                tensors[global_name(name, model)] = {**kept, "cut": cut(parameter)}
        return tensors

    def settings(self):
        """The groups that have parameters on this rank, without these and with plain values only.

        Of others, which a pipeline stage may have, neither a step nor a checkpoint knows what they have counted.
        """
        return [
            [
                {key: value for key, value in group.items() if is_plain(value)}
                for group in each.param_groups
                if group["params"]
            ]
            for each in self.optimizers()
        ]

    def save(self, folder):
        together = os.environ["WORLD_SIZE"] == "1" or sys.exc_info()[0] in (None, SystemExit)
        if self.optimizer is not None and together:  # after an error, other ranks may be elsewhere
            self.after, self.groups = self.snapshot(), self.settings()
        states = [state for each in self.optimizers() for state in each.state.values()] if self.optimizer else []
        held = [getattr(value, "_local_tensor", value) for state in states for value in state.values()]
        kept = {"state_bytes": sum(value.nbytes for value in held if torch.is_tensor(value) and value.ndim)}
        kept["host_bytes"] = sum(map(on_host, self.optimizers())) if self.optimizer else 0
        of_run = ("losses", "grad_norms", "before", "after", "groups_of_steps", "groups", "calls")
        kept |= {key: getattr(self, key) for key in of_run}
        torch.save(kept, Path(folder) / f"{os.environ['RANK']}.pt")


def on_host(optimizer):
    """Bytes of the state that an optimizer of this package keeps in host memory."""
    total = 0
    for parameter, state in optimizer.state.items():
        if hasattr(optimizer, "on_host") and optimizer.on_host(parameter):
            total += sum(value.nbytes for value in state.values() if value.shape == parameter.shape)
    return total


def unsharded(value, parameter):
    """A copy of a tensor of a parameter; with FSDP, of its tensor-parallel shard. All ranks call it together."""
    value = value.detach()
    if hasattr(parameter, "orig_param"):
        return unsharded_by_megatron(value).clone()
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if not isinstance(parameter, DTensor) or not value.ndim:
        return value.clone()
    group = parameter.device_mesh.get_group()
    parts = [None] * group.size()
    torch.distributed.all_gather_object(parts, value, group=group)
    alike = all(torch.equal(part, parts[0]) for part in parts)
    return parts[0] if alike else torch.cat(parts)


def is_plain(value):
    return value is None or isinstance(value, int | float | str | tuple)


def global_name(name, model):
    """Name of a parameter without wrappers, its layer counted over pipeline stages and its expert over ranks."""
    if (layer := re.match(r".*\.layers\.\d+(?=\.)", name)) is not None:
        number = model.get_submodule(layer[0]).layer_number - 1
        name = re.sub(r"\.layers\.\d+\.", f".layers.{number}.", name)
    if (expert := re.search(r"local_experts\.(\d+)", name)) is not None:
        per_rank = get_args().num_experts // parallel_state.get_expert_model_parallel_world_size()
        number = parallel_state.get_expert_model_parallel_rank() * per_rank + int(expert[1])
        name = name.replace(expert[0], f"local_experts.{number}")
    return re.sub(r"^(module\.)*", "", name)


def unsharded_by_megatron(x):
    """What a rank would have without Megatron-FSDP, of a tensor that this has sharded; all ranks ask together."""
    if not isinstance(x, DTensor):
        return x
    from megatron.core.distributed.fsdp.src.megatron_fsdp.uneven_dtensor import uneven_dtensor_to_full_tensor

    full, mesh = uneven_dtensor_to_full_tensor(x), x.device_mesh
    if mesh.mesh_dim_names[-1] != "tp" or not x.placements[-1].is_shard():
        return full
    return full.chunk(mesh.shape[-1], x.placements[-1].dim)[mesh.get_local_rank("tp")]


def cut(parameter):
    if not getattr(parameter, "tensor_model_parallel", False):
        return -1, 0
    return parameter.partition_dim, tensor_parallel_group(parameter).rank()


def tensor_parallel_group(parameter):
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def of_context_rank(x, dim, rank=None):
    """What a context-parallel rank has of sequences: one part from the front and its counterpart from the end."""
    ranks = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank() if rank is None else rank
    parts = x.chunk(2 * ranks, dim)
    return torch.cat([parts[rank], parts[-1 - rank]], dim) if ranks > 1 else x


class Attention(torch.nn.Module):
    """Causal attention, also over context-parallel ranks, and which keeps the largest logit of each head.

    Its values may be shorter than its keys. Megatron's own without Transformer Engine can do none of it.
    """

    current_max_attn_logits = None

    def __init__(self, softmax_scale=None, **described):
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query, key, value, attention_mask, **described):
        """(sequence, batch, heads, channels) to (sequence, batch, all channels of all heads)."""
        heads = query.size(2) // key.size(2)
        ranks = parallel_state.get_context_parallel_world_size()
        seen = torch.ones(len(query) * ranks, len(query) * ranks, dtype=torch.bool).tril()
        if ranks > 1:
            group = parallel_state.get_context_parallel_group()
            key, value = (torch.cat(all_gather(each, group=group)) for each in (key, value))
            seen = torch.cat([of_context_rank(seen, 1, rank) for rank in range(ranks)], 1)
            seen = of_context_rank(seen, 0)
        query, key, value = (
            each.repeat_interleave(repeated, 2).permute(1, 2, 0, 3)
            for each, repeated in ((query, 1), (key, heads), (value, heads))
        )
        if getattr(get_args(), "qk_clip", False):
            logits = (query @ key.mT).detach().float() * (self.softmax_scale or query.size(-1) ** -0.5)
            largest = logits.where(seen, -torch.inf).amax((0, 2, 3))
            before = self.current_max_attn_logits
            self.current_max_attn_logits = largest if before is None else largest.maximum(before)
        result = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, scale=self.softmax_scale
        )
        return result.permute(2, 0, 1, 3).flatten(2)


record = Record()


def loss_func(mask, output):
    losses, mask = output.float().view(-1), mask.view(-1).float()
    total, count = (losses * mask).sum(), mask.sum().detach().to(torch.int)
    if torch.is_grad_enabled():  # evaluation has losses of its own
        record.losses.append((total.detach() / count).item())
    return total, count, {"lm loss": torch.cat([total.detach().view(1), count.view(1).float()])}


def forward_step(iterator, model, return_schedule_plan=False):
    record.models.setdefault(id(model), model)
    batch = {key: of_context_rank(value, 1) for key, value in next(iterator).items()}
    output = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return output, partial(loss_func, batch["loss_mask"])


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    config = config or core_transformer_config_from_args(args)
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization=args.normalization, vp_stage=vp_stage
        ),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def main():
    from megatron.training import argument_utils
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args()
    if args.multi_latent_attention or args.context_parallel_size > 1 or getattr(args, "qk_clip", False):
        from megatron.core.models.backends import LocalSpecProvider

        LocalSpecProvider.core_attention = lambda provider: Attention
    if "FROM_PROVIDER" in os.environ:
        config = argument_utils.pretrain_cfg_container_from_args(args)
        pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, model_provider=model_provider)
    else:
        config = argument_utils.pretrain_cfg_container_from_args(args, argument_utils.gpt_config_from_args(args))
        pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    rank, _, flags = os.environ.get("ON_ONE_RANK", "").partition(" ")
    if rank == os.environ["RANK"]:
        sys.argv += flags.split()
    try:
        main()
    finally:
        if "RECORD" in os.environ:
            record.save(os.environ["RECORD"])
    torch.distributed.barrier()  # a rank that leaves closes connections that others still read
    torch.distributed.destroy_process_group()  # a thread of gloo that still runs at the end aborts the process
