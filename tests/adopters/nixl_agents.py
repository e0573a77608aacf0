# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs two agents of NIXL on one host, and checks the data of writes and reads of many sizes, and a notification."""

import multiprocessing
import sys
import time
import zlib

import numpy
from nixl._api import nixl_agent, nixl_agent_config

SIZE = 64 << 20
LENGTHS = [64, 4096, 65537, 1 << 20, 16 << 20, SIZE]


def agent(name):
    made = nixl_agent(name, nixl_agent_config(backends=["UCX"]))
    block = numpy.zeros(SIZE, dtype=numpy.uint8)
    if not made.register_memory([(block.ctypes.data, SIZE, 0, "")], "DRAM"):
        sys.exit("register_memory failed")
    return made, block


def target(pipe):
    made, block = agent("target")
    pipe.send((made.get_agent_metadata(), block.ctypes.data))
    made.add_remote_agent(pipe.recv())
    while True:
        length = pipe.recv()
        if length is None:
            return
        until = time.monotonic() + 30
        notes = {}
        while not notes.get("client") and time.monotonic() < until:
            notes = made.get_new_notifs()
        pipe.send((notes.get("client"), zlib.crc32(block[:length])))


def transfer(made, operation, ours, theirs, note):
    handle = made.initialize_xfer(operation, ours, theirs, "target", note)
    state = made.transfer(handle)
    until = time.monotonic() + 60
    while state not in ("DONE", "ERR") and time.monotonic() < until:
        state = made.check_xfer_state(handle)
    if state != "DONE":
        sys.exit(f"{operation}: {state}")
    made.release_xfer_handle(handle)


def main():
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=target, args=(theirs,))
    other.start()
    metadata, remote = ours.recv()
    made, block = agent("client")
    made.add_remote_agent(metadata)
    ours.send(made.get_agent_metadata())
    random = numpy.random.default_rng(1)
    for length in LENGTHS:
        block[:length] = random.integers(0, 256, length, dtype=numpy.uint8)
        data = zlib.crc32(block[:length])
        here = made.get_xfer_descs([(block.ctypes.data, length, 0)], "DRAM")
        there = made.get_xfer_descs([(remote, length, 0)], "DRAM")
        transfer(made, "WRITE", here, there, b"written")
        ours.send(length)
        notes, arrived = ours.recv()
        if notes != [b"written"] or arrived != data:
            sys.exit(f"write of {length} bytes: notes {notes}, or the data differs")
        block[:length] = 0
        transfer(made, "READ", here, there, b"read")
        if zlib.crc32(block[:length]) != data:
            sys.exit(f"read of {length} bytes: the data differs")
        ours.send(0)
        ours.recv()
    ours.send(None)
    other.join(30)
    if other.exitcode:
        sys.exit(f"the other agent ended with {other.exitcode}")
    print("equal", len(LENGTHS))


if __name__ == "__main__":
    main()
