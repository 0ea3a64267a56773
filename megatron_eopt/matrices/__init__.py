"""The logical matrices of parameters: exact split and merge."""

from megatron_eopt.matrices.declared import ATTRIBUTE as ATTRIBUTE
from megatron_eopt.matrices.declared import GATE_UP as GATE_UP
from megatron_eopt.matrices.declared import check_split_shapes as check_split_shapes
from megatron_eopt.matrices.declared import concatenated as concatenated
from megatron_eopt.matrices.declared import declare as declare
from megatron_eopt.matrices.declared import declared_split as declared_split
from megatron_eopt.matrices.declared import experts as experts
from megatron_eopt.matrices.declared import heads as heads
from megatron_eopt.matrices.declared import interleaved as interleaved
from megatron_eopt.matrices.declared import interleaved_gate_up as interleaved_gate_up
from megatron_eopt.matrices.declared import is_transposed as is_transposed
from megatron_eopt.matrices.declared import key_value as key_value
from megatron_eopt.matrices.declared import latent_down as latent_down
from megatron_eopt.matrices.declared import per_shard as per_shard
from megatron_eopt.matrices.declared import query_key_value as query_key_value
from megatron_eopt.matrices.declared import split_of as split_of
from megatron_eopt.matrices.declared import tag_declared as tag_declared
from megatron_eopt.matrices.declared import transposed as transposed
from megatron_eopt.matrices.declared import undeclare as undeclare
from megatron_eopt.matrices.declared import warn_of_unmatched as warn_of_unmatched
from megatron_eopt.matrices.split import WHOLE as WHOLE
from megatron_eopt.matrices.split import LocalRows as LocalRows
from megatron_eopt.matrices.split import Order as Order
from megatron_eopt.matrices.split import Part as Part
from megatron_eopt.matrices.split import Split as Split
