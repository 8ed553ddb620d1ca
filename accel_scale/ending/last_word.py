"""Print last why a launch failed: launchers print their own reports after the worker's line.

`accelerate launch` ends with a traceback of its own, torchrun with a table of the workers' exit codes. A line given
here is printed at once, and again by a small process that waits for the launcher to end: it comes last in a log, a
pipe or a terminal. If that process cannot live on (in a container or a Slurm step that ends with the launcher), only
the first line appears.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence

from accel_scale.ending.launcher import launcher_of, open_process
from accel_scale.secrets import is_secret, mask

# The time that torchrun gives its workers to end before it reports, plus the time of its report.
_WAIT_SECONDS = 120
_OTHER_RANK_SECONDS = 3.0
_SPEAKER = (
    "import os, select, sys\n"
    "poll = select.poll()\n"
    "poll.register(int(sys.argv[1]), select.POLLIN)\n"
    "if poll.poll(int(sys.argv[2]) * 1000):\n"
    "    os.write(2, sys.argv[3].encode() + b'\\n')\n"
)


def say_last(line: str, *, all_ranks: bool = False) -> None:
    """Print `line` on stderr, once for the whole launch whichever ranks call, and again after the launcher's report.

    Call this when the process is about to end with an error.

    Args:
        line: The reason, and what to do.
        all_ranks: Whether every rank that has the error calls this, rather than a chosen one.
    """
    line = mask(" ".join(line.split("\n")))
    launcher = launcher_of(os.getpid())
    if launcher is None:
        if all_ranks and os.environ.get("RANK", "0") != "0":
            _wait_to_be_ended()  # rank 0 prints it, unless only this rank has the error
        print(line, file=sys.stderr, flush=True)
        return
    turn = _first_turn(launcher)
    if turn is not None:
        print(line, file=sys.stderr, flush=True)
        _repeat_after(launcher, line, turn)


def repeat_cause(program: str, error: BaseException) -> None:
    """Print one line for `error`, whose traceback Python is about to print, after the launcher's report."""
    repeat_last(cause_line(program, error))


def repeat_last(line: str) -> None:
    """Print `line`, which has been printed before, again after the launcher's report."""
    launcher = launcher_of(os.getpid())
    turn = None if launcher is None else _first_turn(launcher)
    if launcher is not None and turn is not None:
        _repeat_after(launcher, mask(line), turn)


def cause_line(program: str, error: BaseException) -> str:
    """``program: error: KeyError at sft.py:12: the first line of its message``."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
    return f"{program}: error: {type(error).__name__}{where}: {text}"


@contextlib.contextmanager
def credentials_unsaid() -> Iterator[None]:
    """If the command line holds a credential, end the launcher of a single process without its report.

    `accelerate launch` (1.15) reports a failure of one process with the whole command line, in logs that others may
    read. It is ended once everything has been printed here: its status is then that of SIGTERM.
    """
    try:
        yield
    except BaseException as error:
        if not (isinstance(error, SystemExit) and error.code in (None, 0)) and holds_credential(sys.argv[1:]):
            launcher = None if "TORCHELASTIC_RUN_ID" in os.environ else launcher_of(os.getpid())
            if launcher is not None:
                _say_and_end(launcher, error)
                raise SystemExit(getattr(error, "code", 1)) from None  # printed already
        raise


def holds_credential(words: Sequence[str]) -> bool:
    """True if a command line has a flag for a credential, or a credential in a value."""
    names = (word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--"))
    return any(map(is_secret, names)) or any(mask(word) != word for word in words)


def _say_and_end(launcher: int, error: BaseException) -> None:
    if not isinstance(error, SystemExit):
        print(mask("".join(traceback.format_exception(error))), file=sys.stderr)
    sys.stdout.flush()
    print("The launcher ends without its report, which would show a credential.", file=sys.stderr, flush=True)
    os.kill(launcher, signal.SIGTERM)


def _wait_to_be_ended() -> None:
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(_OTHER_RANK_SECONDS)


def _first_turn(launcher: int) -> socket.socket | None:
    """A socket held by the first worker on this machine to report an error: the others' errors follow from its own."""
    turn = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        # An abstract socket name, not one in the file system: it goes away with its holders.
        turn.bind(f"\0accel-scale-last-word-{launcher}")
    except OSError:
        turn.close()
        return None
    return turn


def _repeat_after(launcher: int, line: str, turn: socket.socket) -> None:
    if not _is_last_attempt():
        return
    descriptor = open_process(launcher)
    if descriptor is None:
        return
    with contextlib.suppress(OSError):
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SPEAKER, str(descriptor), str(_WAIT_SECONDS), line],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(descriptor, turn.fileno()),
            start_new_session=True,  # launchers end the sessions of their workers
        )


def _is_last_attempt() -> bool:
    """True if torchrun would not restart the workers."""
    try:
        return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) >= int(
            os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        )
    except ValueError:
        return True
