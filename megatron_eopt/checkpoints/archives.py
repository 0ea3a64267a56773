"""Zip files as ``torch.save`` writes them, and no others.

A zip file says several times what it holds, and readers differ in what they believe. Here only files are opened that
say it in one way: entries are stored as they are, once, in the order of torch.
"""

import io
import struct
import zipfile
from typing import BinaryIO

_END = struct.Struct("<4s36xQQ4s4xQ4x4s18x")  # of a zip file that torch wrote: its last 98 bytes
_DIRECTORY = 2**24  # bytes, of which an entry has about a hundred


def open_archive(file: BinaryIO) -> zipfile.ZipFile:
    """Open what ``torch.save`` wrote; ``ValueError`` for ambiguous zip files."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - _END.size))
    end = file.read()
    if _ends_as_written(end, size):
        archive = zipfile.ZipFile(file)
        if _is_written_by_torch(archive.infolist(), size):
            return archive
    raise ValueError("it is no archive as torch.save writes them, or it is damaged")


def root_of(archive: zipfile.ZipFile) -> str:
    """The folder in which everything is, with its slash."""
    return archive.namelist()[0].split("/")[0] + "/"


def _ends_as_written(end: bytes, size: int) -> bool:
    if len(end) != _END.size or not end.endswith(b"\0\0"):
        return False
    wide, length, start, locator, at, last = _END.unpack(end)
    if [wide, locator, last] != [b"PK\6\6", b"PK\6\7", b"PK\5\6"]:
        return False
    return bool(at == start + length == size - _END.size and length <= _DIRECTORY)


def _is_written_by_torch(entries: list[zipfile.ZipInfo], size: int) -> bool:
    names = [entry.filename for entry in entries]
    root = names[0].split("/")[0] if names else ""
    if f"{root}/data.pkl" not in names or f"{root}/constants.pkl" in names:  # which is TorchScript's
        return False
    if not all(name.startswith(f"{root}/") for name in names):
        return False
    if len({name.casefold() for name in names}) < len(names):  # torch looks for them in any case
        return False
    if any(entry.filename != entry.orig_filename for entry in entries):  # which torch reads by the latter
        return False
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        return False
    if sum(entry.file_size for entry in entries) > size:  # they share bytes
        return False
    if not any(entry.CRC for entry in entries):  # saved without checksums: zipfile then compares none
        for entry in entries:
            entry.CRC = None  # type: ignore[assignment]
    return True
