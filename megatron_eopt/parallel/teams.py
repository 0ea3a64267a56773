"""Whole matrices that several ranks of a node orthogonalize together.

The rank that has such a matrix hands shards of it to its team: equally many consecutive ranks of a node. They work on
the shards as tensor-parallel ranks would, and hand the shards of the factor back. Pure Python: the same on every rank.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import gcd, prod

from megatron_eopt.parallel.cost import Rates, Works
from megatron_eopt.parallel.explain import figure
from megatron_eopt.parallel.plan import make_plan
from megatron_eopt.parallel.records import Matrix, Plan, TpMode, cut_at
from megatron_eopt.parallel.workspace import Workspace

TEAM = "team"  # label of the group

GPUS_OF_NODE = 8  # where nothing else is known

MODES: tuple[TpMode, ...] = ("auto", "gram")  # in which ranks work on shards where that is faster


@dataclass(frozen=True)
class Shared:
    """What a team works on, as one of its ranks sees it."""

    matrices: Sequence[Matrix]  # cut over the team
    own: frozenset[str]  # names of those that the rank has
    handed: int  # bytes of the whole matrices of the rank that has the most

    @property
    def ranks(self) -> int:
        """Ranks of the team."""
        return self.matrices[0].ranks

    @property
    def held(self) -> int:
        """Bytes of temporaries while matrices are handed over: them, and a copy that is sent."""
        return 2 * self.handed

    def seconds(self, rates: Rates) -> float:
        """What it takes to hand matrices over, and factors back."""
        return handed_seconds(self.handed, self.ranks, rates)

    def beside(self, matrices: Sequence[Matrix]) -> list[Matrix]:
        """Those of a rank's matrices that it keeps, and what its team works on."""
        return [*(matrix for matrix in matrices if matrix.name not in self.own), *self.matrices]

    def plan(self, matrices: Sequence[Matrix], mode: TpMode, works: Works, rates: Rates, workspace: Workspace) -> Plan:
        """The plan of a rank's matrices, and of those that its team works on."""
        return make_plan(self.beside(matrices), mode, works, rates, workspace=workspace)

    def explain(self, rates: Rates) -> str:
        """What the table of that plan lacks."""
        sent, ms = handed_bytes(self.handed, self.ranks), self.seconds(rates) * 1e3
        return (
            f"The matrices of group {TEAM!r} are the work of {self.ranks} ranks of a node. The rank that has one sends "
            f"shards, and gets those of the\nfactor back: at most {figure(sent / 1e6)} MB each way, {figure(ms)} ms "
            f"for both, and {figure(self.held / 2**20)} MiB of temporaries beside those above."
        )


def shared_by(matrices: Sequence[Matrix], owners: Sequence[int], rank: int) -> Shared:
    """What a team works on: matrices cut over it, and the rank that has each."""
    handed, pairs = Counter[int](), list(zip(matrices, owners, strict=True))
    for matrix, owner in pairs:
        handed[owner] += nbytes([matrix])
    return Shared(matrices, frozenset(m.name for m, owner in pairs if owner == rank), max(handed.values()))


def mode_of_team(mode: TpMode) -> TpMode:
    """The mode in which a team works, or would."""
    return mode if mode in MODES else MODES[0]


def nbytes(matrices: Sequence[Matrix]) -> int:
    """Bytes of whole matrices where they are exchanged."""
    return sum(matrix.itemsize * prod(matrix.shape) for matrix in matrices)


def cut_over(matrix: Matrix, ranks: int) -> Matrix:
    """A whole matrix, cut along its long side over a team."""
    dim = int(matrix.shape[1] > matrix.shape[0])
    edges = [matrix.shape[dim] * rank // ranks for rank in range(ranks + 1)]
    return replace(matrix, rectangles=cut_at(matrix.shape, dim, edges), group=TEAM)


def handed_bytes(nbytes: int, ranks: int) -> int:
    """Bytes of whole matrices that their rank sends, and later gets back."""
    return nbytes * (ranks - 1) // ranks


def handed_seconds(nbytes: int, ranks: int, rates: Rates) -> float:
    """Seconds of both ways, if the busiest rank has so many bytes of whole matrices."""
    return 2 * (handed_bytes(nbytes, ranks) / rates.bytes + rates.latency)


def run_length(ranks: Sequence[int], of_node: int) -> int:
    """Ranks of a group that always are on one node, one behind another.

    ``ranks`` are global, ``of_node`` of them are on each node. Runs of several lengths are cut into equal ones.
    """
    return gcd(*(len(list(run)) for _, run in groupby(rank // of_node for rank in ranks)))


def team_sizes(together: int, most: int) -> list[int]:
    """Sizes of teams into which ``together`` ranks of a node can be cut."""
    return [size for size in range(2, min(together, most) + 1) if together % size == 0]
