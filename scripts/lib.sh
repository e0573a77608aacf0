# SPDX-License-Identifier: Apache-2.0 OR MIT
# Functions of the other scripts: headings, and installation of missing packages. This file is sourced.

say() { printf '\n==> %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# Runs a command as root, with sudo if necessary.
as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "this needs root, and sudo is not installed; run as root once: $*"
    fi
}

# need_debian PROBE=PACKAGE...: installs the Debian packages whose probe is missing. A probe with a slash is a file, any other a
# program.
need_debian() {
    local entry probe package missing=()
    for entry; do
        probe=${entry%%=*} package=${entry#*=}
        case $probe in
        */*) [ -e "$probe" ] || missing+=("$package") ;;
        *) PATH=$PATH:/usr/sbin:/sbin command -v "$probe" >/dev/null || missing+=("$package") ;;
        esac
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    command -v apt-get >/dev/null || die "these packages are missing, and can be installed only on Debian or Ubuntu: ${missing[*]}"
    say "installing ${missing[*]}"
    as_root apt-get update -q
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "${missing[@]}"
}

# Checks that Rust is new enough for the workspace.
need_rust() {
    local wanted have
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
    [ -x "$HOME/.cargo/bin/cargo" ] && PATH=$HOME/.cargo/bin:$PATH
    command -v cargo >/dev/null || die "no cargo: install Rust $wanted or newer (https://rustup.rs)"
    have=$(cargo --version | awk '{print $2}')
    [ "$(printf '%s\n' "$wanted" "$have" | sort -V | head -n 1)" = "$wanted" ] ||
        die "cargo $have is too old: Rust $wanted or newer is needed (https://rustup.rs)"
}

# Installs a nightly Rust if necessary, for sanitizers and fuzzing.
need_nightly() {
    cargo +nightly --version >/dev/null 2>&1 || rustup toolchain install nightly --profile minimal ||
        die "sanitizers and fuzzing need a nightly Rust: rustup toolchain install nightly"
}

# Packages for building, and those of scripts/demo.
BUILD_PACKAGES=(cc=gcc ld=binutils /usr/include/stdio.h=libc6-dev
    /usr/include/infiniband/verbs.h=libibverbs-dev /usr/include/rdma/rdma_cma.h=librdmacm-dev)
PROGRAM_PACKAGES=(ibv_devinfo=ibverbs-utils rping=rdmacm-utils ib_write_bw=perftest qperf=qperf ip=iproute2
    unshare=util-linux setpriv=util-linux stdbuf=coreutils)
# Further packages for the tests: rdma-core's own tests, tshark, middleware.
TEST_PACKAGES=(/usr/lib/python3/dist-packages/pytest=python3-pytest /usr/share/doc/python3-venv=python3-venv tshark=tshark gunzip=gzip /usr/lib/python3/dist-packages/pyverbs=python3-pyverbs
    redis-server=redis-server redis-cli=redis-tools /usr/sbin/nginx=nginx-light curl=curl wget=wget
    memcached=memcached iperf3=iperf3 /usr/sbin/sshd=openssh-server ssh=openssh-client /usr/sbin/haproxy=haproxy socat=socat ab=apache2-utils
    sipp=sip-tester sockperf=sockperf ffmpeg=ffmpeg wrk=wrk /usr/share/doc/postgresql=postgresql
    cvlc=vlc-bin /usr/share/doc/vlc-plugin-base=vlc-plugin-base
    ucx_perftest=ucx-utils fi_pingpong=libfabric-bin /usr/include/rdma/fabric.h=libfabric-dev fio=fio mpiexec.mpich=mpich mpicc.mpich=libmpich-dev
    mpiexec.openmpi=openmpi-bin mpicc.openmpi=libopenmpi-dev
    pkg-config=pkg-config cmake=cmake)
# Packages that create root file systems of other releases.
TREE_PACKAGES=(mmdebstrap=mmdebstrap unshare=util-linux
    /usr/share/keyrings/debian-archive-keyring.gpg=debian-archive-keyring)
# Packages that build and run the guest of tests/interop.
INTEROP_PACKAGES=(qemu-system-x86_64=qemu-system-x86 gcc-12=gcc-12 make=make cpio=cpio xz=xz-utils
    tcpdump=tcpdump tshark=tshark)
# The software of other projects in tests/adopters, and what builds it.
ADOPTER_PACKAGES=(/usr/share/doc/python3-venv=python3-venv c++=g++ cmake=cmake /usr/include/gloo/config.h=libgloo-dev
    /usr/include/librpma.h=librpma-dev dtest=dapl2-utils tgtd=tgt iscsi-readcapacity16=libiscsi-bin qemu-io=qemu-utils qemu-system-x86_64=qemu-system-x86
    /usr/share/doc/qemu-block-extra=qemu-block-extra /usr/share/doc/libclang1-14=libclang1-14
    /usr/share/doc/libclang-common-14-dev=libclang-common-14-dev)
