"""argparse with errors as everywhere else: what, where and the fix, in place of a usage text.

For `erniekit data` and its commands, and `erniekit bench`.
"""

from __future__ import annotations

import argparse
import re
from typing import NoReturn

from erniekit.errors import ConfigError
from erniekit.registry import nearest


class FlagParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        fix = f"{self.prog} --help lists what it takes"
        flags = [flag for action in self._actions for flag in action.option_strings]
        mistyped = re.search(r"unrecognized arguments: (--[\w-]+)", message)
        if mistyped and (near := nearest(mistyped[1], flags)):
            fix = f"did you mean {near[0]}? {fix}"
        raise ConfigError(message, where=self.prog, fix=fix)
