"""What is installed, and what of it works together: without a GPU, and whatever is missing or broken."""
