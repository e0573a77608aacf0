# SPDX-License-Identifier: Apache-2.0 OR MIT
"""The test programs of uDAPL (dtest, dtestsrq) over its provider for the connection manager, which moves queue pairs between identifiers, and over
its provider that exchanges addresses by TCP. They compare the data themselves."""

import os
import subprocess
import sys
import tempfile
import time

# The provider for the connection manager needs an interface that is not the loopback interface.
INTERFACE, ADDRESS = "dapl0", "10.77.0.1"
PROVIDERS = {
    "cma": f'libdaplofa.so.2 dapl.2.0 "{INTERFACE} 0"',
    "scm": 'libdaploscm.so.2 dapl.2.0 "anywarp0 1"',
}
PROGRAMS = ["dtest", "dtestsrq"]
SECONDS = 30


def add_interface():
    for command in [
        f"ip link add {INTERFACE} type veth peer name dapl1",
        f"ip address add {ADDRESS}/24 dev {INTERFACE}",
        f"ip link set {INTERFACE} up",
        "ip link set dapl1 up",
    ]:
        subprocess.run(command.split(), check=True)


def listeners():
    """Returns the number of TCP listeners in this network namespace."""
    listening = "0A"
    tables = [open(f"/proc/net/{name}").read() for name in ("tcp", "tcp6")]
    return sum(line.split()[3] == listening for table in tables for line in table.splitlines()[1:])


def end(process):
    """Returns the status and the output of a process, which is ended if it takes too long."""
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output = process.communicate()[0] + f"\nended after {SECONDS} s\n"
    return process.returncode, output


def run(program, provider):
    """Runs both ends of a program."""
    start = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    before = listeners()
    server = subprocess.Popen([program, "-P", provider, "-s"], **start)
    for _ in range(SECONDS * 50):
        if listeners() > before or server.poll() is not None:
            break
        time.sleep(0.02)
    client = subprocess.Popen([program, "-P", provider, "-h", ADDRESS], **start)
    ends = [end(client), end(server)]
    for status, output in ends:
        sys.stderr.write(output)
        if status != 0:
            raise SystemExit(f"{program} over {provider}: status {status}")


with tempfile.NamedTemporaryFile("w", suffix=".conf") as conf:
    add_interface()
    for name, rest in PROVIDERS.items():
        conf.write(f'{name} u2.0 nonthreadsafe default {rest} ""\n')
    conf.flush()
    os.environ["DAT_OVERRIDE"] = conf.name
    for name in PROVIDERS:
        for program in PROGRAMS:
            run(program, name)
print("equal", len(PROVIDERS) * len(PROGRAMS))
