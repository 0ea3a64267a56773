"""What steps of all optimizers are made of: state, gradients, stacks of matrices, loads."""
