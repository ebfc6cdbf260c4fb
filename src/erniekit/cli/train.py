"""`erniekit train`: in this process on one device, else one process per device on every machine.

Called by commands.py; launch/ starts and watches the ranks.
"""

from __future__ import annotations

import os
import sys

from erniekit.cli.system_limits import NEEDED_BY_RANKS, require_descriptors
from erniekit.config import load
from erniekit.config.machines import machines
from erniekit.launch.plan import (
    LAUNCH_NAME,
    choose_devices,
    inside,
    launch_name,
    needed,
    plan,
)
from erniekit.launch.start import start
from erniekit.log import drop_stray_rank


def train_command(args: list[str]) -> int:
    from erniekit.recipes import run
    from erniekit.recipes.first_line import begin
    from erniekit.recipes.output_folder import take_output

    cfg = load(args, "train")
    if not inside():
        if machines(cfg) == 1:
            drop_stray_rank()
        begin(cfg)
        choose_devices(cfg)
        launch = plan(cfg)
        if needed(launch, cfg):
            require_descriptors(NEEDED_BY_RANKS)
            run.check_world(cfg, launch.world)
            take_output(cfg)
            return start(launch, [sys.executable, "-m", "erniekit.cli.launch_rank", "train", *args])
    run.run_train(cfg, ["erniekit", "train", *args], launch_name(), begun=not inside() or LAUNCH_NAME in os.environ)
    return 0
