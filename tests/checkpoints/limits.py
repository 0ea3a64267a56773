"""Run a function in a process of its own, which has little memory and time, and may die."""

import contextlib
import gc
import os
import resource
import signal
import sys

MEMORY = 2**30  # bytes beyond those that the process has
SECONDS = 30  # of a processor; each of these takes less than one
# What code in a file would do: Python tells audit hooks of it before it happens.
DEEDS = (
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link"),
    *(
        "os.symlink",
        "os.chmod",
        "os.putenv",
        "subprocess.",
        "exec",
        "compile",
        "import",
        "socket.",
        "shutil.",
        "ctypes.",
    ),
)
_watched = None
"".encode("cp437")  # which Python imports for the first archive whose names are not of UTF-8


def run(function):
    """Exit status of ``function`` and what it printed."""
    read, write = os.pipe()
    if not (child := os.fork()):
        gc.freeze()  # what the parent has is copied where it is looked at
        status = 99
        with contextlib.suppress(BaseException), open(write, "w") as out:
            os.close(read)
            with open("/proc/self/statm") as file:
                used = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            spent = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
            resource.setrlimit(resource.RLIMIT_CPU, (int(spent) + SECONDS, int(spent) + SECONDS))
            signal.alarm(10 * SECONDS)  # should it wait for what never comes
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                status = function()
        os._exit(status)
    os.close(write)
    with open(read, errors="replace") as out:
        said = out.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said


def _hook(event, arguments):
    if _watched is not None:
        opened = event == "open" and any(each in str(arguments[1]) for each in "wax+")
        if opened or event.startswith(DEEDS):
            _watched.append((event, str(arguments)[:200]))


@contextlib.contextmanager
def deeds():
    """What was done meanwhile that a load of data does not do."""
    global _watched
    if not hasattr(sys, "_megatron_eopt_hook"):  # a hook stays for ever
        sys.addaudithook(_hook)
        sys._megatron_eopt_hook = True
    _watched = found = []
    try:
        yield found
    finally:
        _watched = None
