//! A scripted peer, which sends and receives single FPDUs.

use anywarp_core::llp::mpa::crc::Crc32c;
use anywarp_core::llp::mpa::marker::Stripper;
use anywarp_core::wire::ddp::Header;
use anywarp_core::wire::pretty;
use anywarp_core::wire::rdmap::{Opcode, Terminate};

/// An FPDU sent by the end under test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fpdu {
    /// The ULPDU.
    pub ulpdu: Vec<u8>,
}

impl Fpdu {
    /// The FPDU as one line of text.
    pub fn text(&self) -> String {
        pretty::fpdu(&self.ulpdu)
    }

    /// The DDP header.
    pub fn header(&self) -> Header {
        Header::parse(&self.ulpdu).expect("a header").0
    }

    /// The bytes after the DDP header.
    pub fn payload(&self) -> &[u8] {
        let at = Header::parse(&self.ulpdu).expect("a header").1;
        &self.ulpdu[at..]
    }

    /// The opcode.
    pub fn opcode(&self) -> Opcode {
        self.header().opcode()
    }

    /// The Terminate message in the FPDU.
    pub fn terminate(&self) -> Option<Terminate> {
        (self.opcode() == Opcode::Terminate).then(|| Terminate::parse(self.payload()))
    }
}

/// The CRC of `bytes` in wire format.
pub fn crc_of(bytes: &[u8]) -> [u8; 4] {
    Crc32c::of(bytes)
}

/// `ulpdu` as FPDU.
pub fn framed(ulpdu: &[u8]) -> Vec<u8> {
    let mut out = (ulpdu.len() as u16).to_be_bytes().to_vec();
    out.extend_from_slice(ulpdu);
    out.resize(out.len().next_multiple_of(4), 0);
    let crc = crc_of(&out);
    out.extend(crc);
    out
}

/// A scripted peer.
#[derive(Debug)]
pub struct Raw {
    pub(crate) out: Vec<u8>,
    pub(crate) closing: bool,
    /// Whether the end under test has closed the stream.
    pub closed: bool,
    crc: bool,
    markers: Option<Stripper>,
    stream: Vec<u8>,
    got: Vec<Fpdu>,
}

impl Raw {
    pub(crate) fn new(crc: bool) -> Self {
        Self {
            out: Vec::new(),
            closing: false,
            closed: false,
            crc,
            markers: None,
            stream: Vec::new(),
            got: Vec::new(),
        }
    }

    /// Removes markers from what this peer receives, as if it had requested them; the `Setup::markers` of the other end must be set.
    pub fn wants_markers(&mut self) {
        self.markers = Some(Stripper::new());
    }

    /// Sends an FPDU.
    pub fn sends(&mut self, ulpdu: &[u8]) {
        self.out.extend(framed(ulpdu));
    }

    /// Sends bytes without framing.
    pub fn sends_bytes(&mut self, bytes: &[u8]) {
        self.out.extend_from_slice(bytes);
    }

    /// Closes the peer's direction of the stream.
    pub fn closes(&mut self) {
        self.closing = true;
    }

    /// Removes and returns the FPDUs that have arrived.
    pub fn received(&mut self) -> Vec<Fpdu> {
        std::mem::take(&mut self.got)
    }

    /// The bytes of an FPDU that is not complete.
    pub fn incomplete(&self) -> &[u8] {
        &self.stream
    }

    pub(crate) fn take_bytes(&mut self, bytes: &[u8]) {
        match &mut self.markers {
            Some(markers) => markers
                .strip(bytes, self.crc, &mut self.stream)
                .expect("good markers"),
            None => self.stream.extend_from_slice(bytes),
        }
        while let Some(len) = self.stream.first_chunk::<2>() {
            let ulpdu = usize::from(u16::from_be_bytes(*len));
            let covered = (2 + ulpdu).next_multiple_of(4);
            if self.stream.len() < covered + 4 {
                return;
            }
            let fpdu: Vec<u8> = self.stream.drain(..covered + 4).collect();
            if self.crc && self.markers.is_none() {
                assert_eq!(fpdu[covered..], crc_of(&fpdu[..covered]), "a wrong CRC");
            }
            assert!(fpdu[2 + ulpdu..covered].iter().all(|b| *b == 0), "padding");
            self.got.push(Fpdu {
                ulpdu: fpdu[2..2 + ulpdu].to_vec(),
            });
        }
    }
}
