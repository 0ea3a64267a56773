"""Settings of optimizers: what a constructor's signature cannot say of them is said here once."""
