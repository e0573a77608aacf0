# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Builds the wheel: python3 python/wheel.py VERSION ARCHITECTURE DIST FOLDER. `cargo xtask wheel` calls it.

A wheel is a zip archive with a list of its files. The same input gives the same bytes: files are sorted, dates are fixed.
"""

import base64
import hashlib
import os
import stat
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
# These are needed only for linking, and C programs are compiled and linked with the distribution's headers and libraries.
EXCLUDED = {"libibverbs.so", "librdmacm.so"}

METADATA = """\
Metadata-Version: 2.1
Name: anywarp
Version: {version}
Summary: RDMA on any machine: a software RDMA network card
License: Apache-2.0 OR MIT
Classifier: Operating System :: POSIX :: Linux
Classifier: Framework :: Pytest
Requires-Python: >=3.7
Description-Content-Type: text/markdown

{text}"""

ENTRY_POINTS = """\
[console_scripts]
anywarp = anywarp.__main__:main

[pytest11]
anywarp = anywarp.pytest_plugin
"""


def contents(version, dist, tag):
    """The files of the wheel: name, contents, and whether it is executable."""
    for path in sorted((HERE / "anywarp").glob("*.py")):
        yield f"anywarp/{path.name}", path.read_bytes().replace(b"@VERSION@", version.encode()), False
    for path in sorted(dist.rglob("*")):
        if path.is_file() and path.name not in EXCLUDED:
            executable = bool(path.stat().st_mode & stat.S_IXUSR)
            yield f"anywarp/prefix/{path.relative_to(dist)}", path.read_bytes(), executable
    info = f"anywarp-{version}.dist-info"
    root = HERE.parent
    text = (HERE / "README.md").read_text()
    yield f"{info}/METADATA", METADATA.format(version=version, text=text).encode(), False
    wheel = f"Wheel-Version: 1.0\nGenerator: anywarp\nRoot-Is-Purelib: false\nTag: {tag}\n"
    yield f"{info}/WHEEL", wheel.encode(), False
    yield f"{info}/entry_points.txt", ENTRY_POINTS.encode(), False
    for name in ("LICENSE-APACHE", "LICENSE-MIT"):
        yield f"{info}/licenses/{name}", (root / name).read_bytes(), False


def main(version, architecture, dist, folder):
    tag = f"py3-none-manylinux_2_28_{architecture}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"anywarp-{version}-{tag}.whl"
    record = f"anywarp-{version}.dist-info/RECORD"
    lines = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def put(name, data, executable):
            entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (stat.S_IFREG | (0o755 if executable else 0o644)) << 16
            archive.writestr(entry, data)

        for name, data, executable in contents(version, dist, tag):
            put(name, data, executable)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            lines.append(f"{name},sha256={digest},{len(data)}\n")
        put(record, ("".join(lines) + f"{record},,\n").encode(), False)
    print(os.fspath(path))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
