//! Every environment variable that a part of the product reads: the table that the manual pages are made from.

/// Which part reads a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// The device, which reads the variable once, when the device is first used.
    Device,
    /// The C interface of libibverbs.
    Abi,
    /// The `anywarp` command and the programs that it runs for itself.
    Command,
    /// The library that carries sockets of unmodified programs, `libanywarp-sockets.so`.
    Sockets,
    /// The library that `anywarp run` preloads for programs that read /sys/class/infiniband.
    Shim,
}

/// An environment variable.
#[derive(Debug, Clone, Copy)]
pub struct Variable {
    /// Its name.
    pub name: &'static str,
    /// Which part reads it.
    pub reader: Reader,
    /// What applies when it is unset.
    pub default: &'static str,
    /// The form of its value.
    pub value: &'static str,
    /// What it does, in whole sentences.
    pub text: &'static str,
}

/// The levels of `ANYWARP_LOG`, from the least verbose on.
pub const LOG_LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// All variables, in the order of the manual.
pub const VARIABLES: &[Variable] = &[
    Variable {
        name: "ANYWARP_LOG",
        reader: Reader::Device,
        default: "off",
        value: "off|error|warn|info|debug|trace",
        text: "The level of the log, which the device writes to stderr. Nothing is written when unset. The level \
               info reports connections and why they ended; debug adds each work request, and trace each frame. With \
               another value the log is off, and a warning on stderr says so.",
    },
    Variable {
        name: "ANYWARP_ADDR",
        reader: Reader::Device,
        default: "first address",
        value: "ADDRESS",
        text: "The IPv4 or IPv6 address of this machine that becomes GID 0, the address that most programs use. \
               When unset it is the first IPv4 address, or else the first IPv6 address, of an interface that is up \
               and not the loopback; on a machine without one, it is the loopback address. All other addresses \
               follow as GID 1, 2 and so on; link-local addresses are left out. A value that is no address, or that no \
               interface has, is ignored with a warning in the log.",
    },
    Variable {
        name: "ANYWARP_PORTS",
        reader: Reader::Device,
        default: "tcp",
        value: "tcp|apart",
        text: "Whether a listener of rdma_cm also uses the TCP port with the same number, if that is free; tcp when \
               unset. Peers that are not anywarp need this port to find the listener. If a program that runs on the \
               device binds a plain socket to the port, the listener moves to another port. apart: the \
               listener never uses this TCP port, so that programs that do not run on the device can use it; all peers \
               must then be anywarp.",
    },
    Variable {
        name: "ANYWARP_FACE",
        reader: Reader::Device,
        default: "roce",
        value: "roce|iwarp|ib",
        text: "The device type that queries report, for programs that behave differently by type; when unset, \
               roce, or iwarp with ANYWARP_DEVICE_PROFILE=siw. It does not change what is sent.",
    },
    Variable {
        name: "ANYWARP_DEVICE_PROFILE",
        reader: Reader::Device,
        default: "anywarp",
        value: "anywarp|siw|rxe|mlx5|efa",
        text: "The name of a device whose limits are reported and enforced, and whose missing features are \
               disabled, so that programs can be tested against it: Linux's software iWARP (siw) or software RoCE \
               (rxe), a ConnectX-6 Dx (mlx5), an Elastic Fabric Adapter without SRD (efa). `anywarp run --profile` \
               sets it. It does not change what is sent. With an unknown name the device does not open.",
    },
    Variable {
        name: "ANYWARP_CRC",
        reader: Reader::Device,
        default: "1",
        value: "0|1",
        text: "Whether this side requests a CRC32C in each frame on TCP; 1 when unset. The CRC is left out only if \
               both sides request none.",
    },
    Variable {
        name: "ANYWARP_CARRIER",
        reader: Reader::Device,
        default: "auto",
        value: "tcp|auto|eager",
        text: "The transport between two processes of one user on one host: of reliable connections, which begin on \
               TCP, and of datagrams, which begin on UDP. auto (when unset): shared memory after some \
               requests or datagrams. eager: shared memory from the first on. tcp: always TCP and UDP, even if only \
               one of the two processes sets it. For streams of the sockets library, tcp means the same as set memory off.",
    },
    Variable {
        name: "ANYWARP_TRUNK",
        reader: Reader::Device,
        default: "16",
        value: "N|eager",
        text: "The number of reliable connections between two processes from which on one TCP connection, the trunk, \
               carries the streams of those that have made some requests. 0: never, even if only one of the two processes \
               sets it. eager: from the first request of the first connection on.",
    },
    Variable {
        name: "ANYWARP_PIN",
        reader: Reader::Device,
        default: "0",
        value: "1",
        text: "Registering memory locks its pages, as the driver of a network card does, within the limit of \
               `ulimit -l`; beyond the limit it fails with ENOMEM. A page is unlocked when its last region is \
               deregistered. Regions with on-demand paging are not locked.",
    },
    Variable {
        name: "ANYWARP_PREFAULT",
        reader: Reader::Device,
        default: "0",
        value: "1",
        text: "Registering memory faults its pages in, so that the first transfer does not wait for them. They are \
               not locked.",
    },
    Variable {
        name: "ANYWARP_CC",
        reader: Reader::Device,
        default: "host's",
        value: "NAME",
        text: "The congestion control of this side's TCP connections (reno, cubic, bbr, …), one of those in \
               net.ipv4.tcp_allowed_congestion_control. When unset, it is the host's default; but on paths with a \
               round trip of less than 100 µs, cubic or reno takes the place of bbr, until one segment in 50 is lost. \
               `anywarp stat` shows it. A name that the host does not allow is ignored with a warning in the log.",
    },
    Variable {
        name: "ANYWARP_GSO",
        reader: Reader::Device,
        default: "1",
        value: "0",
        text: "Datagrams of one length to one peer are passed to the kernel in one piece, which the kernel or the \
               network card divides (UDP_SEGMENT). With 0 each datagram is passed separately. The peer need not set \
               the same.",
    },
    Variable {
        name: "ANYWARP_GRO",
        reader: Reader::Device,
        default: "1",
        value: "0",
        text: "Datagrams that arrive together are received from the kernel in one piece (UDP_GRO). With 0 each \
               datagram is received separately. The peer need not set the same.",
    },
    Variable {
        name: "ANYWARP_RC",
        reader: Reader::Device,
        default: "tcp",
        value: "tcp|udp",
        text: "The transport of reliable connections that programs set up themselves with ibv_modify_qp: standard \
               iWARP over TCP (when unset), or the reliable datagrams of anywarp over UDP. Both sides have to \
               choose the same. Connections of rdma_cm always use TCP.",
    },
    Variable {
        name: "ANYWARP_UC",
        reader: Reader::Device,
        default: "udp",
        value: "udp|rd",
        text: "The transport of unreliable connections: datagrams that may be lost (when unset), or reliable ones. \
               Both sides have to choose the same.",
    },
    Variable {
        name: "ANYWARP_FAULTS",
        reader: Reader::Device,
        default: "none",
        value: "SPEC|@FILE",
        text: "Faults to inject, to test how a program handles them: settings of the link such as \
               loss=0.01,dup=0.01,reorder=0.01,corrupt=0.01,kill=0.001,delay=5ms,jitter=1ms,rate=10MB/s,dir=both,seed=7, \
               and rules such as 'op=send nth=3 -> error=remote-access'. The same seed gives the same faults. Each \
               fault is logged at the level info, and a summary is written to stderr at exit unless summary=off is \
               set. `anywarp run --faults` sets it, after a check. If the text is invalid, the device does not \
               open.",
    },
    Variable {
        name: "ANYWARP_FAULTS_FILE",
        reader: Reader::Device,
        default: "none",
        value: "FILE",
        text: "The name of a file with the text of ANYWARP_FAULTS. Only one of the two variables may be set.",
    },
    Variable {
        name: "ANYWARP_QOS",
        reader: Reader::Device,
        default: "none",
        value: "SETTINGS|@FILE",
        text: "A link with virtual lanes on which the device sends, to test how programs share a slow link: \
               rate=1Gbit/s and, with the names and forms of OpenSM, qos_max_vls, qos_high_limit, qos_vlarb_high, \
               qos_vlarb_low and qos_sl2vl, on lines or between semicolons. The service level of a queue pair selects \
               its lane. With link=FILE, all processes that name the file share one link. If the text is invalid, the \
               device does not open. anywarp-qos(7) describes the settings.",
    },
    Variable {
        name: "ANYWARP_STAT",
        reader: Reader::Device,
        default: "0",
        value: "0|1",
        text: "Whether `anywarp stat PID` may read the counters of the program's queue pairs; 0 when unset. With 1 \
               the device listens on an abstract socket, anywarp-stat-PID, for processes of the same user.",
    },
    Variable {
        name: "ANYWARP_CAPTURE",
        reader: Reader::Device,
        default: "none",
        value: "FILE",
        text: "Appends the traffic of the device to this pcapng file, which is created with mode 0600. A symbolic \
               link, a file of another user and a file with several names (hard links) are refused. `anywarp \
               capture` sets it.",
    },
    Variable {
        name: "ANYWARP_CAPTURE_SNAPLEN",
        reader: Reader::Device,
        default: "all",
        value: "BYTES",
        text: "The number of bytes of each packet that a capture contains; all when unset.",
    },
    Variable {
        name: "ANYWARP_CAPTURE_LIMIT",
        reader: Reader::Device,
        default: "1073741824",
        value: "BYTES",
        text: "The largest number of bytes that one process adds to a capture; 1 GiB when unset.",
    },
    Variable {
        name: "ANYWARP_PROFILE",
        reader: Reader::Device,
        default: "auto",
        value: "auto|standard|large",
        text: "The framing of rdma_cm connections; auto when unset. auto: a peer that is not anywarp gets frames of \
               one TCP segment each, which hardware handles best, and two anywarp ends use large frames and private \
               messages. standard: this side does not identify itself as anywarp, so that only standard iWARP is \
               used. large: peers that are not anywarp get large frames too, which software such as the kernel's \
               siw accepts.",
    },
    Variable {
        name: "ANYWARP_LIB",
        reader: Reader::Command,
        default: "../lib/anywarp",
        value: "DIRECTORY",
        text: "The directory in which the command finds libibverbs.so.1 and librdmacm.so.1. When unset, it is \
               ../lib/anywarp relative to the directory of the anywarp program.",
    },
    Variable {
        name: "ANYWARP_PERF_DEVICE",
        reader: Reader::Command,
        default: "first device",
        value: "NAME",
        text: "The RDMA device that `anywarp ping`, `blast` and `bench` measure; the first one when unset.",
    },
    Variable {
        name: "SYSFS_PATH",
        reader: Reader::Abi,
        default: "/sys",
        value: "DIRECTORY",
        text: "The result of ibv_get_sysfs_path, as with the libibverbs of the distribution. Ignored in a program \
               with elevated rights.",
    },
    Variable {
        name: "XDG_RUNTIME_DIR",
        reader: Reader::Shim,
        default: "/tmp",
        value: "DIRECTORY",
        text: "The directory in which the preloaded library of `anywarp run` creates the replacement of \
               /sys/class/infiniband; /tmp when unset or not writable.",
    },
    Variable {
        name: "ANYWARP_SOCKETS",
        reader: Reader::Sockets,
        default: "all prefer",
        value: "RULES|FILE",
        text: "Selects the sockets of a program with libanywarp-sockets.so preloaded that become iWARP streams: \
               rules separated by semicolons, or a file with rules (anywarp-sockets.conf(5)). They come before the \
               rules in sockets.conf of the user and of the machine. When unset, and without these files, a TCP \
               connection is upgraded if its peer is known to support it.",
    },
    Variable {
        name: "ANYWARP_SOCKETS_RULES",
        reader: Reader::Sockets,
        default: "unset",
        value: "RULES",
        text: "Rules that come before those of ANYWARP_SOCKETS and of the files. `anywarp sockets run --rule` sets \
               it.",
    },
    Variable {
        name: "ANYWARP_SOCKETS_TAG",
        reader: Reader::Sockets,
        default: "unset",
        value: "TAG",
        text: "The tag by which a line `program NAME tag TAG` of the rules selects this process. `anywarp sockets \
               run --tag` sets it.",
    },
    Variable {
        name: "ANYWARP_TEST_PANIC",
        reader: Reader::Device,
        default: "unset",
        value: "1",
        text: "Builds with debug assertions only: requests with two reserved identifiers cause an internal error, \
               for tests of its handling.",
    },
];
