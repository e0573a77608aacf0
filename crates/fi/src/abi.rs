//! The structures and constants of libfabric's headers that a provider uses.
//!
//! The structures are those of libfabric 1.17. Later versions append members to some of them, so structures that this library
//! allocates for the core of libfabric get additional space (`info.rs`). A test compares all names with the installed headers.

use libc::{c_char, c_int, c_void, iovec};

/// An entry of a function table. The tables contain functions with the signatures given in the headers. `no_function` of
/// `api/object.rs` is used for functions that this provider does not have.
pub type Call = *const ();

/// A peer, as the program names it: an index of an address vector.
pub type FiAddr = u64;

/// Declares structures with the layout of C, and describes them for the test.
macro_rules! c_types {
    ($($(#[$meta:meta])* struct $name:ident { $($field:ident: $type:ty,)* })*) => {
        $(
            $(#[$meta])*
            #[repr(C)]
            #[derive(Debug, Clone, Copy)]
            #[allow(missing_docs, non_camel_case_types, reason = "names and meaning are those of the headers")]
            pub struct $name { $(pub $field: $type,)* }
        )*

        /// For each structure: its name and size, and the name, offset and size of each member.
        #[cfg(test)]
        fn layout() -> Vec<(&'static str, usize, Vec<(&'static str, usize, usize)>)> {
            vec![$((
                stringify!($name),
                size_of::<$name>(),
                vec![$((
                    stringify!($field),
                    std::mem::offset_of!($name, $field),
                    size_of::<$type>(),
                ),)*],
            ),)*]
        }
    };
}

/// Declares constants, and lists them for the test.
macro_rules! c_consts {
    ($($name:ident: $type:ty = $value:expr;)*) => {
        $(#[allow(missing_docs, reason = "names and meaning are those of the headers")]
        pub const $name: $type = $value;)*

        #[cfg(test)]
        fn constants() -> Vec<(&'static str, i128)> {
            vec![$((stringify!($name), i128::from($name)),)*]
        }
    };
}

c_types! {
    struct fid {
        fclass: usize,
        context: *mut c_void,
        ops: *const fi_ops,
    }
    struct fi_alias {
        fid: *mut *mut fid,
        flags: u64,
    }
    struct fi_ops {
        size: usize,
        close: Call,
        bind: Call,
        control: Call,
        ops_open: Call,
        tostr: Call,
        ops_set: Call,
    }
    struct fi_context {
        internal: [*mut c_void; 4],
    }
    struct fi_provider {
        version: u32,
        fi_version: u32,
        context: fi_context,
        name: *const c_char,
        getinfo: Call,
        fabric: Call,
        cleanup: Call,
    }

    struct fi_info {
        next: *mut fi_info,
        caps: u64,
        mode: u64,
        addr_format: u32,
        src_addrlen: usize,
        dest_addrlen: usize,
        src_addr: *mut c_void,
        dest_addr: *mut c_void,
        handle: *mut fid,
        tx_attr: *mut fi_tx_attr,
        rx_attr: *mut fi_rx_attr,
        ep_attr: *mut fi_ep_attr,
        domain_attr: *mut fi_domain_attr,
        fabric_attr: *mut fi_fabric_attr,
        nic: *mut c_void,
    }
    struct fi_tx_attr {
        caps: u64,
        mode: u64,
        op_flags: u64,
        msg_order: u64,
        comp_order: u64,
        inject_size: usize,
        size: usize,
        iov_limit: usize,
        rma_iov_limit: usize,
        tclass: u32,
    }
    struct fi_rx_attr {
        caps: u64,
        mode: u64,
        op_flags: u64,
        msg_order: u64,
        comp_order: u64,
        total_buffered_recv: usize,
        size: usize,
        iov_limit: usize,
    }
    struct fi_ep_attr {
        r#type: u32,
        protocol: u32,
        protocol_version: u32,
        max_msg_size: usize,
        msg_prefix_size: usize,
        max_order_raw_size: usize,
        max_order_war_size: usize,
        max_order_waw_size: usize,
        mem_tag_format: u64,
        tx_ctx_cnt: usize,
        rx_ctx_cnt: usize,
        auth_key_size: usize,
        auth_key: *mut u8,
    }
    struct fi_domain_attr {
        domain: *mut fid_domain,
        name: *mut c_char,
        threading: u32,
        control_progress: u32,
        data_progress: u32,
        resource_mgmt: u32,
        av_type: u32,
        mr_mode: c_int,
        mr_key_size: usize,
        cq_data_size: usize,
        cq_cnt: usize,
        ep_cnt: usize,
        tx_ctx_cnt: usize,
        rx_ctx_cnt: usize,
        max_ep_tx_ctx: usize,
        max_ep_rx_ctx: usize,
        max_ep_stx_ctx: usize,
        max_ep_srx_ctx: usize,
        cntr_cnt: usize,
        mr_iov_limit: usize,
        caps: u64,
        mode: u64,
        auth_key: *mut u8,
        auth_key_size: usize,
        max_err_data: usize,
        mr_cnt: usize,
        tclass: u32,
    }
    struct fi_fabric_attr {
        fabric: *mut fid_fabric,
        name: *mut c_char,
        prov_name: *mut c_char,
        prov_version: u32,
        api_version: u32,
    }

    struct fid_fabric {
        fid: fid,
        ops: *const fi_ops_fabric,
        api_version: u32,
    }
    struct fi_ops_fabric {
        size: usize,
        domain: Call,
        passive_ep: Call,
        eq_open: Call,
        wait_open: Call,
        trywait: Call,
        domain2: Call,
    }

    struct fid_domain {
        fid: fid,
        ops: *const fi_ops_domain,
        mr: *const fi_ops_mr,
    }
    struct fi_ops_domain {
        size: usize,
        av_open: Call,
        cq_open: Call,
        endpoint: Call,
        scalable_ep: Call,
        cntr_open: Call,
        poll_open: Call,
        stx_ctx: Call,
        srx_ctx: Call,
        query_atomic: Call,
        query_collective: Call,
        endpoint2: Call,
    }
    struct fi_ops_mr {
        size: usize,
        reg: Call,
        regv: Call,
        regattr: Call,
    }
    struct fid_mr {
        fid: fid,
        mem_desc: *mut c_void,
        key: u64,
    }
    struct fi_mr_attr {
        mr_iov: *const iovec,
        iov_count: usize,
        access: u64,
        offset: u64,
        requested_key: u64,
        context: *mut c_void,
        auth_key_size: usize,
        auth_key: *mut u8,
        iface: u32,
        device: u64,
    }
    struct fi_atomic_attr {
        count: usize,
        size: usize,
    }

    struct fi_av_attr {
        r#type: u32,
        rx_ctx_bits: c_int,
        count: usize,
        ep_per_node: usize,
        name: *const c_char,
        map_addr: *mut c_void,
        flags: u64,
    }
    struct fid_av {
        fid: fid,
        ops: *const fi_ops_av,
    }
    struct fi_ops_av {
        size: usize,
        insert: Call,
        insertsvc: Call,
        insertsym: Call,
        remove: Call,
        lookup: Call,
        straddr: Call,
        av_set: Call,
    }

    struct fi_cq_attr {
        size: usize,
        flags: u64,
        format: u32,
        wait_obj: u32,
        signaling_vector: c_int,
        wait_cond: u32,
        wait_set: *mut c_void,
    }
    struct fid_cq {
        fid: fid,
        ops: *const fi_ops_cq,
    }
    struct fi_ops_cq {
        size: usize,
        read: Call,
        readfrom: Call,
        readerr: Call,
        sread: Call,
        sreadfrom: Call,
        signal: Call,
        strerror: Call,
    }
    struct fi_cq_entry {
        op_context: *mut c_void,
    }
    struct fi_cq_msg_entry {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
    }
    struct fi_cq_data_entry {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
    }
    struct fi_cq_tagged_entry {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
        tag: u64,
    }
    struct fi_cq_err_entry {
        op_context: *mut c_void,
        flags: u64,
        len: usize,
        buf: *mut c_void,
        data: u64,
        tag: u64,
        olen: usize,
        err: c_int,
        prov_errno: c_int,
        err_data: *mut c_void,
        err_data_size: usize,
    }

    struct fi_cntr_attr {
        events: u32,
        wait_obj: u32,
        wait_set: *mut c_void,
        flags: u64,
    }
    struct fid_cntr {
        fid: fid,
        ops: *const fi_ops_cntr,
    }
    struct fi_ops_cntr {
        size: usize,
        read: Call,
        readerr: Call,
        add: Call,
        set: Call,
        wait: Call,
        adderr: Call,
        seterr: Call,
    }

    struct fi_eq_attr {
        size: usize,
        flags: u64,
        wait_obj: u32,
        signaling_vector: c_int,
        wait_set: *mut c_void,
    }
    struct fid_eq {
        fid: fid,
        ops: *const fi_ops_eq,
    }
    struct fi_ops_eq {
        size: usize,
        read: Call,
        readerr: Call,
        write: Call,
        sread: Call,
        strerror: Call,
    }

    struct fid_ep {
        fid: fid,
        ops: *const fi_ops_ep,
        cm: *const fi_ops_cm,
        msg: *const fi_ops_msg,
        rma: *const fi_ops_rma,
        tagged: *const fi_ops_tagged,
        atomic: *const fi_ops_atomic,
        collective: *const fi_ops_collective,
    }
    struct fi_ops_ep {
        size: usize,
        cancel: Call,
        getopt: Call,
        setopt: Call,
        tx_ctx: Call,
        rx_ctx: Call,
        rx_size_left: Call,
        tx_size_left: Call,
    }
    struct fi_ops_cm {
        size: usize,
        setname: Call,
        getname: Call,
        getpeer: Call,
        connect: Call,
        listen: Call,
        accept: Call,
        reject: Call,
        shutdown: Call,
        join: Call,
    }
    struct fi_ops_msg {
        size: usize,
        recv: Call,
        recvv: Call,
        recvmsg: Call,
        send: Call,
        sendv: Call,
        sendmsg: Call,
        inject: Call,
        senddata: Call,
        injectdata: Call,
    }
    struct fi_ops_tagged {
        size: usize,
        recv: Call,
        recvv: Call,
        recvmsg: Call,
        send: Call,
        sendv: Call,
        sendmsg: Call,
        inject: Call,
        senddata: Call,
        injectdata: Call,
    }
    struct fi_ops_rma {
        size: usize,
        read: Call,
        readv: Call,
        readmsg: Call,
        write: Call,
        writev: Call,
        writemsg: Call,
        inject: Call,
        writedata: Call,
        injectdata: Call,
    }
    struct fi_ops_atomic {
        size: usize,
        write: Call,
        writev: Call,
        writemsg: Call,
        inject: Call,
        readwrite: Call,
        readwritev: Call,
        readwritemsg: Call,
        compwrite: Call,
        compwritev: Call,
        compwritemsg: Call,
        writevalid: Call,
        readwritevalid: Call,
        compwritevalid: Call,
    }
    struct fi_ops_collective {
        size: usize,
        barrier: Call,
        broadcast: Call,
        alltoall: Call,
        allreduce: Call,
        allgather: Call,
        reduce_scatter: Call,
        reduce: Call,
        scatter: Call,
        gather: Call,
        msg: Call,
        barrier2: Call,
    }

    struct fi_msg {
        msg_iov: *const iovec,
        desc: *mut *mut c_void,
        iov_count: usize,
        addr: FiAddr,
        context: *mut c_void,
        data: u64,
    }
    struct fi_msg_tagged {
        msg_iov: *const iovec,
        desc: *mut *mut c_void,
        iov_count: usize,
        addr: FiAddr,
        tag: u64,
        ignore: u64,
        context: *mut c_void,
        data: u64,
    }
    struct fi_rma_iov {
        addr: u64,
        len: usize,
        key: u64,
    }
    struct fi_msg_rma {
        msg_iov: *const iovec,
        desc: *mut *mut c_void,
        iov_count: usize,
        addr: FiAddr,
        rma_iov: *const fi_rma_iov,
        rma_iov_count: usize,
        context: *mut c_void,
        data: u64,
    }
    struct fi_ioc {
        addr: *mut c_void,
        count: usize,
    }
    struct fi_rma_ioc {
        addr: u64,
        count: usize,
        key: u64,
    }
    struct fi_msg_atomic {
        msg_iov: *const fi_ioc,
        desc: *mut *mut c_void,
        iov_count: usize,
        addr: FiAddr,
        rma_iov: *const fi_rma_ioc,
        rma_iov_count: usize,
        datatype: u32,
        op: u32,
        context: *mut c_void,
        data: u64,
    }
}

c_consts! {
    FI_MSG: u64 = 1 << 1;
    FI_RMA: u64 = 1 << 2;
    FI_TAGGED: u64 = 1 << 3;
    FI_ATOMIC: u64 = 1 << 4;
    FI_READ: u64 = 1 << 8;
    FI_WRITE: u64 = 1 << 9;
    FI_RECV: u64 = 1 << 10;
    FI_SEND: u64 = 1 << 11;
    FI_REMOTE_READ: u64 = 1 << 12;
    FI_REMOTE_WRITE: u64 = 1 << 13;
    FI_MULTI_RECV: u64 = 1 << 16;
    FI_REMOTE_CQ_DATA: u64 = 1 << 17;
    FI_MORE: u64 = 1 << 18;
    FI_PEEK: u64 = 1 << 19;
    FI_FENCE: u64 = 1 << 21;
    FI_COMPLETION: u64 = 1 << 24;
    FI_INJECT: u64 = 1 << 25;
    FI_INJECT_COMPLETE: u64 = 1 << 26;
    FI_TRANSMIT_COMPLETE: u64 = 1 << 27;
    FI_DELIVERY_COMPLETE: u64 = 1 << 28;
    FI_AFFINITY: u64 = 1 << 29;
    FI_COMMIT_COMPLETE: u64 = 1 << 30;
    FI_MATCH_COMPLETE: u64 = 1 << 31;
    FI_LOCAL_COMM: u64 = 1 << 51;
    FI_REMOTE_COMM: u64 = 1 << 52;
    FI_SOURCE: u64 = 1 << 57;
    FI_NUMERICHOST: u64 = 1 << 55;
    FI_DIRECTED_RECV: u64 = 1 << 59;
    FI_CLAIM: u64 = 1 << 59;
    FI_DISCARD: u64 = 1 << 58;
    FI_SELECTIVE_COMPLETION: u64 = 1 << 59;
    FI_FETCH_ATOMIC: u64 = 1 << 58;
    FI_COMPARE_ATOMIC: u64 = 1 << 59;
    FI_TRANSMIT: u64 = FI_SEND;
    FI_SYNC_ERR: u64 = 1 << 58;
    FI_SYMMETRIC: u64 = 1 << 59;
    FI_EVENT: u64 = 1 << 24;
    FI_ADDR_UNSPEC: u64 = u64::MAX;
    FI_ADDR_NOTAVAIL: u64 = u64::MAX;

    FI_FORMAT_UNSPEC: u32 = 0;
    FI_SOCKADDR: u32 = 1;
    FI_SOCKADDR_IN: u32 = 2;
    FI_SOCKADDR_IN6: u32 = 3;

    FI_EP_UNSPEC: u32 = 0;
    FI_EP_RDM: u32 = 3;
    FI_PROTO_UNSPEC: u32 = 0;

    FI_THREAD_UNSPEC: u32 = 0;
    FI_THREAD_SAFE: u32 = 1;
    FI_PROGRESS_UNSPEC: u32 = 0;
    FI_PROGRESS_AUTO: u32 = 1;
    FI_PROGRESS_MANUAL: u32 = 2;
    FI_RM_UNSPEC: u32 = 0;
    FI_RM_ENABLED: u32 = 2;
    FI_AV_UNSPEC: u32 = 0;
    FI_AV_MAP: u32 = 1;
    FI_AV_TABLE: u32 = 2;

    FI_MR_UNSPEC: c_int = 0;
    FI_MR_BASIC: c_int = 1;
    FI_MR_SCALABLE: c_int = 2;
    FI_MR_LOCAL: c_int = 1 << 2;
    FI_MR_VIRT_ADDR: c_int = 1 << 4;
    FI_MR_ALLOCATED: c_int = 1 << 5;
    FI_MR_PROV_KEY: c_int = 1 << 6;

    FI_ORDER_NONE: u64 = 0;
    FI_ORDER_SAS: u64 = 1 << 8;
    FI_ORDER_ATOMIC_RAR: u64 = 1 << 36;
    FI_ORDER_ATOMIC_RAW: u64 = 1 << 37;
    FI_ORDER_ATOMIC_WAR: u64 = 1 << 38;
    FI_ORDER_ATOMIC_WAW: u64 = 1 << 39;

    FI_CLASS_FABRIC: u32 = 1;
    FI_CLASS_DOMAIN: u32 = 2;
    FI_CLASS_EP: u32 = 3;
    FI_CLASS_AV: u32 = 11;
    FI_CLASS_MR: u32 = 12;
    FI_CLASS_EQ: u32 = 13;
    FI_CLASS_CQ: u32 = 14;
    FI_CLASS_CNTR: u32 = 15;

    FI_CQ_FORMAT_UNSPEC: u32 = 0;
    FI_CQ_FORMAT_CONTEXT: u32 = 1;
    FI_CQ_FORMAT_MSG: u32 = 2;
    FI_CQ_FORMAT_DATA: u32 = 3;
    FI_CQ_FORMAT_TAGGED: u32 = 4;
    FI_WAIT_NONE: u32 = 0;
    FI_WAIT_UNSPEC: u32 = 1;
    FI_WAIT_FD: u32 = 3;
    FI_WAIT_YIELD: u32 = 5;

    FI_GETWAIT: c_int = 5;
    FI_ENABLE: c_int = 6;
    FI_GETFIDFLAG: c_int = 0;
    FI_GETOPSFLAG: c_int = 2;
    FI_SETOPSFLAG: c_int = 3;
    FI_GETWAITOBJ: c_int = 16;
    FI_ALIAS: c_int = 4;

    FI_OPT_ENDPOINT: c_int = 0;
    FI_OPT_MIN_MULTI_RECV: c_int = 0;
    FI_OPT_CM_DATA_SIZE: c_int = 1;
    FI_OPT_BUFFERED_MIN: c_int = 2;

    FI_INT8: u32 = 0;
    FI_UINT8: u32 = 1;
    FI_INT16: u32 = 2;
    FI_UINT16: u32 = 3;
    FI_INT32: u32 = 4;
    FI_UINT32: u32 = 5;
    FI_INT64: u32 = 6;
    FI_UINT64: u32 = 7;
    FI_FLOAT: u32 = 8;
    FI_DOUBLE: u32 = 9;
    FI_MIN: u32 = 0;
    FI_MAX: u32 = 1;
    FI_SUM: u32 = 2;
    FI_PROD: u32 = 3;
    FI_LOR: u32 = 4;
    FI_LAND: u32 = 5;
    FI_BOR: u32 = 6;
    FI_BAND: u32 = 7;
    FI_LXOR: u32 = 8;
    FI_BXOR: u32 = 9;
    FI_ATOMIC_READ: u32 = 10;
    FI_ATOMIC_WRITE: u32 = 11;
    FI_CSWAP: u32 = 12;
    FI_CSWAP_NE: u32 = 13;
    FI_CSWAP_LE: u32 = 14;
    FI_CSWAP_LT: u32 = 15;
    FI_CSWAP_GE: u32 = 16;
    FI_CSWAP_GT: u32 = 17;
    FI_MSWAP: u32 = 18;

    FI_EIO: c_int = 5;
    FI_EAGAIN: c_int = 11;
    FI_ENOMEM: c_int = 12;
    FI_EACCES: c_int = 13;
    FI_EBUSY: c_int = 16;
    FI_ENODEV: c_int = 19;
    FI_EINVAL: c_int = 22;
    FI_ENOSYS: c_int = 38;
    FI_ENOMSG: c_int = 42;
    FI_ENODATA: c_int = 61;
    FI_EMSGSIZE: c_int = 90;
    FI_ENOPROTOOPT: c_int = 92;
    FI_EOPNOTSUPP: c_int = 95;
    FI_ECONNRESET: c_int = 104;
    FI_ETIMEDOUT: c_int = 110;
    FI_EHOSTUNREACH: c_int = 113;
    FI_EREMOTEIO: c_int = 121;
    FI_ECANCELED: c_int = 125;
    FI_EOTHER: c_int = 256;
    FI_ETOOSMALL: c_int = 257;
    FI_EOPBADSTATE: c_int = 258;
    FI_EAVAIL: c_int = 259;
    FI_EBADFLAGS: c_int = 260;
    FI_EADDRNOTAVAIL: c_int = 99;
    FI_ENOEQ: c_int = 261;
    FI_EDOMAIN: c_int = 262;
    FI_ENOCQ: c_int = 263;
    FI_ECRC: c_int = 264;
    FI_ETRUNC: c_int = 265;
    FI_ENOKEY: c_int = 266;
    FI_ENOAV: c_int = 267;
    FI_EOVERRUN: c_int = 268;
    FI_ENORX: c_int = 269;
}

/// Returns a version of libfabric's interface, like the macro `FI_VERSION`.
pub const fn fi_version(major: u32, minor: u32) -> u32 {
    major << 16 | minor
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;
    use std::process::Command;

    /// Compiles assertions about all structures and constants of this file with the headers of the installed libfabric.
    #[test]
    fn the_structures_are_those_of_the_headers() {
        let mut c = String::from(
            "#include <rdma/fabric.h>\n#include <rdma/fi_domain.h>\n#include <rdma/fi_endpoint.h>\n\
             #include <rdma/fi_eq.h>\n#include <rdma/fi_cm.h>\n#include <rdma/fi_tagged.h>\n#include <rdma/fi_rma.h>\n\
             #include <rdma/fi_atomic.h>\n#include <rdma/fi_collective.h>\n#include <rdma/providers/fi_prov.h>\n\
             #include <rdma/fi_errno.h>\n#include <stddef.h>\n",
        );
        let newer = "FI_MAJOR_VERSION * 100 + FI_MINOR_VERSION > 117";
        for (name, size, fields) in super::layout() {
            // Later versions append members.
            writeln!(
                c,
                "_Static_assert(sizeof(struct {name}) == {size} || (({newer}) && sizeof(struct {name}) > {size}), \"{name}\");"
            )
            .unwrap();
            for (field, offset, size) in fields {
                let field = field.trim_start_matches("r#");
                writeln!(
                    c,
                    "_Static_assert(offsetof(struct {name}, {field}) == {offset} && \
                     sizeof(((struct {name} *)0)->{field}) == {size}, \"{name}.{field}\");"
                )
                .unwrap();
            }
        }
        for (name, value) in super::constants() {
            let value = if value > i128::from(i64::MAX) {
                format!("{value}ULL")
            } else {
                value.to_string()
            };
            writeln!(
                c,
                "_Static_assert((unsigned long long)({name}) == (unsigned long long)({value}), \"{name}\");"
            )
            .unwrap();
        }
        let dir = std::env::temp_dir().join(format!("anywarp-fi-abi-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let file = dir.join("abi.c");
        std::fs::write(&file, c).unwrap();
        let out = Command::new("cc")
            .args([
                "-std=gnu11",
                "-fsyntax-only",
                "-Wno-deprecated-declarations",
            ])
            .arg(&file)
            .output()
            .unwrap();
        std::fs::remove_dir_all(&dir).unwrap();
        assert!(
            out.status.success(),
            "{}",
            String::from_utf8_lossy(&out.stderr)
        );
    }
}
