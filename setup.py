"""What pyproject.toml cannot say: the wheel holds the recipes and the launch files, below ``accel_scale/assets``."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildPy(build_py):
    """Copies both folders beside the package's modules; an editable install finds them in the checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for name in ("recipes", "accelerate_configs"):
                target = Path(self.build_lib) / "accel_scale" / "assets" / name
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(Path(__file__).parent / name, target, ignore=ignored, dirs_exist_ok=True)


setup(cmdclass={"build_py": BuildPy})
