# SPDX-License-Identifier: Apache-2.0 OR MIT
"""GROMACS simulates water on two ranks, over each transport of Open MPI that uses the device. The energies of the first step
are compared with those that one rank calculates without messages."""

import os
import re
import subprocess
import sys
import tempfile

# The size of two of the boxes of water that GROMACS provides, side by side.
BOX = ["3.72412", "1.86206", "1.86206"]
STEPS = "200"

TOPOLOGY = """#include "oplsaa.ff/forcefield.itp"
#include "oplsaa.ff/spce.itp"
[ system ]
water
[ molecules ]
"""

PARAMETERS = """integrator = md
dt = 0.002
nstenergy = 100
nstlog = 100
cutoff-scheme = Verlet
coulombtype = PME
rcoulomb = 0.9
rvdw = 0.9
constraints = h-bonds
gen-vel = yes
gen-seed = 1
"""

PROVIDER = ["--mca", "pml", "cm", "--mca", "mtl", "ofi", "--mca", "mtl_ofi_provider_include", "anywarp"]
UCX = ["--mca", "pml", "ucx"]
TRANSPORTS = {
    "provider": (PROVIDER, {}),
    "ucx rc": (UCX, {"UCX_TLS": "rc_verbs,ud_verbs:aux,self"}),
    "ucx ud": (UCX, {"UCX_TLS": "ud_verbs,self"}),
}
TERMS = ["LJ (SR)", "Coulomb (SR)", "Coul. recip.", "Potential"]
# The two ranks add the same terms in another order, in single precision.
PRECISION = 1e-4


def run(command, env={}):
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    # What is needed of the output is on stderr: the messages of GROMACS and the log of the device.
    done = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=60, env={**os.environ, **root, **env})
    if done.returncode:
        sys.exit(f"{' '.join(command)}: status {done.returncode}")


def energies(name):
    """Returns the energies of the first step, and the rate of the run in ns a day."""
    with open(f"{name}.log") as log:
        text = log.read()
    # Lines of names and lines of values alternate, in columns of 15 characters.
    table = text[text.index("Energies (kJ/mol)") :].split("\n\n")[0].splitlines()[1:]
    found = {}
    for names, values in zip(table[::2], table[1::2]):
        for at in range(0, len(values), 15):
            found[names[at : at + 15].strip()] = float(values[at : at + 15])
    return {term: found[term] for term in TERMS}, re.search(r"Performance:\s+(\S+)", text)[1]


def simulate(ranks, name, options=[], env={}):
    command = ["mpiexec", "--oversubscribe", "-n", str(ranks), *options]
    run([*command, "gmx_mpi", "mdrun", "-s", "run.tpr", "-nsteps", STEPS, "-ntomp", "1", "-npme", "0", "-deffnm", name], env)
    return energies(name)


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for name, text in [("water.top", TOPOLOGY), ("run.mdp", PARAMETERS)]:
            with open(name, "w") as file:
                file.write(text)
        run(["gmx_mpi", "solvate", "-cs", "spc216.gro", "-box", *BOX, "-o", "water.gro", "-p", "water.top"])
        run(["gmx_mpi", "grompp", "-f", "run.mdp", "-c", "water.gro", "-p", "water.top", "-o", "run.tpr"])
        expected, _ = simulate(1, "one")
        rates = []
        for transport, (options, env) in TRANSPORTS.items():
            found, rate = simulate(2, transport.replace(" ", "-"), options, env)
            for term, value in expected.items():
                if abs(found[term] - value) > PRECISION * abs(value):
                    sys.exit(f"{transport}: {term} is {found[term]}, expected {value}")
            rates.append(f"{transport} {rate} ns/day")
        print(f"equal energies: {', '.join(rates)}")


main()
