# SPDX-License-Identifier: Apache-2.0 OR MIT
"""``python -m anywarp ARGUMENTS``: the ``anywarp`` command of this package."""

import os
import sys

from . import tool


def main():
    """Becomes the command."""
    path = tool()
    try:
        os.execv(path, ["anywarp", *sys.argv[1:]])
    except OSError as e:
        sys.exit(f"anywarp: {path}: {e.strerror}: the package is for another kind of machine, or damaged")


if __name__ == "__main__":
    main()
