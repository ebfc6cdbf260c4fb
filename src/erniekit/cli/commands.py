"""The table of commands: what each runs, and the help that `erniekit help` shows of it.

A command is one entry here; its target is imported when the command runs, so the table costs no import.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """`target` is imported on use and called with the arguments after the command; it returns the exit code."""

    target: str
    group: str
    about: str
    usage: tuple[str, ...]
    keys: tuple[str, ...] = ()  # shown by `erniekit COMMAND --help`; none: the basic keys of training
    parts: tuple[tuple[str, str], ...] = ()  # subcommands: name and target, which has its own help
    meant: tuple[tuple[str, str], ...] = ()  # keys that have no default here and mean this, other than in training


# Commands that take no keys of a run; the others take all of them.
KEYLESS = ("version", "help", "completion", "webui", "bench", "data", "recipes", "migrate")
_MODEL_KEYS = ("model_name_or_path", "lora_path", "output_dir", "override_base", "compute_type", "device")
_COMPUTED = (("compute_type", "Not given: fp32 on a CPU, as stored on a GPU."),)

COMMANDS: dict[str, Command] = {
    "demo": Command(
        "erniekit.recipes.demo:demo_command",
        "start",
        "train, resume, merge, export and query a tiny model; offline, one minute",
        (
            "erniekit demo [--dir DIR] [--device NAME]",
            "erniekit demo vision [--dir DIR]   a tiny vision model learns shapes, colours and counts; two minutes",
        ),
        ("output_dir",),
    ),
    "train": Command(
        "erniekit.cli.train:train_command",
        "train",
        "train a model from a recipe, from flags, or both",
        (
            "erniekit train RECIPE.yaml [key=value ...] [--key value ...]",
            "erniekit train --model_name_or_path DIR --data my.jsonl --output_dir out",
        ),
    ),
    "eval": Command(
        "erniekit.recipes.run:eval_command",
        "train",
        "loss and perplexity on the evaluation files",
        ("erniekit eval RECIPE.yaml", "erniekit eval --model_name_or_path DIR --eval_dataset_path my.jsonl"),
        (
            *_MODEL_KEYS,
            "eval_dataset_path",
            "eval_dataset_type",
            "max_seq_len",
            "batch_size",
            "max_evaluate_steps",
            "eval_tasks",
        ),
    ),
    "doctor": Command(
        "erniekit.recipes.doctor_command:doctor_command",
        "train",
        "check this machine's devices, or a recipe before training: labels, leaks, gradients, disk",
        ("erniekit doctor [RECIPE.yaml] [key=value ...]   without a recipe: probe this machine's devices",),
    ),
    "plan": Command(
        "erniekit.recipes.plan_command:plan_command",
        "train",
        "which layouts of a cluster fit a recipe, how fast each would be, and what to change; needs no device",
        (
            "erniekit plan RECIPE.yaml --cluster 8x80G [key=value ...]",
            "  --cluster       8x80G, 2x8xH200-141G, 16xBI150-32G, 128xAscend-64G, or a YAML of unlike islands",
            "  --packs N       sequences per step over all devices; default: the recipe's",
            "  --calibration F rates measured by `erniekit bench --calibrate` instead of data sheets",
            "  --write F       the recipe with the fastest layout, as a new YAML",
            "  --take N        with --write: the layout of this number in the list instead",
            "  --timeline F    the fastest pipeline's step as an SVG picture, or - to print it",
            "  --top N, --json layouts shown (8); everything for programs",
        ),
        ("model_name_or_path", "fine_tuning", "max_seq_len", "batch_size", "global_batch_size", "recompute"),
    ),
    "rehearse": Command(
        "erniekit.recipes.rehearse_command:rehearse_command",
        "train",
        "check a distributed run without its cluster: do all ranks' calls match, does a small copy train",
        (
            "erniekit rehearse RECIPE.yaml [key=value ...]   every rank at full size, without memory; needs no device",
            "  --ranks N          number of ranks; default: nproc_per_node, else what the degrees need",
            "  --every-rank       check every rank; default: one of each kind",
            "  --micro-batches N  micro-batches per step; default: enough to cover the whole schedule",
            "  --timeline FILE    a step as an SVG picture (- prints it): what ranks compute, transfer and wait for",
            "  --cluster 8xH200   the devices of the timeline; default: H200, eight in a machine",
            "  --rank R           run this rank's slice at full size on this device and compare it with the plan",
            "  --shrunken N       the recipe made small, trained for two steps by up to N real processes on this CPU",
            "  --json             for programs",
            "exit code: 0 fine, 1 ranks do not match or the small run failed, 2 bad input",
        ),
        ("model_name_or_path", "max_seq_len", "batch_size", "gradient_accumulation_steps", "device"),
    ),
    "config": Command(
        "erniekit.cli.config_command:config_command",
        "train",
        "the resolved run: every value with where it came from",
        (
            "erniekit config RECIPE.yaml [key=value ...] [--all] [--json] [--for COMMAND]",
            "erniekit config --schema   every key as a JSON schema, for editors",
        ),
    ),
    "recipes": Command(
        "erniekit.cli.recipes_command:recipes_command",
        "train",
        "the shipped recipes: what each trains, on how many cards, and what has run",
        (
            "erniekit recipes [WORD] [--json]   all of them, or those whose name contains the word",
            "erniekit recipes NAME              one of them: each value with the file and line it comes from",
            "erniekit recipes NAME --flat       one of them as a whole file, with what its bases give",
            "erniekit recipes --fits 8x80G      and the fewest such cards that each is planned to fit",
        ),
    ),
    "migrate": Command(
        "erniekit.cli.migrate_command:migrate_command",
        "train",
        "convert a Paddle launch script or recipe; reports every changed line",
        (
            "erniekit migrate FILE [--output NEW.yaml]   .sh, or .yaml and .json of ERNIEKit 1.x and PaddleFormers 1.2",
            "erniekit migrate FILE --print               the recipe on the screen; nothing is written",
        ),
    ),
    "data": Command(
        "erniekit.data.inspect:data_command",
        "train",
        "inspect dataset files: format, rows, lengths, duplicates, bad rows; preview, clean or index them",
        (
            "erniekit data FILE [FILE ...] [key=value ...]   reads only, needs no model",
            "  FILE: .jsonl .json .csv .tsv .parquet, .gz of them, a folder, a pattern, a URL, OWNER/NAME of the hub",
            "  --stage NAME      (stage) read rows as SFT, DPO, RM, KTO, CLS or PT does; default: by their fields",
            "  --type NAME       (train_dataset_type) read as this format instead of detecting it: erniekit, alpaca,",
            "                    messages, chatml, sharegpt, prompt_completion",
            "  --columns F=C,..  (columns) which column holds which field: prompt=q,response=a",
            "  --model DIR       (model_name_or_path) count tokens as this model does; else characters",
            "  --length N        (max_seq_len) list the rows that would not fit; default: 8192",
            "  --pixels N        maximum pixels of an image; default: the model's limit",
            "erniekit data clean FILE [FILE ...] --output NEW.jsonl [--dedup] [--against EVAL] ...   a cleaned copy",
            "erniekit data preview RECIPE | FILE ... [key=value ...]   rows as tokens, the trained ones marked",
            "erniekit data index FILE [FILE ...] --model_name_or_path DIR --output PREFIX   text for pre-training",
            "  data clean --help, data preview --help and data index --help list what these take",
        ),
        (),
        (
            ("clean", "erniekit.data.clean:clean_command"),
            ("index", "erniekit.data.index_command:index_command"),
            ("preview", "erniekit.recipes.preview:preview_command"),
        ),
    ),
    "bench": Command(
        "erniekit.bench.command:bench_command",
        "train",
        "training speed on this machine, next to other trainers",
        (
            "erniekit bench [--only A1,C1] [--peers hf,unsloth | --peers none] [key=value ...]",
            "  --list             the workloads and the whole commands",
            "  --only NAMES       some of both: --only A1,sft",
            "  --real             whole `erniekit train` commands alone, timed from outside; --only sft,lora,vl-lora",
            "                     --again runs each twice: caches are warm; --layers N cuts models with experts",
            "  --calibrate        rates of this device for `erniekit plan --calibration`, instead of workloads",
            "  --output_dir DIR   where bench.json and a file for each workload go (bench)",
            "  --steps N          timed steps of each (8); --warmup N steps before them (3, and a second's)",
            "  --seconds-limit S  begin no more workloads than this time allows",
            "  --profile          where the time of our steps goes, by kernel",
            "  --tiny             sizes a CPU does in seconds each: whether it works, not how fast",
            "  key=value          keys of our run over the workload's, e.g. attention=varlen compile=False",
        ),
    ),
    "export": Command(
        "erniekit.recipes.run:export_command",
        "use",
        "merge LoRA adapters into the model and verify the result",
        (
            "erniekit export RECIPE.yaml",
            "erniekit export OUTPUT_DIR [--model_name_or_path BASE]             a run's, to OUTPUT_DIR/export",
            "erniekit export BASE lora_path=ADAPTER[,ADAPTER] output_dir=DEST   adapters from anywhere",
            "erniekit export OUTPUT_DIR format=gguf gguf_type=q8_0              for llama.cpp and Ollama",
            "erniekit export OUTPUT_DIR quant=w4a16 --data my.jsonl             then quantised, to .../export-w4a16",
        ),
        (
            "model_name_or_path",
            "lora_path",
            "output_dir",
            "override_base",
            "save_format",
            "max_shard_size",
            "copy_tokenizer",
            "tokenizer_name",
            "quant",
        ),
    ),
    "quantize": Command(
        "erniekit.recipes.run:quantize_command",
        "use",
        "quantise a finished model to 4 or 8 bits, calibrated on your rows, with an accuracy report",
        (
            "erniekit quantize DIR quant=w4a16 output_dir=OUT --data my.jsonl   GPTQ on 128 rows of it",
            "erniekit quantize DIR quant=fp8_dynamic output_dir=OUT             rounded to nearest, no rows needed",
        ),
        (
            "model_name_or_path",
            "output_dir",
            "quant",
            "quant_method",
            "quant_group_size",
            "train_dataset_path",
            "calibration_rows",
            "eval_dataset_path",
            "max_seq_len",
            "expert_tokens",
            "compute_type",
            "device",
            "max_shard_size",
        ),
    ),
    "split": Command(
        "erniekit.recipes.run:split_command",
        "use",
        "split a model's weights into files of a given size",
        ("erniekit split OUTPUT_DIR --max_shard_size 5",),
        ("model_name_or_path", "output_dir", "save_format", "max_shard_size", "copy_tokenizer"),
    ),
    "chat": Command(
        "erniekit.serve.chat:chat_command",
        "use",
        "chat with a server, or with a base, adapter or merged folder, in the terminal",
        (
            "erniekit chat DIR [--system TEXT] [--prompt TEXT]   a folder, opened here",
            "erniekit chat DIR --prompt TEXT --image PATH ...    with pictures, or --video PATH",
            "erniekit chat [URL] [--port 8188]                   a server that runs",
            "erniekit chat RECIPE.yaml [key=value ...]           the server at its port, or else its folder",
        ),
        (
            *_MODEL_KEYS,
            "host",
            "port",
            "served_model_name",
            "max_new_tokens",
            "temperature",
            "top_p",
            "repetition_penalty",
            "enable_thinking",
            "max_model_len",
        ),
        meant=_COMPUTED,
    ),
    "server": Command(
        "erniekit.serve.server:server_command",
        "use",
        "an OpenAI-compatible server for a base, adapter or merged folder",
        ("erniekit server DIR [--port 8188]", "erniekit server BASE lora_modules=name=DIR,other=DIR"),
        (
            *_MODEL_KEYS,
            "engine",
            "host",
            "port",
            "lora_modules",
            "served_model_name",
            "max_model_len",
            "max_num_seqs",
            "max_queue",
            "request_timeout",
            "api_key_file",
            "allow_unauthenticated",
            "server_names",
        ),
        meant=_COMPUTED,
    ),
    "webui": Command(
        "erniekit.webui.app:webui_command",
        "use",
        "a page in the browser: train and watch, compare runs, evaluate, chat, export",
        (
            "erniekit webui [host=ADDRESS] [port=PORT] [root=DIR,DIR] [--runs DIR,DIR] [idle=MINUTES]",
            "               [name=HOST,HOST] [lang=en|zh|auto] [--no-token]",
            "  host  127.0.0.1; open the address that is printed: it has a token",
            "  port  7860, or the variable GRADIO_SERVER_PORT; 0 takes a free one",
            "  root  folders whose files the page may read and write; this one when none is given",
            "  --runs  further folders with training runs to list; may be given several times",
            "  name  further host names that this machine is reached by",
            "  idle  minutes without a message until a chat model is unloaded: 30; 0 keeps it while its tab is open",
            "  --no-token  any account of this machine may use the page; on 127.0.0.1 only",
        ),
    ),
    "completion": Command(
        "erniekit.cli.completion:completion_command",
        "about",
        "tab completion for your shell: commands, keys, their values, recipes",
        (
            'eval "$(erniekit completion bash)"   in ~/.bashrc',
            'eval "$(erniekit completion zsh)"    in ~/.zshrc',
            "erniekit completion fish > ~/.config/fish/completions/erniekit.fish",
        ),
    ),
    "version": Command("erniekit.cli.main:version_command", "about", "version and commit", ("erniekit version",)),
    "help": Command("erniekit.cli.help:help_command", "about", "this text", ("erniekit help [COMMAND]",)),
}
