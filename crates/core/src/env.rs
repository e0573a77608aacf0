//! Every environment variable that a part of the product reads: the table that the manual pages are made from.

/// Which part reads a variable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// The device: once, when it is first used.
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

/// All variables, in the order of the manual.
pub const VARIABLES: &[Variable] = &[
    Variable {
        name: "ANYWARP_LOG",
        reader: Reader::Device,
        default: "off",
        value: "error|warn|info|debug|trace",
        text: "How much the device writes to stderr. Nothing when unset. The level info names connections and \
               why they ended; debug adds each work request and trace each frame.",
    },
    Variable {
        name: "ANYWARP_ADDR",
        reader: Reader::Device,
        default: "first address",
        value: "ADDRESS",
        text: "The IPv4 or IPv6 address of this machine that becomes GID 0, the address that most programs \
               use. When unset it is the first IPv4 address, or else the first IPv6 address, of an interface \
               that is up and not the loopback; on a machine without one, that of the loopback. All other \
               addresses follow as GID 1, 2 and so on; link-local addresses are left out.",
    },
    Variable {
        name: "ANYWARP_PORTS",
        reader: Reader::Device,
        default: "tcp",
        value: "tcp|apart",
        text: "Whether a listener of rdma_cm also has the TCP port of its number, if that is free; tcp when unset. Peers \
               that are not anywarp need it to find the listener. A plain socket of a program that runs on the device \
               gets the port all the same: the listener moves. Set apart where a program that does not run on \
               the device wants TCP ports of the same numbers, and all peers are anywarp.",
    },
    Variable {
        name: "ANYWARP_FACE",
        reader: Reader::Device,
        default: "roce",
        value: "roce|iwarp|ib",
        text: "What the device calls itself; roce when unset. It changes only what queries report, for \
               programs that behave differently by type. What travels is the same.",
    },
    Variable {
        name: "ANYWARP_DEVICE_PROFILE",
        reader: Reader::Device,
        default: "anywarp",
        value: "anywarp|siw|rxe|mlx5|efa",
        text: "A device whose limits are shown and enforced, and whose missing features are missing, so that \
               code can be tried against it: Linux's software iWARP (siw) or software RoCE (rxe), a \
               ConnectX-6 Dx (mlx5), an Elastic Fabric Adapter without SRD (efa). `anywarp run --profile` sets it. \
               What travels is the same. With another value the device does not open.",
    },
    Variable {
        name: "ANYWARP_CRC",
        reader: Reader::Device,
        default: "1",
        value: "0|1",
        text: "Whether this side asks for a CRC32C in each frame on TCP; 1 when unset. It is left out only \
               where both sides ask for none.",
    },
    Variable {
        name: "ANYWARP_CARRIER",
        reader: Reader::Device,
        default: "auto",
        value: "tcp|auto|eager",
        text: "What carries reliable connections between two processes of one user on one host, begun over TCP: memory \
               that they share, once a connection has carried some requests (auto, when unset) or from the first on \
               (eager); TCP all the time (tcp). It is TCP also where only one of the two is set to tcp.",
    },
    Variable {
        name: "ANYWARP_PIN",
        reader: Reader::Device,
        default: "0",
        value: "1",
        text: "Registering memory locks its pages, as a card's driver does, within the limit of `ulimit -l`: more is \
               ENOMEM. A page is unlocked with the last region that has it. Regions paged on demand are left alone.",
    },
    Variable {
        name: "ANYWARP_PREFAULT",
        reader: Reader::Device,
        default: "0",
        value: "1",
        text: "Registering memory brings its pages in, so that the first transfer does not wait for them. They are not \
               locked.",
    },
    Variable {
        name: "ANYWARP_CC",
        reader: Reader::Device,
        default: "host's",
        value: "NAME",
        text: "The congestion control of this side's connections over TCP (reno, cubic, bbr, …), of those that \
               net.ipv4.tcp_allowed_congestion_control names; the host's when unset. `anywarp stat` shows it.",
    },
    Variable {
        name: "ANYWARP_GSO",
        reader: Reader::Device,
        default: "1",
        value: "0",
        text: "Datagrams of one length to one peer go to the kernel as one that it, or the card, divides (UDP_SEGMENT); each by \
               itself with 0. This end alone needs it.",
    },
    Variable {
        name: "ANYWARP_GRO",
        reader: Reader::Device,
        default: "1",
        value: "0",
        text: "Datagrams that arrive together come from the kernel as one (UDP_GRO); each by itself with 0. This end alone needs \
               it.",
    },
    Variable {
        name: "ANYWARP_RC",
        reader: Reader::Device,
        default: "tcp",
        value: "tcp|udp",
        text: "What carries reliable connections that programs make by themselves, with ibv_modify_qp: standard iWARP \
               over TCP (when unset), or the reliable datagrams of anywarp over UDP. Both sides have to choose the \
               same. Connections of rdma_cm are always over TCP.",
    },
    Variable {
        name: "ANYWARP_UC",
        reader: Reader::Device,
        default: "udp",
        value: "udp|rd",
        text: "What carries unreliable connections: datagrams that may be lost (when unset), or reliable ones. Both \
               sides have to choose the same.",
    },
    Variable {
        name: "ANYWARP_FAULTS",
        reader: Reader::Device,
        default: "none",
        value: "SPEC|@FILE",
        text: "What is to go wrong, for trying how a program takes it: settings of the link such as \
               loss=0.01,dup=0.01,reorder=0.01,corrupt=0.01,kill=0.001,delay=5ms,jitter=1ms,rate=10MB/s,dir=both,seed=7, \
               and rules such as 'op=send nth=3 -> error=remote-access'. The same seed brings the same faults. Each is \
               logged at the level info, and a summary is written to stderr at exit unless it says summary=off. \
               `anywarp run --faults` sets it, after a check; with a text that cannot be understood the device does not \
               open.",
    },
    Variable {
        name: "ANYWARP_FAULTS_FILE",
        reader: Reader::Device,
        default: "none",
        value: "FILE",
        text: "A file with what ANYWARP_FAULTS may say. One of the two can be set.",
    },
    Variable {
        name: "ANYWARP_STAT",
        reader: Reader::Device,
        default: "0",
        value: "0|1",
        text: "Whether `anywarp stat PID` may ask the program for the counters of its queue pairs; 0 when unset. With 1 \
               the device listens on an abstract socket, anywarp-stat-PID, for processes of the same user.",
    },
    Variable {
        name: "ANYWARP_CAPTURE",
        reader: Reader::Device,
        default: "none",
        value: "FILE",
        text: "Appends what the device sends and receives to this pcapng file, which is made with mode 0600. A symbolic \
               link, a file of another user and a file with further names are refused. `anywarp capture` sets it.",
    },
    Variable {
        name: "ANYWARP_CAPTURE_SNAPLEN",
        reader: Reader::Device,
        default: "all",
        value: "BYTES",
        text: "The number of bytes of a packet that a capture keeps; all when unset.",
    },
    Variable {
        name: "ANYWARP_CAPTURE_LIMIT",
        reader: Reader::Device,
        default: "1073741824",
        value: "BYTES",
        text: "The number of bytes that one process adds to a capture at most; 1 GiB when unset.",
    },
    Variable {
        name: "ANYWARP_PROFILE",
        reader: Reader::Device,
        default: "auto",
        value: "auto|standard|large",
        text: "How peers on rdma_cm connections are spoken to; auto when unset. Then a peer that is not anywarp gets \
               frames that fill one TCP segment each and begin with it, as hardware likes them, and two anywarp \
               ends use large frames and messages of their own. standard: no peer is let know that \
               this side is anywarp, so that only standard iWARP travels. large: peers that are not anywarp \
               get large frames too; software such as the kernel's siw takes them.",
    },
    Variable {
        name: "ANYWARP_LIB",
        reader: Reader::Command,
        default: "../lib/anywarp",
        value: "DIRECTORY",
        text: "Where the command finds libibverbs.so.1 and librdmacm.so.1. When unset, ../lib/anywarp seen \
               from the folder of the anywarp program.",
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
        text: "What ibv_get_sysfs_path reports, as with the libibverbs of the distribution. Ignored in a program with \
               elevated rights.",
    },
    Variable {
        name: "XDG_RUNTIME_DIR",
        reader: Reader::Shim,
        default: "/tmp",
        value: "DIRECTORY",
        text: "Where the preloaded library of `anywarp run` makes the folder that stands for /sys/class/infiniband; /tmp when \
               unset or not writable.",
    },
    Variable {
        name: "ANYWARP_SOCKETS",
        reader: Reader::Sockets,
        default: "all prefer",
        value: "RULES|FILE",
        text: "Which sockets of a program with libanywarp-sockets.so preloaded become iWARP streams: rules with semicolons \
               between them, or a file with rules (anywarp-sockets.conf(5)). They come before those of the user's and the machine's \
               sockets.conf. When unset, and without these files, all TCP connections are upgraded whose peers are \
               known to understand it.",
    },
    Variable {
        name: "ANYWARP_SOCKETS_RULES",
        reader: Reader::Sockets,
        default: "unset",
        value: "RULES",
        text: "Rules that are looked at before those of ANYWARP_SOCKETS and of the files. `anywarp sockets run --rule` sets it.",
    },
    Variable {
        name: "ANYWARP_SOCKETS_TAG",
        reader: Reader::Sockets,
        default: "unset",
        value: "TAG",
        text: "The tag by which a line `program NAME tag TAG` of the rules selects this process. `anywarp sockets run --tag` sets \
               it.",
    },
    Variable {
        name: "ANYWARP_TEST_PANIC",
        reader: Reader::Device,
        default: "unset",
        value: "1",
        text: "Builds with debug assertions only: requests with two reserved identifiers cause an internal error, for tests \
               of what follows.",
    },
];
