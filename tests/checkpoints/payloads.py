"""Pickles that would do harm, each in its own way: code, memory, time, or the end of the process."""

import codecs
import collections
import copyreg
import functools
import io
import os
import pickle
import struct
import zipfile
import zlib
from dataclasses import dataclass

import numpy
import torch


@dataclass(eq=False)
class Call:
    """Pickles itself as a call of any function, and then the rest of what ``__reduce__`` may say."""

    function: object
    arguments: tuple
    rest: tuple = ()

    def __reduce__(self):
        return self.function, self.arguments, *self.rest


dumps = functools.partial(pickle.dumps, protocol=2)  # whose operations torch's reader has


def called_by_pickle(function, *arguments):
    """A pickle that calls a function."""
    return dumps(Call(function, arguments))


def archive(value, **how):
    file = io.BytesIO()
    torch.save(value, file, **how)
    return file.getvalue()


def legacy(value):
    return archive(value, _use_new_zipfile_serialization=False)


def byte_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def zipped(entries):
    """A zip file as torch writes it, of (name, data, another name that some readers take)."""
    out = directory = b""
    for name, data, other in entries:
        name, crc, at = name.encode(), zlib.crc32(data), len(out)
        sizes = (crc, len(data), len(data), len(name))
        out += struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 0, 0x800, 0, 0, 0, *sizes, 0) + name + data
        extra = b""
        if other:
            body = struct.pack("<BL", 1, zlib.crc32(name)) + other.encode()
            extra = struct.pack("<HH", 0x7075, len(body)) + body
        head = (b"PK\1\2", 0, 0, 0x800, 0, 0, 0, *sizes, len(extra), 0, 0, 0, 0, at)
        directory += struct.pack("<4sHHHHHHIIIHHHHHII", *head) + name + extra
    at, count = len(out), len(entries)
    end = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 0x31E, 45, 0, 0, count, count, len(directory), at)
    end += struct.pack("<4sIQI", b"PK\6\7", 0, at + len(directory), 1)
    end += struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, len(directory), 2**32 - 1, 0)
    return out + directory + end


def with_pickle(pickled, hidden=False, sound=None):
    """An archive whose ``data.pkl`` is another; hidden from readers that take the names of Unicode fields."""
    sound = archive({"a": 1}) if sound is None else sound
    entries = [(each.filename, zipfile.ZipFile(io.BytesIO(sound)).read(each), None) for each in entries_of(sound)]
    root = entries[0][0].split("/")[0]
    changed = []
    if hidden:
        good = next(data for name, data, _ in entries if name == f"{root}/data.pkl")
        changed = [(f"{root}/z", good, f"{root}/data.pkl")]
    for name, data, _ in entries:
        is_pickle = name == f"{root}/data.pkl"
        changed.append((name, pickled if is_pickle else data, f"{root}/.x" if is_pickle and hidden else None))
    return zipped(changed)


def entries_of(data):
    return zipfile.ZipFile(io.BytesIO(data)).infolist()


def raw(*operations):
    return b"\x80\x04" + b"".join(operations) + b"."


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def named(module, name):
    return b"c%s\n%s\n" % (module.encode(), name.encode())


def number(value):
    return b"\x8a\x08" + struct.pack("<q", value)


def binary(data):
    return b"B" + struct.pack("<I", len(data)) + data


def called(module, name, *arguments):
    return named(module, name) + b"(" + b"".join(arguments) + b"tR"


def dtype_of(state, name="O8"):
    return Call(numpy.dtype, (name, False, True), (state,))


def array_of(dtype, data=b"A" * 16, count=2):
    array = (numpy.ndarray, (0,), b"b")
    return dumps(Call(numpy._core.multiarray._reconstruct, array, ((1, (count,), dtype, False, data),)))


def payloads(mark):
    """Name -> pickle, or what ``torch.save`` wrote. Code in them makes a folder."""
    make = (os.mkdir, (str(mark),))
    code = Call(*make)
    plain = dumps(code)
    mkdir, path = named("posix", "mkdir"), text(str(mark))
    bytes_of = named("torch.storage", "_load_from_bytes") + binary(plain)
    huge = number(10**15)
    copyreg_name = named("copyreg", "_reconstructor")
    deep = b")" + b"\x85" * 300_000
    return {
        # by every operation that calls
        "REDUCE": raw(mkdir, b"(", path, b"tR"),
        "INST": raw(b"(", path, b"iposix\nmkdir\n"),
        "NEWOBJ": raw(mkdir, b"(", path, b"t\x81"),
        "EXT1": raw(b"\x82\x05(", path, b"tR"),
        "protocol 0": pickle.dumps(code, protocol=0),
        # in every place
        "an array of objects": dumps(numpy.array([code], dtype=object)),
        "a dict that makes values": called_by_pickle(collections.defaultdict, os.getcwd),
        # by what torch, numpy and Python have
        "copyreg._reconstructor": raw(copyreg_name, mkdir, named("builtins", "object"), b"N\x87R"),
        "a dotted name": raw(text("torch"), text("Tensor.__class__"), b"\x93"),
        "a subclass of tensors": called_by_pickle(torch._tensor._rebuild_from_type_v2, os.mkdir, int, make[1], {}),
        "an encoding": called_by_pickle(codecs.encode, "x", "rot13"),
        # in bytes that are loaded again
        "_load_from_bytes": raw(bytes_of, b"\x85R"),
        "_load_from_bytes of an archive": called_by_pickle(torch.storage._load_from_bytes, archive(code)),
        # what changes more than what is loaded
        "the state of a class": raw(named("argparse", "Namespace"), b"N}", text("lr"), b"K\1s\x86b"),
        "the state of an enum": raw(called("signal", "Signals", b"K\x0f"), b"}", text("lr"), b"K\1sb"),
        "slots": raw(named("argparse", "Namespace"), b")\x81N}", text("a"), mkdir, b"s\x86b"),
        # what is not in the file
        "a storage elsewhere": with_pickle(
            b"\x80\x02((" + text("storage") + text("x") + text("0") + text("cpu") + b"K\1tQt."
        ),
        # memory
        "a storage of 1e15 bytes": raw(called("torch.storage", "UntypedStorage", huge)),
        "a tensor of 1e15 bytes": raw(called("torch", "Tensor", huge)),
        "bytes of 1e15": raw(called("builtins", "bytes", huge)),
        "a tuple of a range": raw(called("builtins", "tuple", called("builtins", "range", number(10**11)))),
        "a far place in the memo": raw(b"Nr\xff\xff\xff\xff"),
        "bytes that are not there": raw(b"\x8e" + struct.pack("<Q", 2**62)),
        # the end of the process, or of time
        "a deep tuple for a key": raw(b"}", deep, b"K\1s"),
        "a deep list": raw(b"]" * 300_000, b"a" * 299_999),
        # objects of numpy in memory that holds other things
        "a dtype of objects": array_of(dtype_of((3, "|", None, None, None, -1, -1, 0))),
        "a field of objects": array_of(
            dtype_of((3, "|", None, ("f",), {"f": (numpy.dtype("O"), 0)}, 8, 1, 0), "V8"),
        ),
        "flags of objects": array_of(dtype_of((3, "<", None, None, None, -1, -1, 63), "i8")),
        "a number that is an object": dumps(Call(numpy._core.multiarray.scalar, (numpy.dtype("O"), b"A" * 8))),
        "a number of another size": dumps(Call(numpy._core.multiarray.scalar, (numpy.dtype("i8"), b"A"))),
        "more numbers than bytes": array_of(numpy.dtype("i8"), count=2**40),
        # archives that readers read in different ways
        "an archive": archive(code),
        "before archives": legacy(code),
        "in a Unicode field": with_pickle(plain, hidden=True),
    }


def register_extension():
    """As in a program that has used an extension code: Python then keeps what it names."""
    copyreg.add_extension("posix", "mkdir", 5)
    pickle.loads(raw(b"\x82\x05"))
