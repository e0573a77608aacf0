//! The rules of this process: which connections are upgraded.

use crate::log;
use crate::sys;
use sockets_base::host::Machine;
use sockets_base::rules::{Listener, Mode, Policy, Role, Settings, Who};
use sockets_base::sources;
use sockets_base::stat::Why;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::OnceLock;

#[derive(Debug)]
struct Mine {
    policy: Policy,
    who: Who,
    settings: Settings,
    /// All its connections stay plain, whatever the rules.
    left_alone: bool,
    datagrams: bool,
}

static MINE: OnceLock<Mine> = OnceLock::new();

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The rules of this process.
///
/// A program with more rights than its caller has none, so that all its sockets stay plain: the caller's variables could name
/// a file that the caller may not read, and a mistake in it is shown with its line.
fn load(has_more_rights: bool) -> Policy {
    if has_more_rights {
        return Policy::default();
    }
    sources::read(&sources::all(variable)).unwrap_or_else(|mistake| {
        // The program runs on plain sockets rather than by half of the rules.
        log::always(&format!("{mistake}\nall sockets stay plain"));
        Policy::default()
    })
}

/// The names of this program: of its file, and of the link or script that it was started by.
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
    MINE.get_or_init(|| {
        let has_more_rights = sys::has_more_rights_than_its_caller();
        let policy = load(has_more_rights);
        let who = Who {
            names: names(),
            tag: variable(sources::TAG).filter(|tag| !has_more_rights && !tag.is_empty()),
        };
        Mine {
            settings: policy.settings(&who),
            left_alone: who.is_left_alone(),
            datagrams: policy.has_datagrams(&who) && !who.is_left_alone(),
            policy,
            who,
        }
    })
}

/// What this process does with a connection; `other` is asked for the other end's address if a rule needs it.
pub fn decide(role: Role, addr: SocketAddr, other: impl Fn() -> Option<IpAddr>) -> Mode {
    let mine = mine();
    if mine.left_alone {
        return Mode::Tcp;
    }
    mine.policy
        .rule(role, &mine.who, addr, other, &Machine)
        .map_or(Mode::Tcp, |r| r.mode)
}

/// Whether a rule may make datagrams of this process messages.
pub fn has_datagrams() -> bool {
    let mine = mine();
    mine.datagrams
}

/// What the rules say about datagrams; `None`: nothing. Also whether peers understand messages without being asked.
pub fn datagrams(role: Role, addr: SocketAddr) -> Option<(Mode, bool)> {
    let mine = mine();
    let rule = mine.policy.rule(role, &mine.who, addr, || None, &Machine)?;
    Some((rule.mode, rule.unasked))
}

/// What this process does with the connections of a listener.
pub fn listener(addr: SocketAddr) -> Listener {
    let mine = mine();
    if mine.left_alone {
        return Listener::All(Mode::Tcp);
    }
    mine.policy.listener(&mine.who, addr, &Machine)
}

/// The settings of this process.
pub fn settings() -> &'static Settings {
    &mine().settings
}

/// A connection that might have been upgraded stays plain.
pub fn stays_plain(fd: i32, why: Why) {
    if settings().logs_fallback {
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
