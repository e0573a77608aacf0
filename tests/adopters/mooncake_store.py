# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A store of Mooncake: its master, a client that provides the memory, and a client that puts and gets objects. Compares all objects.

With `--time` it also prints the throughput of large objects and the time of small ones; `--protocol tcp` uses TCP instead.
"""

import argparse
import multiprocessing
import os
import socket
import subprocess
import sys
import time

from mooncake.store import MooncakeDistributedStore

SEGMENT = 512 << 20
BUFFER = 128 << 20
LARGE = 16 << 20
MASTER = 50051


def client(protocol, segment):
    store = MooncakeDistributedStore()
    failed = store.setup("127.0.0.1", "P2PHANDSHAKE", segment, BUFFER, protocol, "", f"127.0.0.1:{MASTER}")
    if failed:
        sys.exit(f"setup failed: {failed}")
    return store


def keeper(pipe, protocol):
    store = client(protocol, SEGMENT)
    pipe.send("ready")
    pipe.recv()
    store.close()


def await_port(port, master):
    until = time.monotonic() + 20
    while time.monotonic() < until and master.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    sys.exit("the master does not listen")


def content(seed, length):
    block = bytes((i * 131 + seed) & 0xFF for i in range(4096))
    return (block * (length // 4096 + 1))[:length]


def exchange(store, name, objects):
    """Puts and gets objects. Returns the seconds that putting and getting took."""
    start = time.perf_counter()
    for at, value in enumerate(objects):
        if store.put(f"{name}{at}", value):
            sys.exit(f"put of {name}{at} failed")
    put = time.perf_counter() - start
    start = time.perf_counter()
    back = [store.get(f"{name}{at}") for at in range(len(objects))]
    got = time.perf_counter() - start
    for at, (sent, received) in enumerate(zip(objects, back)):
        if received != sent:
            sys.exit(f"{name}{at}: {len(received)} bytes differ from the {len(sent)} that were put")
    return put, got


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--protocol", default="rdma")
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    program = os.path.join(os.path.dirname(sys.executable), "mooncake_master")
    master = subprocess.Popen([program, f"--rpc_port={MASTER}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await_port(MASTER, master)
        ours, theirs = multiprocessing.Pipe()
        other = multiprocessing.get_context("spawn").Process(target=keeper, args=(theirs, options.protocol))
        other.start()
        ours.recv()
        # This client has no memory for objects, so all are stored in the memory of the other client.
        store = client(options.protocol, 0)
        lengths = [1, 64, 4096, 65537, 1 << 20, LARGE]
        exchange(store, "of-length", [content(seed, length) for seed, length in enumerate(lengths)])
        large = [content(seed, LARGE) for seed in range(12)]
        small = [content(seed, 1024) for seed in range(200)]
        seconds = exchange(store, "large", large)
        each = exchange(store, "small", small)
        if options.time:
            rates = [len(large) * LARGE / s / 1e9 for s in seconds]
            times = [s / len(small) * 1e6 for s in each]
            print("16 MiB: put %.2f, get %.2f GB/s" % tuple(rates))
            print("1 KiB: put %.0f, get %.0f µs" % tuple(times))
        store.close()
        ours.send("end")
        other.join(30)
        if other.exitcode:
            sys.exit(f"the other client ended with {other.exitcode}")
        print("equal", len(lengths) + len(large) + len(small))
    finally:
        master.terminate()
        master.wait(10)


if __name__ == "__main__":
    main()
