//! The rules of this process: which connections are upgraded.

use crate::inherited::Inherited;
use crate::log;
use crate::sys;
use sockets_base::host::Machine;
use sockets_base::rules::{Fallback, Listener, Mode, Policy, Role, Settings, Who};
use sockets_base::sources;
use sockets_base::stat::Why;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

#[derive(Debug)]
struct Mine {
    policy: Policy,
    who: Who,
    settings: Settings,
    /// All sockets stay plain, regardless of the rules.
    left_alone: bool,
    datagrams: bool,
    reliable: bool,
}

static MINE: Inherited<Mine> = Inherited::new(load_mine);

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// Loads the rules of this process.
///
/// A program with more privileges than its caller (set-user-ID) loads no rules, so all its sockets stay plain. Otherwise the
/// caller could set a variable to the name of a file that it may not read, and the error message would show a line of the
/// file.
fn load(has_more_rights: bool) -> Policy {
    if has_more_rights {
        return Policy::default();
    }
    sources::read(&sources::all(variable)).unwrap_or_else(|mistake| {
        // If the rules contain an error, none of them is applied.
        log::always(&format!("{mistake}\nall sockets stay plain"));
        Policy::default()
    })
}

/// Returns the names of this program: of its executable, and of the link or script by which it was started.
fn names() -> Vec<String> {
    let started = sys::started_as().map(PathBuf::from);
    let file = std::fs::read_link("/proc/self/exe").ok();
    let mut names: Vec<String> = [file, started]
        .iter()
        .flatten()
        .filter_map(|path| Some(path.file_name()?.to_string_lossy().into_owned()))
        .collect();
    names.dedup();
    names
}

fn mine() -> &'static Mine {
    MINE.get()
}

fn load_mine() -> Mine {
    let has_more_rights = sys::has_more_rights_than_its_caller();
    let policy = load(has_more_rights);
    let who = Who {
        names: names(),
        tag: variable(sources::TAG).filter(|tag| !has_more_rights && !tag.is_empty()),
    };
    let mut settings = policy.settings(&who);
    if variable("ANYWARP_CARRIER").is_some_and(|carrier| carrier == "tcp") {
        settings.memory = 0;
    }
    Mine {
        settings,
        left_alone: who.is_left_alone(),
        reliable: policy.has_reliable(&who) && !who.is_left_alone(),
        datagrams: policy.has_datagrams(&who) && !who.is_left_alone(),
        policy,
        who,
    }
}

/// Returns how this process handles a connection. `other` returns the address of the other end, and is called only if a rule
/// needs it.
pub fn decide(role: Role, addr: SocketAddr, other: impl Fn() -> Option<IpAddr>) -> Mode {
    let mine = mine();
    if mine.left_alone {
        return Mode::Tcp;
    }
    mine.policy
        .rule(role, &mine.who, addr, other, &Machine)
        .map_or(Mode::Tcp, |r| r.mode)
}

/// Returns whether a rule may turn datagrams of this process into messages.
pub fn has_datagrams() -> bool {
    let mine = mine();
    mine.datagrams
}

/// Returns whether a rule may make datagrams of this process reliable.
pub fn has_reliable() -> bool {
    mine().reliable
}

/// Returns the rule for datagrams, and whether peers are assumed to accept messages without a query. `None`: there is no rule.
pub fn datagrams(role: Role, addr: SocketAddr) -> Option<(Mode, bool)> {
    let mine = mine();
    let rule = mine.policy.rule(role, &mine.who, addr, || None, &Machine)?;
    Some((rule.mode, rule.unasked))
}

/// Returns how this process handles the connections of a listener.
pub fn listener(addr: SocketAddr) -> Listener {
    let mine = mine();
    if mine.left_alone {
        return Listener::All(Mode::Tcp);
    }
    mine.policy.listener(&mine.who, addr, &Machine)
}

/// Returns the settings of this process.
pub fn settings() -> &'static Settings {
    &mine().settings
}

/// Logs that a connection that might have been upgraded stays plain.
pub fn stays_plain(fd: i32, why: Why) {
    if settings().fallback == Fallback::Log {
        log::always(&format!("connection {fd} stays plain: {}", why.text()));
    } else {
        log::with(|| format!("connection {fd} stays plain: {}", why.text()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_with_more_rights_than_its_caller_has_no_rules() {
        assert_eq!(load(true), Policy::default());
        assert_ne!(load(false), Policy::default());
    }
}
