# SPDX-License-Identifier: Apache-2.0 OR MIT
"""tgt exports a disk by iSER. QEMU's block driver (libiscsi) writes and reads it, and the script compares the disk's file."""

import os
import random
import re
import subprocess
import sys
import tempfile
import time

ADDRESS, PORT, CONTROL = "127.0.0.1", "3260", "1"
TARGET, INITIATOR = "iqn.2026-01.example:disk", "iqn.2026-01.example:client"
SIZE = 32 << 20
SECTOR = 512
# The last length is the longest request that libiscsi sends by iSER.
LENGTHS = [SECTOR, 4096, 65536, 256 << 10]
PATH = "/usr/sbin:/sbin:" + os.environ["PATH"]


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": PATH})
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def tgtadm(mode, operation, *arguments):
    run("tgtadm", "--control-port", CONTROL, "--lld", "iser", "--mode", mode, "--op", operation, "--tid", "1", *arguments)


def serve(disk):
    log = open(disk + ".log", "w")
    portal = ["--iscsi", f"portal={ADDRESS}:3261", "--iser", f"port={PORT}"]
    command = ["tgtd", "--foreground", "--control-port", CONTROL, *portal]
    tgtd = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PATH": PATH})
    socket = f"{os.environ['TGT_IPC_SOCKET']}.{CONTROL}"
    for _ in range(500):
        if os.path.exists(socket):
            return tgtd
        time.sleep(0.02)
    tgtd.kill()
    raise SystemExit("tgtd does not start:\n" + open(log.name).read())


def offer(disk):
    tgtadm("target", "new", "--targetname", TARGET)
    tgtadm("logicalunit", "new", "--lun", "1", "--backing-store", disk)
    # With iSER, tgt 1.0.85 accepts an initiator only if both its address and its name are bound.
    tgtadm("target", "bind", "--initiator-address", "ALL")
    tgtadm("target", "bind", "--initiator-name", INITIATOR)


def transfer(disk):
    """Writes parts of the disk and reads them back with qemu-io, which compares them. Then compares the file of the disk with
    what was written. Returns the number of parts."""
    image = f"driver=iscsi,transport=iser,portal={ADDRESS}:{PORT},target={TARGET},lun=1,initiator-name={INITIATOR}"
    numbers = random.Random(1)
    wanted = bytearray(SIZE)
    commands = []
    for turn, length in enumerate(LENGTHS * 4, 1):
        at = numbers.randrange((SIZE - length) // SECTOR) * SECTOR
        commands += ["-c", f"write -P {turn} {at} {length}", "-c", f"read -P {turn} {at} {length}"]
        wanted[at : at + length] = bytes([turn]) * length
    run("qemu-io", "--image-opts", image, *commands, "-c", "flush")
    with open(disk, "rb") as file:
        if file.read() != wanted:
            raise SystemExit("the file of the disk differs from what was written")
    return len(LENGTHS) * 4


def released(log):
    """Waits until tgt has released the connections that it has closed. It does so at RDMA_CM_EVENT_TIMEWAIT_EXIT."""
    for _ in range(500):
        with open(log) as file:
            text = file.read()
        closed, done = (set(re.findall(name + r"\(\d+\) conn:(\w+)", text)) for name in ("close", "timewait_exit"))
        if closed and closed <= done:
            return
        time.sleep(0.02)
    raise SystemExit("tgt does not release its connections:\n" + text)


with tempfile.TemporaryDirectory() as folder:
    os.environ["TGT_IPC_SOCKET"] = os.path.join(folder, "control")
    disk = os.path.join(folder, "disk")
    with open(disk, "wb") as file:
        file.truncate(SIZE)
    tgtd = serve(disk)
    try:
        offer(disk)
        url = f"iser://{ADDRESS}:{PORT}/{TARGET}/1"
        size = run("iscsi-readcapacity16", "-i", INITIATOR, url)
        if f"Total size:{SIZE}" not in size:
            raise SystemExit(f"the size of the disk is {size}")
        count = transfer(disk)
        released(disk + ".log")
    finally:
        tgtd.kill()
        tgtd.wait()
        sys.stderr.write(open(disk + ".log").read())
    print("equal", count)
