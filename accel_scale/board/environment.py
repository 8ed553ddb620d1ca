"""Gradio's environment, set before it is imported: nothing leaves this machine, and files get their own folder."""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from accel_scale.errors import ConfigError

LOCAL_NAMES = ("localhost", "127.0.0.1")
_FOLDER_VARIABLE = "GRADIO_TEMP_DIR"
# Each of these would open something that the board keeps closed.
_IGNORED = ("GRADIO_SHARE", "GRADIO_ALLOWED_PATHS", "GRADIO_MCP_SERVER", "GRADIO_SERVER_NAME", "GRADIO_SERVER_PORT")
_SWITCHED_OFF = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}


def require_gradio() -> None:
    """Check that the optional dependency is installed.

    Raises:
        ConfigError: if it is missing, naming what to install.
    """
    if importlib.util.find_spec("gradio") is None:
        raise ConfigError(
            "Gradio is not installed.", place="accel-scale board", fix="pip install 'accel-scale[board]'"
        )


def prepare() -> None:
    """Set up the environment; call before Gradio is imported."""
    require_gradio()
    for name in _IGNORED:
        os.environ.pop(name, None)
    os.environ.update(_SWITCHED_OFF)
    os.environ[_FOLDER_VARIABLE] = str(served_folder())


@cache
def served_folder() -> Path:
    """Folder of uploads and downloads, private to this process and user; removed when the process ends."""
    folder = Path(tempfile.mkdtemp(prefix="accel-scale-board-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
