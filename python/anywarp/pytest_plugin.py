# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The fixture ``rdma``: an RDMA device for the programs that a test starts.

    def test_transfer(rdma):
        port = rdma.port()
        with rdma.start(["./server", port]):
            assert rdma.run(["./client", port]).returncode == 0

    def test_an_error_is_handled(rdma):
        rdma.faults = "op=write nth=3 -> error=remote-access"
        assert rdma.run(["./client"]).returncode != 0

Both ends are on the loopback interface. Programs find the device by the environment ``rdma.env()``. A program that still runs when
the test ends is killed.
"""

import contextlib
import socket
import subprocess

import pytest

import anywarp


class Rdma:
    """The device of one test."""

    #: The address of the device.
    address = "127.0.0.1"

    def __init__(self):
        #: Faults for the programs that are started later (docs/faults.md), or None.
        self.faults = None
        #: Seconds after which `run` kills a program.
        self.timeout = 60
        self._running = []

    def env(self, base=None):
        """Returns an environment in which a program finds the device."""
        return anywarp.env(base, faults=self.faults, addr=self.address)

    def port(self):
        """Returns a port that was free a moment ago."""
        with socket.socket() as s:
            s.bind((self.address, 0))
            return s.getsockname()[1]

    def run(self, arguments, **kwargs):
        """``subprocess.run`` of a program, with its output as text."""
        kwargs = {"text": True, "capture_output": True, "timeout": self.timeout, **kwargs}
        env = self.env(kwargs.pop("env", None))
        return subprocess.run(anywarp.command(arguments), env=env, **kwargs)

    @contextlib.contextmanager
    def start(self, arguments, **kwargs):
        """Starts a program in the background. It is killed at the end of the block if it still runs."""
        env = self.env(kwargs.pop("env", None))
        program = subprocess.Popen(anywarp.command(arguments), env=env, **kwargs)
        self._running.append(program)
        try:
            yield program
        finally:
            self._end(program)

    def _end(self, program):
        if program.poll() is None:
            program.kill()
        program.wait()

    def close(self):
        """Kills programs that still run."""
        for program in self._running:
            self._end(program)


@pytest.fixture
def rdma():
    """An RDMA device for the programs that the test starts."""
    device = Rdma()
    yield device
    device.close()
