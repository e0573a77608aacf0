# SPDX-License-Identifier: Apache-2.0 OR MIT
"""QEMU moves a virtual machine to a second QEMU by RDMA. The script compares the machine's memory before and after.

The machine has no disk and executes only its firmware. Each mode moves another machine: `chunks` registers its memory while it moves, `pinned`
registers all memory at once. With --time, the script prints how long the moves took, and how long by TCP (medians).
"""

import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ADDRESS = "127.0.0.1"
MEMORY = 192
# The part of the memory that is compared: (address, length). The firmware does not use it.
AT, LENGTH = 64 << 20, 64 << 20
PATH = "/usr/sbin:/sbin:" + os.environ["PATH"]


class Machine:
    """A QEMU process, and its control socket."""

    def __init__(self, folder, name, *arguments):
        self.log = os.path.join(folder, name + ".log")
        path = os.path.join(folder, name)
        command = ["qemu-system-x86_64", "-machine", "pc,accel=tcg", "-m", str(MEMORY), "-nodefaults", "-display", "none",
                   "-qmp", f"unix:{path},server,nowait", *arguments]
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PATH": PATH})
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(60)
        for _ in range(500):
            try:
                self.socket.connect(path)
                break
            except OSError:
                time.sleep(0.02)
        else:
            raise SystemExit(f"QEMU does not start:\n{open(self.log).read()}")
        self.lines = self.socket.makefile("r")
        self.lines.readline()
        self("qmp_capabilities")

    def __call__(self, command, **arguments):
        self.socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode())
        while True:
            answer = json.loads(self.lines.readline())
            if "return" in answer:
                return answer["return"]
            # Events may come before the answer.
            if "error" in answer:
                raise SystemExit(f"{command}: {answer['error']['desc']}\n{open(self.log).read()}")

    def end(self):
        self.process.kill()
        self.process.wait()
        # The log of the device.
        sys.stderr.write(open(self.log).read())


def move(folder, uri, pinned):
    """Moves a machine. Returns the result of QEMU."""
    content = os.path.join(folder, "content")
    name = f"{uri.split(':')[0]}-{pinned}"
    target = Machine(folder, "to-" + name, "-incoming", uri)
    try:
        source = Machine(folder, "from-" + name, "-device", f"loader,file={content},addr={AT:#x},force-raw=on")
        try:
            for end in (source, target):
                if pinned:
                    end("migrate-set-capabilities", capabilities=[{"capability": "rdma-pin-all", "state": True}])
            # The default limit is 128 MiB/s.
            source("migrate-set-parameters", **{"max-bandwidth": 100 << 30})
            source("migrate", uri=uri)
            end = time.monotonic() + 60
            while (state := source("query-migrate"))["status"] not in ("completed", "failed", "cancelled"):
                if time.monotonic() > end:
                    raise SystemExit(f"the move does not end: {state}")
                time.sleep(0.01)
            if state["status"] != "completed":
                raise SystemExit(f"{state}\n{open(source.log).read()}{open(target.log).read()}")
            got = os.path.join(folder, "got")
            target("stop")
            target("pmemsave", val=AT, size=LENGTH, filename=got)
            if open(got, "rb").read() != open(content, "rb").read():
                raise SystemExit(f"{uri}, pinned {pinned}: the memory is different after the move")
            return state
        finally:
            source.end()
    finally:
        target.end()


def free_port():
    with socket.socket() as probe:
        probe.bind((ADDRESS, 0))
        return probe.getsockname()[1]


def main():
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "content"), "wb") as file:
            file.write(random.Random(1).randbytes(LENGTH))
        times = {}
        timed = "--time" in sys.argv
        # The first move of each kind does not count: it is slower, because the host uses some of its memory for the first time.
        for turn in range(6 if timed else 1):
            for transport, pinned in [("rdma", False), ("rdma", True)] + [("tcp", False)] * timed:
                state = move(folder, f"{transport}:{ADDRESS}:{free_port()}", pinned)
                moved = state["ram"]["normal-bytes"]
                if moved < LENGTH:
                    raise SystemExit(f"only {moved} bytes were moved")
                name = f"{transport}, {'pinned' if pinned else 'chunks'}"
                if turn == 0:
                    print(f"equal after {name}: {moved >> 20} MiB", flush=True)
                else:
                    times.setdefault(name, []).append(state["total-time"])
        for name, took in times.items():
            print(f"{name}: {statistics.median(took)} ms ({', '.join(map(str, took))})")


main()
