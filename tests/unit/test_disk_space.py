"""A full disk gives one line that names the folder, its free space and the setting, whichever library ran into it."""

from __future__ import annotations

import errno
from io import FileIO
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import save_file

from accel_scale.disk_space import full_disk, writes_into
from accel_scale.ending.user_errors import user_errors
from accel_scale.reporting.metrics_log import MetricsLog, read_metrics


def write_safetensors(folder: Path) -> None:
    save_file({"weight": torch.zeros(1_000_000)}, folder / "model.safetensors")


def write_torch(folder: Path) -> None:
    torch.save(torch.zeros(1_000_000), folder / "optimizer.pt")


def write_arrow(folder: Path) -> None:
    table = pa.table({"text": ["a" * 1000] * 1000})
    with pa.ipc.new_stream(str(folder / "rows.arrow"), table.schema) as writer:
        writer.write_table(table)


def write_plain(folder: Path) -> None:
    (folder / "file").write_bytes(b"0" * 1_000_000)


def write_wrapped(folder: Path) -> None:
    try:
        write_plain(folder)
    except OSError as error:
        raise RuntimeError("the data set could not be made") from error


@pytest.mark.parametrize("write", [write_safetensors, write_torch, write_arrow, write_plain, write_wrapped])
def test_every_writer_is_understood(small_disk, capsys, write):
    writes_into(small_disk, "--output_dir")
    with pytest.raises(SystemExit) as leaving, user_errors("sft.py"):
        write(small_disk)
    assert leaving.value.code == 74
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"error: --output_dir: the disk of {small_disk} is full" in said
    assert "B are free" in said
    assert "Fix: make room" in said


def test_other_errors_are_not_a_full_disk(tmp_path):
    writes_into(tmp_path, "--output_dir")
    assert full_disk(PermissionError(errno.EACCES, "Permission denied", str(tmp_path / "x"))) is None
    assert full_disk(RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed")) is None
    quota = full_disk(OSError(errno.EDQUOT, "Disk quota exceeded", str(tmp_path / "x")))
    assert quota is not None
    assert quota.place == "--output_dir"
    limit = full_disk(OSError(errno.EFBIG, "File too large", str(tmp_path / "x")))
    assert limit is not None
    assert "ulimit -f" in limit.problem


def test_the_setting_of_a_cache_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    full = full_disk(OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "cache" / "rows" / "x.arrow")))
    assert full is not None
    assert full.place == "HF_DATASETS_CACHE"


def fill(file: FileIO) -> None:
    while file.write(b"0" * 4096):
        pass


def test_a_log_waits_for_room_and_loses_no_line(small_disk, capsys):
    log = MetricsLog(small_disk / "run", True)
    log.write(1, loss=1.0)
    filler = small_disk / "filler"
    with open(filler, "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        fill(file)
    for step in range(2, 400):  # beyond the page that the file already occupies
        log.write(step, loss=float(step))
    assert len(read_metrics(log.path)) < 399
    assert capsys.readouterr().err.count("lines wait") == 1
    filler.unlink()
    log.write(400, loss=400.0)
    assert [line["step"] for line in read_metrics(log.path)] == list(range(1, 401))
