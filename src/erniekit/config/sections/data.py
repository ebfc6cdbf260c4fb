"""What is trained and evaluated on, how rows are mixed and packed. Read by the recipes and `erniekit data`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from erniekit.config.field import key


@dataclass(frozen=True)
class DataSection:
    train_dataset_path: tuple[str, ...] = key(
        (),
        "Training files, comma-separated (or --data)",
        also=("data",),
        commas=True,
        basic=True,
        path="several",
    )
    train_dataset_type: tuple[str, ...] = key(
        (),
        "Format of each file; detected when not given.",
        commas=True,
        basic=True,
        fixed=True,
    )
    columns: Mapping[str, Any] | None = key(
        None, "Which column of the files holds which field: {prompt: q, response: a}.", fixed=True
    )
    train_dataset_prob: tuple[float, ...] = key(
        (), "Share of each file in the mix; equal when not given.", low=0, commas=True, fixed=True
    )
    eval_dataset_path: tuple[str, ...] = key(
        (), "Evaluation files. None: no evaluation.", also=("eval_data",), commas=True, basic=True, path="several"
    )
    eval_dataset_type: tuple[str, ...] = key((), "As train_dataset_type.", commas=True)
    eval_dataset_prob: tuple[float, ...] = key((), "As train_dataset_prob.", low=0, commas=True)
    max_seq_len: int = key(
        4096,
        "Tokens per sequence; lower it first when memory runs out.",
        also=("max_seq_length",),
        low=2,
        basic=True,
        fixed=True,
    )
    overlong: str = key(
        "drop",
        "What happens to a turn longer than max_seq_len; either way it is counted.",
        choices=("drop", "truncate"),
        fixed=True,
    )
    train_thinking: str = key(
        "all",
        "What answers think first: all is trained, last keeps only the last answer's, mask reads it untrained, "
        "drop leaves it out.",
        choices=("all", "last", "mask", "drop"),
        fixed=True,
    )
    packing: bool = key(True, "Several examples per sequence; False gives each its own.", fixed=True)
    length_buckets: tuple[str, ...] = key(
        ("auto",),
        "With packing: False: join the rows of a micro-batch and pad them to a few lengths, which compiled layers and "
        "CUDA graphs need; the loss is the same. auto: where layers are compiled. on, off, or the lengths themselves: "
        "4096,6144,8192.",
    )
    greedy_intokens: bool = key(
        True, "Fill packs tightly from a buffer; False fills them in reading order.", fixed=True
    )
    buffer_size: int = key(500, "Examples the packer chooses from.", low=1, fixed=True)
    random_shuffle: bool = key(True, "Shuffle training rows, by seed.", fixed=True)
    mix_strategy: str = key(
        "random",
        "How several files are combined: by share at random, one after the other, or until the first or last ends.",
        choices=("random", "concat", "interleave_under", "interleave_over"),
        fixed=True,
    )
    num_samples_each_epoch: int = key(
        6000000, "Draws per epoch under compat: erniekit; else an epoch is a pass over the rows.", low=1, fixed=True
    )
    max_bad_fraction: float = key(
        0.001, "Stop when more of the rows than this are bad; 1 reads on whatever comes.", low=0, high=1
    )
    dataset_num_proc: int = key(0, "Processes that tokenise; 0 uses all cores.", low=0)
    dataloader_num_workers: int = key(0, "Threads that prepare batches ahead of the step.", low=0)
    prefetch_factor: int = key(2, "Batches each of them keeps ready.", low=1)
    cache_dir: str | None = key(None, "Where tokenised files are kept; ~/.cache/erniekit when not given.", path="out")
    dataset_type: str = key(
        "iterable",
        "pretrain is stage: PT by another name; map reads packs made beforehand, which is not in this version.",
        choices=("iterable", "map", "pretrain"),
        fixed=True,
    )
    offline_dataset_path: str | None = key(None, "Folder of such packs.", later="packs made beforehand", path="one")
    split_multi_turn: bool = key(False, "One example per assistant turn.", fixed=True, later="one example per turn")
    encode_one_turn: bool = key(False, "Encode each turn on its own.", fixed=True, later="one example per turn")
    use_template: bool = key(
        True, "Render with the chat template; False trains raw text.", fixed=True, later="raw text"
    )
    input_dir: str | None = key(
        None,
        "Pre-training data that `erniekit data index` made: a prefix, a folder, or weight prefix weight prefix ...",
        path="prefixes",
    )
    split: str = key(
        "950,50", "Shares of its documents for training, evaluation and test; all are trained with eval_dataset_path.",
        fixed=True,
    )  # fmt: skip
    eval_part: str = key("eval", "Which part of `split` is evaluated.", choices=("eval", "test"))
    data_filelist: str | None = key(
        None, "Prefixes by commas, or a file of them, instead of input_dir.", path="prefix_list"
    )
    data_weights: str | None = key(None, "Their weights, likewise.", path="numbers")

    @property
    def joins_rows(self) -> bool:
        """Once a run's device and model have decided it."""
        return self.length_buckets not in (("auto",), ("off",))

    @property
    def written_lengths(self) -> tuple[int, ...]:
        """Lengths that the recipe names; none where they follow from the data."""
        return tuple(int(word) for word in self.length_buckets if word.isdecimal())
