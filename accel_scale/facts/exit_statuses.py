"""Exit statuses of this project's programs, and what each means. The table in the docs must match this one."""

from __future__ import annotations

# Wrong flags or settings, in every program; the same status as argparse's.
CONFIG_STATUS = 2
# An import that wrote what it could.
INCOMPLETE_STATUS = 3
# sysexits.h's EX_DATAERR: the input was wrong, and the same command would fail again.
GUARD_STATUS = 65
# sysexits.h's EX_IOERR.
FULL_DISK_STATUS = 74
# sysexits.h's EX_TEMPFAIL: a retry can succeed, here with the flags that the message names.
OUT_OF_MEMORY_STATUS = 75
# sysexits.h's EX_PROTOCOL: the other side does not answer.
HUNG_STATUS = 76
# The status of HTCondor and others for "checkpointed, restart me".
EXIT_STOPPED = 85
# What shells report for a program ended by Ctrl-C.
INTERRUPTED_STATUS = 130

MEANINGS: dict[int, str] = {
    CONFIG_STATUS: "a setting cannot be honoured (`ConfigError`)",
    INCOMPLETE_STATUS: "`accel-scale import`: keys that change training have no counterpart; the lines name them",
    GUARD_STATUS: "the guard stopped the run: the line says which step and what to change",
    FULL_DISK_STATUS: "the last checkpoint could not be written, or a disk is full: the line names folder and room",
    OUT_OF_MEMORY_STATUS: "memory ran out; the line says what to change",
    HUNG_STATUS: "a collective did not complete in `--collective_timeout`; the line names rank, step and operation",
    EXIT_STOPPED: "saved after a signal: start the same command again",
    INTERRUPTED_STATUS: "Ctrl-C before there was anything to save",
}
