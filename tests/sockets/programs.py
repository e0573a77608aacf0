# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs Python programs under `anywarp sockets run`, for the tests in this directory."""

import json
import os
import subprocess
import sys

ANYWARP = sys.argv[1]
PRELUDE = "import errno, os, socket, subprocess, sys\n"
# A server that echoes each line. It prints its port when it listens. Its first argument is the address to listen at.
SERVER = """
l = socket.create_server((sys.argv[1], 0))
print(l.getsockname()[1], flush=True)
while True:
    s, _ = l.accept()
    f = b''
    while d := s.recv(65536):
        f += d
        while b'\\n' in f:
            line, f = f.split(b'\\n', 1)
            s.sendall(line + b'\\n')
    s.close()
"""
CLIENT = """
s = socket.create_connection(('127.0.0.1', int(sys.argv[1])), 10, (sys.argv[2], 0))
def ask(text):
    s.sendall(text + b'\\n')
    got = b''
    while not got.endswith(b'\\n'):
        got += s.recv(65536) or sys.exit('the server closed')
    assert got == text + b'\\n', got
ask(b'hello')
"""
# Keeps the connection open until standard input is closed.
WAIT = "print('there', flush=True); sys.stdin.read()\n"


def sockets(*args, **more):
    return subprocess.run([ANYWARP, "sockets", *args], capture_output=True, text=True, timeout=20, **more)


class Program:
    """A Python program, under `anywarp sockets run` unless it is plain."""

    def __init__(self, text, *args, rule="all prefer", plain=False, variables={}):
        run = [] if plain else [ANYWARP, "sockets", "run", "--rule", rule, "--"]
        self.p = subprocess.Popen([*run, "/usr/bin/python3", "-c", PRELUDE + text, *args],
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})
        self.pid = str(self.p.pid)

    def line(self):
        text = self.p.stdout.readline()
        assert text, "the program ended"
        return text.strip()

    def end(self):
        self.p.stdin.close()
        assert self.p.wait(20) == 0, self.p.returncode

    def kill(self):
        self.p.kill()
        self.p.wait()


def stat(program):
    found = sockets("stat", program.pid, "--json")
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


def modes(program):
    return sorted(s["mode"] for s in stat(program)["sockets"])


def run(*tests):
    """Runs tests, which raise an exception if they fail. The process exits with 1 if one has failed."""
    failed = 0
    for test in tests:
        try:
            test()
            print(f"ok   {test.__name__}", flush=True)
        except Exception as e:  # the other tests still run
            print(f"FAIL {test.__name__}: {type(e).__name__} {e}", flush=True)
            failed += 1
    sys.exit(failed != 0)
