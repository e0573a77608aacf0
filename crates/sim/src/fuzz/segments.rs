//! Valid messages, and messages with single errors.

use anywarp_core::wire::control::Control;
use anywarp_core::wire::ddp::{Tagged, Untagged};
use anywarp_core::wire::rdmap::{AtomicRequest, AtomicResponse, Opcode, ReadRequest, Terminate};
use anywarp_core::wire::{Msn, Stag, To};

use crate::{Mr, framed};

use super::input::Input;
use super::target::Target;

/// Sends FPDUs whose headers and lengths are chosen by the input, between calls of the application.
pub fn segments(data: &[u8]) {
    converse(data);
}

/// Runs [`segments`], and returns whether the connection was still open at the end.
pub fn converse(data: &[u8]) -> bool {
    let mut input = Input::new(data);
    let mut t = Target::new(&mut input);
    input.set_odds();
    let peer = t.peer;
    if input.byte() < 180 {
        let hello = Control::Hello {
            version: 1,
            features: 0,
        };
        t.w[peer].sends(&hello.header().emit());
    }
    let mut numbers = Numbers::default();
    let mut steps = 0;
    while !input.is_done() && steps < 200 {
        steps += 1;
        match input.byte() {
            0..170 => {
                let ulpdu = numbers.message(&t, &mut input);
                t.w[peer].sends(&ulpdu);
            }
            170..190 if input.odd() => {
                // Sends a damaged segment in a valid frame.
                let mut ulpdu = numbers.message(&t, &mut input);
                damage(&mut ulpdu, &mut input);
                t.w[peer].sends(&ulpdu);
            }
            190..195 if input.odd() => {
                // Sends the same segment twice.
                let frame = framed(&numbers.message(&t, &mut input));
                t.w[peer].sends_bytes(&frame);
                t.w[peer].sends_bytes(&frame);
            }
            195..198 if input.odd() => {
                let mut frame = framed(&numbers.message(&t, &mut input));
                let bit = usize::from(input.u16()) % (frame.len() * 8);
                frame[bit / 8] ^= 1 << (bit % 8);
                t.w[peer].sends_bytes(&frame);
            }
            198 if input.odd() => t.deregister(),
            199..225 => t.work(&mut input),
            _ => {
                let n = input.below(8);
                t.turns(n);
            }
        }
    }
    t.turns(200);
    let alive = t.is_alive();
    if input.byte() & 1 != 0 {
        t.w[peer].closes();
    }
    t.check();
    alive
}

fn damage(ulpdu: &mut Vec<u8>, input: &mut Input<'_>) {
    let head = ulpdu.len().min(60);
    match input.below(5) {
        0 => ulpdu[input.below(head)] ^= 1 << input.below(8),
        1 => ulpdu[input.below(head)] = input.byte(),
        2 => ulpdu.truncate(input.below(head + 1)),
        3 => {
            let more = input.below(200);
            ulpdu.resize(ulpdu.len() + more, 0x33);
        }
        // The Last flag is inverted.
        _ => ulpdu[0] ^= 0x40,
    }
}

/// The message sequence numbers of a peer, and how many messages it has sent.
struct Numbers {
    send_msn: u32,
    read_msn: u32,
    atomic_msn: u32,
    seq: u32,
}

impl Default for Numbers {
    fn default() -> Self {
        Self {
            send_msn: 1,
            read_msn: 1,
            atomic_msn: 1,
            seq: 0,
        }
    }
}

fn untagged(
    opcode: Opcode,
    msn: u32,
    inv_stag: Stag,
    input: &mut Input<'_>,
    body: &[u8],
) -> Vec<u8> {
    let header = Untagged {
        last: !input.odd(),
        opcode,
        inv_stag,
        qn: input.near(opcode.queue().unwrap_or(0)),
        msn: Msn(input.near(msn)),
        mo: input.near(0),
    };
    [&header.emit()[..], body].concat()
}

fn tagged(opcode: Opcode, mr: &Mr, at: u64, input: &mut Input<'_>, body: &[u8]) -> Vec<u8> {
    let header = Tagged {
        last: !input.odd(),
        opcode,
        stag: Stag(input.near(mr.stag().0)),
        to: To(match input.byte() {
            _ if !input.odd() => mr.all().addr.wrapping_add(at),
            0..220 => mr.all().addr.wrapping_add(u64::from(input.u16())),
            _ => input.u64(),
        }),
    };
    [&header.emit()[..], body].concat()
}

impl Numbers {
    /// Returns the next message of the peer. Its header is valid unless the input chooses an error. The receiver may refuse a valid
    /// message too, for example because no receive request is posted.
    fn message(&mut self, t: &Target, input: &mut Input<'_>) -> Vec<u8> {
        let len = match input.byte() {
            n @ 0..5 => [0, 8, 100, 1_000, 4_900][usize::from(n)],
            n => usize::from(n),
        };
        let body = vec![0xee; len];
        let any = [
            &t.writable,
            &t.readable,
            &t.atomic,
            &t.closed,
            &t.source,
            &t.sink,
        ];
        match input.below(16) {
            0..3 => {
                self.seq += 1;
                let at = u64::from(input.u16() % 2_000);
                tagged(Opcode::Write, &t.writable, at, input, &body)
            }
            3 if input.odd() => {
                self.seq += 1;
                let mr = input.one_of(&any);
                tagged(Opcode::Write, mr, 0, input, &body)
            }
            4..7 => {
                let opcode = match input.odd() {
                    false => input.one_of(&[Opcode::Send, Opcode::SendSolicited]),
                    true => {
                        input.one_of(&[Opcode::SendInvalidate, Opcode::SendSolicitedInvalidate])
                    }
                };
                self.send_msn += 1;
                self.seq += 1;
                let stag = input.one_of(&any).stag();
                untagged(opcode, self.send_msn - 1, stag, input, &body)
            }
            7 => {
                self.send_msn += 1;
                self.seq += 1;
                untagged(
                    Opcode::Immediate,
                    self.send_msn - 1,
                    Stag(0),
                    input,
                    &[1; 8],
                )
            }
            8 => {
                let source = if input.odd() {
                    input.one_of(&any)
                } else {
                    &t.readable
                };
                let request = ReadRequest {
                    sink_stag: Stag(0x700),
                    sink_to: To(0),
                    size: input.near(len as u32),
                    source_stag: Stag(input.near(source.stag().0)),
                    source_to: To(source.all().addr),
                };
                self.read_msn += 1;
                self.seq += 1;
                let msn = self.read_msn - 1;
                untagged(Opcode::ReadRequest, msn, Stag(0), input, &request.emit())
            }
            9 => {
                let to = To(t.atomic.all().addr + 8 * u64::from(input.near(1)));
                let mut request = AtomicRequest::fetch_add(1, t.atomic.stag(), to, 5).emit();
                if input.odd() {
                    let at = input.below(request.len());
                    request[at] = input.byte();
                }
                self.read_msn += 1;
                self.seq += 1;
                let msn = self.read_msn - 1;
                untagged(Opcode::AtomicRequest, msn, Stag(0), input, &request)
            }
            10 | 11 if input.odd() => {
                let mr = if input.odd() {
                    input.one_of(&any)
                } else {
                    &t.sink
                };
                tagged(Opcode::ReadResponse, mr, 0, input, &body)
            }
            12 if input.odd() => {
                let response = AtomicResponse {
                    id: u32::from(input.byte() % 4),
                    value: 9,
                };
                self.atomic_msn += 1;
                let msn = self.atomic_msn - 1;
                untagged(
                    Opcode::AtomicResponse,
                    msn,
                    Stag(0),
                    input,
                    &response.emit(),
                )
            }
            13 if input.odd() => {
                let terminate = Terminate {
                    layer: input.byte() & 15,
                    etype: input.byte() & 15,
                    code: input.byte(),
                    ddp_len: None,
                    ddp_header: None,
                    read_request: None,
                };
                untagged(Opcode::Terminate, 1, Stag(0), input, &terminate.emit())
            }
            _ => {
                let seq = input.byte().into();
                let control = match input.below(9) {
                    _ if !input.odd() => Control::Ping,
                    0 | 1 => Control::Ack { seq },
                    2 => Control::Rnr {
                        seq,
                        timer: input.byte() & 31,
                    },
                    3 => Control::Restart { seq: self.seq },
                    4 => Control::Restart { seq },
                    5 => Control::Nak {
                        seq,
                        status: input.byte(),
                    },
                    6 => Control::SendImmediate { value: [1; 4] },
                    7 => Control::Bye,
                    _ => Control::Ping,
                };
                control.header().emit().to_vec()
            }
        }
    }
}
