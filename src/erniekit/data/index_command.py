"""`erniekit data index FILE... --output PREFIX`: text becomes the token files that pre-training reads.

Called by the command table; needs a tokenizer folder, and no torch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from erniekit.data.index import Indexed, index_text
from erniekit.data.mmap_files import CODES, SUFFIXES, narrowest
from erniekit.data.report import short
from erniekit.data.text_job import TextJob
from erniekit.data.token_cache import cores
from erniekit.data.tokenizer import load_tokenizer
from erniekit.errors import ConfigError
from erniekit.flag_parser import FlagParser
from erniekit.log import emit, paint, typed, warn
from erniekit.printable import counted

_DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")
assert len(_DTYPES) == len(CODES)


def index_command(args: list[str]) -> int:
    given = _parser().parse_args(args)
    tokenizer = load_tokenizer(Path(given.model_name_or_path).expanduser())
    dtype = narrowest(tokenizer.vocab_size) if given.dtype == "auto" else given.dtype
    job = TextJob(tokenizer, given.json_key, given.append_eos, dtype)
    began = time.monotonic()
    made = index_text(
        given.files,
        given.output,
        job,
        format=given.format,
        num_proc=given.num_proc or cores(),
        max_bad_fraction=given.max_bad_fraction,
    )
    _print_result(made, given, dtype, time.monotonic() - began)
    return 0


def _print_result(made: Indexed, given: argparse.Namespace, dtype: str, seconds: float) -> None:
    report = made.report
    both = " and ".join(made.prefix + suffix for suffix in SUFFIXES[given.format])
    emit(f"{paint(both, 'bold')}: {counted(report.samples, 'document')}, {short(report.tokens)} tokens ({dtype})")
    emit(report.lines()[1].replace("a sample", "a document"))
    size = sum(Path(file).expanduser().stat().st_size for file in given.files) / 2**20
    if made.fresh:
        emit(f"  {size:,.1f} MiB of text; this run took {seconds:.1f} s")
    else:
        emit("  it was there already, from the same text and settings")
    if report.bad:
        left = f"{'is' if report.bad_rows == 1 else 'are'} left out"
        what = f"{report.bad_rows:,} of {counted(report.rows, 'row')} {left}"
        warn(f"{what}; {made.prefix}_bad_rows.jsonl names each")
    model = given.model_name_or_path
    arguments = ("--stage", "PT", "--model_name_or_path", model, "--input_dir", made.prefix, "--output_dir", "out")
    emit(f"next: {typed('train', *arguments)}")


def _parser() -> argparse.ArgumentParser:
    parser = FlagParser(
        prog="erniekit data index",
        description="Tokenise text for pre-training. The same command resumes after a kill.",
    )
    parser.add_argument(
        "files", nargs="+", metavar="FILE", help=".jsonl, .json or .parquet rows with a text, .txt; .gz of them"
    )
    parser.add_argument("--model_name_or_path", required=True, metavar="DIR", help="folder of the tokenizer")
    parser.add_argument("--output", required=True, metavar="PREFIX", help="makes PREFIX.bin and PREFIX.idx")
    parser.add_argument("--format", choices=list(SUFFIXES), default="bin", help="npy: PREFIX_ids.npy, PREFIX_idx.npz")
    parser.add_argument(
        "--append_eos", nargs="?", const=True, default=True, type=_yes, help="end each document with eos (True)"
    )
    parser.add_argument("--dtype", choices=["auto", *_DTYPES], default="auto", help="of a token (auto: the narrowest)")
    parser.add_argument("--json_key", default="text", metavar="KEY", help="the field that holds the text (text)")
    parser.add_argument(
        "--num_proc", "--dataset_num_proc", type=int, default=0, metavar="N", help="processes (0: all cores)"
    )
    parser.add_argument(
        "--max_bad_fraction", type=float, default=0.001, metavar="X", help="stop when more rows are bad (0.001)"
    )
    return parser


def _yes(text: str) -> bool:
    known = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if text.lower() not in known:
        raise ConfigError(f"--append_eos takes True or False, not {text!r}", where="command line")
    return known[text.lower()]
