"""What ranks fork with: they would take longer to import it than for most of what they do."""

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401

import megatron_eopt  # noqa: F401

gc.collect()
gc.freeze()  # a collection would write to all objects that were imported, and so copy them
