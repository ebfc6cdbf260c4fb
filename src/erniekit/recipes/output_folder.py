"""output_dir of a training run: checked before the model is opened, created when nothing refuses the run any more.

Called by training.py and doctor_command.py.
"""

from __future__ import annotations

import os
from pathlib import Path

from erniekit.config import RunConfig
from erniekit.config.inputs import input_files, input_folders
from erniekit.files.output import check_output, open_output
from erniekit.log import is_main_rank


def take_output(cfg: RunConfig, create: bool = True) -> Path:
    """output_dir, refused unless it is empty or a run and apart from all inputs; created by the first rank."""
    output = Path(cfg.train.output_dir or "output").expanduser()
    real = Path(os.path.realpath(output))
    if real != Path(os.path.abspath(output)):  # a link may be pointed elsewhere while the run goes on
        output = real
    if is_main_rank():
        (open_output if create else check_output)(output, input_folders(cfg), input_files(cfg))
    elif create:
        output.mkdir(parents=True, exist_ok=True)
    return output
