"""Forms from the declared keys: their fields, their values as YAML and back, and what is wrong with them.

Called by the pages and by jobs.py, which checks every recipe here again before anything is started.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from erniekit.config.convert import convert
from erniekit.config.field import Key
from erniekit.config.flat import DEFAULTS, KEYS, canonical
from erniekit.errors import ConfigError, ErnieKitError
from erniekit.webui.allowed import NEVER, check_number
from erniekit.webui.form_pages import PAGES, STAGES, UNSET, PageKeys
from erniekit.webui.paths import KEYS as PATH_KEYS
from erniekit.webui.paths import Roots

Kind = Literal["text", "number", "flag", "choice", "path", "list"]
Values = Mapping[str, Any]


@dataclass(frozen=True)
class FieldSpec:
    """One field of a form. `default` is a list for `list`, None or a value for the others."""

    key: str
    kind: Kind
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    basic: bool = False
    low: float | None = None
    high: float | None = None
    section: str = ""
    whole: bool = False  # a number without a fraction
    optional: bool = False  # may be left empty


@dataclass(frozen=True)
class Form:
    page: str
    command: str  # of the CLI that takes its recipe
    fields: tuple[FieldSpec, ...]
    fixed: dict[str, Any]  # set by the page itself, such as the stage
    needed: tuple[str, ...]  # keys without which the command stops

    def field(self, key: str) -> FieldSpec:
        return next(f for f in self.fields if f.key == key)

    @property
    def basic(self) -> tuple[FieldSpec, ...]:
        return tuple(f for f in self.fields if f.basic)

    def defaults(self) -> dict[str, Any]:
        return {f.key: f.default for f in self.fields}


@dataclass(frozen=True)
class FormProblem:
    """`key` is empty where the values are wrong together and none of them alone."""

    key: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what} ({self.fix})" if self.fix else self.what


COMMANDS = tuple(dict.fromkeys([p.command for p in PAGES.values()] + ["doctor"]))


def form(page: str) -> Form:
    """The form of a page; what a later version brings, and what no page may set, is not in it."""
    spec = _page(page)
    names = [*spec.keys] if not spec.sections else _of_sections(spec)
    fields = tuple(_field(KEYS[name], spec) for name in names if name not in spec.fixed)
    return Form(page, spec.command, fields, dict(spec.fixed), spec.needed)


def page_of(command: str, values: Values) -> str:
    """The page whose form a recipe of this command fills."""
    if command in ("train", "doctor"):
        return STAGES.get(str(values.get("stage", "SFT")), "train.sft")
    return next(name for name, spec in PAGES.items() if spec.command == command)


def to_yaml(values: Values, page: str) -> str:
    """A recipe: what differs from the defaults, in the order the keys are declared. Unknown keys raise."""
    import yaml

    spec = _page(page)
    given = {canonical(name): value for name, value in {**values, **spec.fixed}.items()}
    if unknown := [name for name in given if name not in KEYS]:
        raise ConfigError(f"unknown key {unknown[0]!r}", where=unknown[0], fix="")
    recipe = {}
    for name, k in KEYS.items():
        if name not in given or k.secret:
            continue
        if name in UNSET and str(given[name]).strip() == str(UNSET[name]):
            continue
        value = _typed(k, given[name])
        if value != DEFAULTS[name] or name in (*spec.fixed, *spec.defaults, *UNSET):
            recipe[name] = list(value) if isinstance(value, tuple) else value
    if not recipe:
        return ""
    return str(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True, width=10_000, default_flow_style=False))


def from_yaml(text: str, name: str = "recipe.yaml") -> dict[str, Any]:
    """What a recipe gives, by declared key and in the form's types; a ConfigError names the line as the CLI would."""
    with tempfile.TemporaryDirectory(prefix="erniekit-") as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_bytes(text.encode("utf-8", errors="surrogatepass"))
        try:
            return from_file(file, alone=True)
        except ErnieKitError as error:
            raise _renamed(error, str(file), name) from None


def from_file(file: Path, alone: bool = False) -> dict[str, Any]:
    """The same of a file; unless `alone`, one that extends others is read with them, as shipped recipes do."""
    from erniekit.config.sources import collect

    parsed = collect([str(file)], "train", standalone=alone)
    out = {key: list(g.value) if isinstance(g.value, tuple) else g.value for key, g in parsed.given.items()}
    if parsed.sectioned or out.get("input_dir") or out.get("data_filelist"):
        out.setdefault("stage", "PT")
    return out


def check(values: Values, page: str, roots: Roots | None = None) -> list[FormProblem]:
    """Everything wrong with these values: each alone, then together with the command's messages. Empty: good."""
    spec = _page(page)
    given = {canonical(name): value for name, value in {**spec.fixed, **values}.items()}
    problems = check_each(given, roots)
    missing = [name for name in spec.needed if not _given(given.get(name))]
    texts = ("train_dataset_path", "input_dir", "data_filelist")
    if page == "train.pt" and not any(_given(given.get(name)) for name in texts):
        missing.append("train_dataset_path")
    if page == "evaluate" and _given(given.get("output_dir")):  # the result of a run can be evaluated by itself
        missing = [name for name in missing if name != "model_name_or_path"]
    problems += [FormProblem(name, f"{name} must be given", KEYS[name].help) for name in missing]
    given = {k: v for k, v in given.items() if _given(v)}
    return problems or _check_combined(given, spec.command, roots)


def check_each(values: Values, roots: Roots | None) -> list[FormProblem]:
    """What is wrong with each of these by itself: for the data preview, which needs less than a run."""
    return [problem for name, value in values.items() if (problem := _check_one(name, value, roots))]


def checked(text: str, command: str, roots: Roots) -> dict[str, Any]:
    """A recipe's values, every path resolved; a ConfigError with all that is wrong. Jobs start from nothing else."""
    values = from_yaml(text)
    if problems := check(values, page_of(command, values), roots):
        raise ConfigError(
            "; ".join(p.what for p in problems),
            where=", ".join(p.key for p in problems if p.key) or "recipe",
            fix="; ".join(p.fix for p in problems if p.fix),
        )
    return roots.resolve_values(values)


def default_of(name: str) -> Any:
    value = DEFAULTS.get(name)
    return list(value) if isinstance(value, tuple) else value


# ---- one key


def _page(page: str) -> PageKeys:
    if page not in PAGES:
        raise ConfigError(f"unknown page {page!r}", where="page", fix="one of " + ", ".join(PAGES))
    return PAGES[page]


def _of_sections(spec: PageKeys) -> list[str]:
    wanted = [k for k in KEYS.values() if k.section in spec.sections or k.name in spec.keys]
    return [k.name for k in wanted if not k.not_yet and not k.secret and k.name not in NEVER and _is_offered(k)]


# Second names of other keys, switches the page itself sets, and what only a script of ERNIEKit's would give.
_NOT_OFFERED = (
    "from_scratch", "lora", "bf16", "fp16", "no_cuda", "do_train", "do_eval", "per_device_train_batch_size",
    "sep_parallel_degree", "use_expert_parallel", "lr_scheduler", "eval_tasks", "use_global_causal_attn",
    "dataset_type", "download_hub", "disable_ckpt_quant",
)  # fmt: skip


def _is_offered(k: Key) -> bool:
    return k.name not in _NOT_OFFERED


def _field(k: Key, spec: PageKeys) -> FieldSpec:
    default = {**DEFAULTS, **UNSET, **spec.defaults}[k.name]
    return FieldSpec(
        key=k.name,
        kind=_kind(k),
        default=list(default) if isinstance(default, tuple) else default,
        help=k.help,
        choices=_choices(k),
        basic=k.basic if spec.sections else True,
        low=k.low,
        high=k.high,
        section=k.section,
        whole=k.item == "int",
        optional=k.optional or k.is_list,
    )


def _kind(k: Key) -> Kind:
    if k.is_list:
        return "list"
    if k.name in PATH_KEYS:
        return "path"
    if k.choices:
        return "choice"
    return {"int": "number", "float": "number", "bool": "flag"}.get(k.item, "text")  # type: ignore[return-value]


def _choices(k: Key) -> tuple[str, ...]:
    """The choices without those that change nothing here."""
    return tuple(c for c in k.choices if c not in k.idle)


def _typed(k: Key, value: Any) -> Any:
    """As the key declares it; what cannot be converted stays as it is, for check() to complain about."""
    if isinstance(value, str) and not value.strip() and not (k.choices and "" in k.choices):
        return k.default
    if value is None:
        return None if k.optional else k.default
    try:
        return convert(k, value, k.name)
    except ErnieKitError:
        return list(value) if isinstance(value, tuple) else value


def _given(value: Any) -> bool:
    return value not in (None, "", (), []) and not (isinstance(value, str) and not value.strip())


def _check_one(name: str, value: Any, roots: Roots | None) -> FormProblem | None:
    if name in NEVER:
        if name in KEYS and value == KEYS[name].default:
            return None
        return FormProblem(name, f"{name} cannot be set from the page", NEVER[name])
    if name not in KEYS:
        return FormProblem(name, f"unknown key {name!r}", "erniekit train --help all lists the keys")
    if not _given(value):
        return None
    try:
        for text in _texts(value):
            _check_text(text, name, is_plain_text=KEYS[name].item == "str" and name not in PATH_KEYS)
        check_number(name, convert(KEYS[name], value, name))
        if roots is not None:
            roots.resolve_value(name, value)
            if missing_path := roots.missing(name, value):
                return FormProblem(
                    name, f"{name} does not exist: {_short(missing_path)}", "choose one of the list, or check the path"
                )
    except ErnieKitError as error:
        return FormProblem(name, _short(error.what), error.fix)
    return None


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield str(name)
            yield from _texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _texts(item)


MAX_TEXT = 4096  # characters of one value


def _check_text(text: str, key: str, is_plain_text: bool) -> None:
    if len(text) > MAX_TEXT:
        raise ConfigError(f"{key} is {len(text):,} characters long", where=key, fix=f"at most {MAX_TEXT:,}")
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ConfigError(f"{key} holds a control character", where=key, fix="one line of plain text")
    if is_plain_text and text.startswith("-"):  # an engine that is started might take it for an option
        raise ConfigError(f"{key} begins with a dash", where=key, fix="begin it with a letter or a digit")


# ---- all together


def _check_combined(given: dict[str, Any], command: str, roots: Roots | None) -> list[FormProblem]:
    from erniekit.config import load, not_yet_supported
    from erniekit.config.inputs import input_files, input_folders
    from erniekit.files.output import check_output

    try:
        cfg = load([], command, given if roots is None else roots.resolve_values(given))
        if command in ("train", "doctor") and "output_dir" in given:
            check_output(str(cfg.train.output_dir), input_folders(cfg), input_files(cfg))
    except ErnieKitError as error:
        return [FormProblem(_key_of_error(error, given), _short(error.what), error.fix)]
    return [
        FormProblem(item.key, f"not in this version: {item.what}", item.today)
        for item in not_yet_supported(cfg, command)
        if item.stops
    ]


def _key_of_error(error: ErnieKitError, given: Values) -> str:
    """The first given key that an error names; empty where it names none."""
    tokens = f"{error.where} {error.what}".replace(",", " ").replace(":", " ").replace("=", " ").split()
    return next((token for token in tokens if token in given), "")


def _renamed(error: ErnieKitError, file: str, name: str) -> ErnieKitError:
    what, where, fix = (_short(text.replace(file, name)) for text in (error.what, error.where, error.fix))
    return type(error)(what, where=where, fix=fix)


def _short(text: str) -> str:
    """Errors repeat what was typed, however much that was."""
    return text if len(text) <= 400 else text[:397] + "..."
