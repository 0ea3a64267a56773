"""torchrun for ranks of this machine alone, with a store that nobody else can reach.

torch's own store listens on all interfaces, and believes whoever connects. Use it as torchrun:

    python examples/loopback.py --nproc-per-node 2 examples/train_ddp.py --optimizer muon
"""

import os
import socket

from torch.distributed import PrefixStore, TCPStore, run
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

ADDRESS = "127.0.0.1"
BACKEND = "loopback"


def listening_store() -> TCPStore:
    """A store that listens on the loopback interface, at a port that the system chooses, as long as it is kept."""
    listener = socket.create_server((ADDRESS, 0))
    port = listener.getsockname()[1]
    return TCPStore(ADDRESS, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def interfaces() -> dict[str, str]:
    """What lets gloo and NCCL talk over the loopback interface, where it is called as Linux calls it."""
    if "lo" not in {name for _, name in socket.if_nameindex()}:
        return {}
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def environment(store: TCPStore) -> dict[str, str]:
    """What ranks need to find a store that their parent keeps: torch then starts none in the first rank."""
    address = {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    return {**interfaces(), **address}


class Loopback(RendezvousHandler):
    """A rendezvous of one node with itself."""

    use_agent_store = True

    def __init__(self, parameters: RendezvousParameters) -> None:
        if parameters.max_nodes != 1:
            raise ValueError(f"these ranks are on one machine, but --nnodes allows {parameters.max_nodes}")
        self._run_id = parameters.run_id
        self._store = listening_store()
        self._attempts = 0  # of which each needs keys of its own

    def get_backend(self) -> str:
        """The name of this rendezvous."""
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """The store of an attempt, for the only node."""
        self._attempts += 1
        store = PrefixStore(f"attempt {self._attempts}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(ADDRESS, self._store.port))

    def is_closed(self) -> bool:
        """Never: no other node could close it."""
        return False

    def set_closed(self) -> None:
        """Nobody waits."""

    def num_nodes_waiting(self) -> int:
        """None: there is one node."""
        return 0

    def get_run_id(self) -> str:
        """The run's name, as torchrun has it."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing is left to end."""
        return True


@record
def main() -> None:
    """Run torchrun with this rendezvous, whatever its arguments name."""
    rendezvous_handler_registry.register(BACKEND, Loopback)
    os.environ.update(interfaces())
    arguments = run.parse_args(None)
    arguments.standalone = False
    arguments.rdzv_backend = BACKEND
    arguments.rdzv_endpoint = ""
    run.run(arguments)


if __name__ == "__main__":
    main()
