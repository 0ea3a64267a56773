"""Count what a whole step launches on a GPU, and the bytes it moves. No GPU is needed.

A step runs on CUDA tensors without numbers, with the kernels that a GPU would take left out. A multi-tensor call counts
as the kernels that torch makes of it, by its limits of tensors and blocks, and as one a tensor where tensors are not
alike. Bytes are those of each operation's tensors, read and written once; what a library's call takes inside is unseen.
"""

import argparse
import warnings
from math import prod

from counting import launches_of_step
from models import CASES, SETS


def main() -> None:
    """Print a table of launches and bytes, or what one optimizer launches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}; by default all")
    parser.add_argument("--set", choices=SETS, default="124M", help="the matrices")
    parser.add_argument("--kernels", action="store_true", help="also list kernels by name")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(CASES)):
        parser.error(f"unknown {', '.join(unknown)}: choose from {', '.join(CASES)}")
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    shapes = SETS[args.set]
    entries = sum(map(prod, shapes))
    print(f"{args.set}: {len(shapes)} parameters, {entries / 1e6:.0f} M entries")
    print(f"{'':32}{'launches':>10}{'bytes an entry':>16}")
    for label in args.names or CASES:
        name, settings = CASES[label]
        counted = launches_of_step(name, shapes, **settings)
        total = sum(counted.bytes.values()) / entries
        print(f"{label:32}{counted.kernels.total():10,}{total:16.1f}", flush=True)
        if args.kernels:
            for kernel, count in counted.kernels.most_common():
                print(f"    {kernel:32}{count:6,}{counted.bytes[kernel] / entries:16.1f}")


if __name__ == "__main__":
    main()
