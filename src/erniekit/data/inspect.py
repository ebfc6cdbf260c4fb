"""`erniekit data FILE...`: which format each file has, how many rows, what they hold, and bad rows by line.

Called by the command table; reads only, and needs neither a model nor torch.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from erniekit.data.assemble import Assembled
from erniekit.data.formats import FORMATS, Detected, Raw, no_rows
from erniekit.data.formats.columns import Columns, as_columns
from erniekit.data.formats.files import file_encoding
from erniekit.data.preference import Preference
from erniekit.data.quality import RowCounts, is_near_empty, length_line, row_key, size_of
from erniekit.data.report import SHOWN_LINES, DataReport, quality_lines, unused_line, verdicts
from erniekit.data.stage_rows import STAGES, StageRows, stage_rows
from erniekit.data.storage import listed_files
from erniekit.data.thinking import has_thought
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.data.types import ChatMessage, ParsedRow, RowProblem
from erniekit.errors import ConfigError, DataError
from erniekit.flag_parser import FlagParser
from erniekit.log import emit, paint
from erniekit.printable import counted
from erniekit.progress import WorkProgress
from erniekit.registry import nearest

_SHOWN = 20  # bad rows printed per file
_CLASSES = 20  # named
_ERRORS = 3  # files that cannot be read, shown in full; a wrong folder has hundreds
KEYS_TAKEN = ("stage", "train_dataset_type", "model_name_or_path", "max_seq_len", "columns")  # of a recipe


def data_command(args: list[str]) -> int:
    """Exit code 0 when every row of every file is usable, 1 when some are not, 2 when a file cannot be read."""
    given = data_parser().parse_args(as_flags(args))
    for name, least in (("pixels", given.pixels), ("length", given.length)):
        if least is not None and least < 1:
            raise ConfigError(f"--{name} is {least}", where="erniekit data", fix=f"--{name} takes a number from 1 on")
    given.columns = columns_given(given.columns)
    plain = given.stage == "PT" or any(word.endswith(".txt") for word in given.files)
    files = [str(file.path) for file in listed_files(given.files, text=plain)]
    tokenizer = load_tokenizer(Path(given.model).expanduser()) if given.model else None  # seconds: once for all files
    code, unread = 0, list[str]()
    for path in files:
        try:
            code = max(code, _check(path, given, tokenizer))
        except DataError as error:  # of several files, one that cannot be read does not hide the others
            if len(files) == 1:
                raise
            code = max(code, error.exit_code)
            unread.append(path)
            if len(unread) <= _ERRORS:
                emit("\n".join(error.lines()))
    if more := unread[_ERRORS:]:
        named = ", ".join(more[:_ERRORS]) + (" ..." if len(more) > _ERRORS else "")
        emit(f"error: {counted(len(more), 'more file')} cannot be read as data: {named}")
        emit("fix:   name the data files themselves, or a folder that holds nothing else")
    return code


def as_flags(args: list[str], taken: Sequence[str] = KEYS_TAKEN, command: str = "erniekit data") -> list[str]:
    """key=value as its flag, for the keys of a recipe that the command takes."""
    out: list[str] = []
    for before, word in zip(["", *args], args):
        name, equals, value = word.partition("=")
        if before in ("--columns", "--output"):  # whose value may be such a word
            out.append(word)
            continue
        if name.startswith("columns.") and equals:
            out += ["--columns", f"{name.removeprefix('columns.')}={value}"]
        elif equals and name.isidentifier() and not Path(word).exists():
            if name not in taken:
                near = nearest(name, list(taken))
                hint = f"did you mean {near[0]}? " if near else ""
                raise ConfigError(f"unknown key {name!r}", where=command, fix=f"{hint}it takes {', '.join(taken)}")
            out += [f"--{name}", value]
        else:
            out.append(word)
    return out


def columns_given(words: Sequence[str] | None) -> Columns:
    """`prompt=q,response=a`, once or several times."""
    pairs = [part.partition("=") for word in words or () for part in word.split(",")]
    return as_columns({field.strip(): column.strip() for field, _, column in pairs}, "--columns")


def data_parser() -> argparse.ArgumentParser:
    """cli/commands.py has the same in its table."""
    parser = FlagParser(prog="erniekit data", description="Check dataset files.", allow_abbrev=False)
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help=".jsonl, .json, .csv, .tsv, .parquet, .gz; folders, patterns, URLs")
    add("--stage", choices=STAGES, help="read rows as this stage does; else by their fields")
    add("--type", "--train_dataset_type", choices=FORMATS.names(), help="read as this format instead of detecting it")
    add("--columns", action="append", metavar="FIELD=COLUMN,...", help="which column holds which field: prompt=q")
    add("--model", "--model_name_or_path", metavar="DIR", help="count tokens as this model does; else characters")
    add("--pixels", type=int, metavar="N", help="most pixels of a picture; the model's own")
    add("--length", "--max_seq_len", type=int, default=8192, metavar="N", help="which rows would be cut; 8192")
    return parser


def _check(path: str, given: argparse.Namespace, tokenizer: Tokenizer | None) -> int:
    found = stage_rows(path, given.stage, given.type, given.columns, tokenizer, vision=True)
    if found.vision:
        return _check_vision(path, found, given, tokenizer)
    total = examples = 0
    kinds: Counter[str] = Counter()
    shown: list[RowProblem] = []
    unused: Counter[str] = Counter()
    thoughts = 0
    pairs, quality = _Pairs(), _Quality(path, found, given)
    labels: Counter[str] = Counter()
    for line, raw in _counted(path, found):
        total += 1
        read = found.read(raw, line)
        if isinstance(read, RowProblem):
            kinds[read.kind] += 1
            if len(shown) < _SHOWN:
                shown.append(read)
            continue
        quality.add(line, read)
        examples += len(read)
        unused.update(read[0].unused)
        labels.update(said.contents().label for said in read)
        last = read[-1]  # of several conversations each is how the next begins
        thoughts += sum(has_thought(message) for part in last.contents().parts for message in part)
        if isinstance(last, Preference):
            pairs.add(line, last)
    if not total:
        raise no_rows(path)
    bad = sum(kinds.values())
    what = counted(examples, found.noun)
    emit(f"{path}: {paint(found.format, 'bold')} ({found.why})")
    emit(f"  {counted(total, 'row')}, {what}, {counted(bad, 'bad row')} ({bad / total:.2%})")
    if thoughts:
        think = "answer has" if thoughts == 1 else "answers have"
        emit(f"  {thoughts:,} {think} a thought first; `train_thinking` decides how it is trained")
    if told := _label_line(labels, found):
        emit(f"  {told}")
    if unused:
        emit(f"  {unused_line(unused)}")
    for line_of_text in (*quality.lines(), *pairs.lines()):
        emit(f"  {line_of_text}")
    _say_bad(shown, kinds)
    return 1 if bad else 0


def _label_line(labels: Counter[str], found: StageRows) -> str:
    """What stages KTO and CLS learn of a row."""
    if found.format == "unpaired":
        return verdicts(labels["True"], labels["False"])
    if found.format != "classes":
        return ""
    named = ", ".join(f"{name} {count:,}" for name, count in labels.most_common(_CLASSES))
    more = f" and {len(labels) - _CLASSES:,} more" if len(labels) > _CLASSES else ""
    return f"classes: {named}{more}"


def _check_vision(path: str, rows: StageRows, given: argparse.Namespace, tokenizer: Tokenizer | None) -> int:
    from erniekit.data.vision.budget import budget_lines, measure, model_rules

    found = Detected(rows.format, rows.why, rows.preference, rows.vision)

    model = Path(given.model).expanduser() if given.model else None
    rules = model_rules(model, given.pixels)
    budget = measure(path, found, rules, given.length, tokenizer)
    emit(f"{path}: {paint(found.format, 'bold')} ({found.why})")
    for line in budget_lines(path, budget, rules, given.length, model is not None):
        emit(line)
    _say_bad(budget.bad, budget.kinds)
    return 1 if budget.kinds else 0


def _say_bad(shown: list[RowProblem], kinds: Counter[str]) -> None:
    for problem in shown:
        emit(f"  {paint(f'{problem.file}:{problem.line}', 'yellow')}: {problem.reason} [{problem.kind}]")
    rest = kinds - Counter(problem.kind for problem in shown)
    if rest:
        more = ", ".join(f"{k} {n:,}" for k, n in rest.most_common())
        emit(f"  ... and {rest.total():,} more: {more}")


def _counted(path: str, found: StageRows) -> Iterator[tuple[int, Raw]]:
    with WorkProgress(f"checking {Path(path).name}", None, "rows") as progress:
        for row in found.rows():
            yield row
            progress.add()


class _Quality:
    """Lengths, repeated rows, near-empty answers and the encoding of a file."""

    def __init__(self, path: str, found: StageRows, given: argparse.Namespace) -> None:
        self.report = DataReport(path, found.format, encoding=file_encoding(path).describe())
        self.limit, self.over, self.sizes = given.length, list[int](), Counter[int]()
        self._rows = RowCounts()
        self._job = found.job if given.model else None

    def add(self, line: int, read: Sequence[ParsedRow]) -> None:
        self._rows.add([(line, row_key(read))], [line] * is_near_empty(read))
        if self._job is None:
            self.sizes[size_of(read)] += 1
            return
        made = [self._job.assemble(said) for said in read]
        lengths = [len(one.sample.ids) for one in made if isinstance(one, Assembled)]
        self.sizes.update(lengths)
        if any(length > self.limit for length in lengths) and self.report.format != "text":  # documents are divided
            self.over.append(line)

    def lines(self) -> list[str]:
        self._rows.fill(self.report)
        unit = "characters a row" if self._job is None else "tokens an example"
        out = [length_line(self.sizes, unit)] if self.sizes else []
        if self.over:
            more = ", ..." if len(self.over) > SHOWN_LINES else ""
            named = ", ".join(map(str, self.over[:SHOWN_LINES]))
            out.append(f"longer than {self.limit:,} tokens: {counted(len(self.over), 'row')} (row {named}{more})")
        return out + quality_lines(self.report)


class _Pairs:
    """What the pairs of a file are like, in characters: which model will read them is not known here."""

    def __init__(self) -> None:
        self.count = self.longer = self.alike = self.several = self.past = 0
        self.sizes: dict[str, Counter[int]] = {"prompt": Counter(), "chosen": Counter(), "rejected": Counter()}
        self.first: tuple[int, Preference] | None = None

    def add(self, line: int, pair: Preference) -> None:
        self.first = self.first or (line, pair)
        sizes = {"prompt": _size(pair.prompt), "chosen": _size(pair.chosen), "rejected": _size(pair.rejected)}
        for name, size in sizes.items():
            self.sizes[name][size] += 1
        self.count += 1
        self.longer += sizes["chosen"] > sizes["rejected"]
        self.alike += pair.chosen == pair.rejected
        self.several += len(pair.chosen) > 1 or len(pair.rejected) > 1
        self.past += any(message.role == "assistant" for message in pair.prompt)

    def lines(self) -> list[str]:
        if self.first is None:
            return []
        told = ", ".join(f"{name} {_median(sizes):,} (to {max(sizes):,})" for name, sizes in self.sizes.items())
        out = [f"characters, median: {told}; chosen is longer in {self.longer / self.count:.0%}"]
        if self.past:
            out.append(f"earlier turns in {counted(self.past, 'prompt')}: they are read, not scored")
        if self.several:
            out.append(f"answers of several turns in {counted(self.several, 'pair')}: the assistant's are scored")
        if self.alike:
            out.append(f"two equal answers in {counted(self.alike, 'pair')}, which training leaves out")
        line, pair = self.first
        out.append(f"row {line}; scored is what the assistant says in its last two lines:")
        out += [f"  {message.role:9} {_shown(message)}" for message in pair.prompt]
        for name, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            said = [paint(_shown(m), "bold") if m.role == "assistant" else f"({m.role}: {_shown(m)})" for m in answer]
            out.append(f"  {name:9} " + " ".join(said))
        return out


def _size(said: tuple[ChatMessage, ...]) -> int:
    return sum(len(message.content) for message in said)


def _median(counts: Counter[int]) -> int:
    seen = 0
    for size in sorted(counts):
        seen += counts[size]
        if 2 * seen >= counts.total():
            return size
    raise AssertionError("no counts")


def _shown(message: ChatMessage, most: int = 80) -> str:
    text = " ".join(message.content.split())
    return text if len(text) <= most else text[: most - 3] + "..."
