"""The version: the one place of it, which pyproject.toml and the command read."""

__version__ = "0.1.0.dev0"
