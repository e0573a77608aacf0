# SPDX-License-Identifier: Apache-2.0 OR MIT
"""RDMA on any machine: a software RDMA network card for the programs that this process starts.

>>> subprocess.run(["ibv_devinfo"], env=anywarp.env())
>>> anywarp.run(["ib_write_bw", "-F"], faults="loss=1%,seed=7")

A program loads the libraries when it starts. This process itself has the device only if it was started with
``python -m anywarp run -- python ...``.
"""

import json
import os
import subprocess
from pathlib import Path

__all__ = ["__version__", "command", "env", "lib", "run", "tool"]

__version__ = "@VERSION@"

_PREFIX = Path(__file__).parent / "prefix"


def tool():
    """The path of the ``anywarp`` command."""
    return str(_PREFIX / "bin" / "anywarp")


def lib():
    """The folder with ``libibverbs.so.1`` and ``librdmacm.so.1``."""
    return str(_PREFIX / "lib" / "anywarp")


def env(base=None, *, faults=None, log=None, addr=None):
    """The environment in which a program finds the device.

    The variables are added to ``base`` (a mapping; the default is ``os.environ``). ``faults``, ``log`` and ``addr`` are the
    variables ``ANYWARP_FAULTS``, ``ANYWARP_LOG`` and ``ANYWARP_ADDR``.
    """
    made = dict(os.environ if base is None else base)
    # The command prints the variables that it would set. It does not get the existing values, because these are appended
    # below.
    asked = {k: v for k, v in os.environ.items() if not (k.startswith("LD_") or k == "FI_PROVIDER_PATH")}
    asked.pop("ANYWARP_LIB", None)
    shown = subprocess.run([tool(), "env", "--json"], env=asked, check=True, stdout=subprocess.PIPE)
    for name, value in json.loads(shown.stdout).items():
        ours = value.split(":")
        before = made.get(name, "").replace(" ", ":") if name == "LD_PRELOAD" else made.get(name, "")
        made[name] = ":".join(ours + [e for e in before.split(":") if e and e not in ours])
    for name, value in (("FAULTS", faults), ("LOG", log), ("ADDR", addr)):
        if value is not None:
            made["ANYWARP_" + name] = str(value)
    return made


def command(arguments):
    """The command line that runs a program on the device: ``anywarp run -- PROGRAM ...``."""
    return [tool(), "run", "--", *map(str, arguments)]


def run(arguments, *, faults=None, log=None, addr=None, **kwargs):
    """``subprocess.run`` of a program on the device."""
    base = kwargs.pop("env", None)
    made = env(base, faults=faults, log=log, addr=addr)
    return subprocess.run(command(arguments), env=made, **kwargs)
