"""Steps before a recipe's slow imports: end with the launcher, and refuse early what can be refused."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from accel_scale.ending.last_word import repeat_last
from accel_scale.ending.launcher import end_with_launcher
from accel_scale.ending.user_errors import user_errors
from accel_scale.facts.exit_statuses import INTERRUPTED_STATUS
from accel_scale.flags.library import FlagClass
from accel_scale.flags.parsing import ParsedFlags
from accel_scale.launching.environment import check_launch_variables
from accel_scale.launching.machine import refuse_native_windows
from accel_scale.starting.early_checks import check_command_line


def begin(program: str, flag_classes: Sequence[FlagClass], refuse: Callable[[ParsedFlags], None]) -> None:
    """Call first in a recipe that is run as a program; ends it with one line and status 2 if something is wrong.

    Args:
        flag_classes: The recipe's flags, as for `parse_flags`.
        refuse: Refuses flags of the recipe that cannot work together, without large imports.
    """
    end_at_interrupt(program)
    with user_errors(program):
        refuse_native_windows()
        begin_process()
        check_command_line(program, sys.argv[0], sys.argv[1:], flag_classes, refuse)


def end_at_interrupt(program: str) -> None:
    """Make Ctrl-C end the process with one line and status 130 while there is nothing to save, even during imports.

    Under a launcher, which ends with a traceback, the line is repeated after it. During training, `StopSignals`
    replaces this handler.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # run in the background by a shell
        return
    own = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        try:
            if os.getpid() == own and os.environ.get("RANK", "0") == "0":
                line = f"{program}: interrupted; the same command starts over, or continues from its last checkpoint."
                os.write(2, f"{line}\n".encode())
                repeat_last(line)
        finally:
            os._exit(INTERRUPTED_STATUS)

    signal.signal(signal.SIGINT, end)


def begin_process() -> None:
    """Steps for every process that trains.

    Raises:
        ConfigError: if the launch variables are not as a launcher sets them.
    """
    end_with_launcher()
    check_launch_variables(os.environ)
