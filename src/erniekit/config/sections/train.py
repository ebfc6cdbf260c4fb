"""How long, how often, on which device, and what is checked. Read by the recipes and the training loop."""

from __future__ import annotations

from dataclasses import dataclass

from erniekit.config.compat import COMPAT
from erniekit.config.field import key
from erniekit.devices import AUTO, DEVICES, INSTALLED, instead
from erniekit.loss_table import CROSS_ENTROPY, TOKEN_LOSSES

_INTERVALS = ("no", "steps", "epoch")


@dataclass(frozen=True)
class TrainSection:
    stage: str = key(
        "SFT",
        "SFT, DPO pairs, KTO judged answers, RM, CLS, PT text.",
        choices=("SFT", "DPO", "KTO", "RM", "CLS", "PT", "VL-SFT", "OCR-VL-SFT"),
        basic=True,
        fixed=True,
    )
    output_dir: str | None = key(
        "./output", "Folder for results and checkpoints; the same command resumes from it.", basic=True, path="out"
    )
    do_train: bool = key(False, "Train; `erniekit train` turns it on.")
    do_eval: bool = key(False, "Evaluate; on when there is an evaluation file and a strategy.")
    num_train_epochs: float = key(1.0, "Passes over the data if max_steps is -1.", low=0, basic=True)
    max_steps: int = key(-1, "Number of steps; -1 = from num_train_epochs. Try 3 first.", low=-1, basic=True)
    batch_size: int = key(1, "Sequences per micro-batch; lower it if memory runs out.", low=1, basic=True, fixed=True)
    gradient_accumulation_steps: int = key(
        1,
        "Micro-batches per step: a larger batch in the same memory.",
        basic=True,
        fixed=True,
    )
    per_device_train_batch_size: int = key(1, "Other name of batch_size (script form).", low=1, fixed=True)
    per_device_eval_batch_size: int = key(1, "Sequences per evaluation batch; default: batch_size.", low=1)
    global_batch_size: int | None = key(
        None, "Sequences per step over all devices; sets gradient_accumulation_steps if that is not given.", low=1
    )
    evaluation_strategy: str = key(
        "no", "When to evaluate: no, steps, epoch.", also=("eval_strategy",), choices=_INTERVALS, basic=True
    )
    eval_steps: int | None = key(None, "Steps between evaluations.", low=1, basic=True)
    max_evaluate_steps: int = key(-1, "Maximum number of evaluation batches; -1 = all.", also=("eval_iters",), low=-1)
    eval_tasks: tuple[str, ...] = key(
        (), "Benchmarks of lm-evaluation-harness for `eval`.", also=("tasks",), commas=True, path="several"
    )
    eval_generate: int = key(
        0,
        "Answers generated at every evaluation of a training run, to the first prompts of the evaluation file: greedy, "
        "compared with the data's answers, kept in samples.jsonl and report.html. 0 = none.",
        low=0,
    )
    eval_generate_max_tokens: int = key(64, "Maximum tokens of each of them.", low=1)
    minimum_eval_times: int | None = key(None, "Minimum number of evaluations in a run.", low=1)
    early_stopping_patience: int = key(0, "Stop after this many evaluations without improvement; 0 = never.", low=0)
    early_stopping_threshold: float = key(0.0, "Smallest change of the metric that counts as an improvement.", low=0)
    seed: int = key(42, "Same seed, same run.", basic=True, fixed=True)
    deterministic: bool = key(
        False,
        "Bit-identical runs and resumes on accelerators too: attention by FlashAttention-2, no autotuned kernels. "
        "Runs on a CPU always are.",
    )
    device: str = key(
        "auto",
        "gpu, cpu, or a vendor's name: iluvatar_gpu, npu, xpu; auto = the accelerator that is present.",
        choices=(AUTO, *DEVICES),
        further=INSTALLED,
        elsewhere=instead,
        basic=True,
    )
    token_loss: str = key(
        CROSS_ENTROPY,
        "Loss per trained token, in stages SFT and PT: cross_entropy, or the name of an installed package's loss.",
        choices=(CROSS_ENTROPY,),
        further=TOKEN_LOSSES,
        fixed=True,
    )
    no_cuda: bool = key(False, "Old name of device: cpu.")
    compat: str = key(
        "",
        "erniekit repeats the old toolkit's faults too (end token before the next user turn, means of "
        "micro-batch means, first step at lr 0), so that recorded runs can be matched.",
        choices=tuple(COMPAT),
        fixed=True,
    )
    doctor: str = key("on", "Check labels, leaks, gradients and disk before the first step.", choices=("on", "off"))
    max_bad_steps: int = key(5, "Steps in a row with a non-finite loss or gradient before stopping.", low=1)
    preempt_grace_s: float = key(25.0, "Seconds a save may take after SIGTERM.", low=0)
    hang_soft_s: float = key(
        0.0,
        "Seconds without progress before the stacks of every rank are written to output_dir/hangs; 0: ten median "
        "steps, 60 at least; -1: never. Ten times as long in the first steps, evaluation and saving; twenty times "
        "while a run is prepared.",
        low=-1,
    )
    hang_hard_s: float = key(
        0.0,
        "Seconds without progress before a rank ends (code 70) for a restart; 0: three times hang_soft_s; -1: never.",
        low=-1,
    )
    straggler_factor: float = key(2.0, "Report a rank whose own work takes this many times the median; 0 = off.", low=0)
    drift_check_steps: int = key(
        100,
        "Steps between checks that replicas hold the same bits, done after the first step and before each save too; "
        "0: never.",
        low=0,
    )
    train_emb_only: int = key(0, "Train only the embedding.", fixed=True, not_yet="partial training")
    adaptive_norm_clip: bool = key(False, "Clip by a running norm.", fixed=True, not_yet="pre-training")
    sft_benchmark: bool = key(False, "Train without evaluation or intermediate checkpoints; print tokens/s at the end.")
