//! `cargo lab mpi`: runs the program of tests/mpi with the distribution's MPIs over the device.
//!
//! Shared memory and plain TCP are disabled, so that all messages between ranks are sent through verbs.

use std::process::{Command, Stdio};
use std::time::Instant;

use xtask::{Result, sh};

/// The time limit of one run in seconds.
const PATIENCE: &str = "120";

/// The least number of bytes that the ranks must exchange, which is much less than they do.
const LEAST: u64 = 4 << 20;

struct Way {
    name: &'static str,
    compiler: &'static str,
    launcher: &'static [&'static str],
    env: &'static [(&'static str, &'static str)],
}

const RC: &str = "rc_verbs,ud_verbs:aux,self";
const UD: &str = "ud_verbs,self";

const WAYS: &[Way] = &[
    Way {
        name: "mpich ch4:ucx rc",
        compiler: "mpicc.mpich",
        launcher: &["mpiexec.mpich", "-launcher", "fork"],
        env: &[("UCX_TLS", RC), ("MPIR_CVAR_NOLOCAL", "1")],
    },
    Way {
        name: "mpich ch4:ucx ud",
        compiler: "mpicc.mpich",
        launcher: &["mpiexec.mpich", "-launcher", "fork"],
        env: &[("UCX_TLS", UD), ("MPIR_CVAR_NOLOCAL", "1")],
    },
    Way {
        name: "openmpi pml/ucx rc",
        compiler: "mpicc.openmpi",
        launcher: &[
            "mpiexec.openmpi",
            "--oversubscribe",
            "--mca",
            "pml",
            "ucx",
            "--mca",
            "osc",
            "ucx",
        ],
        env: &[("UCX_TLS", RC)],
    },
    Way {
        name: "openmpi mtl/ofi verbs;ofi_rxm",
        compiler: "mpicc.openmpi",
        launcher: &[
            "mpiexec.openmpi",
            "--oversubscribe",
            "--mca",
            "pml",
            "cm",
            "--mca",
            "mtl",
            "ofi",
            "--mca",
            "mtl_ofi_provider_include",
            "verbs;ofi_rxm",
        ],
        env: &[],
    },
    Way {
        name: "openmpi mtl/ofi anywarp",
        compiler: "mpicc.openmpi",
        launcher: &[
            "mpiexec.openmpi",
            "--oversubscribe",
            "--mca",
            "pml",
            "cm",
            "--mca",
            "mtl",
            "ofi",
            "--mca",
            "mtl_ofi_provider_include",
            "anywarp",
        ],
        env: &[],
    },
];

pub(crate) fn run() -> Result {
    let work = sh::target().join("mpi");
    std::fs::create_dir_all(&work)?;
    let (mut passed, mut failed) = (0, 0);
    for way in WAYS {
        let program = work.join(way.compiler);
        sh::run(
            Command::new(way.compiler)
                // The compiler would warn, because MPICH's constant for "no statuses" looks like an array that is too short.
                .args(["-O1", "-Wall", "-Wno-stringop-overflow", "-o"])
                .arg(&program)
                .arg(sh::root().join("tests/mpi/ranks.c")),
        )?;
        for ranks in ["2", "4"] {
            let begin = Instant::now();
            let mut command = Command::new("timeout");
            command.arg(PATIENCE).args(way.launcher).args(["-n", ranks]);
            // Disables the selection among all devices and the signal handlers of UCX.
            let common = [
                ("UCX_NET_DEVICES", "anywarp0:1"),
                ("UCX_HANDLE_ERRORS", "none"),
                ("OMPI_MCA_btl", "^vader,tcp,openib"),
                ("OMPI_ALLOW_RUN_AS_ROOT", "1"),
                ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"),
            ];
            command.envs(common).envs(way.env.iter().copied());
            // The capture contains all traffic of the device. It is empty if the MPI used another network.
            let capture = work.join("capture.pcapng");
            let _none_yet = std::fs::remove_file(&capture);
            command
                .env("ANYWARP_CAPTURE", &capture)
                .env("ANYWARP_CAPTURE_LIMIT", (2 * LEAST).to_string());
            command
                .arg(sh::dist().join("bin/anywarp"))
                .args(["run", "--device-ip", "127.0.0.1", "--"])
                .arg(&program)
                .stdin(Stdio::null());
            let output = command.output()?;
            let printed = String::from_utf8_lossy(&output.stdout);
            let seen = std::fs::metadata(&capture).map_or(0, |m| m.len());
            let name = format!("{}, {ranks} ranks", way.name);
            let seconds = begin.elapsed().as_secs_f32();
            if seen < LEAST {
                println!("FAIL  {name}: only {seen} bytes went through the device");
                failed += 1;
            } else if output.status.success() && printed.contains(&format!("{ranks} ranks, ")) {
                println!("ok    {name} ({seconds:.1} s): {}", printed.trim());
                passed += 1;
            } else {
                println!("FAIL  {name} ({seconds:.1} s): {}", output.status);
                println!("{printed}{}", String::from_utf8_lossy(&output.stderr));
                failed += 1;
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed > 0 {
        return Err("an MPI does not work over the device".into());
    }
    Ok(())
}
