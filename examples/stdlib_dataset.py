"""Write the sources of Python's standard library as a dataset that Megatron trains from.

Every Python brings them, so that the example downloads nothing. A byte is a token: there are 256 of them, and 255
occurs in no UTF-8 text, so Megatron's NullTokenizer may take it for its end-of-document token.

    python examples/stdlib_dataset.py demo-out/stdlib    # writes demo-out/stdlib.bin and demo-out/stdlib.idx
"""

import argparse
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path


def stdlib_sources() -> list[Path]:
    """The top-level modules of the standard library, in the order of their names."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def write_dataset(files: Sequence[Path], prefix: Path) -> int:
    """Write ``prefix.bin`` and ``prefix.idx`` with one document per file that is not empty.

    Returns:
        the number of tokens, which is the number of bytes.

    Raises:
        ValueError: there is nothing to write.
    """
    documents = [np.frombuffer(text, dtype=np.uint8) for file in files if (text := file.read_bytes())]
    if not documents:
        raise ValueError(f"no bytes to write to {prefix}: {len(files)} files were given, and none holds any")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=np.uint8)
    for document in documents:
        builder.add_document(document, lengths=[document.size])
    builder.finalize(get_idx_path(str(prefix)))
    return sum(document.size for document in documents)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the standard library's sources as a Megatron dataset.")
    parser.add_argument("prefix", type=Path, help="path of the dataset without .bin and .idx")
    arguments = parser.parse_args()
    print(f"{write_dataset(stdlib_sources(), arguments.prefix)} tokens in {arguments.prefix}.bin")
