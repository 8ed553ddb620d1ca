"""Importing the package is light, and every public name resolves."""

from __future__ import annotations

import subprocess
import sys

import accel_scale


def test_import_brings_no_heavy_library() -> None:
    code = "import sys, accel_scale; print([m for m in ('torch', 'transformers', 'trl', 'rich') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_resolves() -> None:
    for name in accel_scale.__all__:
        assert getattr(accel_scale, name) is not None, name
    assert set(accel_scale.__all__) == set(dir(accel_scale))


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(accel_scale, "no_such_name")
