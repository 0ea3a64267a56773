"""Muon's step."""

from megatron_eopt.parallel.scheduler import Program
from megatron_eopt.step.step import Step


def muon(step: Step) -> Program:
    """Muon's step of some parameters [1].

    ``p`` is a parameter, ``g`` its gradient, ``m`` its momentum; without ``nesterov`` ``u`` is ``m``. ``O`` is the
    orthogonal factor of a whole logical matrix of ``u``, on whichever ranks it lies, and ``s`` its scale. What groups
    modify is in :mod:`~megatron_eopt.step.modifiers`.

    [1] Jordan et al., Muon: An optimizer for hidden layers in neural networks, https://kellerjordan.github.io/posts/muon/
    """
    step.decay()  # p -= lr * weight_decay * p
    u = step.momentum()  # m += (1 - beta) (g - m);  u = (1 - beta) g + beta m
    O = yield from step.orthogonalize(u)  # of each whole logical matrix: ranks may wait here
    step.subtract(O, step.scales)  # p -= lr * s O
