"""What pyproject.toml cannot say: a wheel carries the recipes of examples/ inside the package, for `erniekit recipes`.

Called by setuptools when a wheel is built. A checkout, and an editable install of it, reads examples/ itself.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EXAMPLES = Path(__file__).parent / "examples"
CARRIED = (".yaml", ".json")  # recipes, what is claimed of them, model configs; not the data, which users bring


class BuildWithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for path in sorted(EXAMPLES.rglob("*")):
            kept = path.relative_to(EXAMPLES)
            if path.suffix in CARRIED and kept.parts[0] != "data":
                target = Path(self.build_lib, "erniekit", "examples", kept)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


setup(cmdclass={"build_py": BuildWithRecipes})
