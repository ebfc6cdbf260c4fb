"""`erniekit chat`: a conversation in the terminal, or one answer with --prompt. Called by cli/commands.py.

It connects to a running server, or starts one for a folder (chat_server.py); either way it is a client.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from erniekit.config import RunConfig, load, refuse_not_yet_supported
from erniekit.config.opening_line import announce_command
from erniekit.errors import ConfigError, ErnieKitError
from erniekit.serve import chat_media
from erniekit.serve.chat_client import EVERYWHERE, Address, Client, NoAnswer, address_of, is_address
from erniekit.serve.chat_commands import QUOTES, command_in, run_command
from erniekit.serve.chat_screen import CONTROLS, Screen, notes_on
from erniekit.serve.chat_session import ChatSession
from erniekit.serve.interrupts import prompt_interrupts
from erniekit.serve.server import read_key

HINT = "'exit' quits, 'clear' resets, '/help' lists commands, Ctrl-C stops an answer"


def chat_command(args: list[str]) -> int:
    """`erniekit chat [URL | DIR | RECIPE.yaml] [key=value ...] [--system TEXT] [--prompt TEXT]
    [--image PATH ...] [--video PATH ...]`."""
    rest, own, shown = own_flags(args)
    if not own.get("prompt", "-").strip() and not shown:
        raise ConfigError("--prompt is empty: there is nothing to answer", where="flag --prompt", fix='--prompt "..."')
    cfg = load(rest, "chat")
    refuse_not_yet_supported(cfg, "chat")
    pixels = cfg.vision.media_max_pixels
    attached = [chat_media.attach(path, kind, pixels) for kind, path in shown]  # before a model is opened
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a character this terminal cannot spell must not end the conversation
            stream.reconfigure(errors="replace")
    one_shot = "prompt" in own
    with connect(cfg, sys.stderr if one_shot else sys.stdout, quiet=one_shot) as (client, about):
        session = ChatSession(client, request_fields(cfg), own.get("system", ""), pixels=pixels)
        session.attached = attached
        if one_shot:
            return answer_prompt(session, own["prompt"], sys.stdout, sys.stderr)
        return converse(session, about, sys.stdin, sys.stdout)


# ---- the server to connect to


@contextmanager
def connect(cfg: RunConfig, output: TextIO, quiet: bool = False) -> Iterator[tuple[Client, str]]:
    """A client and what it reaches, for as long as the block lasts."""
    address, must = server_of(cfg)
    if address is not None:
        client = Client(address, read_key(cfg), cfg.serve.request_timeout)
        try:
            client.choose_model(cfg.serve.served_model_name)
        except NoAnswer as error:
            if must or error.status in (401, 403):
                raise
        else:
            if quiet and not must:
                print(f"asking {client.model} at {address.url}", file=output, flush=True)
            yield client, f"{client.model} at {address.url}"
            return
    if not quiet:
        announce_command(cfg)
    from erniekit.serve.chat_server import embedded
    from erniekit.serve.folder import choose_folder

    if not quiet:
        print(f"loading {choose_folder(cfg)[0]}", file=output, flush=True)
    with embedded(cfg) as opened:
        yield opened


def server_of(cfg: RunConfig) -> tuple[Address | None, bool]:
    """(server to use, whether it must be there). A recipe of a chat names both a port and a folder: the folder is
    opened when no server answers at the port."""
    s, model = cfg.serve, cfg.model.model_name_or_path
    if model and is_address(model):
        return address_of(model), True
    addressed = [name for name in ("host", "port") if cfg.given(name)]
    named = [name for name in ("model_name_or_path", "lora_path", "output_dir") if cfg.given(name) and cfg[name]]
    if named and not addressed:
        return None, False
    typed = [[name for name in names if cfg.typed(name)] for names in (addressed, named)]
    if all(typed):
        raise ConfigError(
            f"{typed[0][0]} names a server and {typed[1][0]} a folder",
            where="command line",
            fix="give one of the two: erniekit chat --port 8188, or erniekit chat DIR",
        )
    if typed[1]:
        return None, False
    must = not named or bool(typed[0])
    if s.port == 0 and must:
        raise ConfigError(
            "port 0 is not a server's address", where=cfg.origin("port"), fix="the port in its `ready` line"
        )
    return (Address(EVERYWHERE.get(s.host, s.host.strip("[]")), s.port) if s.port else None), must


def request_fields(cfg: RunConfig) -> dict[str, Any]:
    """Every sampling key by its name in the API; the server's defaults are never used."""
    s = cfg.serve
    out: dict[str, Any] = {
        "max_tokens": s.max_new_tokens,
        "min_tokens": s.min_tokens,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "frequency_penalty": s.frequency_penalty,
        "presence_penalty": s.presence_penalty,
        "repetition_penalty": s.repetition_penalty,
        "stream": s.stream,
    }
    if cfg.given("top_k"):  # not one of OpenAI's fields; -1 is what every server that has it reads as no limit
        out["top_k"] = s.top_k or -1
    if cfg.given("seed"):
        out["seed"] = cfg.train.seed
    if cfg.given("enable_thinking"):
        out["chat_template_kwargs"] = {"enable_thinking": s.enable_thinking}
    if s.stream and s.stream_options:
        out["stream_options"] = dict(s.stream_options)
    return out


# ---- the conversation


def answer_prompt(session: ChatSession, prompt: str, output: TextIO, notes_output: TextIO) -> int:
    """One answer, and nothing else on `output`: reasoning and notes go to `notes_output`."""
    screen = Screen(output, notes_output)
    answer = session.send(prompt, screen)
    screen.end("", output)
    notes = notes_on(answer)
    if notes:
        screen.end(notes, notes_output)
    return 130 if answer.finish == "interrupt" else 0


def converse(session: ChatSession, about: str, input_stream: TextIO, output: TextIO) -> int:
    """Turns until `exit` or `quit`, the end of the input, or Ctrl-C twice."""
    print(f"{about}; {HINT}", file=output, flush=True)
    interrupts = 0
    with prompt_interrupts():
        while interrupts < 2:
            try:
                text = _read(input_stream, output)
                command = None if text is None else command_in(text)
                if text is None or (command is not None and command[0] == "/exit"):
                    break
                if command is not None:
                    print(_command_output(session, *command), file=output, flush=True)
                elif message := _whole(text, input_stream, output).strip():
                    interrupts, last = _turn(session, message, output)
                    print(last, file=output, flush=True)
            except KeyboardInterrupt:  # at the prompt, or on the way there
                interrupts += 1
                print("" if interrupts > 1 else "\nCtrl-C again to quit", file=output, flush=True)
    return 0


def _whole(line: str, input_stream: TextIO, output: TextIO) -> str:
    """The message that begins with a line: up to the closing quotes, or as long as lines end in a backslash."""
    if line.lstrip().startswith(QUOTES):
        text = line.lstrip()[len(QUOTES) :]
        while not text.rstrip().endswith(QUOTES) and (more := _read(input_stream, output, first=False)) is not None:
            text += "\n" + more
        return text.rstrip().removesuffix(QUOTES).strip("\n")
    while line.endswith("\\"):
        more = _read(input_stream, output, first=False)
        line = line[:-1] + ("" if more is None else "\n" + more)
    return line


def _command_output(session: ChatSession, name: str, rest: str) -> str:
    try:
        return run_command(session, name, rest).translate(CONTROLS)
    except ErnieKitError as error:
        return "\n".join(error.lines()).translate(CONTROLS)


def _turn(session: ChatSession, text: str, output: TextIO) -> tuple[int, str]:
    """One answer on the screen; 1 when it was interrupted, and how its line ends. A refusal is printed and the
    conversation goes on."""
    screen = Screen(output, output)
    try:
        print("Assistant: ", end="", file=output, flush=True)
        answer = session.send(text, screen)
    except ErnieKitError as error:
        return 0, "\n" + "\n".join(error.lines()).translate(CONTROLS)
    except KeyboardInterrupt:  # before the request was sent
        return 1, "[stopped]"
    return int(answer.finish == "interrupt"), screen.ending(notes_on(answer), output)


def _read(input_stream: TextIO, output: TextIO, first: bool = True) -> str | None:
    """One line, or what was pasted; None at the end. A terminal gets line editing, a pipe is read as it is. first: of a
    message."""
    if input_stream is sys.stdin and sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # input() then edits lines and keeps a history

            # Python switches it off. Pasted lines are then one message, and not a question each.
            readline.parse_and_bind("set enable-bracketed-paste on")
        try:
            return input("User: " if first else "... ")
        except EOFError:
            print(file=output)
            return None
    if first:
        print("User: ", end="", file=output, flush=True)
    line = input_stream.readline()
    if first:  # a pipe shows no typed line: end the prompt's own, so that answers begin on a new line
        print(file=output, flush=True)
    return line.rstrip("\n") if line else None


def own_flags(args: list[str]) -> tuple[list[str], dict[str, str], list[tuple[str, str]]]:
    """--prompt, --system, --image and --video belong to chat only: they are no keys of a run. The last are (kind,
    path), in their order."""
    rest: list[str] = []
    own: dict[str, str] = {}
    shown: list[tuple[str, str]] = []
    arguments = iter(args)
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if not argument.startswith("--") or name not in ("prompt", "system", "image", "video"):
            rest.append(argument)
            continue
        is_path = name in ("image", "video")
        given = value if equals else next(arguments, None)
        if given is None or (is_path and not given):
            needs, form = ("a path", "PATH") if is_path else ("a text", '"..."')
            raise ConfigError(f"--{name} needs {needs}", where=f"flag --{name}", fix=f"--{name} {form}")
        if is_path:
            shown.append((name, given))
        else:
            own[name] = given
    return rest, own, shown
