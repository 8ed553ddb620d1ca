"""A stand-in for ``python`` with the libraries already imported, so that tests launch in tenths of a second.

Importing torch, transformers, peft, bitsandbytes and TRL takes seven seconds of one core, and a test that launches two
ranks pays for it three times. `WarmPython` imports them once, in server processes. Its `executable` is called like
``python`` (``-u``, ``-m``, ``-c``, a script), and a server forks the child that becomes that process: arguments,
environment, folder and standard streams are the caller's, the script is ``__main__``, signals and the exit status are
forwarded, and the interpreter shuts down as usual. This project's modules have no import side effects, so they are
imported ahead too; a process whose PYTHONPATH holds another copy of them drops them first.

A real Python starts instead if an environment variable that libraries read at import differs from the servers'
(`READ_AT_IMPORT`), for the modules in `COLD_MODULES`, and for command lines that this stand-in does not understand.
Neighbouring ranks come from two servers, so that string hashes differ between them as between real processes.
"""

from __future__ import annotations

import array
import builtins
import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

SERVERS = 2
# Prefixes. All other variables are read when they are used, and by then the environment is the caller's.
READ_AT_IMPORT = ("BNB_", "DATASETS_", "HF_", "HOME", "HUGGINGFACE_", "LD_", "TRACKIO_", "TRANSFORMERS_")
# The recipes set it for the processes they start; no test downloads.
OF_NO_MATTER = ("HF_HUB_DISABLE_PROGRESS_BARS",)
# Inspects its parent and its children, and imports nothing large.
COLD_MODULES = ("accel_scale.tuning.process_guard",)
PRELOADED = (
    "accelerate.commands.launch",
    "bitsandbytes",
    "deepspeed",  # Accelerate imports it in every run where it is installed
    "peft",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
)
# Packages whose imports no launch needs.
NOT_PRELOADED = ("accel_scale.board", "accel_scale.tuning")
PROJECT = "accel_scale"
_NUMBER = struct.Struct("<i")
_PREFIX = "warm-python-"

_CLIENT = """#!{python} -ISE
import array, json, os, resource, signal, socket, struct, sys

def cold():
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])

words = [word for word in sys.argv[1:2] if word != "-u"] + sys.argv[2:]
known = bool(words) and (words[0] in ("-m", "-c") or not words[0].startswith("-"))
if not known or (words[0] == "-m" and words[1] in {cold!r}):
    cold()
seen = {{name: value for name, value in os.environ.items() if name.startswith({prefixes!r})}}
if {{name: value for name, value in seen.items() if name not in {of_no_matter!r}}} != {watched!r}:
    cold()
server = socket.socket(socket.AF_UNIX)
try:
    server.connect({address!r} + str(int(os.environ.get("RANK", "0")) % {servers}))
except OSError:
    cold()
unbuffered = sys.argv[1] == "-u" or bool(os.environ.get("PYTHONUNBUFFERED"))
request = json.dumps([words, unbuffered, os.getcwd(), dict(os.environ), sys.argv[0]]).encode()
streams = array.array("i", [0, 1, 2])
server.sendmsg([struct.pack("<i", len(request))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
server.sendall(request)
for passed_on in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
    signal.signal(passed_on, lambda number, frame: server.send(struct.pack("<i", number)))
answer = server.recv(4, socket.MSG_WAITALL)
if len(answer) < 4:
    sys.exit("the server of warm processes is gone")
(status,) = struct.unpack("<i", answer)
if status < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
    signal.pause()
os._exit(status)
"""


def read_at_import() -> dict[str, str]:
    """Variables of this process that libraries read when they are imported."""
    return {
        name: value
        for name, value in os.environ.items()
        if name.startswith(READ_AT_IMPORT) and name not in OF_NO_MATTER
    }


def is_possible() -> bool:
    """True if a process can watch another one's end and there is no GPU, which is unusable after a fork."""
    import torch

    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # not Linux, or a kernel or sandbox without it
        return False
    return not torch.cuda.is_available()


def is_warm() -> bool:
    """True if ``sys.executable`` is already such a stand-in."""
    return Path(sys.executable).parent.name.startswith(_PREFIX)


class WarmPython:
    """Servers of warm processes; `close` ends them.

    Attributes:
        executable: The path to call instead of ``sys.executable``.
    """

    @property
    def servers(self) -> list[int]:
        """Process ids of the servers, the ancestors of all warm processes."""
        return [server.pid for server in self._servers]

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.executable = self.folder / "python"
        address = str(self.folder / "server")
        self._servers = [
            subprocess.Popen(
                [sys.executable, __file__, f"{address}{number}"],
                stdin=subprocess.PIPE,  # closes when the test process ends, however it ends
                stdout=subprocess.PIPE,
                stderr=(self.folder / f"log{number}").open("wb"),
            )
            for number in range(SERVERS)
        ]
        client = _CLIENT.format(
            python=sys.executable,
            cold=COLD_MODULES,
            prefixes=READ_AT_IMPORT,
            of_no_matter=OF_NO_MATTER,
            watched=read_at_import(),
            address=address,
            servers=SERVERS,
        )
        self.executable.write_text(client)
        self.executable.chmod(0o755)
        for number, server in enumerate(self._servers):
            if server.stdout is None or server.stdout.readline() != b"ready\n":
                raise RuntimeError((self.folder / f"log{number}").read_text(errors="replace")[-3000:])

    def close(self) -> None:
        for server in self._servers:
            server.communicate(timeout=20)
        shutil.rmtree(self.folder, ignore_errors=True)


class _Process:
    """A forked process: the connection to its caller, its process id, and the descriptor that reports its end."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.end = os.pidfd_open(pid)


def serve(listener: socket.socket) -> list[Any]:
    """Fork and watch children until standard input closes; returns only in a child, with the request."""
    waiting = selectors.DefaultSelector()
    waiting.register(listener, selectors.EVENT_READ)
    waiting.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fd not in waiting.get_map():  # unregistered while the previous key was handled
                continue
            if key.fileobj is sys.stdin:
                _leave(waiting)
            if key.fileobj is not listener:
                (_end if key.data.end == key.fileobj else _pass_on)(waiting, key.data)
                continue
            connection = listener.accept()[0]
            try:
                request, streams = _received(connection)
            except (OSError, ValueError, IndexError):  # the caller has been killed in the meantime
                connection.close()
                continue
            pid = os.fork()
            if pid == 0:
                _let_go(waiting, listener, connection)
                _take_streams(streams)
                return request
            for stream in streams:
                os.close(stream)
            process = _Process(connection, pid)
            waiting.register(connection, selectors.EVENT_READ, process)
            waiting.register(process.end, selectors.EVENT_READ, process)


def _leave(waiting: selectors.BaseSelector) -> NoReturn:
    for process in {key.data for key in waiting.get_map().values() if key.data is not None}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    os._exit(0)


def _received(connection: socket.socket) -> tuple[list[Any], array.array[int]]:
    """The request and the caller's three standard streams."""
    size, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(3 * 4))
    streams = array.array("i")
    streams.frombytes(ancillary[0][2][: 3 * streams.itemsize])
    (length,) = _NUMBER.unpack(size)
    data = connection.recv(length, socket.MSG_WAITALL)
    return json.loads(data), streams


def _pass_on(waiting: selectors.BaseSelector, process: _Process) -> None:
    """Forward a signal to the process; if the caller was killed, kill the process too."""
    try:
        message = process.connection.recv(4)
    except OSError:
        message = b""
    number = _NUMBER.unpack(message)[0] if len(message) == 4 else signal.SIGKILL
    if number == signal.SIGKILL:
        waiting.unregister(process.connection)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)


def _end(waiting: selectors.BaseSelector, process: _Process) -> None:
    """Tell the caller how its process ended."""
    status = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    waiting.unregister(process.end)
    os.close(process.end)
    with contextlib.suppress(KeyError):
        waiting.unregister(process.connection)
    with contextlib.suppress(OSError):
        process.connection.sendall(_NUMBER.pack(status))
    process.connection.close()


def _let_go(waiting: selectors.BaseSelector, listener: socket.socket, connection: socket.socket) -> None:
    """Drop the server's connections in the child, so that a caller sees its own process end as soon as it ends."""
    others = {key.data for key in waiting.get_map().values() if key.data is not None}
    waiting.close()
    for other in others:
        other.connection.close()
        os.close(other.end)
    listener.close()
    connection.close()


def _take_streams(streams: array.array[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)


def become(words: list[str], unbuffered: bool, folder: str, environment: Mapping[str, str], executable: str) -> None:
    """Run the command ``python words`` in this process."""
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # cached at first use
    sys.executable = executable  # processes started from here are warm too
    sys.orig_argv = [executable, *words]
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = _written(1, unbuffered)
    sys.stderr = _written(2, unbuffered, errors="backslashreplace", line_buffering=True)
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if environment.get("OMP_NUM_THREADS"):  # torch read it when it was imported
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.modules["numpy"].random.seed()  # as in every fresh process
    for path in reversed(environment.get("PYTHONPATH", "").split(os.pathsep)):
        if path and path not in sys.path:
            sys.path.insert(1, path)
        if path and (Path(path) / PROJECT).is_dir() and (Path(path) / PROJECT).resolve() != _project_folder():
            _forget_project()
    if words[0] == "-m":
        sys.path[0] = folder
        sys.argv = words[1:]
        sys.modules.pop(words[1], None)  # it is run, not imported
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if words[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *words[2:]]
        exec(words[1], vars(main))
        return
    main.__file__ = words[0]
    sys.path[0], sys.argv = str(Path(words[0]).resolve().parent), words
    exec(compile(Path(words[0]).read_bytes(), words[0], "exec"), vars(main))


def _project_folder() -> Path | None:
    project = sys.modules.get(PROJECT)
    return None if project is None or project.__file__ is None else Path(project.__file__).resolve().parent


def _forget_project() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == PROJECT]:
        del sys.modules[name]


def _written(number: int, unbuffered: bool, **options: Any) -> io.TextIOWrapper:
    raw = io.FileIO(number, "w", closefd=False)
    layer: Any = raw if unbuffered else io.BufferedWriter(raw)
    return io.TextIOWrapper(layer, encoding="utf-8", write_through=unbuffered, **options)


def preload() -> None:
    """Import the libraries without starting a thread."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name in PRELOADED:
        importlib.import_module(name)
    from datasets import Dataset  # noqa: F401
    from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    from trl import SFTTrainer  # noqa: F401

    get_checkpoint_conversion_mapping("llama")  # compiles a thousand expressions, once
    import accel_scale

    for module in pkgutil.walk_packages(accel_scale.__path__, f"{PROJECT}."):
        if not module.name.startswith(NOT_PRELOADED):
            importlib.import_module(module.name)


def main() -> None:
    preload()
    gc.collect()
    gc.freeze()  # otherwise a child copies all of it when it collects garbage, and again at exit
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(64)
    print("ready", flush=True)
    become(*serve(listener))


if __name__ == "__main__":
    main()
