# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Tests the fixture `rdma` of the wheel. tests/install/wheel runs it."""

import os
import subprocess
import time

import anywarp


def both(rdma, *arguments):
    """Runs rping as a server and as a client. Returns the finished client and the server."""
    port = rdma.port()
    with rdma.start(["rping", "-s", "-a", rdma.address, "-p", port, *arguments], stdout=subprocess.DEVNULL) as server:
        for _ in range(100):
            client = rdma.run(["rping", "-c", "-a", rdma.address, "-p", port, *arguments])
            if "refused" not in client.stderr and "REJECTED" not in client.stderr:
                break
            time.sleep(0.05)
        return client, server


def test_programs_have_a_device(rdma):
    shown = rdma.run(["ibv_devinfo"])
    assert shown.returncode == 0 and "anywarp0" in shown.stdout


def test_two_programs_connect(rdma):
    client, _ = both(rdma, "-C", "5", "-V")
    assert client.returncode == 0, client.stderr


def test_faults_reach_the_program(rdma):
    rdma.faults = "op=send nth=3 -> error=remote-access"
    client, _ = both(rdma, "-C", "5", "-V")
    # Status 10 is IBV_WC_REM_ACCESS_ERR. The exit status of rping is 0 nevertheless if it first sees the end of the connection.
    assert "cq completion failed status 10" in client.stderr, client


def test_faults_are_reset(rdma):
    assert "ANYWARP_FAULTS" not in rdma.env({})


def test_a_program_is_terminated_after_its_block(rdma):
    with rdma.start(["rping", "-s", "-a", rdma.address, "-p", rdma.port()]) as program:
        assert program.poll() is None
    assert program.returncode < 0


def test_env_keeps_existing_variables(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/elsewhere")
    path = anywarp.env({"LD_LIBRARY_PATH": "/mine:/too", "KEPT": "1"})
    assert path["LD_LIBRARY_PATH"].split(":") == [anywarp.lib(), "/mine", "/too"]
    assert path["KEPT"] == "1" and "HOME" not in path
    twice = anywarp.env(anywarp.env({}))
    assert twice == anywarp.env({})
    assert os.environ["LD_LIBRARY_PATH"] == "/elsewhere"
