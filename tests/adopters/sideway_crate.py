# SPDX-License-Identifier: Apache-2.0 OR MIT
"""Runs the tests and the examples of the Rust crate sideway: `sideway_crate.py EXAMPLES TEST...`, where EXAMPLES is the folder of the
built examples and each TEST is a built test."""

import re
import subprocess
import sys

ADDRESS = "127.0.0.1"
ITERATIONS, SIZE = 2000, 4096
PAIRS = [
    (["rc_pingpong", "-n", str(ITERATIONS), "-s", str(SIZE)], [ADDRESS]),
    (["rc_pingpong_split", "-n", str(ITERATIONS), "-s", str(SIZE)], [ADDRESS]),
    (["cmtime", "-b", ADDRESS, "-c", "50"], ["-s", ADDRESS]),
]


def run(command):
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    sys.stderr.write(done.stderr)
    return done.stdout


def tests(programs):
    passed = 0
    for program in programs:
        counts = re.search(r"(\d+) passed; 0 failed; (\d+) ignored", run([program]))
        passed += int(counts[1])
    return passed


def pairs(folder):
    for (server, *options), client in PAIRS:
        command = [f"{folder}/{server}", *options]
        # A client that starts before its server listens is refused. It is started again.
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as other:
            try:
                printed = connect([*command, *client])
                out, err = other.communicate(timeout=20)
            finally:
                other.kill()
        if other.returncode != 0:
            raise SystemExit(f"the server of {server}: status {other.returncode}\n{out}{err}")
        if server.startswith("rc_pingpong") and f"{2 * ITERATIONS * SIZE} bytes" not in printed:
            raise SystemExit(f"{server} did not transfer the expected number of bytes:\n{printed}")
    return len(PAIRS)


def connect(command):
    for attempt in range(100):
        try:
            return run(command)
        except SystemExit as end:
            # cmtime prints the second text. It does not print why it could not connect.
            reasons = ("Connection refused", "Failed to receive cm_id")
            if attempt == 99 or not any(reason in str(end) for reason in reasons):
                raise
            subprocess.run(["sleep", "0.05"], check=True)


folder, *programs = sys.argv[1:]
print("equal", tests(programs) + pairs(folder))
