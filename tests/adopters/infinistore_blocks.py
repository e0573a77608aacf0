# SPDX-License-Identifier: Apache-2.0 OR MIT
"""A server and a client of InfiniStore on one host. Stores blocks of many sizes by RDMA, reads them and compares them.

The server process registers the server with an event loop, as `python -m infinistore.server` does. The script does not run that
command, because the command protects itself from the OOM killer, which only root may do.
"""

import asyncio
import ctypes
import multiprocessing
import os
import sys
import time
import zlib

import infinistore

PORT = 22345
BLOCKS = 16
LENGTHS = [4096, 65536, 1 << 20]
DEVICE = {"dev_name": "anywarp0", "link_type": "Ethernet", "service_port": PORT}


def serve():
    import uvloop

    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    infinistore.register_server(loop, infinistore.ServerConfig(prealloc_size=1, **DEVICE))
    loop.run_forever()


def connect():
    until = time.monotonic() + 20
    while True:
        config = infinistore.ClientConfig(host_addr="127.0.0.1", connection_type=infinistore.TYPE_RDMA, **DEVICE)
        connection = infinistore.InfinityConnection(config)
        try:
            connection.connect()
            return connection
        except Exception:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


async def store(connection):
    for length in LENGTHS:
        total = BLOCKS * length
        source, sink = (ctypes.create_string_buffer(total) for _ in range(2))
        ctypes.memmove(source, os.urandom(total), total)
        for block in (source, sink):
            connection.register_mr(ctypes.addressof(block), total)
        blocks = [(f"{length}/{i}", i * length) for i in range(BLOCKS)]
        await connection.rdma_write_cache_async(blocks, length, ctypes.addressof(source))
        if not connection.check_exist(blocks[-1][0]):
            sys.exit(f"the last block of {length} bytes is not stored")
        # In reverse order, so that each block has to be found by its key.
        turned = [(key, total - length - offset) for key, offset in blocks]
        await connection.rdma_read_cache_async(turned, length, ctypes.addressof(sink))
        for (_, at), (_, offset) in zip(turned, blocks):
            if zlib.crc32(sink[at : at + length]) != zlib.crc32(source[offset : offset + length]):
                sys.exit(f"block {offset // length} of {length} bytes differs")


def main():
    server = multiprocessing.get_context("spawn").Process(target=serve, daemon=True)
    server.start()
    connection = connect()
    asyncio.run(store(connection))
    connection.close()
    server.terminate()
    print("equal", len(LENGTHS))


if __name__ == "__main__":
    main()
