"""`erniekit train`: in this process on one device, else one process per device on every machine.

Called by main.py; launch/ starts and watches the ranks.
"""

from __future__ import annotations

import sys

from erniekit.cli.system_limits import NEEDED_BY_RANKS, require_descriptors
from erniekit.config import load, refuse_later
from erniekit.launch.plan import choose_devices, inside, launch_name, needed, plan
from erniekit.launch.start import start


def train_command(args: list[str]) -> int:
    from erniekit.recipes import run
    from erniekit.recipes.output_folder import take_output

    cfg = load(args, "train")
    if not inside():
        choose_devices(cfg)
        launch = plan(cfg)
        if needed(launch, cfg):
            refuse_later(cfg)
            require_descriptors(NEEDED_BY_RANKS)
            run.check_world(cfg, launch.world)
            take_output(cfg)
            return start(launch, [sys.executable, "-m", "erniekit.cli.launch_rank", "train", *args])
    run.run_train(cfg, ["erniekit", "train", *args], launch_name())
    return 0
