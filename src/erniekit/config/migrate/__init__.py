"""From a Paddle launch script or an old recipe to one of ours: read as text, nothing of it is run.

`erniekit migrate` calls `migrate_file`; the result reports what became of every line.
"""

from erniekit.config.migrate.keys import KINDS, Remark
from erniekit.config.migrate.runs import MigratedRun, migrate_file

__all__ = ["KINDS", "MigratedRun", "Remark", "migrate_file"]
