//! `anywarp sockets check`: the rules, and which of them decides.

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
            "the rules are right; looked at in this order: {}",
            names.join(", ")
        );
        return Ok(ExitCode::SUCCESS);
    };
    let who = Who {
        names: names(program),
        tag: args.rules.tag.clone().or_else(|| variable(TAG)),
    };
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
    };
    if who.is_left_alone() {
        return "tcp: connections of sshd always stay plain: it hands them from process to process"
            .to_owned();
    }
    match policy.rule(role, who, address, || from, &Machine) {
        Some(rule) => format!(
            "{}: {}\n  {rule}",
            rule.mode.word(),
            meaning(role, rule.mode)
        ),
        None => "tcp: no rule is about it".to_owned(),
    }
}

fn meaning(role: Role, mode: Mode) -> &'static str {
    match (role, mode) {
        (Role::Connect, Mode::Prefer) => "RDMA if the listener is known to understand it",
        (Role::Connect, Mode::Require) => {
            "RDMA, without asking; a peer that does not understand it resets the connection"
        }
        (Role::Listen, Mode::Prefer) => {
            "RDMA for peers that ask for it, on the same port as plain connections"
        }
        (Role::Listen, Mode::Require) => "RDMA only: plain connections are closed",
        (_, Mode::Tcp) => "the kernel's TCP",
        (_, Mode::Off) => "the kernel's TCP, not looked at",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rule_that_decides_is_shown_with_its_place() {
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
            "tcp: no rule is about it"
        );
        let listens = args::Role::Listen;
        assert!(ask("nginx", listens, "1.2.3.4:80", Some("10.0.0.1")).starts_with("off: "));
        assert!(ask("nginx", listens, "1.2.3.4:80", None).starts_with("tcp: no rule"));
        assert!(ask("sshd", listens, "1.2.3.4:22", None).starts_with("tcp: connections of sshd"));
    }
}
