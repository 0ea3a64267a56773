"""What all tests share."""

import multiprocessing

import pytest
from hypothesis import settings

from megatron_eopt.megatron import releases

# a deadline would make a test of values one of the machine's load
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

multiprocessing.set_forkserver_preload(["tests.distributed.preloaded"])


def pytest_collection_modifyitems(items):
    """Skip tests of what the installed Megatron-Core has not; ``scripts/megatron_sources.py`` runs them on another."""
    for item in items:
        for needed in (mark.args for mark in item.iter_markers("since")):
            if releases.number(releases.version()) < needed:
                item.add_marker(pytest.mark.skip(reason=f"Megatron-Core {'.'.join(map(str, needed))} has it"))


@pytest.fixture(scope="module")
def selected(request):
    """Which values of a parameter the selected tests of a module have: what its fixtures run."""

    def values(name):
        tests = [
            item.callspec.params
            for item in request.session.items
            if hasattr(item, "callspec") and item.module is request.module
        ]
        return list(dict.fromkeys(params[name] for params in tests if name in params))

    return values
