# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Two endpoints of DLSlime on one host. Compares the data of writes, reads and messages with what was sent."""

import ctypes
import multiprocessing
import sys
import zlib

import dlslime

SIZE = 16 << 20
LENGTHS = [1, 64, 4096, 65537, 1 << 20, SIZE]


def endpoint():
    made = dlslime.RDMAEndpoint(device_name=dlslime.available_nic()[0])
    block = ctypes.create_string_buffer(SIZE)
    local = made.register_memory_region("block", ctypes.addressof(block), 0, SIZE)
    return made, block, local


def pattern(seed, length):
    block = bytes((i * 131 + seed) & 0xFF for i in range(4096))
    return (block * (length // 4096 + 1))[:length]


def check(block, length, data, name):
    if zlib.crc32(memoryview(block)[:length]) != zlib.crc32(data):
        sys.exit(f"{name} of {length} bytes: the data differs")


def target(pipe):
    made, block, _ = endpoint()
    pipe.send((made.endpoint_info(), made.mr_info()))
    made.connect(pipe.recv())
    pipe.send("connected")
    for seed, length in enumerate(LENGTHS):
        arrived = made.imm_recv()
        pipe.send("posted")
        if arrived.wait() != 0 or arrived.imm_data() != seed + 7:
            sys.exit(f"immediate data {arrived.imm_data()}, expected {seed + 7}")
        check(block, length, pattern(seed, length), "write")
        message = made.recv((ctypes.addressof(block), 0, length))
        pipe.send("posted")
        if message.wait() != 0:
            sys.exit("the receive failed")
        check(block, length, pattern(seed + 100, length), "message")
        pipe.send("compared")
    pipe.recv()


def main():
    ours, theirs = multiprocessing.Pipe()
    other = multiprocessing.get_context("spawn").Process(target=target, args=(theirs,))
    other.start()
    info, regions = ours.recv()
    made, block, local = endpoint()
    ours.send(made.endpoint_info())
    made.connect(info)
    remote = made.register_remote_memory_region("block", regions["block"])
    ours.recv()
    for seed, length in enumerate(LENGTHS):
        data = pattern(seed, length)
        ours.recv()
        ctypes.memmove(block, data, length)
        if made.write_with_imm([(local, remote, 0, 0, length)], seed + 7).wait() != 0:
            sys.exit(f"write of {length} bytes failed")
        ctypes.memset(block, 0, length)
        if made.read([(local, remote, 0, 0, length)]).wait() != 0:
            sys.exit(f"read of {length} bytes failed")
        check(block, length, data, "read")
        ours.recv()
        data = pattern(seed + 100, length)
        ctypes.memmove(block, data, length)
        if made.send((ctypes.addressof(block), 0, length)).wait() != 0:
            sys.exit(f"message of {length} bytes failed")
        ours.recv()
    ours.send("end")
    other.join(30)
    if other.exitcode:
        sys.exit(f"the other endpoint ended with {other.exitcode}")
    print("equal", len(LENGTHS))


if __name__ == "__main__":
    main()
