//! Pages of `<infiniband/anywarpdv.h>`: anywarpdv(7), and one of section 3 for each function.

use std::io;

use clap_mangen::roff::{Roff, bold, roman};

/// What a function's page says. SYNOPSIS is taken from the header itself.
struct Function {
    name: &'static str,
    does: &'static str,
    text: &'static [&'static str],
    returns: &'static str,
    errors: &'static [(&'static str, &'static str)],
    see: &'static str,
}

const HEADER: &str = include_str!("../../../abi/include/infiniband/anywarpdv.h");

const LOST: (&str, &str) = ("ENODEV", "The device has failed.");
const NOT_DATAGRAMS: (&str, &str) = ("EOPNOTSUPP", "The queue pair is not one of datagrams.");

const FUNCTIONS: &[Function] = &[
    Function {
        name: "anywarpdv_is_supported",
        does: "whether a device is of anywarp",
        text: &[
            "Says whether the other functions of anywarpdv(7) work on the device. A program that looks them up with \
             dlvsym(3), so that it also runs with another libibverbs, knows it by that already.",
        ],
        returns: "true or false.",
        errors: &[],
        see: "ibv_get_device_list(3)",
    },
    Function {
        name: "anywarpdv_create_qp_ex",
        does: "make a datagram queue pair with one-sided operations",
        text: &[
            "Makes a queue pair of unreliable datagrams (qp_type IBV_QPT_UD, driver_qp_type ANYWARPDV_QPT_UD) or of \
             reliable ones (IBV_QPT_DRIVER, ANYWARPDV_QPT_RD). attr_ex is that of ibv_create_qp_ex(3): comp_mask must \
             have IBV_QP_INIT_ATTR_PD and may have IBV_QP_INIT_ATTR_SEND_OPS_FLAGS. Operations of both kinds: SEND, \
             SEND_WITH_IMM, RDMA_WRITE, RDMA_WRITE_WITH_IMM, RDMA_READ; of reliable datagrams also the atomics, \
             SEND_WITH_INV, LOCAL_INV and BIND_MW. The queue pair is destroyed with ibv_destroy_qp(3), and modified as one of \
             datagrams: RTR and RTS need no peer, and no packet goes out.",
            "inlen is sizeof(*attr). All members of attr that are 0 ask for the default, which the header tells. A larger \
             structure of a newer header is taken if what this library does not know is 0.",
            "record_mode, grace_us, deadline_us and max_records say how records are made at this end; segment, repeats and \
             parity how messages of this end are sent. max_send_size above 4096 must be the same at both ends.",
            "Requests are made with ibv_wr_start(3), ibv_wr_rdma_write(3) or another, ibv_wr_set_ud_addr(3) and \
             ibv_wr_set_sge_list(3) or ibv_wr_set_inline_data(3). On UD a Send or Write-Record is complete when the kernel took \
             it; a Read when all of the answer is there, or in error with IBV_WC_RETRY_EXC_ERR after read_timeout_us. On \
             RD every request is complete when its peer has delivered all of it, which waits for a receive or for room for the record, or in error: IBV_WC_RETRY_EXC_ERR when the peer was \
             silent for peer_timeout_ms, IBV_WC_REM_ACCESS_ERR and IBV_WC_REM_INV_REQ_ERR when it refused, \
             IBV_WC_REM_ABORT_ERR when it was made anew meanwhile.",
        ],
        returns: "The queue pair, or null with errno.",
        errors: &[
            (
                "EINVAL",
                "A member has no such value, a reserved one is not 0, or comp_mask lacks the protection domain.",
            ),
            (
                "EOPNOTSUPP",
                "An operation that the kind does not have, or an option that this library does not know.",
            ),
        ],
        see: "ibv_create_qp_ex(3), ibv_wr_post(3), anywarpdv_poll_records(3)",
    },
    Function {
        name: "anywarpdv_poll_records",
        does: "take records of what peers wrote",
        text: &[
            "Takes up to max records, oldest first, and waits for the first one for timeout_ms milliseconds; 0: not at all, -1: \
             for as long as it takes. A record says who wrote what where: source is the address and UDP port, src_qp the queue \
             pair, base and length the message, valid how many bytes of it are there. No receive is consumed.",
            "With ANYWARPDV_RECORD_COMPLETE all bytes are there. Otherwise, and unless ANYWARPDV_RECORD_IS_CHUNK is set, map names \
             the validity map: which bytes are there. It is kept until anywarpdv_release_map(3). A chunk is its own map: \
             valid bytes from offset.",
            "At most max_records wait to be taken. On UD what comes then is written to memory and its record is lost \
             (rec_overflow). On RD nothing is lost: the message that has no room for its record waits, with all that its writer sent \
             behind it (with ANYWARPDV_QP_UNORDERED it alone), until this function makes room, as a Send waits for a receive. A program that \
             does not want to take records asks its writers for ANYWARPDV_QP_PLAIN_WRITES. All records of RD are of complete \
             messages, or chunks.",
            "Messages that are over by time alone, grace_us or deadline_us, are found when a datagram comes or this function is \
             called; no thread watches them unless records make completions as well.",
        ],
        returns: "The number of records, 0 when the time is over, -1 with errno.",
        errors: &[
            ("EINVAL", "max is not positive, or a pointer is null."),
            NOT_DATAGRAMS,
            LOST,
        ],
        see: "anywarpdv_read_map(3), anywarpdv_read_bitmap(3), anywarpdv_release_map(3)",
    },
    Function {
        name: "anywarpdv_read_map",
        does: "read a validity map as ranges",
        text: &[
            "Puts up to max ranges of the bytes that are there into ranges, in order. They neither touch nor overlap; offsets \
             are within the message. max may be 0 to ask how many there are.",
        ],
        returns: "How many ranges the map has, which may be more than max; -1 with errno.",
        errors: &[
            (
                "EINVAL",
                "There is no such map: it was released, or never was.",
            ),
            NOT_DATAGRAMS,
            LOST,
        ],
        see: "anywarpdv_poll_records(3), anywarpdv_read_bitmap(3)",
    },
    Function {
        name: "anywarpdv_read_bitmap",
        does: "read a validity map as bits",
        text: &[
            "Bit i % 8 of byte i / 8 is set if all of the bytes from i * granularity on, granularity of them or to the end of \
             the message, are there. length is that of the record.",
        ],
        returns: "The number of bits, -1 with errno.",
        errors: &[
            ("EINVAL", "There is no such map, or granularity is 0."),
            ("ENOSPC", "size bytes are too few for the bits."),
            NOT_DATAGRAMS,
            LOST,
        ],
        see: "anywarpdv_poll_records(3), anywarpdv_read_map(3)",
    },
    Function {
        name: "anywarpdv_release_map",
        does: "give a validity map back",
        text: &[
            "The program has read the map. Records that wait and maps that are not released together are at most max_records of \
             the queue pair. On UD a record beyond is lost and counted (rec_overflow), though its bytes are in memory; on RD its \
             writer waits: anywarpdv_poll_records(3).",
        ],
        returns: "0, or -1 with errno.",
        errors: &[("EINVAL", "There is no such map."), NOT_DATAGRAMS, LOST],
        see: "anywarpdv_poll_records(3)",
    },
    Function {
        name: "anywarpdv_poll_errors",
        does: "take errors that peers reported",
        text: &[
            "Takes up to max errors as anywarpdv_poll_records(3) takes records. layer, type and code are those of a Terminate \
             message of RFC 5040. On UD they are hints: peers report only if they were made with \
             ANYWARPDV_QP_REPORT_ERRORS, and anybody can send one; none changes anything but a Read that waits for that peer. \
             On RD they tell which message failed and why, also when the queue pair is in the error state.",
            "The newest 256 are kept.",
        ],
        returns: "The number of errors, 0 when the time is over, -1 with errno.",
        errors: &[
            ("EINVAL", "max is not positive, or a pointer is null."),
            NOT_DATAGRAMS,
            LOST,
        ],
        see: "anywarpdv_create_qp_ex(3)",
    },
    Function {
        name: "anywarpdv_poll_cq",
        does: "poll a completion queue, for a while",
        text: &[
            "ibv_poll_cq(3) that waits for the first completion for timeout_ms milliseconds; -1: for as long as it takes. Where \
             datagrams are lost a completion may never come, and a loop around ibv_poll_cq(3) would not end.",
        ],
        returns: "The number of completions, 0 when the time is over, -1 with errno.",
        errors: &[
            ("EINVAL", "max is not positive, or a pointer is null."),
            LOST,
        ],
        see: "ibv_poll_cq(3)",
    },
    Function {
        name: "anywarpdv_query_counters",
        does: "read what a queue pair has seen",
        text: &[
            "Copies the counters, which the header names, as they are now. inlen is sizeof(*counters); those that this library \
             does not know are 0. They count from the making of the queue pair and are never reset.",
        ],
        returns: "0, or -1 with errno.",
        errors: &[("EINVAL", "A pointer is null."), NOT_DATAGRAMS, LOST],
        see: "anywarpdv_create_qp_ex(3)",
    },
    Function {
        name: "anywarpdv_restrict_mr",
        does: "let one host alone reach a memory region",
        text: &[
            "From now on only datagrams from the host of source reach the region, and only from queue pair src_qp there, unless \
             that is 0. Others are dropped as if they had no right. Null: everybody who knows the rkey again. Connected queue \
             pairs over TCP are not asked.",
            "The address of a datagram can be spoofed on UD; on RD the peer has shown that it receives there.",
        ],
        returns: "0, or -1 with errno.",
        errors: &[
            ("EINVAL", "mr is null."),
            ("EAFNOSUPPORT", "source is neither IPv4 nor IPv6."),
        ],
        see: "ibv_reg_mr(3)",
    },
];

const OVERVIEW: &[(&str, &[&str])] = &[
    (
        "DESCRIPTION",
        &[
            "Remote direct memory access without a connection. A datagram queue pair made with anywarpdv_create_qp_ex(3) \
             writes into and reads from the memory of any number of peers, by address and rkey, over plain UDP.",
            "A Write-Record, which ibv_wr_rdma_write(3) and ibv_wr_rdma_write_imm(3) are on such a queue pair, needs no receive at the \
             peer and leaves a record there: who wrote, where, how much of it arrived and which bytes these are. Messages have up to \
             2^31 - 1 bytes in many datagrams; on unreliable datagrams the loss of one costs its own bytes and nothing \
             else.",
            "Reliable datagrams (RD) have the same operations, and atomics, with every message delivered exactly once, in order \
             unless ANYWARPDV_QP_UNORDERED is set. There is no connection either: one queue pair talks to tens of thousands of peers \
             and keeps something only of those that it talked to lately.",
        ],
    ),
    (
        "COMPILING AND LINKING",
        &[
            "The header is PREFIX/include/infiniband/anywarpdv.h and includes infiniband/verbs.h of the distribution. The functions \
             are in anywarp's libibverbs.so.1, with the version ANYWARPDV_1.0. A program that needs them is linked with it:",
            "cc -I PREFIX/include prog.c -L PREFIX/lib/anywarp -libverbs -Wl,-rpath,PREFIX/lib/anywarp",
            "and does not start with another libibverbs. One that only uses them where they are is linked as ever, and asks: \
             dlvsym(RTLD_DEFAULT, \"anywarpdv_create_qp_ex\", \"ANYWARPDV_1.0\") is null where it does not run on anywarp. \
             Structures only grow at their end; every function that takes one also takes its size.",
        ],
    ),
    (
        "WHAT TO EXPECT",
        &[
            "An rkey and a Q_Key are what protects memory; on UD whoever is on the network can send both under any address. \
             anywarpdv_restrict_mr(3) narrows that. Peers that ask for much are answered only when they have shown that they \
             receive at their address.",
            "Datagrams longer than the path carries are cut by IP (ANYWARPDV_SEGMENT_MAX): fast on a network that loses nothing, and \
             on one that loses 1 % a third of them are gone.",
            "The wire format is in docs/datagram-iwarp.md of the source.",
        ],
    ),
];

/// File name and content of each page.
pub(super) fn all() -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut pages = Vec::new();
    for function in FUNCTIONS {
        let name = format!("man3/{}.3", function.name);
        pages.push((name, function_page(function)?));
    }
    pages.push(("man7/anywarpdv.7".to_owned(), overview()?));
    Ok(pages)
}

fn title(name: &str, section: &str, does: &str) -> Roff {
    let mut roff = Roff::new();
    let version = concat!("anywarp ", env!("CARGO_PKG_VERSION"));
    roff.control("TH", [name, section, "", version, "anywarp"]);
    roff.control("SH", ["NAME"]);
    roff.text([roman(format!("{name} - {does}"))]);
    roff
}

fn paragraphs(roff: &mut Roff, title: &str, all: &[&str]) {
    roff.control("SH", [title]);
    for paragraph in all {
        roff.control("PP", []);
        roff.text([roman(*paragraph)]);
    }
}

/// The lines of the header that declare a function.
fn declaration(name: &str) -> Vec<&'static str> {
    let call = format!("{name}(");
    let mut lines = Vec::new();
    for line in HEADER.lines() {
        let first = lines.is_empty()
            && !line.starts_with([' ', '\t', '*', '/'])
            && (line.contains(&format!(" {call}")) || line.contains(&format!("*{call}")));
        if first || !lines.is_empty() {
            lines.push(line.trim());
            if line.ends_with(");") {
                break;
            }
        }
    }
    lines
}

fn function_page(function: &Function) -> io::Result<Vec<u8>> {
    let mut roff = title(function.name, "3", function.does);
    roff.control("SH", ["SYNOPSIS"]);
    roff.control("nf", []);
    roff.text([bold("#include <infiniband/anywarpdv.h>")]);
    roff.control("sp", []);
    for line in declaration(function.name) {
        roff.text([bold(line)]);
    }
    roff.control("fi", []);
    paragraphs(&mut roff, "DESCRIPTION", function.text);
    paragraphs(&mut roff, "RETURN VALUE", &[function.returns]);
    if !function.errors.is_empty() {
        roff.control("SH", ["ERRORS"]);
    }
    for (name, meaning) in function.errors {
        roff.control("TP", []);
        roff.text([bold(*name)]);
        roff.text([roman(*meaning)]);
    }
    let see = format!("anywarpdv(7), {}", function.see);
    paragraphs(&mut roff, "SEE ALSO", &[&see]);
    let mut page = Vec::new();
    roff.to_writer(&mut page)?;
    Ok(page)
}

fn overview() -> io::Result<Vec<u8>> {
    let mut roff = title("anywarpdv", "7", "one-sided operations on datagrams");
    for (title, text) in OVERVIEW {
        paragraphs(&mut roff, title, text);
    }
    roff.control("SH", ["FUNCTIONS"]);
    for function in FUNCTIONS {
        roff.control("TP", []);
        roff.text([bold(format!("{}(3)", function.name))]);
        roff.text([roman(format!("{}.", function.does))]);
    }
    paragraphs(
        &mut roff,
        "SEE ALSO",
        &["anywarp(7), ibv_create_qp_ex(3), ibv_wr_post(3), ibv_create_ah(3)"],
    );
    let mut page = Vec::new();
    roff.to_writer(&mut page)?;
    Ok(page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_function_of_the_header_has_a_page_with_its_declaration() {
        let declared: Vec<&str> = HEADER
            .lines()
            .filter(|l| !l.starts_with([' ', '\t', '*', '/']))
            .filter_map(|l| l.split_once('(').map(|(before, _)| before))
            .filter_map(|before| before.rsplit([' ', '*']).next())
            .filter(|name| name.starts_with("anywarpdv_"))
            .collect();
        assert!(declared.len() >= 10, "{declared:?}");
        let mut known: Vec<&str> = FUNCTIONS.iter().map(|f| f.name).collect();
        known.sort_unstable();
        let mut sorted = declared.clone();
        sorted.sort_unstable();
        assert_eq!(known, sorted);
        for name in declared {
            let lines = declaration(name);
            assert!(
                lines.last().is_some_and(|l| l.ends_with(");")),
                "{name}: {lines:?}"
            );
        }
    }
}
