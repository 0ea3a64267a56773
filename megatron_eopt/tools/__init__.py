"""Commands and aids beside the core, which imports none of them."""
