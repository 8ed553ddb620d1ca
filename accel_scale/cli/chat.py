"""`accel-scale chat`: talk to a saved model, whole or adapter, in a terminal."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from accel_scale.inference.chat import Chat

DESCRIPTION = """Talk to a saved model, whole or adapter, in a terminal; answers appear as they are generated.

  accel-scale chat outputs/sft
  echo 'What is 3 + 4?' | accel-scale chat outputs/sft --temperature 0

Ctrl-C ends an answer, Ctrl-D the chat. Without a terminal every line of standard input is a turn. A model without a
chat template continues each line as text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command; light, so that `--help` stays fast."""
    parser.description = DESCRIPTION
    parser.add_argument("folder", metavar="FOLDER", help="Folder (or Hub id) of a model or an adapter.")
    parser.add_argument("--base_model", help="Folder or Hub id of an adapter's base. Default: the one it names.")
    parser.add_argument("--system", metavar="TEXT", help="The system's turn, before all others.")
    parser.add_argument("--max_new_tokens", type=int, default=512, metavar="N", help="Longest answer. Default: 512.")
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0: the most likely token each time. Default: what the model's generation_config.json says.",
    )


def run(args: argparse.Namespace) -> int:
    """Load, then answer line by line."""
    from accel_scale.errors import ConfigError
    from accel_scale.inference.saved import find_saved, load_saved
    from accel_scale.quiet import quiet_imports

    if args.max_new_tokens < 1:
        raise ConfigError("an answer has tokens.", place="--max_new_tokens", fix="use 1 or more.")
    if args.temperature is not None and not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise ConfigError(f"{args.temperature} is no temperature.", place="--temperature", fix="use 0 or more.")
    saved = find_saved(args.folder, base_model=args.base_model)
    quiet_imports()  # before libraries that would print at import
    from accel_scale.inference.chat import Chat
    from accel_scale.reporting.console import set_up_console

    set_up_console(is_main=True)
    model, tokenizer = load_saved(saved)
    chat = Chat(
        model,
        tokenizer,
        system=args.system,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
    )
    if not chat.has_template:
        print("no chat template: each line is continued as text, without the lines before it.", file=sys.stderr)
    return _converse(chat)


def _converse(chat: Chat) -> int:
    from accel_scale.errors import ConfigError

    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("Ctrl-C ends an answer, Ctrl-D the chat.", file=sys.stderr)
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  # gives input() line editing and history
    elif hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            text = input("> " if is_terminal else "")
        except EOFError:
            print(end="\n" if is_terminal else "")
            return 0
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\nCtrl-D ends the chat.", file=sys.stderr)
            continue
        if not text.strip():
            continue
        try:
            chat.answer(text, _show)
        except ConfigError as error:
            if not is_terminal:
                raise
            print(error.one_line(), file=sys.stderr)
        print(flush=True)


def _show(text: str) -> None:
    print(text, end="", flush=True)
