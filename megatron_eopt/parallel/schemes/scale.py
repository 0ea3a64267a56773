"""The scale of an update."""

from collections.abc import Callable

Scale = Callable[[int, int], float]
"""What an orthogonal factor is multiplied by, from the rows and columns of its matrix."""
