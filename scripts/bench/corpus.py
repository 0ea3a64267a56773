"""The text of the comparison: Python sources of packages that every environment of this repository has.

``write`` makes three Megatron datasets of it in which a byte is a token: ``train``, and two of held-out text, ``tune``,
by which settings are chosen, and ``test``, by which they are judged.
"""

import hashlib
import shutil
from collections.abc import Iterable, Iterator
from importlib.metadata import files
from pathlib import Path

import numpy as np

PACKAGES = ("megatron-core", "torch")  # scripts/constraints.txt names their releases
HELD_OUT = ("tune", "test")
ONE_IN = 24  # files are held out for each of them
PIECES, PIECE = 64, 512
LENGTH = 128  # of a sequence, as the demo's
CACHE = "cache"  # folder of Megatron's indices, beside the text


def digest(data: bytes) -> int:
    """A hash that is the same on every machine."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8])


def sources() -> Iterator[tuple[str, bytes]]:
    """Name and text of the packages' Python files, by name; of several with one text the first, and no empty one.

    Raises:
        ValueError: a package has no list of its files.
    """
    seen = {b""}
    for package in PACKAGES:
        listed = files(package)
        if listed is None:
            raise ValueError(f"{package} is installed without a list of its files; install it by pip")
        for file in sorted(each for each in listed if each.suffix == ".py"):
            text = Path(str(file.locate())).read_bytes()
            if text not in seen:
                seen.add(text)
                yield str(file), text


def parts(texts: Iterable[tuple[str, bytes]]) -> dict[str, list[bytes]]:
    """The documents of each dataset; held-out text is one document, so that its sequences are always the same."""
    train: list[bytes] = []
    held_out: dict[str, list[tuple[int, bytes]]] = {name: [] for name in HELD_OUT}
    for name, text in texts:
        order = digest(name.encode())
        if order % ONE_IN < len(HELD_OUT):
            held_out[HELD_OUT[order % ONE_IN]].append((order, text))
        else:
            train.append(text)
    return {"train": train, **{name: [_pieces(found)] for name, found in held_out.items()}}


def _pieces(found: list[tuple[int, bytes]]) -> bytes:
    """A piece from the middle of each file in the order of their hashes, and one byte more: the last label."""
    long_enough = [text for _, text in sorted(found) if len(text) > 2 * PIECE][: PIECES + 1]
    if len(long_enough) <= PIECES:
        raise ValueError(f"expected {PIECES + 1} held-out files of {2 * PIECE} bytes, found {len(long_enough)}")
    pieces = b"".join(text[len(text) // 2 :][:PIECE] for text in long_enough)
    return pieces[: PIECES * PIECE + 1]


def write(folder: Path) -> str:
    """Write the datasets, unless the folder has them.

    Returns:
        a hash of all texts, which results keep.
    """
    # Megatron warns of much as it is imported
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    found = parts(sources())
    mark = f"{digest(b''.join(text for documents in found.values() for text in documents)):016x}"
    stamp = folder / "text"
    if not stamp.exists() or stamp.read_text() != mark:
        folder.mkdir(parents=True, exist_ok=True)
        # Megatron's indices: their names tell the paths of the text, not whether it is another one
        shutil.rmtree(folder / CACHE, ignore_errors=True)
        for name, documents in found.items():
            builder = IndexedDatasetBuilder(get_bin_path(str(folder / name)), dtype=np.uint8)
            for document in documents:
                builder.add_document(np.frombuffer(document, dtype=np.uint8), lengths=[len(document)])
            builder.finalize(get_idx_path(str(folder / name)))
        stamp.write_text(mark)
    return mark
