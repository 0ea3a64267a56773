"""``megatron-eopt verify-checkpoint`` on what real Megatron saved: whole, and damaged in every way that disks know."""

import importlib
import io
import json
import re
import shlex
import shutil
import zipfile
from dataclasses import is_dataclass
from enum import Enum

import pytest
import torch
from megatron.core import safe_globals

from megatron_eopt.checkpoints import harmless
from megatron_eopt.checkpoints.contents import newest, read_contents
from megatron_eopt.checkpoints.gate import Load
from megatron_eopt.checkpoints.would_load import _SCHEDULER, parse_flags, would_load
from megatron_eopt.cli import main
from megatron_eopt.manifest import from_json
from megatron_eopt.megatron.described.model import described_run
from tests.checkpoints import made
from tests.megatron.runs import MUON, ROOT, SMALL_GPT, train

RUN = ["--num-layers", "2", *MUON, "--train-iters", "4"]
MOMENTUM = "optimizer.state.momentum_buffer.decoder.layers.mlp.linear_fc2.weight"


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def saved(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    flags = [] if request.param == "fp32" else ["--bf16", "--tensor-model-parallel-size", "2"]
    save = ["--ckpt-format", "torch_dist", "--save", folder / "checkpoint", "--save-interval", 2, "--exit-interval", 2]
    train(folder / "run", 1 if request.param == "fp32" else 2, *RUN, *flags, *save)
    return folder / "checkpoint", flags


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved[0], tmp_path / "checkpoint")


def verify(capsys, *arguments):
    status = main(["verify-checkpoint", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


def chunk_of(folder, key):
    """File of the first chunk of a tensor, its bytes, and where the tensor's data lie in it."""
    chunk = read_contents(newest(folder)).tensors[key].chunks[0]
    file = newest(folder) / chunk.file
    raw = bytearray(file.read_bytes())
    archive = bytes(raw[chunk.start : chunk.start + chunk.length])
    data = torch.load(io.BytesIO(archive)).numpy().tobytes()
    return file, raw, chunk.start + archive.index(data), data


def test_who_owned_what(saved, capsys):
    """The table that the run printed, and as JSON what it was printed from."""
    folder = saved[0]
    status, out, _ = verify(capsys, folder, "--manifest")
    lines = [line.split() for line in out.splitlines()]
    (qkv,) = [words for words in lines if words[:1] == ["decoder.layers.*.self_attention.linear_qkv.weight"]]
    assert qkv[1:5] == ["2", "128x64", "muon", "matrix"]
    assert ["muon", "8", "61,440", "12", "0.246"] in lines
    said = json.loads(verify(capsys, folder, "--manifest", "--json")[1])
    assert {family.like.optimizer for family in from_json(said["manifest"])} == {"adam", "muon"}
    assert (status, said["ok"]) == (0, True)


def test_a_whole_one(saved, capsys):
    folder, flags = saved
    status, out, _ = verify(capsys, folder)
    assert status == 0, out
    assert "iteration   2\n" in out
    assert "optimizer   TensorParallelMuon" in out
    assert "momentum_buffer     4 tensors, 61,440 entries float32" in out
    assert "exp_avg_sq          5 tensors, 16,704 entries float32" in out
    assert ("fp32_param          9 tensors" in out) == bool(flags)
    assert ("TP 2" in out) == bool(flags)
    assert "all finite" in out
    assert out.splitlines()[-1] == "OK"


def of_page(page):
    """The flags of the run on a page that saves checkpoints, spelled as they stand there."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    (command,) = re.findall(r"pretrain\.py((?: (?:\\\n|[^\n`])*)--save (?:\\\n|[^\n`])*)", text)
    muon = re.search(r'MUON="(.*)"', text)
    command = command.replace("\\\n", " ").replace('"$@"', muon[1] if muon else "")
    return shlex.split(command.replace("$SMALL_GPT", shlex.join(SMALL_GPT)))


@pytest.mark.parametrize("page", ["quick-start", "manifest"])
def test_the_flags_of_a_page_would_load_what_they_saved(page, tmp_path):
    """Saved are arguments as Megatron completes them."""
    with described_run(of_page(page), 0) as run:
        args = vars(run.args)
    contents = read_contents(made.save(tmp_path, made.tensors(["momentum_buffer"]), made.common(**args)))
    schedule = {key: args[flag] for flag, key in _SCHEDULER.items()}
    contents.common["opt_param_scheduler"].update(
        schedule, lr_decay_steps=args["train_iters"] * args["global_batch_size"]
    )
    problems, notes = would_load(contents, *parse_flags(of_page(page)))
    assert [f"{each.what}: {each.advice}" for each in problems if "half precision" not in each.what] == []
    assert not any("not a whole command line" in note for note in notes)


def test_the_same_run_would_load_it(saved, capsys):
    folder, flags = saved
    status, out, _ = verify(capsys, folder, "--no-data", "--", *SMALL_GPT, *RUN, *flags)
    assert (status, out.splitlines()[-1]) == (0, "OK")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--num-layers", "4"], "num_layers was 2 and is 4"),
        (["--optimizer", "adam"], "it holds the state of muon, and the run wants adam"),
        (["--lr", "3e-3"], "lr was 0.01 and is 0.003"),
    ],
)
def test_another_run_would_not(saved, capsys, flags, words):
    folder, own = saved
    status, out, _ = verify(capsys, folder, "--no-data", "--", *SMALL_GPT, *RUN, *own, *flags)
    assert status == 1
    assert words in out


def test_a_flipped_bit(copy, capsys):
    file, raw, start, data = chunk_of(copy, MOMENTUM)
    raw[start + len(data) // 2] ^= 4
    file.write_bytes(raw)
    status, out, _ = verify(capsys, copy)
    assert status == 1
    assert f"error:      {MOMENTUM} in {file.name}" in out
    assert "Bad CRC-32" in out
    assert verify(capsys, copy, "--no-data")[0] == 0


def test_the_archives_have_checksums(saved):
    """Megatron's writer leaves them on: what the command relies on."""
    contents = read_contents(newest(saved[0]))
    chunk = contents.tensors[MOMENTUM].chunks[0]
    with (contents.folder / chunk.file).open("rb") as file:
        file.seek(chunk.start)
        archive = zipfile.ZipFile(io.BytesIO(file.read(chunk.length)))
    assert all(entry.CRC for entry in archive.infolist())


def test_the_classes_that_are_imported_are_what_they_seem():
    """Enums, records and their like, of which an instance is made without a call of their own code."""
    for module, names in harmless.IMPORTED.items():
        for name in names.split() if importlib.util.find_spec(module.partition(".")[0]) else ():
            found = harmless.imported(module, name)
            if found is not None:  # Megatron mocks what it lacks
                assert issubclass(found, Enum) or is_dataclass(found), found
                assert "__setstate__" not in vars(found), found
    for module in map(importlib.import_module, harmless.ENUMS):
        named = [value for name, value in vars(module).items() if name[0].isupper()]
        assert all(isinstance(value, type) and issubclass(value, Enum) for value in named)


def test_what_megatron_calls_safe_is_harmless():
    """But for classes that it lists because torch compares them, and which no pickle names."""
    safe = {(each.__module__, each.__qualname__) for each in safe_globals.SAFE_GLOBALS} - {
        ("numpy.dtypes", "UInt32DType")
    }
    of_values = {("builtins", name) for name in ("tuple", "float", "bool", "str")}
    named = safe | safe_globals.SafeUnpickler._SAFE_CLASSES - of_values
    load = Load()
    for each in named:
        load.find(*each)
    assert load.foreign == set()
