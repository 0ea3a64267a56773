"""Real, unmodified Megatron-Core on a CPU over gloo.

For tests, the demo and dry runs, never for speed::

    from megatron_eopt.tools import cpu

    cpu.install()  # before torch.distributed is initialized, best before Megatron is imported
    ...            # megatron.training.pretrain as on GPUs
    cpu.undo()     # the process is as it was

The host answers for torch.cuda, the CPU for ``.cuda()`` and ``device="cuda"``, gloo for nccl. Attributes are replaced,
each with its reason (:func:`describe`), in all threads; other torch calls cost nothing more.

Megatron's own arguments still have to suit a CPU: ``--transformer-impl local``, ``--use-cpu-initialization`` and no
fusions (``--no-gradient-accumulation-fusion --no-bias-dropout-fusion --no-masked-softmax-fusion
--no-persist-layer-norm --no-rope-fusion``). Not supported: CUDA graphs, memory pools, Transformer Engine, NCCL's user
buffers and SHARP. What ``torch.compile`` decorated while it was installed runs uncompiled after :func:`undo` too.
"""

import torch
import torch.distributed as dist

from megatron_eopt.redirect import Redirections
from megatron_eopt.tools.cpu import calls, device

_active: Redirections | None = None


def _all() -> Redirections:
    return Redirections(
        # Megatron comes last: it is imported by its redirection, when torch answers already.
        [*device.redirections(), *calls.redirections(), *calls.of_megatron()],
        # Whose modules may have imported a redirected name: torch.distributed and torch.cuda re-export their own.
        ("megatron", "torch.cuda", "torch.distributed"),
    )


def installed() -> bool:
    """Whether :func:`install` is in force."""
    return _active is not None


def install() -> None:
    """Redirect what Megatron asks of a GPU to the CPU.

    Raises:
        RuntimeError: if there is a GPU, or torch.distributed runs on a backend other than gloo. Nothing is changed.
    """
    global _active
    if installed():
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            f"a CPU run was asked for, but torch.cuda finds {torch.cuda.device_count()} GPU(s), and redirecting them "
            "would mix both. Hide them with CUDA_VISIBLE_DEVICES= (set, and empty) before the process starts, or run "
            "without --cpu."
        )
    if dist.is_available() and dist.is_initialized() and dist.get_backend() != dist.Backend.GLOO:
        raise RuntimeError(
            f"torch.distributed is initialized with the backend {dist.get_backend()!r}; a CPU run needs 'gloo'. "
            "Call megatron_eopt.tools.cpu.install() before torch.distributed.init_process_group, or initialize it "
            "with 'gloo'."
        )
    redirections = _all()
    redirections.install()
    _active = redirections


def undo() -> None:
    """Undo :func:`install`; process groups made in the meantime stay."""
    global _active
    if _active is not None:
        _active.undo()
        _active = None


def describe() -> list[str]:
    """Each installed or possible redirection as ``what: why``."""
    return [str(redirection) for redirection in (_active or _all()).redirections]
