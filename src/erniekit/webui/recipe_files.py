"""Recipe files: the shipped examples and those uploaded to the page, by the names the recipe picker shows.

Used by pages/recipe_source.py. Only recipes of this list are read: a name from a browser is looked up, never
opened as a path.
"""

from __future__ import annotations

from pathlib import Path

from erniekit.errors import ConfigError
from erniekit.webui.uploads import RECIPES

EXAMPLES, FACTS = "examples", "recipes.json"  # the folder of shipped recipes has this file
MAX_RECIPE = 100_000  # characters
# Recipes of other commands, by ERNIEKit's names for them.
OTHER_COMMANDS = ("run_export", "run_eval", "run_chat", "run_server", "run_split", "run_quantize")
FOLDERS = ("configs/", "pre-training/", "post-training/")


def examples_folder(root: Path) -> Path | None:
    """`examples` of the page's first root, else of the package, else of the checkout it runs from."""
    package = Path(__file__).resolve().parents[1]
    for place in (root, package, package.parents[1]):
        if (place / EXAMPLES / FACTS).is_file():
            return place / EXAMPLES
    return None


def recipe_files(root: Path, home: Path) -> dict[str, Path]:
    """Recipes of training by name: uploads first, newest on top, then the examples. `home`: the page's own folder."""
    files: dict[str, Path] = {}
    uploads = [path for path in (home / RECIPES).glob("*") if path.is_file() and not path.is_symlink()]
    for path in sorted(uploads, key=lambda path: -path.stat().st_mtime):
        files[path.name] = path
    examples = examples_folder(root)
    for path in sorted(examples.rglob("*.yaml")) if examples else ():
        name = path.relative_to(examples).with_suffix("").as_posix() if examples else ""
        if name.startswith(FOLDERS) and not path.name.startswith(OTHER_COMMANDS):
            files[name.removeprefix("configs/")] = path
    return files


def read_recipe(path: Path) -> str:
    """Its text; a ConfigError where it is too long or not UTF-8."""
    try:
        with path.open(encoding="utf-8") as opened:
            text = opened.read(MAX_RECIPE + 1)
    except UnicodeDecodeError:
        raise ConfigError("the recipe is not UTF-8", where="recipe", fix="save it as UTF-8") from None
    except OSError as error:
        what = f"the recipe cannot be read: {error.strerror}"
        raise ConfigError(what, where="recipe", fix="choose another") from None
    if len(text) > MAX_RECIPE:
        raise ConfigError(f"the recipe has more than {MAX_RECIPE:,} characters", where="recipe", fix="a shorter one")
    return text
