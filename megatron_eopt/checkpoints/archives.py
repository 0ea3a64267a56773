"""Zip files as ``torch.save`` writes them, of which the data are read."""

import io
import zipfile
from typing import BinaryIO


def open_archive(file: BinaryIO) -> zipfile.ZipFile:
    """Open what ``torch.save`` wrote; ``ValueError`` for other zip files."""
    size = file.seek(0, io.SEEK_END)
    archive = zipfile.ZipFile(file)
    entries = archive.infolist()
    names = {entry.filename.casefold() for entry in entries}  # torch looks for them in any case
    if any(entry.compress_type != zipfile.ZIP_STORED or entry.filename != entry.orig_filename for entry in entries):
        raise ValueError("it is no archive as torch.save writes them, or it is damaged")
    if len(names) < len(entries) or sum(entry.file_size for entry in entries) > size:  # they share bytes
        raise ValueError("it is no archive as torch.save writes them, or it is damaged")
    if not any(entry.CRC for entry in entries):  # saved without checksums: zipfile then compares none
        for entry in entries:
            entry.CRC = None  # type: ignore[assignment]
    return archive
