"""What every optimizer of plain torch says of itself."""

from torch import Tensor
from torch.optim.optimizer import Optimizer

from megatron_eopt.step.ownership import ownership
from megatron_eopt.step.parameters import local


class ReportingOptimizer(Optimizer):
    """A torch optimizer that says what it does."""

    @property
    def matrices(self) -> "ReportingOptimizer":
        """The optimizer of matrices, inside or itself."""
        return self

    def skipped_steps(self) -> int:
        """How many steps were skipped; waits for the device.

        torch's AdamW by itself looks at no gradients, and skips none.
        """
        return 0

    def state_bytes(self) -> int:
        """Bytes of the state that this rank has now."""
        states = self.state.values()
        return sum(local(x).nbytes for state in states for x in state.values() if isinstance(x, Tensor))

    def explain(self) -> str:
        """Which parameters it has, at which rates, and what ranks exchange in a step; all ranks ask.

        Muon and its relatives have a table of their plan alone.
        """
        return ownership([self])
