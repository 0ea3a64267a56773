"""A run that is described by its flags alone: its model without numbers, its optimizers, and what they will do."""
