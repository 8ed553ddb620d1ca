"""`accel-scale comm` on two processes here, and on two servers of two processes each, under torchrun."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils.other import get_free_port

from accel_scale.network.collectives import OPS
from accel_scale.network.link_fit import load_links

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# Half the sizes are fitted; a time is the mean of the fastest quarter, measured in rounds. Ordinary runs are off by a
# twentieth (benchmarks/results/comm_gloo.md); this much is allowed on a machine that is busy with other tests.
MEDIAN_BOUND = 0.5


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "accel_scale.cli.main", "comm", *words]


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)}


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env=environment(folder), capture_output=True, text=True, check=False, timeout=240, cwd=folder
    )


def test_every_collective_is_run_fitted_and_saved(tmp_path: Path) -> None:
    sizes = ["--size", "4KiB..16MiB", "--step_factor", "4", "--repeats", "40"]
    done = run(
        command("--measure", "--processes", "2", "--backend", "gloo", "--op", "all", *sizes, "--json"), tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "\r" not in done.stderr  # no progress bar in a log
    found = json.loads(done.stdout)
    rows = found["measurements"]
    assert {row["op"] for row in rows} == set(OPS)
    assert len(rows) == 7 * len(OPS)
    for row in rows:
        assert row["workers"] == 2
        assert 0 < row["seconds"] <= row["median_seconds"] < 1
        assert row["bus_bandwidth"] == pytest.approx(
            row["algorithm_bandwidth"]
            * {"all_reduce": 1, "broadcast": 1, "reduce": 1, "point_to_point": 1}.get(row["op"], 0.5)
        )
    held_out = [row for row in rows if not row["fitted"]]
    assert len(held_out) == 3 * len(OPS)
    errors = sorted(abs(row["predicted_seconds"] / row["seconds"] - 1) for row in held_out)
    assert found["held_out_error"]["worst"] == pytest.approx(errors[-1])
    assert found["held_out_error"]["median"] < MEDIAN_BOUND
    # Four thousand times as many bytes take longer, however busy the machine is.
    for op in OPS:
        times = [row["seconds"] for row in rows if row["op"] == op]
        assert times[-1] > times[0]
    links = load_links(tmp_path / "accel_scale" / "links.json")  # the documented default
    assert found["source"] == links.source
    assert set(links.inside) == set(OPS)
    assert links.between == {}
    link: Any = links.inside_link("all_reduce")
    assert link.bytes_per_second > 1e7


def test_a_terminal_is_shown_how_far_it_is(tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))  # with size 0, tqdm draws nothing
    words = command("--measure", "--processes", "2", "--op", "all_reduce", "--size", "4KiB..4MiB", "--repeats", "20")
    with subprocess.Popen(words, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=writer) as process:
        os.close(writer)
        shown = read_terminal(reader)
        printed = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 0, shown
    assert re.search(r"all_reduce inside: +\d+%\|.*\b\d+/20\b", shown), shown
    assert "saved" in printed  # the result stays separate from the bar
    assert "/20" not in printed


def read_terminal(reader: int) -> str:
    found = b""
    with contextlib.suppress(OSError):  # reading a terminal fails once its other side is closed
        while block := os.read(reader, 4096):
            found += block
    os.close(reader)
    return found.decode()


def test_servers_are_measured_on_both_levels_and_the_planner_reads_them(tmp_path: Path) -> None:
    """Two launches of two processes stand in for two servers; only rank 0 prints."""
    file, port = tmp_path / "links.json", str(get_free_port())
    launches = []
    for node in range(2):
        words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node_rank", str(node)]
        words += ["--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", port]
        words += ["-m", "accel_scale.cli.main", "comm", "--measure", "--op", "all_reduce", "--repeats", "10"]
        words += ["--size", "64KiB..16MiB", "--step_factor", "4", "--save", str(file)]
        launches.append(
            subprocess.Popen(
                words,
                env=environment(tmp_path),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
            )
        )
    said = [launch.communicate(timeout=240) for launch in launches]
    assert [launch.returncode for launch in launches] == [0, 0], said
    assert all(word in said[0][0] for word in ("inside a server", "between servers", "saved"))
    assert said[1][0] == ""
    links = load_links(file)
    assert links.sharing == 2
    assert (links.inside["all_reduce"].workers, links.between["all_reduce"].workers) == (2, 2)
    words = ["--links", str(file), "--nodes", "2", "--gpus_per_node", "2", "--size", "1MiB", "--json"]
    rows = json.loads(run(command(*words), tmp_path).stdout)["predictions"]
    seconds = {row["algorithm"]: row["seconds"] for row in rows}
    # Both processes of a server send half a megabyte at once, as in the measurement, plus the ring inside.
    between, inside = links.between["all_reduce"], links.inside["all_reduce"]
    expected = between.predicted_seconds(2**19) + inside.predicted_seconds(2**20)
    assert seconds["hierarchical"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.soak
def test_bucket_sizes_are_timed(tmp_path: Path) -> None:
    words = [
        "--num_params",
        "3M",
        "--processes",
        "2",
        "--backend",
        "gloo",
        "--bucket_caps",
        "1",
        "25",
    ]
    script = str(Path(__file__).resolve().parents[2] / "benchmarks" / "ddp_buckets.py")
    done = run([sys.executable, script, *words, "--repeats", "6", "--max_length", "16", "--json"], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    one, usual = found["rows"]
    assert one["num_buckets"] > usual["num_buckets"] >= 1
    assert found["compute_seconds"] > 0
    assert found["best"] in (1, 25)
    assert sum(row["best"] for row in found["rows"]) == 1
