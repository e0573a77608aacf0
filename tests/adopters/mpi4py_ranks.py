# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Two ranks of mpi4py with MPICH. Checks the data that arrives by messages, collectives and windows of many sizes.

Without a launcher the program starts itself on two ranks: first with MPICH's default, the reliable connections of UCX, and
then with the libfabric provider.
"""

import os
import subprocess
import sys

LENGTHS = [1, 64, 4096, 65537, 1 << 20, 16 << 20]


PROVIDER = ["-genv", "MPIR_CVAR_CH4_NETMOD", "ofi", "-genv", "FI_PROVIDER", "anywarp"]


def launch():
    mpiexec = os.path.join(os.path.dirname(sys.executable), "mpiexec")
    for variables in [[], PROVIDER]:
        ranks = subprocess.run([mpiexec, "-n", "2", *variables, sys.executable, __file__])
        if ranks.returncode:
            sys.exit(f"{variables}: mpiexec ended with {ranks.returncode}")


def expect(name, length, got, wanted):
    if got != wanted:
        sys.exit(f"{name} of {length} bytes: the data differs")


def main():
    import numpy
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, size = comm.Get_rank(), comm.Get_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    for length in LENGTHS:
        pattern = numpy.arange(length, dtype=numpy.uint64).astype(numpy.uint8)

        def data(of):
            return pattern + numpy.uint8(of)

        block = numpy.zeros(length, dtype=numpy.uint8)
        comm.Sendrecv(data(rank), right, recvbuf=block, source=left)
        expect("message", length, bytes(block), bytes(data(left)))
        requests = [comm.Irecv(block, left, 7), comm.Isend(data(rank + 10), right, 7)]
        MPI.Request.Waitall(requests)
        expect("request", length, bytes(block), bytes(data(left + 10)))
        # An object is sent as a pickle. The receiver first receives its length.
        expect("object", length, comm.sendrecv(bytes(data(rank)), right, source=left), bytes(data(left)))
        summed = numpy.zeros(length, dtype=numpy.uint8)
        comm.Allreduce(data(rank), summed)
        expect("sum", length, bytes(summed), bytes(sum(data(r) for r in range(size)).astype(numpy.uint8)))
        if rank == 0:
            block[:] = data(3)
        comm.Bcast(block, root=0)
        expect("broadcast", length, bytes(block), bytes(pattern + numpy.uint8(3)))
        window = MPI.Win.Create(block, comm=comm)
        window.Fence()
        window.Put(data(rank + 20), right)
        window.Fence()
        expect("put", length, bytes(block), bytes(data(left + 20)))
        got = numpy.zeros(length, dtype=numpy.uint8)
        window.Get(got, right)
        window.Fence()
        expect("get", length, bytes(got), bytes(data(rank + 20)))
        window.Free()
    comm.Barrier()
    if rank == 0:
        print("equal", len(LENGTHS))


if __name__ == "__main__":
    if "PMI_RANK" in os.environ or "PMI_SIZE" in os.environ:
        main()
    else:
        launch()
