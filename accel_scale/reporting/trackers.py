"""Trackers of a running job: the environment variables their libraries read, and alerts for events."""

from __future__ import annotations

import contextlib
import netrc
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from accel_scale.errors import first_line
from accel_scale.secrets import is_secret, mask

_LONGEST_TAG = 5000  # MLflow takes 8000 characters
_EVALUATED = ("perplexity",)  # validation figures without the eval_ prefix
_WANDB_CREDENTIALS = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")


class TextWriter(Protocol):
    """The part of TensorBoard's `SummaryWriter` that events need."""

    def add_text(self, tag: str, text_string: str, global_step: int) -> object: ...

    def flush(self) -> object: ...


def settle_trackers(
    names: Sequence[str], environment: MutableMapping[str, str], *, project: str, is_chosen: bool = False
) -> list[str]:
    """Set the variables that tracker libraries read, before they are imported; the user's own settings are kept.

    wandb only writes files unless the user has logged in or set ``WANDB_MODE``; mlflow sends no usage statistics.

    Args:
        names: Trackers of the run.
        environment: `os.environ`.
        project: Value of ``--project``.
        is_chosen: Whether the user gave the project; it then overrides the libraries' own variables.

    Returns:
        Lines to print.
    """
    lines = []
    for name, variable in (("wandb", "WANDB_PROJECT"), ("mlflow", "MLFLOW_EXPERIMENT_NAME")):
        if name in names and (is_chosen or variable not in environment):
            environment[variable] = project
    if "mlflow" in names:
        environment.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    if "wandb" in names and not environment.get("WANDB_MODE") and not _has_wandb_login(environment):
        environment["WANDB_MODE"] = "offline"
        environment.setdefault("WANDB_ERROR_REPORTING", "false")
        folder = Path(environment.get("WANDB_DIR") or ".") / "wandb"
        lines.append(f"wandb: offline, as nobody is logged in; wandb sync {folder}/offline-run-* uploads the run.")
    if names:
        sys.argv[1:] = masked_words(sys.argv[1:])  # wandb stores the command line with the run
    return lines


def _has_wandb_login(environment: MutableMapping[str, str]) -> bool:
    """True if wandb would find credentials in the environment or where ``wandb login`` writes them."""
    if any(environment.get(name) for name in _WANDB_CREDENTIALS):
        return True
    host = urlsplit(environment.get("WANDB_BASE_URL") or "https://api.wandb.ai").netloc
    named = [environment["NETRC"]] if environment.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in named:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(os.path.expanduser(path)).authenticators(host):
                return True
    return False


def masked_words(words: Sequence[str]) -> list[str]:
    """Command-line words with credentials masked, whether inside a word or as the value of a credential flag."""
    masked = [mask(word) for word in words]
    for at, word in enumerate(words):
        name, has_value, _ = word.removeprefix("--").replace("-", "_").partition("=")
        if word.startswith("--") and is_secret(name):
            if has_value:
                masked[at] = f"{word.partition('=')[0]}=***"
            elif at + 1 < len(words):
                masked[at + 1] = "***"
    return masked


def tracked_names(values: Mapping[str, float]) -> dict[str, float]:
    """Figures under the names that transformers' callbacks use: ``train/loss``, ``eval/loss``."""
    return {
        f"eval/{name.removeprefix('eval_')}"
        if name.startswith("eval_") or name in _EVALUATED
        else f"train/{name}": value
        for name, value in values.items()
    }


def send_alert(title: str, text: str, *, step: int, is_error: bool, writers: Iterable[TextWriter] = ()) -> None:
    """Send an alert to every tracker of this process; call it on one process.

    trackio and wandb get an alert, TensorBoard a text, MLflow a tag of the run. A failing tracker causes a warning.

    Args:
        title: Short and different for each event: wandb suppresses a title that it has sent within the last minute.
        writers: TensorBoard writers.
    """
    for send in (_to_trackio, _to_wandb, _to_mlflow):
        with _warning_of_failure(send.__name__.removeprefix("_to_")):
            send(title, text, step, is_error)
    for writer in writers:
        with _warning_of_failure("tensorboard"):
            writer.add_text("alerts", f"{title}: {text}", step)
            writer.flush()


@contextlib.contextmanager
def _warning_of_failure(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # no exception of a tracker may end the run
        why = mask(f"{type(error).__name__}: {first_line(error)}")
        print(f"warning: {name} did not take an alert ({why}).", file=sys.stderr, flush=True)


def _to_trackio(title: str, text: str, step: int, is_error: bool) -> None:
    trackio = sys.modules.get("trackio")
    run = trackio.context_vars.current_run.get() if trackio is not None else None
    if trackio is not None and run is not None:
        level = trackio.AlertLevel.ERROR if is_error else trackio.AlertLevel.WARN
        with contextlib.redirect_stdout(None):  # the run has already printed it
            run.alert(title=title, text=text, level=level, step=step)


def _to_wandb(title: str, text: str, step: int, is_error: bool) -> None:
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        wandb.run.alert(title=title, text=text, level="ERROR" if is_error else "WARN")


def _to_mlflow(title: str, text: str, step: int, is_error: bool) -> None:
    mlflow = sys.modules.get("mlflow")
    if mlflow is not None and mlflow.active_run() is not None:
        mlflow.set_tag(f"alert.step_{step}", f"{title}: {text}"[:_LONGEST_TAG])
