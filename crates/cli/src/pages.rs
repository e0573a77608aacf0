//! Man pages: one per subcommand from the command line's own text, one about the device, and those of its C header.

mod dv;

use std::io;

use clap::{Command, CommandFactory};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, italic, roman};

use anywarp_core::env::VARIABLES;

use crate::cli::Cli;

/// File name below `man/` and content of each page.
pub(crate) fn all() -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut root = Cli::command();
    root.build();
    let mut pages = vec![(
        "man1/anywarp.1".to_owned(),
        command_page(&root, "anywarp", &[variables(), see_also()])?,
    )];
    for sub in root
        .get_subcommands()
        .filter(|sub| !sub.is_hide_set() && sub.get_name() != "help")
    {
        let name = format!("anywarp-{}", sub.get_name());
        let more = [
            examples(sub.get_name()),
            exit_status(sub.get_name()),
            see_also(),
        ];
        pages.push((format!("man1/{name}.1"), command_page(sub, &name, &more)?));
    }
    pages.push(("man7/anywarp.7".to_owned(), device_page()?));
    pages.extend(dv::all()?);
    Ok(pages)
}

/// The page of one command, with sections of our own behind clap's.
fn command_page(command: &Command, name: &str, more: &[Roff]) -> io::Result<Vec<u8>> {
    let command = command.clone().display_name(name.to_owned());
    let man = Man::new(command.clone())
        .manual("anywarp")
        .source(format!("anywarp {}", env!("CARGO_PKG_VERSION")));
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    if command.get_arguments().next().is_some() {
        man.render_options_section(&mut page)?;
    }
    if command.get_subcommands().any(|sub| !sub.is_hide_set()) {
        man.render_subcommands_section(&mut page)?;
    }
    for section in more {
        section.to_writer(&mut page)?;
    }
    Ok(page)
}

/// ENVIRONMENT.
fn variables() -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["ENVIRONMENT"]);
    for variable in VARIABLES {
        roff.control("TP", []);
        roff.text([bold(variable.name), roman("="), italic(variable.value)]);
        roff.text([roman(variable.text)]);
    }
    roff
}

/// SEE ALSO.
fn see_also() -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]);
    roff.text([roman(
        "anywarp(1), anywarp-run(1), anywarp-env(1), anywarp-doctor(1), anywarp(7), rdma_cm(7), \
         anywarpdv(7), ibv_post_send(3), \
         ld.so(8)",
    )]);
    roff
}

/// EXAMPLES of a subcommand.
fn examples(name: &str) -> Roff {
    let examples: &[(&str, &str)] = match name {
        "run" => &[
            (
                "A ping between two shells:",
                "anywarp run -- rping -s -a 127.0.0.1 -C 10 -v\nanywarp run -- rping -c -a 127.0.0.1 -C 10 -v",
            ),
            (
                "Bandwidth, with the address of one interface as the device's address:",
                "anywarp run --device-ip 10.0.0.7 -- ib_write_bw\nanywarp run --device-ip 10.0.0.8 -- ib_write_bw 10.0.0.7",
            ),
            (
                "See why a connection ends:",
                "anywarp run --log info -- ./my-program",
            ),
        ],
        "env" => &[
            (
                "For the rest of this shell:",
                "eval \"$(anywarp env --shell)\"",
            ),
            ("For an image:", "anywarp env --docker >> Dockerfile"),
        ],
        "doctor" => &[
            ("Before asking for help:", "anywarp doctor"),
            ("For a script:", "anywarp doctor --json"),
        ],
        _ => &[],
    };
    let mut roff = Roff::new();
    if !examples.is_empty() {
        roff.control("SH", ["EXAMPLES"]);
    }
    for (about, lines) in examples {
        roff.control("PP", []);
        roff.text([roman(*about)]);
        roff.control("PP", []);
        roff.control("nf", []);
        roff.control("RS", ["4"]);
        for line in lines.lines() {
            roff.text([roman(line)]);
        }
        roff.control("RE", []);
        roff.control("fi", []);
    }
    roff
}

/// EXIT STATUS of a subcommand.
fn exit_status(name: &str) -> Roff {
    let codes: &[(&str, &str)] = match name {
        "run" => &[
            (
                "125",
                "anywarp itself cannot go on: its libraries are not there.",
            ),
            ("126", "The program cannot be executed."),
            ("127", "The program is not found."),
            ("any other", "The status of the program."),
        ],
        "doctor" => &[
            ("0", "No line is fail."),
            ("1", "At least one line is fail."),
        ],
        _ => &[("0", "Done."), ("125", "The libraries are not there.")],
    };
    let mut roff = Roff::new();
    roff.control("SH", ["EXIT STATUS"]);
    for (code, meaning) in codes {
        roff.control("TP", []);
        roff.text([bold(*code)]);
        roff.text([roman(*meaning)]);
    }
    roff
}

/// The device as a program and its user see it.
const DEVICE: &[(&str, &[&str])] = &[
    (
        "DESCRIPTION",
        &[
            "A program that runs under anywarp run(1) finds one RDMA device, anywarp0, with one port. The device is \
             a library: it lives in the process that opens it, and ends with it. It needs no kernel module, no \
             device file, no locked memory and no privileges.",
            "Every address of the machine that is up becomes a GID of the port, IPv4 addresses in their IPv6-mapped \
             form. GID 0 is the one that most programs use; ANYWARP_ADDR chooses it. The port also has a LID, made \
             from the address, for programs that exchange nothing else.",
            "An address that comes or goes while a program runs leaves the other GIDs where they are, and the program is \
             told by an asynchronous event, GID_CHANGE. The port is down while the interface of GID 0 is. A program \
             that binds to a loopback address with rdma_bind_addr(3) gets a device when a connection comes, unless GID \
             0 is a loopback address.",
        ],
    ),
    (
        "TRANSPORT",
        &[
            "Reliable connections (RC) travel as iWARP over TCP: MPA revision 2, DDP and RDMAP, with RDMA Write, \
             Read, Send, Send with Invalidate, immediate data and atomic operations. A connection made with \
             rdma_connect(3) goes to the listener's own TCP port and interoperates with other iWARP \
             implementations. A connection made with ibv_modify_qp(3) goes to a TCP port that is part of the queue \
             pair number.",
            "Unreliable datagrams (UD) and unreliable connections (UC) travel over UDP. Datagrams can be lost, as \
             the name says.",
            "A firewall between two machines must let TCP and UDP through to the ports that the kernel hands out.",
        ],
    ),
    (
        "NOTES",
        &[
            "Registered memory is not locked and counts against no limit. A process and its child after fork(2) do \
             not share the device: in the child it is gone, and the parent goes on.",
            "There is no authentication and no encryption beyond what iWARP has, which is none: whoever can reach a \
             port can try to connect, and remote keys protect memory against accidents rather than against \
             attackers in the network. Use networks that you trust, or a tunnel.",
        ],
    ),
    (
        "FILES",
        &[
            "PREFIX/lib/anywarp/libibverbs.so.1, PREFIX/lib/anywarp/librdmacm.so.1: the device.",
            "PREFIX/lib/anywarp/libanywarp-path.so: shows the device at /dev/infiniband/anywarp0 and \
             /sys/class/infiniband/anywarp0 to programs that look there.",
        ],
    ),
];

/// anywarp(7).
fn device_page() -> io::Result<Vec<u8>> {
    let mut roff = Roff::new();
    let version = concat!("anywarp ", env!("CARGO_PKG_VERSION"));
    roff.control("TH", ["anywarp", "7", "", version, "anywarp"]);
    roff.control("SH", ["NAME"]);
    roff.text([roman("anywarp - an RDMA network card made of software")]);
    for (title, paragraphs) in DEVICE {
        roff.control("SH", [*title]);
        for paragraph in *paragraphs {
            roff.control("PP", []);
            roff.text([roman(*paragraph)]);
        }
    }
    let mut page = Vec::new();
    for part in [roff, variables(), see_also()] {
        part.to_writer(&mut page)?;
    }
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_visible_subcommand_has_a_page_and_hidden_ones_have_none() {
        let all = all().unwrap().into_iter().map(|(name, _)| name);
        let names: Vec<String> = all.filter(|name| !name.contains("anywarpdv")).collect();

        assert_eq!(
            names,
            [
                "man1/anywarp.1",
                "man1/anywarp-run.1",
                "man1/anywarp-capture.1",
                "man1/anywarp-env.1",
                "man1/anywarp-doctor.1",
                "man1/anywarp-ping.1",
                "man1/anywarp-blast.1",
                "man1/anywarp-bench.1",
                "man1/anywarp-stat.1",
                "man7/anywarp.7"
            ]
        );
    }

    #[test]
    fn pages_tell_every_variable() {
        for (name, page) in all().unwrap() {
            let text = String::from_utf8(page).unwrap();
            assert!(text.contains(".SH NAME"), "{name}");
            if name.ends_with("anywarp.1") || name.ends_with("anywarp.7") {
                for variable in VARIABLES {
                    assert!(
                        text.contains(variable.name),
                        "{name} lacks {}",
                        variable.name
                    );
                }
            }
        }
    }
}
