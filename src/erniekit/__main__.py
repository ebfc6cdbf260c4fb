"""`python -m erniekit`: the same as the `erniekit` console script."""

import sys

from erniekit.cli.main import main

sys.exit(main())
