"""A small model's parameters, as selectors see them."""

from dataclasses import dataclass, field

from megatron_eopt.routing import ParameterInfo

EMBEDDING = {"is_embedding_or_output_parameter": True}
EXPERT = {"expert_tp": True, "allreduce": False}


def model(layers=2):
    """Parameters of a GPT with one expert layer."""
    found = [ParameterInfo("embedding.word_embeddings.weight", (512, 64), EMBEDDING)]
    for layer in range(layers):
        at = f"decoder.layers.{layer}"
        found += [
            ParameterInfo(f"{at}.self_attention.linear_qkv.weight", (96, 64), {"is_qkv": True}),
            ParameterInfo(f"{at}.self_attention.linear_qkv.bias", (96,)),
            ParameterInfo(f"{at}.self_attention.linear_proj.weight", (64, 64)),
            ParameterInfo(f"{at}.mlp.linear_fc1.weight", (256, 64)),
            ParameterInfo(f"{at}.mlp.linear_fc2.weight", (64, 256)),
            ParameterInfo(f"{at}.mlp.experts.local_experts.0.linear_fc1.weight", (256, 64), EXPERT),
            ParameterInfo(f"{at}.mlp.experts.stacked", (4, 256, 64), EXPERT),
        ]
    return [
        *found,
        ParameterInfo("decoder.final_layernorm.weight", (64,)),
        ParameterInfo("output_layer.weight", (512, 64), EMBEDDING),
    ]


def named(name):
    """The parameter of that name."""
    return next(info for info in model() if info.name == name)


@dataclass(frozen=True)
class FromMegatron:
    """A ParamPredicate, or a ParamWithNamePredicate."""

    name: str
    fn: object = field(compare=False)

    def __call__(self, *args):
        return self.fn(*args)


@dataclass(frozen=True)
class ParamKey:
    """Megatron's, whose fields these are."""

    name: object = ()
    attr: object = ()
    predicate: object = ()
    with_name_predicate: object = ()
