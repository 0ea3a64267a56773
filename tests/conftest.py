"""What all tests share."""

import multiprocessing

from hypothesis import settings

# a deadline would make a test of values one of the machine's load
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

multiprocessing.set_forkserver_preload(["tests.distributed.preloaded"])
