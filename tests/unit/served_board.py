"""The board as a user starts it, and a client that sends requests as a browser would, or as none would."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

REPOSITORY = Path(__file__).parents[2]


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class ServedBoard:
    """A running board server.

    Attributes:
        address: Base URL without a trailing slash.
        log: File with its stdout and stderr.
        process: The server's process.
    """

    address: str
    log: Path
    process: subprocess.Popen[bytes]
    _config: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> dict[str, Any]:
        """The description of its components that the page gets."""
        if not self._config:
            self._config = httpx.get(f"{self.address}/config").json()
        return self._config

    def component(self, name: str) -> int:
        """The id of the component named `name`."""
        return next(each["id"] for each in self.config["components"] if each["props"].get("elem_id") == name)

    def event(self, name: str, kind: str = "click") -> dict[str, Any]:
        """The handler of an event of a component."""
        target = [self.component(name), kind]
        return next(each for each in self.config["dependencies"] if target in each["targets"])

    def names_of(self, event: dict[str, Any]) -> list[str]:
        """Names of the inputs of an event, in order."""
        props = {each["id"]: each["props"] for each in self.config["components"]}
        return [str(props[number].get("elem_id")) for number in event["inputs"]]

    def values_of(self, event: dict[str, Any]) -> list[object]:
        """Initial values of those inputs."""
        props = {each["id"]: each["props"] for each in self.config["components"]}
        return [props[number].get("value") for number in event["inputs"]]

    def send(self, event: dict[str, Any], data: object, *, session: str | None = None) -> dict[str, Any]:
        """Send `data` to an event and return the last message of the answer."""
        session = session or uuid.uuid4().hex
        with httpx.Client(base_url=f"{self.address}/gradio_api", timeout=90) as client:
            body = {"data": data, "fn_index": event["id"], "session_hash": session, "event_data": None}
            joined = client.post("/queue/join", content=json.dumps(body), headers={"content-type": "application/json"})
            if joined.status_code != 200:
                return {"msg": "refused", "status": joined.status_code, "text": joined.text}
            with client.stream("GET", "/queue/data", params={"session_hash": session}) as stream:
                for line in stream.iter_lines():
                    message = json.loads(line.removeprefix("data:")) if line.startswith("data:") else {}
                    if message.get("msg") in ("process_completed", "unexpected_error", "close_stream"):
                        return message
        return {"msg": "nothing"}


@contextlib.contextmanager
def served(folder: Path, *words: str) -> Iterator[ServedBoard]:
    """Run `accel-scale board` with `words`, with its log in `folder`, and end it with Ctrl-C."""
    port, log = free_port(), folder / "board.log"
    command = [sys.executable, "-m", "accel_scale.cli.main", "board", "--port", str(port), *words]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)}
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=folder, env=environment)
    board = ServedBoard(f"http://127.0.0.1:{port}", log, process)
    try:
        _wait_until_served(board)
        yield board
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_served(board: ServedBoard) -> None:
    import time

    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and board.process.poll() is None:
        if "(Ctrl-C ends it)" in board.log.read_text():
            return
        time.sleep(0.1)
    raise AssertionError(board.log.read_text())
