//! One line of text for each message on the wire, for traces, logs and test snapshots.
//!
//! ```text
//! Write stag 0x00abcd01 to 0x1000 len 8 last
//! Send msn 1 mo 0 len 5 last
//! Read Request msn 1 size 4096 source 0x00abcd01+0x1000 sink 0x00000200+0x0
//! Terminate 1/1/00 (ddp tagged: invalid stag) segment 22 [Write stag 0x00abcd01 to 0x1000 last]
//! MPA Request rev 2 crc p2p rtr write+read ird 16 ord 16 private 0
//! Write-Record stag 0x00abcd01 to 0x1008 len 8 last id 3 offset 8 of 16 index 7->3
//! packet 9 base 7 index 7->3 token 0x01020304 echo 0x05060708 ack 11 runs 13-15 window 4096 [Send msn 1 …]
//! ```

use core::fmt::{self, Write as _};

use super::control::Control;
use super::ddp::{Header, Tagged, Untagged};
use super::dgram::{self, Cm, Datagram, SUB_ERROR};
use super::mpa::{DEPTH_NOT_NEGOTIATED, StartupFrame};
use super::rd::{self, Packet};
use super::rdmap::{
    AtomicOp, AtomicRequest, AtomicResponse, Immediate, Opcode, ReadRequest, Terminate,
};

/// Describes the ULPDU of an FPDU: DDP header and what follows it. Bytes that cannot be parsed are described by the
/// error.
pub fn fpdu(ulpdu: &[u8]) -> String {
    if ulpdu.is_empty() {
        return "empty".to_owned();
    }
    line(|out| match Header::parse(ulpdu) {
        Ok((header, len)) => segment(out, &header, ulpdu.get(len..).unwrap_or_default()),
        Err(error) => write!(out, "malformed len {}: {error}", ulpdu.len()),
    })
}

/// Describes the content of a UDP datagram. Bytes that cannot be parsed are described by the error.
pub fn udp(bytes: &[u8]) -> String {
    line(|out| {
        let error = if rd::is_packet(bytes) {
            match rd::parse(bytes) {
                Ok((head, data)) => return packet(out, &head, data),
                Err(error) => error,
            }
        } else if dgram::is_cm(bytes) {
            match Cm::parse(bytes) {
                Ok(message) => return manager(out, &message),
                Err(error) => error,
            }
        } else {
            match dgram::parse(bytes) {
                Ok(datagram) => return shimmed(out, &datagram),
                Err(error) => error,
            }
        };
        write!(out, "malformed len {}: {error}", bytes.len())
    })
}

/// Describes a datagram: its segment, and the fields of the shim.
pub fn datagram(datagram: &Datagram<'_>) -> String {
    line(|out| shimmed(out, datagram))
}

fn shimmed(out: &mut String, datagram: &Datagram<'_>) -> fmt::Result {
    let shim = &datagram.shim;
    if shim.sub_op == SUB_ERROR {
        out.push_str("error report: ");
    }
    segment(out, &datagram.header, datagram.payload)?;
    write!(out, " id {}", shim.id)?;
    write!(out, " offset {} of {}", shim.offset, shim.length)?;
    write!(out, " index {}->{}", shim.src_index, shim.dst_index)?;
    if let Some(value) = shim.immediate {
        write!(out, " imm 0x{:08x}", u32::from_be_bytes(value))?;
    }
    let has = |attribute| shim.attributes & attribute != 0;
    words(
        out,
        &[
            (shim.commit, "commit"),
            (shim.parity, "parity"),
            (has(dgram::ATTR_FINAL_COPY), "again"),
            (has(dgram::ATTR_NOT_AGGREGATED), "chunks"),
        ],
    )?;
    match shim.group {
        0 => Ok(()),
        group => write!(out, " group {group}x{}", shim.segment),
    }
}

/// Describes a packet of reliable datagrams, and its datagram.
fn packet(out: &mut String, head: &Packet, data: Option<&[u8]>) -> fmt::Result {
    let kind = if head.challenge {
        "challenge"
    } else {
        "packet"
    };
    write!(out, "{kind} {} base {}", head.seq, head.base)?;
    write!(out, " index {}->{}", head.src_index, head.dst_index)?;
    write!(out, " token 0x{:08x} echo 0x{:08x}", head.token, head.echo)?;
    if let Some(ack) = head.ack {
        write!(out, " ack {ack}")?;
    }
    for (at, (start, end)) in head.arrived.iter().enumerate() {
        let before = if at == 0 { " runs " } else { "," };
        write!(out, "{before}{start}-{end}")?;
    }
    write!(out, " window {}", head.window)?;
    if head.refused != 0 {
        write!(out, " refused {}", head.refused)?;
    }
    words(
        out,
        &[
            (head.not_ready, "not-ready"),
            (head.ack_now, "ack-now"),
            (head.ack_soon, "ack-soon"),
        ],
    )?;
    match data.map(dgram::parse_covered) {
        None => Ok(()),
        Some(Ok(inner)) => {
            out.push_str(" [");
            shimmed(out, &inner)?;
            out.push(']');
            Ok(())
        }
        Some(Err(error)) => write!(out, " [malformed: {error}]"),
    }
}

/// Describes a message of the connection manager.
fn manager(out: &mut String, message: &Cm) -> fmt::Result {
    match message {
        Cm::Request(m) => {
            let private = m.private_data.len();
            write!(out, "CM Request id {} private {private}", m.id)
        }
        Cm::Reply(m) => {
            write!(out, "CM Reply id {} status {}", m.id, m.status)?;
            write!(out, " qp 0x{:06x}", m.qpn)?;
            write!(out, " private {}", m.private_data.len())
        }
    }
}

/// Describes an MPA Request or Reply.
pub fn startup(frame: &StartupFrame) -> String {
    line(|out| {
        let kind = if frame.reply { "Reply" } else { "Request" };
        write!(out, "MPA {kind} rev {}", frame.rev)?;
        let flags = [
            (frame.reject, "reject"),
            (frame.crc, "crc"),
            (frame.markers, "markers"),
        ];
        words(out, &flags)?;
        if let Some(block) = &frame.enhanced {
            words(out, &[(block.peer_to_peer, "p2p")])?;
            let forms: Vec<_> = [
                (block.rtr_send, "send"),
                (block.rtr_write, "write"),
                (block.rtr_read, "read"),
            ]
            .into_iter()
            .filter_map(|(set, name)| set.then_some(name))
            .collect();
            if !forms.is_empty() {
                write!(out, " rtr {}", forms.join("+"))?;
            }
            for (name, depth) in [("ird", block.ird), ("ord", block.ord)] {
                match depth {
                    DEPTH_NOT_NEGOTIATED => write!(out, " {name} -")?,
                    depth => write!(out, " {name} {depth}")?,
                }
            }
        }
        write!(out, " private {}", frame.private_data.len())
    })
}

fn segment(out: &mut String, header: &Header, payload: &[u8]) -> fmt::Result {
    match header {
        Header::Tagged(h) => {
            write!(
                out,
                "{} stag {} to {} len {}",
                h.opcode,
                h.stag,
                h.to,
                payload.len()
            )?;
            words(out, &[(h.last, "last")])
        }
        Header::Untagged(h) => untagged(out, h, payload),
    }
}

fn untagged(out: &mut String, h: &Untagged, payload: &[u8]) -> fmt::Result {
    let (opcode, msn) = (h.opcode, h.msn);
    match opcode {
        Opcode::Control => {
            return match Control::parse(h) {
                Ok(message) => write!(out, "Control {message:?}"),
                Err(error) => write!(out, "Control malformed: {error}"),
            };
        }
        Opcode::Terminate => return terminate(out, &Terminate::parse(payload)),
        Opcode::ReadRequest => {
            if let Some((request, [])) = payload.split_first_chunk() {
                let r = ReadRequest::parse(request);
                write!(out, "{opcode} msn {msn} size {}", r.size)?;
                write!(out, " source {}+{}", r.source_stag, r.source_to)?;
                return write!(out, " sink {}+{}", r.sink_stag, r.sink_to);
            }
        }
        Opcode::AtomicRequest => {
            if let Some((request, [])) = payload.split_first_chunk()
                && let Ok(r) = AtomicRequest::parse(request)
            {
                let target = format_args!("target {}+{}", r.stag, r.to);
                return match r.op {
                    AtomicOp::FetchAdd => {
                        write!(
                            out,
                            "FetchAdd msn {msn} id {} {target} add {}",
                            r.id, r.data
                        )
                    }
                    AtomicOp::CmpSwap => {
                        write!(out, "CmpSwap msn {msn} id {} {target}", r.id)?;
                        write!(out, " compare {} swap {}", r.compare, r.data)
                    }
                };
            }
        }
        Opcode::AtomicResponse => {
            if let Some((response, [])) = payload.split_first_chunk() {
                let r = AtomicResponse::parse(response);
                return write!(out, "{opcode} msn {msn} id {} value {}", r.id, r.value);
            }
        }
        Opcode::Immediate | Opcode::ImmediateSolicited => {
            if let Some((immediate, [])) = payload.split_first_chunk() {
                let value = u32::from_be_bytes(Immediate::parse(immediate).value);
                return write!(out, "{opcode} msn {msn} value 0x{value:08x}");
            }
        }
        _ => {}
    }
    // Sends, and messages whose length does not fit their opcode.
    write!(out, "{opcode}")?;
    if opcode.invalidates() {
        write!(out, " inv {}", h.inv_stag)?;
    }
    write!(out, " msn {msn} mo {} len {}", h.mo, payload.len())?;
    words(out, &[(h.last, "last")])
}

fn terminate(out: &mut String, t: &Terminate) -> fmt::Result {
    let code = t.term_code();
    let (kind, meaning) = code.name();
    write!(
        out,
        "Terminate {code} ({kind}: {})",
        meaning.unwrap_or("unknown")
    )?;
    if let Some(len) = t.ddp_len {
        write!(out, " segment {len}")?;
    }
    if let Some(raw) = &t.ddp_header {
        match Header::parse(raw.as_slice()) {
            Ok((
                Header::Tagged(Tagged {
                    opcode,
                    stag,
                    to,
                    last,
                }),
                _,
            )) => {
                write!(out, " [{opcode} stag {stag} to {to}")?;
                words(out, &[(last, "last")])?;
            }
            Ok((
                Header::Untagged(Untagged {
                    opcode,
                    msn,
                    mo,
                    last,
                    ..
                }),
                _,
            )) => {
                write!(out, " [{opcode} msn {msn} mo {mo}")?;
                words(out, &[(last, "last")])?;
            }
            Err(error) => write!(out, " [{error}")?,
        }
        out.push(']');
    }
    if let Some(request) = &t.read_request {
        let r = ReadRequest::parse(request);
        write!(
            out,
            " of read size {} source {}+{}",
            r.size, r.source_stag, r.source_to
        )?;
    }
    Ok(())
}

fn words(out: &mut String, words: &[(bool, &str)]) -> fmt::Result {
    words
        .iter()
        .filter(|(set, _)| *set)
        .try_for_each(|(_, word)| write!(out, " {word}"))
}

/// Returns the text that `write` produces. Writing to a string does not fail.
fn line(write: impl FnOnce(&mut String) -> fmt::Result) -> String {
    let mut out = String::new();
    let _never_fails = write(&mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::super::{Msn, Stag, To, dgram};
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
        digits
            .chunks(2)
            .map(|pair| u8::from_str_radix(core::str::from_utf8(pair).unwrap(), 16).unwrap())
            .collect()
    }

    #[test]
    fn messages_are_printed_in_this_form() {
        // RFC 5044 §4.1: length, ULPDU and padding, without the CRC.
        #[rustfmt::skip]
        let table = [
            ("00174143 00000000 00000000 00000001 00000000 68656c6c 6f000000",
             "Send msn 1 mo 0 len 5 last"),
            ("000ec140 00000001 00000000 00000000",
             "Write stag 0x00000001 to 0x0 len 0 last"),
            ("002e4141 00000000 00000001 00000001 00000000 00000000 00000000 00000000 00000000 00000001 00000000 00000000",
             "Read Request msn 1 size 0 source 0x00000001+0x0 sink 0x00000000+0x0"),
            ("000ec142 00000000 00000000 00000000",
             "Read Response stag 0x00000000 to 0x0 len 0 last"),
            ("00124143 00000000 00000000 00000001 00000000",
             "Send msn 1 mo 0 len 0 last"),
            ("00164147 00000000 00000002 00000001 00000000 20020000",
             "Terminate 2/0/02 (mpa: crc)"),
            ("0016c140 00abcd01 00000000 00001000 00010203 04050607",
             "Write stag 0x00abcd01 to 0x1000 len 8 last"),
            ("00264147 00000000 00000002 00000001 00000000 1100c000 0016c140 00abcd01 00000000 00001000",
             "Terminate 1/1/00 (ddp tagged: invalid stag) segment 22 [Write stag 0x00abcd01 to 0x1000 last]"),
            ("00164146 00abcd01 00000000 00000002 00000000 01020304",
             "Send+SE+Inv inv 0x00abcd01 msn 2 mo 0 len 4 last"),
            ("001a4148 00000000 00000000 00000003 00000000 11223344 00000000",
             "Immediate msn 3 value 0x11223344"),
            ("0046414a 00000000 00000001 00000002 00000000 00000000 00000007 00abcd01 00000000 00002000 00000000 00000005 00000000 00000000 00000000 00000000 ffffffff ffffffff",
             "FetchAdd msn 2 id 7 target 0x00abcd01+0x2000 add 5"),
            ("001e414b 00000000 00000003 00000001 00000000 00000007 00000000 00001234",
             "Atomic Response msn 1 id 7 value 4660"),
        ];
        for (bytes, text) in table {
            let bytes = hex(bytes);
            let ulpdu = usize::from(u16::from_be_bytes([bytes[0], bytes[1]]));
            assert_eq!(fpdu(&bytes[2..2 + ulpdu]), text);
        }
    }

    #[test]
    fn other_messages() {
        let swap = AtomicRequest::cmp_swap(9, Stag(1), To(8), 3, 4).emit();
        let head = hex("414a 00000000 00000001 00000002 00000000");
        let text = "CmpSwap msn 2 id 9 target 0x00000001+0x8 compare 3 swap 4";
        assert_eq!(fpdu(&[&head[..], &swap].concat()), text);
        let ack = Control::Ack { seq: 5 }.header().emit();
        assert_eq!(fpdu(&ack), "Control Ack { seq: 5 }");
        let bad = Untagged {
            inv_stag: Stag(0),
            ..Control::Ping.header()
        }
        .emit();
        assert_eq!(
            fpdu(&bad),
            "Control malformed: bad control message: unknown kind"
        );
        let of_read = hex("4147 00000000 00000002 00000001 00000000 0101e000 002e
             4141 00000000 00000001 00000001 00000000
             00000001 00000000 00000000 00001000 00000002 00000000 00000010");
        let text = "Terminate 0/1/01 (rdmap protection: base or bounds) segment 46 \
                    [Read Request msn 1 mo 0 last] of read size 4096 source 0x00000002+0x10";
        assert_eq!(fpdu(&of_read), text);
    }

    #[test]
    fn bytes_that_cannot_be_parsed_are_described() {
        assert_eq!(fpdu(&[]), "empty");
        let text = "malformed len 3: segment of 3 bytes is shorter than its header of 14";
        assert_eq!(fpdu(&[0xc1, 0x40, 0]), text);
        let read_of_no_request = hex("4141 00000000 00000001 00000001 00000000 ff");
        assert_eq!(
            fpdu(&read_of_no_request),
            "Read Request msn 1 mo 0 len 1 last"
        );
        let mut x = 1u64;
        for len in 0..80 {
            for _ in 0..200 {
                let bytes: Vec<u8> = (0..len)
                    .map(|i| {
                        x ^= x << 13;
                        x ^= x >> 7;
                        x ^= x << 17;
                        match i {
                            0 => x as u8 & 0xc0 | 1,
                            1 => x as u8 & 0x0f | 0x40,
                            6..=8 => 0,
                            9 => x as u8 & 7,
                            _ => x as u8,
                        }
                    })
                    .collect();
                let text = fpdu(&bytes);
                assert!(!text.is_empty() && !text.contains('\n'));
            }
        }
    }

    #[test]
    fn startup_frames() {
        let parse = |tail: &str, key: &[u8]| {
            let bytes = [key, &hex(tail)].concat();
            startup(&StartupFrame::parse(&bytes).unwrap().unwrap().0)
        };
        let (req, rep) = (b"MPA ID Req Frame", b"MPA ID Rep Frame");
        assert_eq!(
            parse("40010002 6869", req),
            "MPA Request rev 1 crc private 2"
        );
        let text = "MPA Request rev 2 crc p2p rtr write+read ird 16 ord 16 private 0";
        assert_eq!(parse("50020004 8010c010", req), text);
        let text = "MPA Reply rev 2 reject crc ird - ord 0 private 0";
        assert_eq!(parse("70020004 3fff0000", rep), text);
    }

    #[test]
    fn datagrams() {
        let shim = dgram::Shim {
            epoch: 1,
            qkey: 0,
            id: 2,
            length: 16,
            offset: 8,
            sub_op: dgram::SUB_RECORD_IMMEDIATE,
            attributes: 0,
            dst_index: 3,
            src_index: 7,
            immediate: Some([0, 0, 0, 1]),
            commit: false,
            parity: false,
            group: 0,
            segment: 0,
        };
        let opcode = Opcode::WriteRecord;
        let header = Header::Tagged(Tagged {
            last: true,
            opcode,
            stag: Stag(1),
            to: To(8),
        });
        let text = "Write-Record stag 0x00000001 to 0x8 len 8 last id 2 offset 8 of 16 index 7->3 \
                    imm 0x00000001";
        assert_eq!(
            datagram(&Datagram {
                shim,
                header,
                payload: &[0; 8]
            }),
            text
        );
        assert_eq!(Msn::FIRST.to_string(), "1");
    }

    /// The vectors of docs/datagram-iwarp.md, and packets.
    #[test]
    fn every_kind_of_udp_datagram_is_described() {
        let table = [
            (
                "dc101234 11111111 00000001 00000005 00000000 0000 0307 0000 4143 00000000 00000000 00000001 00000000 68656c6c6f 46b83bd7",
                "Send msn 1 mo 0 len 5 last id 1 offset 0 of 5 index 7->3",
            ),
            (
                "dc101234 11111111 00000003 00000010 00000008 0102 0307 0000 c14f 00abcd01 0000000000001008 08090a0b0c0d0e0f ba734475",
                "Write-Record stag 0x00abcd01 to 0x1008 len 8 last id 3 offset 8 of 16 index 7->3",
            ),
            (
                "dd110002 01020304 6869 9836b8b1",
                "CM Request id 16909060 private 2",
            ),
            (
                "dd120002 01020304 00000000 00123405 11111111 6869 b6de65e0",
                "CM Reply id 16909060 status 0 qp 0x123405 private 2",
            ),
            (
                "dd120002 01020304 00000000 00123405 11111111 6869 b6de65e1",
                "malformed len 26: datagram crc mismatch",
            ),
            ("", "malformed len 0: datagram shorter than its headers"),
        ];
        for (bytes, text) in table {
            assert_eq!(udp(&hex(bytes)), text);
        }
        let sealed = |head: &Packet, data: Option<&[u8]>| {
            let mut bytes = Vec::new();
            head.put(data.is_some(), &mut bytes);
            bytes.extend_from_slice(data.unwrap_or_default());
            dgram::seal(&mut bytes);
            udp(&bytes)
        };
        let mut head = Packet {
            token: 0x0102_0304,
            echo: 0x0506_0708,
            seq: 9,
            base: 7,
            dst_index: 3,
            src_index: 7,
            ack: Some(11),
            instance: 0,
            window: 4096,
            time: 1,
            time_echo: 0,
            arrived: [(13, 15), (17, 18)].into_iter().collect(),
            challenge: false,
            not_ready: true,
            ack_now: true,
            ack_soon: false,
            refused: 10,
        };
        let whole = hex(table[0].0);
        let bare = &whole[..whole.len() - dgram::CRC];
        let text = "packet 9 base 7 index 7->3 token 0x01020304 echo 0x05060708 ack 11 runs 13-15,17-18 window 4096 \
                    refused 10 not-ready ack-now";
        assert_eq!(sealed(&head, None), text);
        assert_eq!(
            sealed(&head, Some(bare)),
            format!("{text} [{}]", table[0].1)
        );
        let text_of_none = format!("{text} [malformed: datagram shorter than its headers]");
        assert_eq!(sealed(&head, Some(&bare[..20])), text_of_none);
        head.challenge = true;
        assert!(sealed(&head, None).starts_with("challenge 9 "));
    }
}
