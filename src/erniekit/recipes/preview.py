"""`erniekit data preview RECIPE | FILE...`: a few rows as the model would see them, the trained tokens marked.

Called by cli/commands.py; the web page asks for `--json`. Imports no torch, so that it answers at once.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from erniekit.checkpoint.hub import resolve_model
from erniekit.config import RunConfig, load, need
from erniekit.config.flat import KEYS
from erniekit.data.assemble import Dropped
from erniekit.data.classification import ClassifyJob, ClassRow, class_rows, classes_in
from erniekit.data.formats import Raw, detect, rows
from erniekit.data.formats.columns import Columns, as_columns
from erniekit.data.formats.files import decode
from erniekit.data.preference import PairRules, PairSample
from erniekit.data.reward import RewardJob, reward_rows
from erniekit.data.storage import listed_files
from erniekit.data.text_rows import Place, PlainText, documents
from erniekit.data.thinking import write_out
from erniekit.data.tokenise import TokeniseJob
from erniekit.data.tokenizer import Tokenizer, load_tokenizer
from erniekit.data.types import IGNORE, ChatMessage, Conversation, RowProblem, Sample
from erniekit.data.unpaired import Unpaired, UnpairedSample
from erniekit.data.unpaired_source import unpaired_rows
from erniekit.flag_parser import FlagParser
from erniekit.log import colour_on, emit, paint
from erniekit.loss_table import PREFERENCE_KEYS
from erniekit.printable import counted

READ, TRAINED, REJECTED = 0, 1, 2  # what a token is to the loss; the last: of the answer that a pair rejects
MOST_TOKENS = 2000  # shown of a row
COUNTED_BYTES = 256 * 2**20  # larger files are not read to their end for the number of their rows

KEYS_READ = (
    "train_dataset_path", "train_dataset_type", "columns", "model_name_or_path", "tokenizer_name", "download_hub",
    "stage", "compat", "max_seq_len", "overlong", "train_thinking", "max_prompt_len", "mask_out_eos_token",
    "class_labels",
)  # fmt: skip

# `erniekit data` calls these keys so, and a preview often follows it.
_KEY_OF_FLAG = {"--model": "--model_name_or_path", "--type": "--train_dataset_type", "--length": "--max_seq_len"}

Piece = tuple[str, int]
# What a row becomes, or why it becomes nothing; and which of its fields no reader takes.
# Rows with pictures have one thing more: their tokens, and what they show.
Shown = tuple[list[Piece], str, tuple[str, ...]] | tuple[list[Piece], str, tuple[str, ...], dict[str, Any]]
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def preview_command(args: list[str]) -> int:
    given, words = preview_parser().parse_known_args(args)
    told = preview(
        load([_KEY_OF_FLAG.get(word, word) for word in words], "data"), max(0, given.start), max(1, given.count)
    )
    if given.json:
        print(json.dumps(told, ensure_ascii=True))
    else:
        emit("\n".join(lines(told)))
    return 0


def preview_parser() -> argparse.ArgumentParser:
    """Of its own flags; all other words are keys, as for `erniekit train`."""
    keys = [f"  {name:<20} {KEYS[name].help}" for name in KEYS_READ]
    parser = FlagParser(
        prog="erniekit data preview",
        usage="erniekit data preview RECIPE | FILE ... [--from N] [--rows N] [--json] [--key value | key=value ...]",
        description="Rows as the model would see them, the trained tokens marked; without a model, what is said.",
        epilog="\n".join(["keys that decide what is shown (a recipe may hold any other as well):", *keys]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--from", dest="start", type=int, default=0, metavar="N", help="rows to pass over first (0)")
    parser.add_argument("--rows", dest="count", type=int, default=5, metavar="N", help="rows to show (5)")
    parser.add_argument("--json", action="store_true", help="one JSON object, for programs")
    return parser


def preview(cfg: RunConfig, start: int, count: int) -> dict[str, Any]:
    """`rows` of the training files from number `start` on; `total`: how many there are, 0 where not counted."""
    need(cfg, "train_dataset_path")
    listed = listed_files(cfg.data.train_dataset_path, text=cfg.train.stage == "PT")
    files = [file.path for file in listed]
    tokenizer = _tokenizer(cfg)
    given = cfg.data.train_dataset_type or ("auto",) * len(files)  # one an entry: config/rules/batch.py sees to it
    formats = [None if given[file.entry] == "auto" else given[file.entry] for file in listed]
    readers = [_reader(cfg, file, name, tokenizer) for file, name in zip(files, formats)]
    stream = ((n, line, raw) for n, file in enumerate(files) for line, raw in _raw_rows(cfg, file))
    wanted = list(islice(stream, start, start + count))
    here = [file for file in files if isinstance(file, Path)]
    small = len(here) == len(files) and sum(file.stat().st_size for file in here if file.is_file()) <= COUNTED_BYTES
    total = start + len(wanted) + sum(1 for _ in stream) if small and wanted else 0
    out = []
    for n, line, raw in wanted:
        shown, problem, unused, *more = readers[n][1](line, raw)
        row: dict[str, Any] = {"file": str(files[n]), "line": line, "pieces": joined(shown[:MOST_TOKENS])}
        row |= {"unused": list(unused)} if unused else {}
        if tokenizer is not None:
            row |= {"tokens": len(shown), "trained": sum(part != READ for _, part in shown)}
        row |= more[0] if more else {}
        out.append(row | ({"problem": problem} if problem else {}))
    return {"format": ", ".join(dict.fromkeys(name for name, _ in readers)), "total": total, "rows": out}


def _tokenizer(cfg: RunConfig) -> Tokenizer | None:
    """None without a model: rows are then shown as what is said, not as tokens."""
    if cfg.model.tokenizer_name:
        return load_tokenizer(Path(cfg.model.tokenizer_name).expanduser())
    folder = _model(cfg)
    return load_tokenizer(folder) if folder else None


def _model(cfg: RunConfig) -> Path | None:
    name = cfg.model.model_name_or_path
    return resolve_model(name, cfg.model.download_hub) if name else None


def _raw_rows(cfg: RunConfig, file: str | Path) -> Iterator[tuple[int, Raw]]:
    if cfg.train.stage != "PT" or not isinstance(file, Path):
        return rows(file)
    return ((found.row, found.raw) for found in documents(file, Place()))


def _reader(
    cfg: RunConfig, file: str | Path, format: str | None, tokenizer: Tokenizer | None
) -> tuple[str, Callable[[int, Raw], Shown]]:
    """The name of the file's format, and what a row of it becomes."""
    if cfg.train.stage == "PT":
        return "text", lambda line, raw: text_pieces(raw, tokenizer, cfg.data.max_seq_len)
    if cfg.train.stage == "VL-SFT" and tokenizer is not None:
        from erniekit.recipes.vision_preview import VisionPreview

        seen = VisionPreview(cfg, Path(file), format, tokenizer, _model(cfg))
        return seen.format, seen.row
    columns = as_columns(cfg.data.columns, cfg.origin("columns"))
    if cfg.train.stage in PREFERENCE_KEYS:
        scored = _scored_job(cfg, file, format, tokenizer, columns)
        return scored.format, lambda line, raw: row_pieces(scored, line, raw)
    found = detect(file, columns=columns) if format is None else None
    pairs = PairRules(cfg.dpo.max_prompt_len, cfg.dpo.mask_out_eos_token) if cfg.train.stage == "DPO" else None
    name = format or (found.format if found else "")
    compat = cfg.compat.erniekit_rows and pairs is None
    d = cfg.data
    rules: Any = (d.max_seq_len, d.overlong, compat, pairs, d.train_thinking, columns)
    job = TokeniseJob(str(file), name, tokenizer, *rules)  # type: ignore[arg-type]  # without a tokenizer it only reads
    return name, lambda line, raw: row_pieces(job, line, raw)


def _scored_job(
    cfg: RunConfig, file: str | Path, format: str | None, tokenizer: Tokenizer | None, columns: Columns
) -> TokeniseJob:
    """Of the stages that score answers or texts, beside DPO."""
    stage, d = cfg.train.stage, cfg.data
    if stage == "CLS":
        classes = cfg.score.class_labels or classes_in([file], columns, [format])
        kind = class_rows(classes)(file, format, columns)
    else:
        kind = (reward_rows if stage == "RM" else unpaired_rows)(file, format, columns)
    rules = None if stage == "CLS" else PairRules(cfg.dpo.max_prompt_len, cfg.dpo.mask_out_eos_token)
    return kind.job(str(file), kind.name, tokenizer, d.max_seq_len, d.overlong, False, rules, d.train_thinking, columns)


def row_pieces(job: TokeniseJob, line: int, raw: Raw) -> Shown:
    parsed = job.read(raw, line)
    if isinstance(parsed, RowProblem):
        return [], parsed.reason, ()
    out: list[Piece] = []
    unused = parsed[0].unused
    for said in parsed:
        if job.tokenizer is None:
            out += said_pieces(said)
            continue
        made = job.assemble(said)
        if isinstance(made, Dropped):
            return [], made.reason, unused
        sample = made.sample
        if isinstance(job, (RewardJob, ClassifyJob)):
            out += scored_pieces(sample, job)
            continue
        if isinstance(sample, PairSample):
            out += pair_pieces(sample, job.tokenizer)
            continue
        avoided = isinstance(sample, UnpairedSample) and not sample.desirable
        shown = pieces(sample, job.tokenizer)
        out += [(text, REJECTED if avoided and part == TRAINED else part) for text, part in shown]
    return out, "", unused


def pieces(sample: Sample, tokenizer: Tokenizer) -> list[Piece]:
    """labels[i] is what position i must say, so token i + 1 is marked; the last target is shown itself."""
    ids, labels = sample.ids.tolist(), sample.labels.tolist()
    if labels[-1] != IGNORE:
        ids = [*ids, labels[-1]]
    parts = [READ, *(TRAINED if label != IGNORE else READ for label in labels)]
    return list(zip(tokenizer.pieces(ids), parts))


def pair_pieces(pair: PairSample, tokenizer: Tokenizer) -> list[Piece]:
    """The prompt once, then both answers; the prompt's last token starts each of them (preference_assemble.py)."""
    ids, labels = pair.ids.tolist(), pair.labels.tolist()
    out = [(text, READ) for text in tokenizer.pieces(ids[: pair.shared + 1])]
    for begin, end, part in ((pair.shared, pair.rejected, TRAINED), (pair.rejected, len(ids), REJECTED)):
        answer, scored = ids[begin + 1 : end], labels[begin:end]
        if scored[-1] != IGNORE:
            answer = [*answer, scored[-1]]
        texts = tokenizer.pieces(answer)
        out += [("\n", READ), *((text, part if on != IGNORE else READ) for text, on in zip(texts, scored))]
    return out


def scored_pieces(sample: Sample, job: TokeniseJob) -> list[Piece]:
    """Nothing is predicted: the whole text is read, or both answers of a pair; a text is followed by its class."""
    ids = sample.ids.tolist()
    if isinstance(sample, PairSample):
        parts = [READ] * sample.shared + [TRAINED] * (sample.rejected - sample.shared)
        parts += [REJECTED] * (len(ids) - len(parts))
        return list(zip(job.tokenizer.pieces(ids), parts))
    assert isinstance(job, ClassifyJob)
    read = [(text, READ) for text in job.tokenizer.pieces(ids)]
    return [*read, (f"\n{job.classes[int(sample.labels[-1])]}", TRAINED)]


def said_pieces(said: Any) -> list[Piece]:
    """Of a Conversation, Preference, Unpaired or ClassRow."""

    def turns(messages: Iterable[ChatMessage], part: int) -> Iterator[Piece]:
        for message in messages:
            trained = message.role == "assistant" and message.trained
            yield f"{message.role}: ", READ
            yield write_out(message).content, part if trained else READ
            yield "\n", READ

    if isinstance(said, Conversation):
        return list(turns(said.messages, TRAINED))
    if isinstance(said, ClassRow):
        return [(f"{said.text}\n", READ), (said.label, TRAINED)]
    if isinstance(said, Unpaired):
        return [*turns(said.prompt, READ), *turns(said.answer, TRAINED if said.desirable else REJECTED)]
    return [*turns(said.prompt, READ), *turns(said.chosen, TRAINED), *turns(said.rejected, REJECTED)]


def text_pieces(raw: Raw, tokenizer: Tokenizer | None, max_seq_len: int) -> Shown:
    """Of pre-training: every token but the first is predicted."""
    try:
        row = raw.decode("utf-8") if isinstance(raw, PlainText) else decode(raw)
    except (ValueError, RecursionError) as error:
        return [], f"not usable: {error}", ()
    if isinstance(raw, RowProblem):
        return [], raw.reason, ()
    text = row.get("text") if isinstance(row, dict) else row
    if not isinstance(text, str) or not text:
        return [], "the row has no `text`", ()
    if tokenizer is None:
        return [(text, TRAINED)], "", ()
    shown = tokenizer.pieces(tokenizer.encode_text(text)[:max_seq_len])
    return [(piece, TRAINED if n else READ) for n, piece in enumerate(shown)], "", ()


def joined(found: Sequence[Piece]) -> list[Piece]:
    """Bytes that make up one letter together, as that letter."""
    out: list[Piece] = []
    held: list[int] = []
    for at, (text, part) in enumerate(found):
        byte = _BYTE.fullmatch(text)
        if byte:
            held.append(int(byte[1], 16))
            follows = found[at + 1] if at + 1 < len(found) else ("", -1)
            if _BYTE.fullmatch(follows[0]) and follows[1] == part:
                continue
            text, held = bytes(held).decode("utf-8", errors="replace"), []
        out.append((text, part))
    return out


def lines(told: dict[str, Any]) -> Iterable[str]:
    """For people: trained tokens green (or in brackets), those of a rejected answer yellow (or in double ones)."""
    marks = {READ: ("", "", ("dim",)), TRAINED: ("[", "]", ("green", "bold")), REJECTED: ("[[", "]]", ("yellow",))}
    for row in told["rows"]:
        place = paint(f"{row['file']}:{row['line']}", "bold")
        yield f"{place}: {row['trained']:,} of {row['tokens']:,} tokens trained" if row.get("tokens") else place
        if row.get("problem"):
            yield f"  not used: {row['problem']}"
            continue
        for medium in row.get("media", ()):
            wide, high = medium["size"]
            frames = f", {medium['frames']} frames" if medium["frames"] > 1 else ""
            yield f"  {medium['kind']} {medium['name']}: {wide} x {high}{frames}, {medium['tokens']:,} tokens"
        text, runs = "", list[Piece]()
        for piece, part in row["pieces"]:
            if runs and runs[-1][1] == part:
                runs[-1] = (runs[-1][0] + piece, part)
            else:
                runs.append((piece, part))
        for run, part in runs:
            before, after, styles = marks[part]
            text += paint(run, *styles) if colour_on() else f"{before}{run}{after}"
        yield "  " + text.replace("\n", "\n  ")
        if row.get("unused"):
            yield "  fields not used: " + ", ".join(f"`{name}`" for name in row["unused"])
    yield f"{counted(told['total'], 'row')}, {told['format']}" if told["total"] else told["format"]
