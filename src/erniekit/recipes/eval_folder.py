"""What `erniekit eval` evaluates and the folder its numbers go to: no model's results replace another's unasked.

Called by evaluate.py and tasks.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from erniekit.config import RunConfig, need
from erniekit.config.sources import BARE
from erniekit.errors import ConfigError
from erniekit.export.plan import adapter_in, starts_training
from erniekit.files.record import OwnedFiles
from erniekit.track.results import write_results

DEFAULT = Path("eval")  # holds a folder for each evaluation that names no output_dir
RESULTS = "eval_results.json"
MODEL = "eval_model"  # key of RESULTS: whose numbers they are
_GENERAL = re.compile(r"(checkpoint-\d+|export|output|model)$")  # names that mean little without their parent's


def what_to_evaluate(cfg: RunConfig) -> tuple[Path, str | None, bool]:
    """(folder, the base below it where a key names one, whether it is the result of a run): lora_path on
    model_name_or_path, the trained result in output_dir when there is one, else model_name_or_path."""
    output, model = Path(cfg.train.output_dir or "output").expanduser(), cfg.model.model_name_or_path
    if cfg.lora.lora_path and not starts_training(cfg):
        return adapter_in(cfg.lora.lora_path[0], cfg.model.download_hub), model, False
    named = cfg.origin("model_name_or_path") == BARE or (model and not cfg.given("output_dir"))
    if not named and has_result(output):
        return output, model, True
    if not model and cfg.given("output_dir"):
        raise ConfigError(
            f"{output} holds no model, adapter or checkpoint-N" if output.exists() else f"there is no {output}",
            where=f"output_dir: {cfg.origin('output_dir')}",
            fix="give the folder of a run, or what to evaluate: model_name_or_path=DIR",
        )
    need(cfg, "model_name_or_path")
    return Path(str(model)), None, False


def has_result(output: Path) -> bool:
    names = ("model*.safetensors", "adapter_model*.safetensors", "lora_config.json", "checkpoint-*")
    return output.is_dir() and any(any(output.glob(name)) for name in names)


@contextmanager
def results_folder(cfg: RunConfig, source: Path, trained: bool) -> Iterator[Path]:
    """output_dir as given; the run's own folder; or a new folder under eval/, removed again if nothing was written."""
    if trained or (cfg.given("output_dir") and cfg.train.output_dir):
        output = source if trained else Path(str(cfg.train.output_dir)).expanduser()
        _refuse_another_models(output, source, cfg.checkpoint.overwrite_output_dir)
        OwnedFiles(output).refuse((RESULTS, "all_results.json"))
        output.mkdir(parents=True, exist_ok=True)
        yield output
        return
    output = _new_folder(DEFAULT, short_name(source))
    try:
        yield output
    except BaseException:
        with suppress(OSError):  # it holds something worth keeping
            output.rmdir()
        raise


def write_evaluation(output: Path, source: Path, metrics: Mapping[str, float]) -> Path:
    write_results(output, evaluation={**metrics, MODEL: _identity(source)})
    return output / RESULTS


def short_name(source: Path) -> str:
    """A folder name for a model: its own, with its parent's where that is a general one (run/export -> run-export)."""
    path = source.resolve() if source.exists() else source
    name = f"{path.parent.name}-{path.name}" if _GENERAL.match(path.name) and path.parent.name else path.name
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "model"


def _new_folder(parent: Path, name: str) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        folder = parent / f"{name}-{number}"
        with suppress(FileExistsError):
            folder.mkdir()
            return folder
    raise AssertionError("unreachable")


def _identity(source: Path) -> str:
    return str(source.resolve() if source.exists() else source)


def _refuse_another_models(output: Path, source: Path, overwrite: bool) -> None:
    """Numbers without a name are a training's: those of the run in the folder, or of a part of it."""
    try:
        earlier = json.loads((output / RESULTS).read_text(encoding="utf-8")).get(MODEL)
    except (OSError, ValueError, AttributeError):
        return
    here, identity = str(output.resolve()), _identity(source)
    same = identity == earlier if earlier else not has_result(output) or Path(identity).is_relative_to(here)
    if not same and not overwrite:
        raise ConfigError(
            f"{output / RESULTS} holds the results of another model, {earlier or here}",
            where="output_dir",
            fix="another output_dir, none at all (a new folder under eval/), or overwrite_output_dir=True",
        )
