"""Steps of optimizers that orthogonalize momenta."""
