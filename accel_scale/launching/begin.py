"""What a recipe does before its slow imports: end when its launcher does, and refuse what can be refused at once."""

from __future__ import annotations

import os
import sys

from accel_scale.errors import user_errors
from accel_scale.launching.early_checks import check_command_line
from accel_scale.launching.environment import check_launch_variables
from accel_scale.launching.launcher import end_with_launcher


def begin(program: str) -> None:
    """Call first in a recipe that is run as a program; ends it with one line and status 2 where something is wrong."""
    with user_errors(program):
        begin_process()
        check_command_line(program, sys.argv[0], sys.argv[1:])


def begin_process() -> None:
    """What holds for every process that trains.

    Raises:
        ConfigError: if the variables of a launch are not as a launcher sets them.
    """
    end_with_launcher()
    check_launch_variables(os.environ)
