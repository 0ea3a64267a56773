"""The command: exit status for scripts, text for people."""

import sys

import pytest

from megatron_eopt.cli import main
from tests.checkpoints.made import block, change_layout, common, overwrite, save, tensors


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    state = common()
    state["optimizer"][0]["megatron_eopt"] = block()
    save(tmp_path / "iter_0000005", state=state)
    return tmp_path


def verify(capsys, *arguments):
    status = main(["verify-checkpoint", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_ok(capsys, folder):
    status, out, err = verify(capsys, folder)
    assert (status, err) == (0, "")
    for words in (folder / "iter_0000005", "TP 1, PP 1", "TensorParallelMuon lr 0.01", "7 tensors, 408 entries"):
        assert str(words) in out
    assert out.splitlines()[-1] == "OK"


def test_it_fits_a_terminal_of_80_columns(capsys, folder, monkeypatch):
    state = common()
    settings = {f"setting_{number}": 0.123456 + number for number in range(12)}
    state["optimizer"][0]["megatron_eopt"] = block() | {"settings": settings}
    save(folder / "iter_0000005", state=state)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = verify(capsys, folder)[1].splitlines()
    assert [line for line in lines if len(line) > 80 and " " in line.strip()] == []
    assert any("setting_11" in line for line in lines)


def test_problems(capsys, folder):
    values = tensors()
    save(folder / "iter_0000005", values)
    key = "mlp.fc1"
    overwrite(folder / "iter_0000005", key, values[key], values[key] + 1)
    status, out, _ = verify(capsys, folder)
    assert status == 1
    assert "error:      mlp.fc1 in __0_0.distcp" in out
    assert out.splitlines()[-1] == "1 error"
    status, out, _ = verify(capsys, folder, "--no-data")
    assert (status, "data        not read" in out) == (0, True)


def test_files_of_another_iteration(capsys, folder):
    (folder / "iter_0000005").rename(folder / "iter_0000006")
    (folder / "latest_checkpointed_iteration.txt").write_text("6")
    status, out, _ = verify(capsys, folder)
    assert (status, "iter_0000006 has files of iteration 5" in out) == (1, True)


def test_data_that_a_load_would_have_to_transform(capsys, folder):
    def through_zstd(metadata):
        next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.zstd"]

    change_layout(folder / "iter_0000005", through_zstd)
    status, out, err = verify(capsys, folder)
    assert (status, out) == (2, "")
    assert "is stored through stream.zstd" in err
