# SPDX-License-Identifier: Apache-2.0 OR MIT
"""``python -m anywarp ARGUMENTS``: the ``anywarp`` command of this package."""

import os
import sys

from . import tool


def main():
    """Replaces this process by the command."""
    path = tool()
    try:
        os.execv(path, ["anywarp", *sys.argv[1:]])
    except OSError as e:
        sys.exit(f"anywarp: {path}: {e.strerror}: the package is damaged, or is for another architecture")


if __name__ == "__main__":
    main()
