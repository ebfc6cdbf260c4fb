"""`erniekit eval`: loss and perplexity of a base model, an adapter or a run's newest checkpoint on a dataset."""

from __future__ import annotations

from pathlib import Path

from erniekit.api_load import load as load_folder
from erniekit.config import RunConfig, need
from erniekit.data.report import total_lines
from erniekit.log import paint, say
from erniekit.parallel.engine import Engine
from erniekit.parallel.mesh import World
from erniekit.recipes.build import loss_for, settle
from erniekit.recipes.datasets import eval_batches, sources_for
from erniekit.result import RunResult
from erniekit.track.results import write_results
from erniekit.train.evaluate import evaluate


def evaluate_run(cfg: RunConfig) -> RunResult:
    """What is evaluated: the trained result in output_dir when there is one, else model_name_or_path."""
    need(cfg, "eval_dataset_path")
    output = Path(cfg.train.output_dir or "output")
    cfg, device, dtype = settle(cfg)
    trained = has_result(output)
    if not trained:
        need(cfg, "model_name_or_path")
    source = output if trained else Path(str(cfg.model.model_name_or_path))
    model, tokenizer = load_folder(source, dtype=dtype, device=device.handle)
    world = World(device_type=device.type)
    engine = Engine([(0, model)], world, device.handle, loss_for(cfg), dtype=dtype)
    say(f"model    {source}" + (" (the result of a run)" if trained else ""))
    output.mkdir(parents=True, exist_ok=True)
    sources = sources_for(cfg, "eval", tokenizer, output / "bad_eval_rows.jsonl")
    for line in [line for s in sources for line in s.report.lines()] + total_lines([s.report for s in sources]):
        say(f"eval     {line}")
    batches = eval_batches(cfg, sources, world, {"pad_id": tokenizer.pad_id or 0})
    metrics = evaluate(engine, batches, cfg.train.max_evaluate_steps, cfg.train.compat == "erniekit")
    write_results(output, evaluation=metrics)
    say(
        f"{paint('done', 'green', 'bold')}     eval_loss {metrics['eval_loss']:.4f}, eval_ppl {metrics['eval_ppl']:.4g}"
        f" on {metrics['eval_tokens']:,.0f} tokens in {metrics['eval_runtime']:.1f} s"
    )
    say(f"result   {output / 'eval_results.json'}")
    say(f"next     erniekit chat {source}")
    return RunResult(output, metrics)


def has_result(output: Path) -> bool:
    names = ("model*.safetensors", "adapter_model*.safetensors", "lora_config.json", "checkpoint-*")
    return output.is_dir() and any(any(output.glob(name)) for name in names)
