"""A bar on a terminal, lines elsewhere; and a clock that stops when the device is done, not when calls return."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import struct
import termios
from types import SimpleNamespace

import pytest

from accel_scale.measuring import meters
from accel_scale.measuring.meters import HostClock, ThroughputMeter, clock_of
from accel_scale.reporting import step_lines
from accel_scale.reporting.step_lines import StepFigures, StepLines

FIGURES = StepFigures(2.34567, 1e-3, 12345.6, 0.41, 3 * 2**30, 2)


class Time:
    """A clock that only the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules) -> None:
        self.seconds = 100.0
        for module in modules:
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.seconds))


class QueueingDevice(HostClock):
    """A device that works through a queue while the host continues, like CUDA."""

    def __init__(self, time: Time) -> None:
        self.time, self.busy_until = time, 0.0
        self.num_waits = 0

    def launch(self, seconds: float, *, host_seconds: float = 0.001) -> None:
        self.time.seconds += host_seconds
        self.busy_until = max(self.busy_until, self.time.seconds) + seconds

    def now(self) -> float:
        self.num_waits += 1
        self.time.seconds = max(self.time.seconds, self.busy_until)
        return self.time.seconds

    def mark(self) -> float:
        return max(self.time.seconds, self.busy_until)


@pytest.mark.parametrize("logging_steps", [1, 4, 100])
def test_speed_on_a_device_that_works_on_while_calls_return(monkeypatch, logging_steps):
    time = Time(monkeypatch, meters)
    device = QueueingDevice(time)
    meter = ThroughputMeter(device)
    num_steps = 100
    for step in range(1, num_steps + 1):
        meter.start_step()
        time.seconds += 0.002  # the loader already has the batch
        meter.fetched()
        for _ in range(4):
            device.launch(0.1)
            meter.add_tokens(250)
        meter.end_step(settle=step % logging_steps == 0)
        if step % logging_steps == 0:
            time.seconds += 3.0  # logging, evaluation and saving belong to no step
    assert meter.tokens_per_second == pytest.approx(1000 / 0.4, rel=0.02)
    assert meter.step_seconds == pytest.approx(0.4, rel=0.02)
    assert meter.timed_steps == num_steps - 1
    assert meter.data_wait_ratio == pytest.approx(0.005 if logging_steps == 1 else 0.0, abs=0.003)
    # The host waits for the device only at log points, and at the first step because it is left out.
    assert device.num_waits == num_steps // logging_steps + (logging_steps > 1)


def test_waiting_for_data_counts_where_the_device_is_idle(monkeypatch):
    time = Time(monkeypatch, meters)
    device = QueueingDevice(time)
    meter = ThroughputMeter(device)
    for step in range(1, 22):
        meter.start_step()
        time.seconds += 0.3  # a slow loader; for 0.1 s of it the device still works on the previous step
        meter.fetched()
        device.launch(0.1, host_seconds=0.0)
        meter.add_tokens(10)
        meter.end_step(settle=step in (1, 21))
    assert meter.data_wait_ratio == pytest.approx((0.3 + 19 * 0.2) / (20 * 0.3 + 0.1), rel=0.01)


def test_which_clock_a_device_gets():
    assert type(clock_of("cpu")) is HostClock
    assert type(clock_of("mps")) is HostClock
    assert [clock_of(name)._device_type for name in ("cuda", "xpu")] == ["cuda", "xpu"]


def test_a_log_file_gets_a_line_with_every_figure(monkeypatch):
    time, out = Time(monkeypatch, step_lines), io.StringIO()
    lines = StepLines(1200, first_step=99, out=out, err=io.StringIO())
    lines.stepped(100)
    lines.log(StepFigures(3.0))
    for step in range(101, 201):
        time.seconds += 0.5
        lines.stepped(step)
    lines.log(FIGURES)
    lines.say("evaluation loss 1.2300")
    lines.close()
    assert out.getvalue().splitlines() == [
        "step   100/1,200  loss 3.0000",
        "step   200/1,200  loss 2.3457  lr 1.00e-03  12,346 tokens/s  MFU 41%  3 GiB  2 skipped  8 min 20 s left",
        "step   200/1,200  evaluation loss 1.2300",
    ]


def test_a_rollback_begins_to_measure_again(monkeypatch):
    time, out = Time(monkeypatch, step_lines), io.StringIO()
    lines = StepLines(100, out=out, err=io.StringIO())
    for step in (1, 2, 3, 2):
        time.seconds += 10.0
        lines.stepped(step)
    assert lines.seconds_left is None
    time.seconds += 1.0
    lines.stepped(3)
    assert lines.seconds_left == pytest.approx(97.0)


def terminal() -> tuple[int, io.TextIOWrapper]:
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 200, 0, 0))
    return parent, open(child, "w", encoding="utf-8")


def shown_on(parent: int) -> str:
    chunks = []
    while select.select([parent], [], [], 0.05)[0]:
        chunks.append(os.read(parent, 65536))
    return b"".join(chunks).decode()


def test_a_terminal_gets_a_bar_and_no_lines():
    parent, stream = terminal()
    lines = StepLines(10, out=stream, err=stream)
    for step in range(1, 6):
        lines.stepped(step)
    lines.log(FIGURES)
    lines.say("evaluation loss 1.2300")
    lines.close()
    stream.flush()
    shown = shown_on(parent)
    assert "5/10" in shown
    assert "loss 2.3457, lr 1.00e-03, 12,346 tokens/s, MFU 41%, 3 GiB, 2 skipped" in shown
    assert "step  5/10  evaluation loss 1.2300" in shown
    assert "step  5/10  loss" not in shown


def test_a_bar_on_the_terminal_and_lines_in_the_file_that_stdout_goes_to():
    parent, stream = terminal()
    out = io.StringIO()
    lines = StepLines(10, out=out, err=stream)
    lines.stepped(5)
    lines.log(FIGURES)
    lines.close()
    stream.flush()
    assert "5/10" in shown_on(parent)
    assert out.getvalue().startswith("step  5/10  loss 2.3457  lr")


def test_no_bar_where_none_is_wanted():
    parent, stream = terminal()
    lines = StepLines(10, bar=False, out=stream, err=stream)
    lines.stepped(5)
    lines.log(FIGURES)
    stream.flush()
    shown = shown_on(parent)
    assert shown.startswith("step  5/10  loss 2.3457")
    assert "|" not in shown
