"""What the tests of several ranks share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Ranks compute in one thread each, and so does what they are compared with: sums round by how they are cut."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
