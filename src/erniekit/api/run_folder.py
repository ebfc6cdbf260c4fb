"""TrainingRun: a run's folder as an object: its numbers as a table, its best checkpoint, its model, its curves.

Returned by `erniekit.train`; `erniekit.TrainingRun(folder)` opens one that was trained before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from erniekit.api.model import Model, load
from erniekit.errors import CheckpointError, ConfigError
from erniekit.recipes.run import run
from erniekit.registry import nearest
from erniekit.result import RunResult
from erniekit.track import jsonl
from erniekit.track.charts import svg_chart
from erniekit.track.curves import read_curves
from erniekit.track.report import series_of

SHOWN = 20  # rows of a table in a notebook
RUN_FILE = "run.json"


class MetricsTable(list[dict[str, Any]]):
    """What a run logged: one dict for each logged step or evaluation, in order, with `global_step`.

    `table.columns` are all names, `table["loss"]` is one of them as a list (without the rows that lack it), and
    `table.to_pandas()` is a DataFrame.
    """

    @property
    def columns(self) -> list[str]:
        """Every name, in the order first met."""
        return list(dict.fromkeys(name for row in self for name in row))

    def __getitem__(self, which: Any) -> Any:
        if not isinstance(which, str):
            return super().__getitem__(which)
        if which not in self.columns:
            raise _unknown_metric(which, self.columns)
        return [row[which] for row in self if which in row]

    def to_pandas(self) -> Any:
        """A DataFrame with `global_step` as its index; pandas must be installed."""
        try:
            import pandas
        except ImportError:
            raise ConfigError("pandas is not installed", where="to_pandas", fix="pip install pandas") from None
        return pandas.DataFrame(list(self), columns=self.columns).set_index("global_step")

    def _repr_html_(self) -> str:
        """In a notebook: the last rows."""
        names = self.columns
        head = "".join(f"<th>{escape(name)}</th>" for name in names)
        rows = (
            "<tr>" + "".join(f"<td>{escape(_shown(row.get(name)))}</td>" for name in names) + "</tr>"
            for row in self[-SHOWN:]
        )
        return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


class Plot:
    """A picture of curves. A notebook shows it; `save(path)` writes it, `svg` is its text."""

    def __init__(self, svg: str) -> None:
        self.svg = svg

    def save(self, path: str | Path) -> Path:
        """Writes the picture as an SVG file that does not exist yet."""
        target = Path(path).expanduser()
        if target.suffix.lower() != ".svg":
            fix = f"name it {target.with_suffix('.svg').name}, or draw run.metrics.to_pandas() with a plotting package"
            raise ConfigError(f"{target.name} does not end in .svg; the picture is SVG", where="save", fix=fix)
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(self.svg)
        except FileExistsError:
            raise ConfigError(f"{target} exists", where="save", fix="choose a new name") from None
        except OSError as error:
            raise ConfigError(
                f"the picture cannot be written: {error.strerror}", where=str(target), fix="check the folder"
            ) from error
        return target

    def _repr_svg_(self) -> str:
        return self.svg


class TrainingRun:
    """A training run and its folder.

    `metrics` is the table of what was logged, `summary` the numbers of the whole run, `best_checkpoint` the folder of
    the best evaluation, `model` the trained model; `chat`, `generate` and `export` use it, `plot` draws curves.
    """

    def __init__(self, output_dir: str | Path, result: RunResult | None = None) -> None:
        self.output_dir = Path(output_dir).expanduser()
        self._result = result
        if not (self.output_dir / RUN_FILE).is_file():
            raise CheckpointError(
                f"{output_dir} holds no run", where=str(self.output_dir), fix="give the output_dir of a training run"
            )

    def __repr__(self) -> str:
        return f"<erniekit.TrainingRun {self.output_dir}: {self.status} at step {self.steps}>"

    @property
    def status(self) -> str:
        """running, finished, stopped or failed."""
        return str(self._record.get("status", ""))

    @property
    def metrics(self) -> MetricsTable:
        """What was logged, one row a record; read from metrics.jsonl, so that it grows while a run goes on."""
        return MetricsTable(jsonl.read(self.output_dir / jsonl.FILE))

    @property
    def summary(self) -> dict[str, float]:
        """The numbers of the whole run: train_loss, train_runtime, eval_loss, ..."""
        return dict(self._result.metrics if self._result else self._record.get("metrics") or {})

    @property
    def steps(self) -> int:
        """The last step that was trained or logged."""
        if self._result is not None:
            return self._result.steps
        return max((row["global_step"] for row in self.metrics), default=0)

    @property
    def next_commands(self) -> list[str]:
        """What to type next in a shell."""
        return list(self._result.next_commands if self._result else self._record.get("next_commands") or [])

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoint folders there are, the oldest first."""
        found = [p for p in self.output_dir.glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdecimal()]
        return sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")))

    @property
    def best_checkpoint(self) -> Path | None:
        """The checkpoint of the best evaluation; None where none was evaluated or it was not kept."""
        named = _json(self.output_dir / "trainer_state.json").get("best_model_checkpoint")
        folder = self.output_dir / Path(named).name if named else None
        return folder if folder is not None and folder.is_dir() else None

    @cached_property
    def model(self) -> Model:
        """The trained model, opened on the device that is there; `erniekit.load(run.output_dir, ...)` chooses."""
        return load(self.output_dir, device="auto")

    def generate(self, prompt: Any, **settings: Any) -> Any:
        """`Model.generate` of the trained model."""
        return self.model.generate(prompt, **settings)

    def chat(self, message: str | Sequence[Mapping[str, Any]], system: str = "", **settings: Any) -> Any:
        """`Model.chat` of the trained model."""
        return self.model.chat(message, system, **settings)

    def export(self, **keys: Any) -> Path:
        """The folder that `erniekit export` makes of this run, adapters merged: by default output_dir/export.

        keys: those of `erniekit export`, such as format="gguf" or quant="wint4"
        """
        return run("export", **{"output_dir": self.output_dir, **keys}).output_dir

    def plot(self, *names: str, path: str | Path | None = None) -> Plot:
        """Curves over steps, of training and evaluation in one picture; needs no plotting package.

        names: of metrics; the loss when none is named
        path: also written there, as SVG
        """
        curves = read_curves(self.output_dir / jsonl.FILE)
        pictures = []
        for name in names or ("loss",):
            series = [one for one in series_of(curves, name.removeprefix("eval_")) if len(one.curve)]
            if not series:
                raise _unknown_metric(name, list(curves))
            pictures.append((name, series))
        plot = Plot(svg_chart(pictures))
        if path is not None:
            plot.save(path)
        return plot

    @property
    def _record(self) -> dict[str, Any]:
        return _json(self.output_dir / RUN_FILE)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _unknown_metric(name: str, known: list[str]) -> ConfigError:
    near = nearest(name, known)
    hint = f"did you mean {near[0]!r}?" if near else "there are: " + ", ".join(known)
    return ConfigError(f"this run logged no {name!r}", where="metrics", fix=hint)


def _shown(value: Any) -> str:
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else str(value)
