//! `anywarp sockets check`: checks the rules, and shows which one decides.

use std::net::SocketAddr;
use std::process::ExitCode;

use sockets_base::host::Machine;
use sockets_base::rules::{Mode, Policy, Role, Who};
use sockets_base::sources::{self, COMMAND, TAG};

use super::args::{self, Check};
use super::{names, variable};
use crate::cmd::Failure;

pub(crate) fn run(args: &Check) -> Result<ExitCode, Failure> {
    let policy = args.rules.read()?;
    let (Some(role), Some(address), Some(program)) = (args.role, args.address, &args.program)
    else {
        let command = args.rules.value(variable(COMMAND));
        let all = sources::all(|name| match name {
            COMMAND => command.clone(),
            name => variable(name),
        });
        let names: Vec<String> = all.into_iter().rev().map(|source| source.name).collect();
        println!(
            "the rules are valid; sources in order of precedence: {}",
            names.join(", ")
        );
        return Ok(ExitCode::SUCCESS);
    };
    let who = Who {
        names: names(program),
        tag: args.rules.tag.clone().or_else(|| variable(TAG)),
    };
    let of_udp = matches!(role, args::Role::Bind | args::Role::Send);
    if of_udp != (args.protocol == Some(args::Protocol::Udp)) {
        return Err(Failure::Rules(
            "the roles of tcp are connect and listen, those of udp bind and send".to_owned(),
        ));
    }
    println!("{}", answer(&policy, &who, role, address, args.from));
    Ok(ExitCode::SUCCESS)
}

fn answer(
    policy: &Policy,
    who: &Who,
    role: args::Role,
    address: SocketAddr,
    from: Option<std::net::IpAddr>,
) -> String {
    let role = match role {
        args::Role::Connect => Role::Connect,
        args::Role::Listen => Role::Listen,
        args::Role::Bind => Role::Bind,
        args::Role::Send => Role::Send,
    };
    if who.is_left_alone() {
        return "tcp: connections of sshd and rsync always stay plain, because several processes use them".to_owned();
    }
    match policy.rule(role, who, address, || from, &Machine) {
        Some(rule) => {
            let peers = match (rule.mode, rule.unasked) {
                (mode, true) if mode.is_messages() => " to all peers, without asking them",
                (mode, false) if mode.is_messages() => " to peers that are known to accept them",
                _ => "",
            };
            format!(
                "{}: {}{peers}\n  {rule}",
                rule.mode.word(),
                meaning(role, rule.mode)
            )
        }
        None => format!(
            "{}: no rule applies",
            if is_udp(role) { "udp" } else { "tcp" }
        ),
    }
}

fn is_udp(role: Role) -> bool {
    matches!(role, Role::Bind | Role::Send)
}

fn meaning(role: Role, mode: Mode) -> &'static str {
    match (role, mode) {
        (Role::Bind, Mode::Datagram) => "messages are accepted, and answers are Sends",
        (Role::Bind, Mode::Record) => "messages are accepted, and answers are Write-Records",
        (Role::Bind, Mode::Reliable) => {
            "messages and reliable datagrams are accepted, and answers are reliable Sends"
        }
        (_, Mode::Reliable) => "reliable Sends, which are retransmitted if they are lost,",
        (_, Mode::Datagram) => "Sends",
        (_, Mode::Record) => "Write-Records",
        (_, Mode::Udp) => "the kernel's UDP",
        (Role::Bind | Role::Send, Mode::Off) => "the kernel's UDP; the library ignores the socket",
        (Role::Connect, Mode::Prefer) => "RDMA if the listener is known to accept it",
        (Role::Connect, Mode::Require) => {
            "RDMA, without asking; a peer without the library resets the connection"
        }
        (Role::Listen, Mode::Prefer) => {
            "RDMA for peers that ask for it, on the same port as plain connections"
        }
        (_, Mode::Prefer) => "RDMA",
        (_, Mode::Require) => "RDMA only: plain connections are closed",
        (_, Mode::Tcp) => "the kernel's TCP",
        (_, Mode::Off) => "the kernel's TCP; the library ignores the socket",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deciding_rule_is_shown_with_its_position() {
        let mut policy = Policy::default();
        policy
            .read("f", "program nginx\nconnect tcp 10.0.0.0/8:6379 require\nlisten tcp *:80 from 10.0.0.0/8 off")
            .unwrap();
        let who = |name: &str| Who {
            names: vec![name.to_owned()],
            tag: None,
        };
        let ask = |name: &str, role, address: &str, from: Option<&str>| {
            let from = from.map(|a| a.parse().unwrap());
            answer(&policy, &who(name), role, address.parse().unwrap(), from)
        };
        let connects = args::Role::Connect;
        let text = ask("nginx", connects, "10.1.2.3:6379", None);
        assert!(text.starts_with("require: "), "{text}");
        assert!(
            text.ends_with("\n  f:2: connect tcp 10.0.0.0/8:6379 require"),
            "{text}"
        );
        assert_eq!(
            ask("curl", connects, "10.1.2.3:6379", None),
            "tcp: no rule applies"
        );
        let listens = args::Role::Listen;
        assert!(ask("nginx", listens, "1.2.3.4:80", Some("10.0.0.1")).starts_with("off: "));
        assert!(ask("nginx", listens, "1.2.3.4:80", None).starts_with("tcp: no rule"));
        for program in ["sshd", "rsync"] {
            let answer = ask(program, listens, "1.2.3.4:22", None);
            assert!(answer.starts_with("tcp: connections of sshd and rsync"));
        }
    }

    #[test]
    fn rules_about_datagrams_are_shown_as_well() {
        let mut policy = Policy::default();
        policy
            .read(
                "g",
                "bind udp *:5060 datagram; send udp 10.0.0.0/8 record require",
            )
            .unwrap();
        let who = Who {
            names: vec!["sipp".to_owned()],
            tag: None,
        };
        let ask = |role, address: &str| answer(&policy, &who, role, address.parse().unwrap(), None);
        let text = ask(args::Role::Bind, "0.0.0.0:5060");
        let bound =
            "datagram: messages are accepted, and answers are Sends to peers that are known";
        assert!(text.starts_with(bound), "{text}");
        let text = ask(args::Role::Send, "10.0.0.1:9");
        let sent = "record: Write-Records to all peers, without asking them\n  g:1: send udp";
        assert!(text.starts_with(sent), "{text}");
        let text = ask(args::Role::Send, "11.0.0.1:9");
        assert_eq!(text, "udp: no rule applies");
    }
}
