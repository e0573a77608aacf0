//! The blocks of a capture file: draft-ietf-opsawg-pcapng, in the byte order of this machine. All packets belong to one interface,
//! of link type RAW (101): they begin with the IP header.

/// The head of a file: a section header and the description of the only interface.
pub fn head() -> Vec<u8> {
    let mut section = Vec::new();
    section.extend(0x1a2b_3c4d_u32.to_ne_bytes());
    section.extend(1_u16.to_ne_bytes());
    section.extend(0_u16.to_ne_bytes());
    section.extend(u64::MAX.to_ne_bytes());
    option(&mut section, 4, b"anywarp");
    end_of_options(&mut section);
    let mut interface = Vec::new();
    interface.extend(101_u16.to_ne_bytes());
    interface.extend(0_u16.to_ne_bytes());
    interface.extend(0_u32.to_ne_bytes());
    option(&mut interface, 2, b"anywarp");
    // Timestamps count nanoseconds (`if_tsresol`).
    option(&mut interface, 9, &[9]);
    end_of_options(&mut interface);
    let mut all = block(0x0a0d_0d0a, &section);
    all.extend(block(1, &interface));
    all
}

/// A packet that was received (`inbound`) or sent `at` nanoseconds since 1970, of which at most `snap` bytes are kept.
pub fn packet(at: u64, inbound: bool, packet: &[u8], snap: usize) -> Vec<u8> {
    let kept = packet.get(..snap).unwrap_or(packet);
    let mut body = Vec::with_capacity(kept.len() + 48);
    body.extend(0_u32.to_ne_bytes());
    let [high, low] = [at >> 32, at & 0xffff_ffff].map(|n| u32::try_from(n).unwrap_or(0));
    body.extend(high.to_ne_bytes());
    body.extend(low.to_ne_bytes());
    for len in [kept.len(), packet.len()] {
        body.extend(u32::try_from(len).unwrap_or(0).to_ne_bytes());
    }
    body.extend(kept);
    body.resize(body.len().next_multiple_of(4), 0);
    let flags: u32 = if inbound { 1 } else { 2 };
    option(&mut body, 2, &flags.to_ne_bytes());
    end_of_options(&mut body);
    block(6, &body)
}

fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    out.extend(code.to_ne_bytes());
    out.extend(u16::try_from(value.len()).unwrap_or(0).to_ne_bytes());
    out.extend(value);
    out.resize(out.len().next_multiple_of(4), 0);
}

fn end_of_options(out: &mut Vec<u8>) {
    out.extend([0; 4]);
}

fn block(kind: u32, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len() + 12).unwrap_or(0).to_ne_bytes();
    let mut out = Vec::with_capacity(body.len() + 12);
    out.extend(kind.to_ne_bytes());
    out.extend(len);
    out.extend(body);
    out.extend(len);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_their_length_at_both_ends() {
        let head = head();
        let len = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().unwrap()) as usize;
        let section = len(4);
        assert_eq!(len(section - 4), section);
        let interface = len(section + 4);
        assert_eq!(section + interface, head.len());
        assert_eq!(len(head.len() - 4), interface);
    }
}
