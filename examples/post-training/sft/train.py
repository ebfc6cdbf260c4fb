"""The script form of `erniekit train`: ERNIEKit's shell scripts start this file with the same keys as flags.

    python examples/post-training/sft/train.py --model_name_or_path DIR --train_dataset_path my.jsonl --bf16 [--lora]
    python examples/post-training/sft/train.py --gpus 0,1 --nnodes 2 --rank 1 --master 10.0.0.1:8021 ...
    torchrun --nproc_per_node 8 examples/post-training/sft/train.py ...

Here every weight is trained unless --lora is given, and in fp32 unless --bf16 is.
"""

import sys

from erniekit.cli.main import main
from erniekit.config.migrate.keys import SCRIPT_DEFAULTS as DEFAULTS

SCRIPT_DEFAULTS = [f"{name}={value}" for name, (value, _) in DEFAULTS.items()]

if __name__ == "__main__":
    sys.exit(main(["train", *SCRIPT_DEFAULTS, *sys.argv[1:]]))
