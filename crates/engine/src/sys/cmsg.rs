//! Control messages of datagrams: addresses, hop limits, traffic classes and segment sizes.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anywarp_core::datagram::TxDatagram;

/// Words of control data of one datagram: address, hop limit, traffic class and segment size need 14.
pub(super) const CONTROL_WORDS: usize = 16;

/// The values in the control data of a received datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Received {
    /// The local address that the datagram was sent to (`IP_PKTINFO`).
    pub(super) to: Option<IpAddr>,
    /// Hop limit or time to live; 64 without a control message.
    pub(super) hop_limit: u8,
    /// Traffic class or type of service; 0 without a control message.
    pub(super) traffic_class: u8,
    /// Length of the datagrams in a *run*, a buffer into which the kernel coalesced several datagrams (`UDP_GRO`); 0 for a single datagram.
    pub(super) segment: usize,
}

/// Reads the control data that the kernel wrote into the control buffer of `msg`.
pub(super) fn read(msg: &libc::msghdr) -> Received {
    let mut out = Received {
        to: None,
        hop_limit: 64,
        traffic_class: 0,
        segment: 0,
    };
    let int = |c: *mut libc::cmsghdr| {
        // SAFETY: called only for kinds whose header is followed by an int.
        unsafe { libc::CMSG_DATA(c).cast::<libc::c_int>().read_unaligned() }
    };
    let byte = |n: libc::c_int| u8::try_from(n & 0xff).unwrap_or(0);
    // SAFETY: `msg` describes a control buffer that the kernel filled; the macros stay inside it.
    let mut c = unsafe { libc::CMSG_FIRSTHDR(msg) };
    while !c.is_null() {
        // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR give null or a header inside the buffer.
        let head = unsafe { c.read_unaligned() };
        match (head.cmsg_level, head.cmsg_type) {
            (libc::SOL_UDP, libc::UDP_GRO) => {
                out.segment = usize::try_from(int(c)).unwrap_or(0);
            }
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                // SAFETY: the kernel puts this structure after such a header.
                let info = unsafe {
                    libc::CMSG_DATA(c)
                        .cast::<libc::in_pktinfo>()
                        .read_unaligned()
                };
                out.to = Some(Ipv4Addr::from(u32::from_be(info.ipi_addr.s_addr)).into());
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                // SAFETY: the kernel puts this structure after such a header.
                let info = unsafe {
                    libc::CMSG_DATA(c)
                        .cast::<libc::in6_pktinfo>()
                        .read_unaligned()
                };
                out.to = Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).to_canonical());
            }
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                out.hop_limit = byte(int(c));
            }
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => out.traffic_class = byte(int(c)),
            (libc::IPPROTO_IP, libc::IP_TOS) => {
                // SAFETY: after this header the kernel puts one byte.
                out.traffic_class = unsafe { libc::CMSG_DATA(c).read() };
            }
            _ => {}
        }
        // SAFETY: as above.
        c = unsafe { libc::CMSG_NXTHDR(msg, c) };
    }
    out
}

/// Control data of a datagram, or a run of datagrams, to send.
#[derive(Debug)]
pub(super) struct Control {
    words: [u64; CONTROL_WORDS],
    len: usize,
}

impl Control {
    fn push<T: Copy>(&mut self, level: libc::c_int, kind: libc::c_int, value: T) {
        let size = size_of::<T>() as libc::c_uint;
        // SAFETY: these two functions only compute lengths and access no memory.
        let (len, space) = unsafe { (libc::CMSG_LEN(size), libc::CMSG_SPACE(size)) };
        if self.len + space as usize > size_of_val(&self.words) {
            return;
        }
        // SAFETY: `len + space` bytes are inside `words`, checked above.
        let at = unsafe { self.words.as_mut_ptr().cast::<u8>().add(self.len) };
        // SAFETY: all-zero is a valid header.
        let mut head: libc::cmsghdr = unsafe { std::mem::zeroed() };
        head.cmsg_len = len as _;
        head.cmsg_level = level;
        head.cmsg_type = kind;
        // SAFETY: a header and the value after it take at most `space` bytes.
        unsafe { at.cast::<libc::cmsghdr>().write_unaligned(head) };
        // SAFETY: CMSG_LEN(0) is where the value starts.
        let data = unsafe { at.add(libc::CMSG_LEN(0) as usize) };
        // SAFETY: as above.
        unsafe { data.cast::<T>().write_unaligned(value) };
        self.len += space as usize;
    }

    /// Control data for datagrams like `first`, sent from address `from`. `segment` is the length of the datagrams in
    /// a run.
    pub(super) fn new(from: Option<IpAddr>, first: &TxDatagram, segment: Option<u16>) -> Self {
        let mut control = Self {
            words: [0; CONTROL_WORDS],
            len: 0,
        };
        let hops = libc::c_int::from(first.hop_limit);
        let class = libc::c_int::from(first.traffic_class);
        match first.to.ip().to_canonical() {
            IpAddr::V4(_) => {
                if let Some(IpAddr::V4(from)) = from {
                    let addr = |ip: Ipv4Addr| libc::in_addr {
                        s_addr: u32::from(ip).to_be(),
                    };
                    let info = libc::in_pktinfo {
                        ipi_ifindex: 0,
                        ipi_spec_dst: addr(from),
                        ipi_addr: addr(Ipv4Addr::UNSPECIFIED),
                    };
                    control.push(libc::IPPROTO_IP, libc::IP_PKTINFO, info);
                }
                if hops != 0 {
                    control.push(libc::IPPROTO_IP, libc::IP_TTL, hops);
                }
                if class != 0 {
                    control.push(libc::IPPROTO_IP, libc::IP_TOS, class);
                }
            }
            IpAddr::V6(_) => {
                if let Some(IpAddr::V6(from)) = from {
                    let info = libc::in6_pktinfo {
                        ipi6_addr: libc::in6_addr {
                            s6_addr: from.octets(),
                        },
                        ipi6_ifindex: 0,
                    };
                    control.push(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, info);
                }
                if hops != 0 {
                    control.push(libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT, hops);
                }
                if class != 0 {
                    control.push(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, class);
                }
            }
        }
        if let Some(segment) = segment {
            control.push(libc::SOL_UDP, libc::UDP_SEGMENT, segment);
        }
        control
    }

    /// Sets the control data of `msg`.
    pub(super) fn attach(&mut self, msg: &mut libc::msghdr) {
        if self.len > 0 {
            msg.msg_control = self.words.as_mut_ptr().cast();
            msg.msg_controllen = self.len as _;
        }
    }
}
