//! The entry point of the fuzzer: messages of a peer, as far as they can be handled without a device.

#![allow(
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a violated invariant must end the fuzzer"
)]

use std::collections::HashMap;

use crate::address::Remote;
use crate::endpoint::Registered;
use crate::endpoint::atomic::operation;
use crate::matching::{Content, Envelope, Matching, Message, Pattern};
use crate::wire::{Announcement, HEADER, Header, Kind};

/// The size in bytes of the memory that peers may change, and of the memory before and after it.
const MEMORY: usize = 512;
const GUARD: usize = 64;
/// The key of the registered memory.
const KEY: u32 = 0x0101;

/// Handles messages of a peer, each preceded by a length byte: atomic operations on registered memory, and messages that are
/// matched with receives. Panics if memory outside the registered region changes, if an answer is longer than the registered
/// memory, or if the recorded size of the stored messages is wrong.
pub fn messages(mut data: &[u8]) {
    let mut memory = vec![0x5a_u64; (MEMORY + 2 * GUARD) / 8];
    let start = memory.as_mut_ptr().expose_provenance();
    let registered = Registered {
        at: start + GUARD,
        len: MEMORY,
        read: true,
        write: true,
    };
    let table = HashMap::from([(KEY, registered)]);
    let mut matching = Matching::<u8>::default();
    let mut bytes = 0;
    let from = Remote {
        ip: std::net::Ipv4Addr::LOCALHOST.into(),
        qpn: 7,
    };
    while let Some((len, rest)) = data.split_first() {
        let (message, rest) = rest.split_at(rest.len().min(usize::from(*len)));
        data = rest;
        let Some((mut header, content)) = Header::decode(message) else {
            continue;
        };
        assert_eq!(message.len(), HEADER + content.len());
        let again = header.encode();
        assert_eq!(
            message.get(..HEADER),
            Some(&again[..]),
            "a parsed header does not encode to the same bytes"
        );
        match header.kind {
            Kind::Atomic => {
                // The fuzzer cannot know the address of the memory, so its input contains an offset.
                header.tag = header.tag.wrapping_add(registered.at as u64);
                if let Ok(former) = operation(&table, &header, content) {
                    assert!(former.len() <= crate::limits::ATOMIC);
                    assert!(former.len() <= MEMORY, "more bytes than the memory has");
                }
            }
            Kind::Eager | Kind::Announce => {
                let envelope = Envelope {
                    source: header.data & 3,
                    tag: header.tag,
                };
                if let Some((at, _)) = matching.receive_for(&envelope) {
                    assert!(matching.remove_receive(at).is_some());
                    continue;
                }
                let content = match header.kind {
                    Kind::Eager => Content::Here(content.to_vec()),
                    _ => Content::Announced(Announcement::new(&header, content)),
                };
                bytes += crate::limits::UNEXPECTED_EACH;
                if let Content::Here(content) = &content {
                    bytes += content.len();
                }
                matching.keep(Message {
                    envelope,
                    from,
                    length: header.length,
                    data: None,
                    content,
                });
            }
            // The fuzzer uses this kind to post a receive of the program.
            Kind::Grant => {
                let pattern = Pattern {
                    source: if header.data & 4 == 0 {
                        header.data & 3
                    } else {
                        crate::abi::FI_ADDR_UNSPEC
                    },
                    tag: header.tag,
                    ignore: header.length,
                };
                let taken = matching.take_message(&pattern);
                match taken {
                    Some(message) => {
                        bytes -= crate::limits::UNEXPECTED_EACH;
                        if let Content::Here(content) = &message.content {
                            bytes -= content.len();
                        }
                    }
                    None => matching.post(pattern, 0),
                }
            }
            Kind::Written
            | Kind::AtomicDone
            | Kind::Probe
            | Kind::Hold
            | Kind::Link
            | Kind::Taken
            | Kind::Ask
            | Kind::Unknown => {}
        }
        assert_eq!((matching.bytes(), matching.bytes_of(from)), (bytes, bytes));
    }
    let guards = memory.iter().take(GUARD / 8);
    let guards = guards.chain(memory.iter().skip((GUARD + MEMORY) / 8));
    assert!(guards.copied().all(|word| word == 0x5a), "a guard changed");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{COMPARE, FETCH};

    /// A linear congruential generator: the bytes are the same in each run.
    struct Random(u64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self
                .0
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (self.0 >> 33) % n
        }
    }

    /// Returns a message that is valid more often than random bytes are.
    fn message(random: &mut Random) -> Vec<u8> {
        let mut header = Header::new(match random.below(4) {
            0 => Kind::Eager,
            1 => Kind::Announce,
            2 => Kind::Grant,
            _ => Kind::Atomic,
        });
        header.tag = random.below(4);
        header.data = random.below(8);
        let mut content = 0;
        match header.kind {
            Kind::Eager => {
                content = random.below(200);
                header.length = content;
            }
            Kind::Atomic => {
                let count = random.below(9);
                let (op, datatype) = (random.below(20), random.below(11));
                header.flags = [0, FETCH, FETCH | COMPARE, COMPARE][random.below(4) as usize];
                header.length = count;
                header.data = u64::from(KEY) << 32 | op << 16 | datatype;
                header.tag = random.below(600).wrapping_sub(40);
                let size = [1, 1, 2, 2, 4, 4, 8, 8, 4, 8, 8][datatype as usize];
                let lists = 1 + u64::from(header.has(COMPARE));
                content = (count * size * lists).min(200);
            }
            _ => header.length = random.below(3),
        }
        let mut bytes = header.encode().to_vec();
        bytes.extend((0..content).map(|_| random.below(256) as u8));
        if random.below(8) == 0 {
            let at = random.below(bytes.len() as u64) as usize;
            bytes[at] ^= 1 << random.below(8);
        }
        bytes
    }

    #[test]
    fn no_messages_violate_an_invariant() {
        let mut random = Random(1);
        for _ in 0..3000 {
            let mut all = Vec::new();
            for _ in 0..random.below(40) {
                let message = message(&mut random);
                all.push(u8::try_from(message.len()).unwrap());
                all.extend(message);
            }
            messages(&all);
        }
    }

    #[test]
    fn inputs_found_by_the_fuzzer_pass() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/provider");
        let mut n = 0;
        for file in std::fs::read_dir(dir).unwrap() {
            messages(&std::fs::read(file.unwrap().path()).unwrap());
            n += 1;
        }
        assert!(n > 0, "no corpus");
    }
}
