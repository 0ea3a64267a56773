"""The walk of a gradient through one step has the files that it enters, and counts calls of the package alone."""

from typing import get_args

import walk

from megatron_eopt.orthogonalize.coefficients import NSCoeffT, set_length


def test_what_is_counted_are_calls_of_the_package():
    def outer():
        return [set_length(get_args(NSCoeffT)[0]), sorted([2, 1])]

    found = walk.walk(outer)
    assert found.files == ["orthogonalize/coefficients.py", "orthogonalize/choices.py"]
    assert (found.calls, found.depth, found.stays) == (5, 4, 2)
