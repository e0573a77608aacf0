# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Two workers of PyTorch's RPC, whose tensors are sent by TensorPipe's transport ibv.

The test compares the results of calls with tensors of several lengths.
"""

import multiprocessing
import os

import torch
from torch.distributed import rpc

LENGTHS = [1, 1000, 1 << 20, 16 << 20]


def double(tensor):
    return tensor * 2


def worker(rank, store):
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"file://{store}", _transports=["ibv"], _channels=["basic"]
    )
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        for length in LENGTHS:
            tensor = torch.arange(length, dtype=torch.float32)
            if not torch.equal(rpc.rpc_sync("worker1", double, args=(tensor,)), tensor * 2):
                raise SystemExit(f"{length} numbers: the result differs")
        print("equal", len(LENGTHS))
    rpc.shutdown()


if __name__ == "__main__":
    store = f"/tmp/tensorpipe-{os.getpid()}"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=worker, args=(rank, store)) for rank in range(2)]
    for one in workers:
        one.start()
    for one in workers:
        one.join()
    raise SystemExit(max(abs(one.exitcode) for one in workers))
