"""What is trained and evaluated on, how rows are mixed and packed. Read by the recipes and `erniekit data`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from erniekit.config.field import key
from erniekit.config.mix_schedule import Stage, stages_of


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
        "Data format; default: detected.",
        commas=True,
        basic=True,
        fixed=True,
    )
    columns: Mapping[str, Any] | None = key(
        None, "Which column of the files holds which field: {prompt: q, response: a}.", fixed=True
    )
    train_dataset_prob: tuple[float, ...] = key(
        (), "Share of each file in the mixture; default: equal shares.", low=0, commas=True, fixed=True
    )
    eval_dataset_path: tuple[str, ...] = key(
        (),
        "Evaluation files, comma-separated; default: no evaluation.",
        also=("eval_data",),
        commas=True,
        basic=True,
        path="several",
    )
    eval_dataset_type: tuple[str, ...] = key((), "As train_dataset_type.", commas=True)
    eval_dataset_prob: tuple[float, ...] = key((), "As train_dataset_prob.", low=0, commas=True)
    max_seq_len: int = key(
        4096,
        "Maximum tokens per sequence; the first to lower if memory runs out.",
        also=("max_seq_length",),
        low=2,
        basic=True,
        fixed=True,
    )
    overlong: str = key(
        "drop",
        "What to do with a turn longer than max_seq_len; the data report counts them.",
        choices=("drop", "truncate"),
        fixed=True,
    )
    train_thinking: str = key(
        "all",
        "Reasoning parts of answers: all = trained, last = only the last answer's are kept, mask = in the context, not "
        "trained, drop = removed.",
        choices=("all", "last", "mask", "drop"),
        fixed=True,
    )
    packing: bool = key(True, "Pack several examples into one sequence; False = one example per sequence.", fixed=True)
    length_buckets: tuple[str, ...] = key(
        ("auto",),
        "With packing: False: join the rows of a micro-batch and pad them to a few lengths, which compiled layers and "
        "CUDA graphs need; the loss is the same. auto: where layers are compiled. on, off, or the lengths themselves: "
        "4096,6144,8192.",
    )
    greedy_intokens: bool = key(True, "Pack from a buffer for the best fit; False = in reading order.", fixed=True)
    buffer_size: int = key(500, "Number of examples in the packing buffer.", low=1, fixed=True)
    random_shuffle: bool = key(True, "Shuffle training rows, by seed.", fixed=True)
    streaming: bool = key(
        False,
        "Train while files are read, from disk, a URL, an object store or the hub; needs max_steps. "
        "All stages but KTO and VL-SFT.",
        fixed=True,
    )
    shuffle_buffer: int = key(
        10000, "With streaming: shuffle within blocks of this many samples; the first step waits for a block.",
        low=1, fixed=True,
    )  # fmt: skip
    mix_strategy: str = key(
        "random",
        "How several files are combined: random by share, concatenated, or interleaved until the first (under) or last "
        "(over) ends.",
        choices=("random", "concat", "interleave_under", "interleave_over"),
        fixed=True,
    )
    mix_schedule: tuple[str, ...] = key(
        (),
        "Shares that change at steps, as step=share/share for several of train_dataset_path: 500=0.5/0.5,2000=0.2/0.8. "
        "train_dataset_prob holds before the first.",
        fixed=True,
    )
    curriculum: str = key(
        "", "Order training rows from low to high: by length (in tokens), or by a column of numbers.", fixed=True
    )
    curriculum_epochs: int = key(
        1, "Epochs that curriculum orders; later ones are shuffled. 0 = all.", low=0, fixed=True
    )
    num_samples_each_epoch: int = key(
        6000000,
        "Samples per epoch under compat: erniekit; otherwise an epoch is one pass over the rows.",
        low=1,
        fixed=True,
    )
    max_bad_fraction: float = key(
        0.001, "Stop if a larger share of the rows is bad; 1 = never stop for bad rows.", low=0, high=1
    )
    dataset_num_proc: int = key(0, "Tokenizer processes; 0 = all cores.", low=0)
    dataloader_num_workers: int = key(0, "Threads that prepare batches ahead of the step.", low=0)
    prefetch_factor: int = key(2, "Batches prefetched by each loader thread.", low=1)
    cache_dir: str | None = key(None, "Folder for tokenised files; default: ~/.cache/erniekit.", path="out")
    dataset_type: str = key(
        "iterable",
        "pretrain = stage: PT; map = packs made in advance, which this version does not have.",
        choices=("iterable", "map", "pretrain"),
        fixed=True,
    )
    offline_dataset_path: str | None = key(
        None, "Folder of packs made in advance.", not_yet="packs made beforehand", path="one"
    )
    split_multi_turn: bool = key(False, "One example per assistant turn.", fixed=True, not_yet="one example per turn")
    encode_one_turn: bool = key(False, "Encode each turn on its own.", fixed=True, not_yet="one example per turn")
    use_template: bool = key(
        True, "Render with the chat template; False trains raw text.", fixed=True, not_yet="raw text"
    )
    input_dir: str | None = key(
        None,
        "Pre-training data that `erniekit data index` made: a prefix, a folder, or weight prefix weight prefix ...",
        path="prefixes",
    )
    split: str = key(
        "950,50", "Shares of its documents for training, evaluation and test; with eval_dataset_path all are trained.",
        fixed=True,
    )  # fmt: skip
    eval_part: str = key("eval", "Which part of `split` is evaluated.", choices=("eval", "test"))
    data_filelist: str | None = key(
        None, "Prefixes, comma-separated or in a file, instead of input_dir.", path="prefix_list"
    )
    data_weights: str | None = key(None, "Weights of these prefixes, comma-separated or in a file.", path="numbers")

    @property
    def mix_stages(self) -> tuple[Stage, ...]:
        """First steps and shares of mix_schedule."""
        return stages_of(self.mix_schedule)

    @property
    def joins_rows(self) -> bool:
        """Once a run's device and model have decided it."""
        return self.length_buckets not in (("auto",), ("off",))

    @property
    def written_lengths(self) -> tuple[int, ...]:
        """Lengths that the recipe names; none where they follow from the data."""
        return tuple(int(item) for item in self.length_buckets if item.isdecimal())
