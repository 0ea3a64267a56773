"""pretrain.py with weights and gradients of the whole model that are the same on any layout.

The gradients take the place of the model's own before each step of Megatron's optimizer. What it makes of them can be
compared to rounding: forward and backward passes, which layouts round in different ways, have no part in it. FAULT
names a function below, which changes gradients of the whole model.
"""

import os
import runpy
import zlib
from pathlib import Path

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer
from megatron.training import get_args
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.megatron.faulty import replaced
from tests.megatron.pretrain import cut, global_name, tensor_parallel_group

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
SIGNAL = 4.0
"""Of the gradients, over their noise: the singular values of a matrix with short side n are so far apart, over n."""


def generator(*of):
    return torch.Generator().manual_seed(zlib.crc32(repr(of).encode()))


def weights_of(name, shape):
    noise = 0.1 * torch.randn(shape, generator=generator(name))
    return noise if len(shape) > 1 else 1 + noise


def gradient_of(name, shape, step):
    """Noise and, in a matrix, blocks of diagonals along its long side.

    Any whole number of blocks spans both of its sides, with singular values that lie apart, so that the eigenvectors of
    Shampoo's factors follow from the gradients, and not from their rounding.
    """
    gradient = torch.randn(shape, generator=generator(name, step))
    if len(shape) == 2:
        diagonal = SIGNAL * (1 + torch.arange(min(shape)) / min(shape)).diag()
        gradient += diagonal.repeat([length // min(shape) for length in shape])
    return gradient


def shards(name, gradient, step):
    """In the last step, shards of one matrix change places, and a half of another has the other sign."""
    if step == 5 and name == "decoder.layers.1.self_attention.linear_proj.weight":
        return gradient.roll(gradient.size(1) // 2, 1)
    if step == 5 and name == "decoder.layers.0.self_attention.linear_proj.weight":
        return torch.cat([-gradient[:4], gradient[4:]])
    return gradient


def part(parameter, name, whole):
    """This rank's part of what a function makes of the name and the shape of a parameter of the whole model."""
    tied = name == OUTPUT and not get_args().untie_embeddings_and_output_weights
    (dim, rank), size = cut(parameter), tensor_parallel_group(parameter).size()
    x = whole(EMBEDDING if tied else name, [n * (size if i == dim else 1) for i, n in enumerate(parameter.shape)])
    if dim < 0:
        return x
    matrices = x.chunk(2) if name.endswith("linear_fc1.weight") else [x]  # gate and up
    return torch.cat([matrix.chunk(size, dim)[rank] for matrix in matrices])


def set_gradient(parameter, gradient):
    """Put the gradient of a tensor-parallel shard where the optimizer looks for it."""
    if hasattr(parameter, "orig_param"):  # of Megatron-FSDP
        if parameter.grad is not None:
            (own,) = parameter._local_tensor.__create_chunk_list__()
            rows = gradient[tuple(slice(at, at + n) for at, n in zip(own.offsets, own.sizes, strict=True))]
            parameter.grad._local_tensor.copy_(rows)
    elif isinstance(parameter, DTensor):
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
    else:
        parameter.main_grad.copy_(gradient)


def main():
    fault = globals().get(os.environ.get("FAULT"), lambda name, gradient, step: gradient)
    models, names = [], {}

    @replaced(GPTModel, "__init__")
    def init(real, self, *args, **kwargs):
        real(self, *args, **kwargs)
        models.append(self)
        for name, parameter in self.named_parameters():
            names[parameter] = global_name(name, self)
            parameter.data.copy_(part(parameter, names[parameter], weights_of))

    @replaced(ChainedOptimizer, "step")
    def step(real, self):
        def gradient(name, shape):
            iteration = get_args().curr_iteration  # from 0, also counted where a run goes on
            return fault(name, gradient_of(name, shape, iteration), iteration)

        if get_args().use_megatron_fsdp:
            for parameter in (p for group in self.param_groups for p in group["params"]):
                whole = parameter.orig_param
                set_gradient(parameter, part(whole, names[whole], gradient))
        else:
            for model in models:
                for name, parameter in model.named_parameters():
                    set_gradient(parameter, part(parameter, global_name(name, model), gradient))
        return real(self)

    runpy.run_path(str(Path(__file__).with_name("pretrain.py")), run_name="__main__")


if __name__ == "__main__":
    main()
