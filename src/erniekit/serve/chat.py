"""`erniekit chat`: a conversation with a local model folder in the terminal, or one answer with --prompt.

Called by cli/main.py. The prompt is built by data/template.py, so it equals what training saw.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from erniekit.config import RunConfig, load, need, refuse_later
from erniekit.errors import ConfigError, DataError, ErnieKitError

if TYPE_CHECKING:
    import torch

    from erniekit.api_load import Found
    from erniekit.serve.generate import Answer, Generator, Sampling

WORDS = "exit leaves, clear starts anew, Ctrl-C stops an answer"


@dataclass(frozen=True)
class ChatSettings:
    sampling: Sampling
    system: str = ""
    stream: bool = True
    dtype: str | None = None  # as stored when not given
    device: str | torch.device = "cpu"
    base: str | None = None  # the model below an adapter, when the adapter's own word for it does not do
    tokenizer: str | None = None
    seed: int | None = None  # of the sampling


def chat_command(args: list[str]) -> int:
    """`erniekit chat DIR | RECIPE.yaml [key=value ...] [--system TEXT] [--prompt TEXT]`."""
    rest, own = _own_flags(args)
    cfg = load(rest, "chat")
    refuse_later(cfg, "chat")
    folder, base = choose_folder(cfg)
    settings = settings_from(cfg, own.get("system", ""), base)
    if "prompt" in own:
        return ask(folder, settings, own["prompt"], sys.stdout)
    return chat(folder, settings, sys.stdin, sys.stdout)


def chat(folder: str | Path, settings: ChatSettings, input_stream: TextIO, output: TextIO) -> int:
    """Turns until `exit`, the end of the input, or Ctrl-C twice."""
    print(f"loading {folder}", file=output, flush=True)
    talk, opened = _open(folder, settings)
    print(f"{opened}; {WORDS}", file=output, flush=True)
    interrupts = 0
    while interrupts < 2:
        try:
            text = _read(input_stream, output)
        except KeyboardInterrupt:
            interrupts += 1
            print("" if interrupts > 1 else "\nCtrl-C again to leave", file=output, flush=True)
            continue
        if text is None or text.strip() == "exit":
            break
        if text.strip() == "clear":
            talk.clear()
            print("cleared", file=output, flush=True)
        elif text.strip():
            interrupts = _turn(talk, text.strip(), output)
    return 0


def ask(folder: str | Path, settings: ChatSettings, prompt: str, output: TextIO) -> int:
    """One answer, and nothing else on `output`."""
    talk, _ = _open(folder, settings)
    answer = talk.say(prompt, _writer(settings, output))
    print("" if settings.stream else answer.text, file=output, flush=True)
    return 130 if answer.stopped == "interrupt" else 0


@dataclass
class Talk:
    """A conversation so far; what failed or was refused leaves no trace in it."""

    generator: Generator
    settings: ChatSettings
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.messages = [{"role": "system", "content": self.settings.system}] if self.settings.system else []

    def say(self, text: str, on_text: Any) -> Answer:
        from erniekit.data.template import TemplateRefused, prompt_ids

        asked = [*self.messages, {"role": "user", "content": text}]
        try:
            ids = prompt_ids(asked, self.generator.tokenizer)
        except TemplateRefused as refused:
            raise DataError(
                str(refused), where="chat template", fix="leave --system out, or start with clear"
            ) from None
        answer = self.generator.answer(ids, self.settings.sampling, on_text)
        self.messages = [*asked, {"role": "assistant", "content": answer.text}]
        return answer


def _turn(talk: Talk, text: str, output: TextIO) -> int:
    """One answer on the screen; 1 when it was interrupted. A refusal is said and the conversation goes on."""
    try:
        print("Assistant: ", end="", file=output, flush=True)
        answer = talk.say(text, _writer(talk.settings, output))
    except ErnieKitError as error:
        print("\n" + "\n".join(error.lines()), file=output, flush=True)
        return 0
    except KeyboardInterrupt:  # before the first token
        print("[stopped]", file=output, flush=True)
        return 1
    tail = "" if talk.settings.stream else answer.text
    note = {"stop": "", "length": " [cut at the length limit]", "interrupt": " [stopped]"}[answer.stopped]
    print(tail + note, file=output, flush=True)
    return int(answer.stopped == "interrupt")


def _writer(settings: ChatSettings, output: TextIO) -> Any:
    def write(piece: str) -> None:
        print(piece, end="", file=output, flush=True)

    return write if settings.stream else (lambda piece: None)


def _read(input_stream: TextIO, output: TextIO) -> str | None:
    """One line; None at the end. A terminal gets line editing, a pipe is read as it is."""
    if input_stream is sys.stdin and sys.stdin.isatty():
        try:
            return input("User: ")
        except EOFError:
            print(file=output)
            return None
    print("User: ", end="", file=output, flush=True)
    line = input_stream.readline()
    # A pipe shows no typed line: end the prompt's own, so that answers stand apart.
    print(file=output, flush=True)
    return line.rstrip("\n") if line else None


def _open(folder: str | Path, settings: ChatSettings) -> tuple[Talk, str]:
    import torch

    from erniekit.api_load import DTYPES, find_model
    from erniekit.data.tokenizer import load_tokenizer
    from erniekit.serve.generate import Generator

    found = find_model(folder, settings.base)
    tokenizer = load_tokenizer(settings.tokenizer) if settings.tokenizer else found.tokenizer()
    model = found.build(DTYPES[settings.dtype] if settings.dtype else None, settings.device)
    kind = str(next(model.parameters()).dtype).removeprefix("torch.")
    generator = Generator(model, tokenizer, stop_ids(found))
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    return Talk(generator, settings), f"{found.describe()}, {kind} on {settings.device}"


def stop_ids(found: Found) -> list[int]:
    """Ends the model's own files name; a chat release may list more than its tokenizer's one eos."""
    out: list[int] = []
    side = found.weights.path / "generation_config.json"
    try:
        told = json.loads(side.read_text(encoding="utf-8")) if side.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"generation_config.json is not JSON: {error}", where=str(side)) from None
    for source in (found.weights.config_json, told):
        ends = source.get("eos_token_id") if isinstance(source, dict) else None
        out += [id for id in (ends if isinstance(ends, list) else [ends]) if isinstance(id, int)]
    return [id for id in out if id < found.weights.config.vocab_size]


def choose_folder(cfg: RunConfig) -> tuple[str, str | None]:
    """(folder to open, base below it). A recipe means what it trained, when there is something; a typed DIR itself."""
    model = cfg.model.model_name_or_path
    if cfg.lora.lora_path:
        return cfg.lora.lora_path, model
    if cfg.origin("model_name_or_path") != "command line" and cfg.given("output_dir"):
        from erniekit.export.source import find_source

        trained = find_source(Path(str(cfg.train.output_dir)).expanduser())
        if trained is not None:
            return str(trained.path), model if trained.is_adapter else None
    need(cfg, "model_name_or_path")
    return str(model), None


def settings_from(cfg: RunConfig, system: str, base: str | None) -> ChatSettings:
    from erniekit.devices import pick
    from erniekit.serve.generate import Sampling

    s, kind = cfg.serve, cfg.precision.compute_type
    return ChatSettings(
        Sampling(
            s.max_new_tokens,
            s.min_tokens,
            s.temperature,
            s.top_p,
            s.repetition_penalty,
            s.frequency_penalty,
            s.presence_penalty,
            s.max_model_len,
        ),
        system=system,
        stream=s.stream,
        dtype=kind if cfg.given("compute_type") and kind in ("bf16", "fp16", "fp32") else None,
        device=pick(cfg.train.device, cfg.train.no_cuda).handle,
        base=base,
        tokenizer=cfg.model.tokenizer_name,
        seed=cfg.train.seed if cfg.given("seed") else None,
    )


def _own_flags(args: list[str]) -> tuple[list[str], dict[str, str]]:
    """--prompt and --system belong to chat alone: they are no keys of a run."""
    rest: list[str] = []
    own: dict[str, str] = {}
    words = iter(args)
    for word in words:
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in ("prompt", "system"):
            rest.append(word)
            continue
        if not equals:
            following = next(words, None)
            if following is None:
                raise ConfigError(f"--{name} needs a text", where=f"flag --{name}", fix=f'--{name} "..."')
            value = following
        own[name] = value
    return rest, own
