"""`accel-scale board`: plans, the doctor and live runs on a local web page, for this machine only by default."""

from __future__ import annotations

import argparse
import ipaddress
import sys
from pathlib import Path

DESCRIPTION = """A local web page: plan a run, check its files, watch runs and stop them safely.

  accel-scale board
  accel-scale board --runs outputs

Needs pip install 'accel-scale[board]', and no network. Ctrl-C ends it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags for where the page is served and which runs it shows."""
    parser.description = DESCRIPTION
    parser.add_argument("--port", metavar="N", help="default: the first that is free from 7860 on")
    parser.add_argument(
        "--host",
        default="localhost",
        help="interface to listen on. Default: localhost, this machine alone. Others can read what the page shows, "
        "and nobody can stop a run from it",
    )
    parser.add_argument("--runs", metavar="FOLDER", help="folder whose runs are shown live. Default: no such tab")


def run(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    from accel_scale.facts.exit_statuses import INTERRUPTED_STATUS

    try:
        return _serve(args)
    except KeyboardInterrupt:  # before the server started
        return INTERRUPTED_STATUS


def _serve(args: argparse.Namespace) -> int:
    from accel_scale.board.environment import LOCAL_NAMES, require_gradio

    port = None if args.port is None else _port(args.port)
    runs = None if args.runs is None else _folder(args.runs)
    interface = _interface(args.host)
    if port is not None:
        _refuse_taken(interface, port)
    require_gradio()
    from accel_scale.board.app import BoardSettings, build_app, start, wait

    is_local = ipaddress.ip_address(interface).is_loopback
    page = build_app(BoardSettings(runs, can_stop=is_local))
    if is_local:
        address = start(page, host=interface, port=port, hosts=(*LOCAL_NAMES, args.host, interface))
    else:
        what = "plans, and the runs of --runs" if runs else "plans"
        print(f"warning: whoever reaches {args.host} sees this page ({what}); there is no password.", file=sys.stderr)
        address = start(page, host=interface, port=port, hosts=())
    print(f"board  {address}  (Ctrl-C ends it)", flush=True)
    wait(page)
    return 0


def _interface(host: str) -> str:
    """Resolve `host` to the address of an interface of this machine."""
    import socket

    from accel_scale.errors import ConfigError

    try:
        found = socket.getaddrinfo(host, 0, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        with socket.socket() as probe:
            probe.bind(found)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "no such name"
        fix = "use localhost, 0.0.0.0 for all, or an IPv4 address of this machine."
        raise ConfigError(f"{host!r} is no interface of this machine ({why}).", place="--host", fix=fix) from None
    return str(found[0])


def _refuse_taken(interface: str, port: int) -> None:
    import socket

    from accel_scale.errors import ConfigError

    try:
        with socket.socket() as probe:
            # As servers set it, so that a port whose server has just ended can be reused.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((interface, port))
    except OSError as error:
        why = f"cannot be used ({error.strerror})."
        raise ConfigError(why, place=f"--port {port}", fix="name another.") from None


def _port(text: str) -> int:
    from accel_scale.errors import ConfigError

    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise ConfigError(f"{text!r} is no port.", place="--port", fix="use 1 to 65535.")
    return int(text)


def _folder(text: str) -> Path:
    from accel_scale.errors import ConfigError

    path = Path(text).expanduser()
    if not path.is_dir():
        what = "is a file." if path.exists() else "is not there."
        raise ConfigError(what, place=f"--runs {text}", fix="name the folder that holds output folders of runs.")
    return path.resolve()
