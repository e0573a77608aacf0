# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Two transfer engines of Mooncake on one host. Compares writes and reads of many sizes."""

import ctypes
import multiprocessing
import sys
import zlib

from mooncake.engine import TransferEngine

SIZE = 64 << 20
LENGTHS = [1, 64, 4096, 65537, 1 << 20, 16 << 20, SIZE]


def engine():
    made = TransferEngine()
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", ""):
        sys.exit("initialize failed")
    return made


def memory(made):
    block = ctypes.create_string_buffer(SIZE)
    if made.register_memory(ctypes.addressof(block), SIZE):
        sys.exit("register_memory failed")
    return block


def pattern(seed, length):
    block = bytes((i * 131 + seed) & 0xFF for i in range(4096))
    return (block * (length // 4096 + 1))[:length]


def target(pipe):
    made = engine()
    block = memory(made)
    pipe.send((made.get_rpc_port(), ctypes.addressof(block)))
    while True:
        length = pipe.recv()
        if length is None:
            return
        pipe.send(zlib.crc32(memoryview(block)[:length]))


def main():
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=target, args=(theirs,))
    other.start()
    port, remote = ours.recv()
    session = f"127.0.0.1:{port}"
    made = engine()
    block = memory(made)
    local = ctypes.addressof(block)
    for seed, length in enumerate(LENGTHS):
        data = pattern(seed, length)
        ctypes.memmove(local, data, length)
        if made.transfer_sync_write(session, local, remote, length):
            sys.exit(f"write of {length} bytes failed")
        ours.send(length)
        if ours.recv() != zlib.crc32(data):
            sys.exit(f"write of {length} bytes: the data differs")
        ctypes.memset(local, 0, length)
        if made.transfer_sync_read(session, local, remote, length):
            sys.exit(f"read of {length} bytes failed")
        if zlib.crc32(memoryview(block)[:length]) != zlib.crc32(data):
            sys.exit(f"read of {length} bytes: the data differs")
    ours.send(None)
    other.join(30)
    if other.exitcode:
        sys.exit(f"the other engine ended with {other.exitcode}")
    print("equal", len(LENGTHS))


if __name__ == "__main__":
    main()
