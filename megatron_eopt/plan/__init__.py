"""Plans of models without a GPU, a model or Megatron: the command ``megatron-eopt plan``."""
