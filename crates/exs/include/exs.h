/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Extended sockets: asynchronous sockets with zero copy over any RDMA device. See exs(7). */
#ifndef EXS_H
#define EXS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EXS_VERSION1 1
#define EXS_VERSION EXS_VERSION1

typedef int exs_qhandle_t;
typedef int exs_mhandle_t;
typedef intptr_t exs_ahandle_t;

#define EXS_QHANDLE_INVALID (-1)
#define EXS_MHANDLE_INVALID (-1)
#define EXS_MHANDLE_UNREGISTERED (-2)

#define EXS_MRF_SHARED 1

/* Flags of transfers */
#define EXS_PERSISTENT 1
#define EXS_PERSISTENT_NOTIFY 3
#define EXS_MSG_WAITALL 4

/* Flags in events of transfers */
#define EXS_MSG_TRUNC 0x100
#define EXS_MSG_MORE 0x200

/* exs_cancel: all operations of the socket, or those with the application handle */
#define EXS_CAF_FILDES 1
#define EXS_CAF_AHANDLE 2

#define EXS_SHUT_WR 1

/* Commands of exs_fcntl, with an int argument. The settings of commands 1, 3, 5 and 11 must be set before the socket is connected. */
#define EXS_F_SETCREDITS 1
#define EXS_F_GETCREDITS 2
#define EXS_F_SETSMALLPACKET 3
#define EXS_F_GETSMALLPACKET 4
#define EXS_F_SETSTREAMBUFFER 5
#define EXS_F_GETSTREAMBUFFER 6
#define EXS_F_SETCONNECTTIMEOUT 7 /* milliseconds */
#define EXS_F_GETCONNECTTIMEOUT 8
#define EXS_F_SETLINGER 9 /* milliseconds: how long exs_close_async waits for the peer */
#define EXS_F_GETLINGER 10
#define EXS_F_SETRECVADVERT 11 /* 1: receives may be advertised to the peer, 0: not; before the connection */
#define EXS_F_GETRECVADVERT 12

/* Options, set with exs_fcntl */
#define SO_ASYNC_RECV_ORDERED 100
#define SO_ASYNC_SEND_TIMEOUT 101 /* milliseconds; 0: no limit */
#define SO_ASYNC_RECV_TIMEOUT 102
#define EXS_TIMEOUT_ONCE (1 << 30) /* added to a time limit above: the limit applies only to the next operation */

/* Attributes of queues */
#define EXS_QATTR_DEPTH 1      /* int */
#define EXS_QATTR_SIGNAL 2     /* exs_signal_t */
#define EXS_QATTR_EVENTS 3     /* int: number of queued events; read-only */
#define EXS_QATTR_WAIT 4       /* int */
#define EXS_QATTR_FD 100       /* int: a descriptor that is readable while there are events; read-only */
#define EXS_QATTR_COUNTERS 101 /* exs_counters_t of the process; read-only */

#define EXS_WAIT_ADAPTIVE 1
#define EXS_WAIT_NOTIFY 2
#define EXS_WAIT_BUSY_POLL 3

#define EXS_SIG_DISABLE 0
#define EXS_SIG_ENABLE 1

typedef struct exs_signal {
	int exs_signo;
	int exs_mode;
} exs_signal_t;

typedef struct exs_counters {
	uint64_t exs_copied; /* bytes that the library copied */
	uint64_t exs_direct; /* bytes that a device transferred without a copy, by RDMA requests that this process posted */
} exs_counters_t;

typedef struct exs_iovec {
	void *iov_base;
	size_t iov_len;
	exs_mhandle_t iov_mhandle;
} exs_iovec_t;

typedef struct exs_msghdr {
	void *msg_name;
	socklen_t msg_namelen;
	exs_iovec_t *msg_iov;
	int msg_iovlen;
	void *msg_control;
	socklen_t msg_controllen;
	int msg_flags;
} exs_msghdr_t;

#define EXS_IOVEC 1
#define EXS_FDVEC 2

/* EXS_IOVEC: memory, in xv_iov. EXS_FDVEC: xv_iov.iov_len bytes of a file. */
typedef struct exs_fdvec {
	int xv_kind;
	int xv_fd;
	int64_t xv_offset;
	exs_iovec_t xv_iov;
} exs_fdvec_t;

typedef struct exs_xferfile {
	exs_fdvec_t *xf_vec;
	int xf_veclen; /* 1 to 8 */
} exs_xferfile_t;

typedef struct exs_acceptaddr {
	struct sockaddr *exs_addr;
	socklen_t exs_addrlen;
} exs_acceptaddr_t;

#define EXS_POLLIN 1
#define EXS_POLLOUT 4

typedef struct exs_pollfd {
	int fd;
	short events;
	short revents;
} exs_pollfd_t;

enum {
	EXS_EVT_POLL = 1,
	EXS_EVT_CONNECT,
	EXS_EVT_ACCEPT,
	EXS_EVT_SEND,
	EXS_EVT_RECV,
	EXS_EVT_SENDMSG,
	EXS_EVT_RECVMSG,
	EXS_EVT_SENDFILE,
	EXS_EVT_SENDTIMEOUT,
	EXS_EVT_RECVTIMEOUT,
	EXS_EVT_SHUTDOWN,
	EXS_EVT_CLOSE
};

#define EXS_EVTVEC_MAX 1024

typedef struct exs_evt_accept {
	int exs_evt_newfd;
	struct sockaddr *exs_evt_addr;
	socklen_t exs_evt_addrlen;
} exs_evt_accept_t;

typedef struct exs_evt_xfer {
	void *exs_evt_buffer;
	size_t exs_evt_length;
	int exs_evt_flags;
	int exs_evt_count; /* with EXS_MSG_MORE: how often the peer has read the memory since the previous such event */
	uint64_t exs_evt_offset;
} exs_evt_xfer_t;

typedef struct exs_evt_xfermsg {
	exs_msghdr_t *exs_evt_msg;
	size_t exs_evt_length;
	int exs_evt_flags;
} exs_evt_xfermsg_t;

typedef struct exs_evt_xferfile {
	exs_xferfile_t *exs_evt_xf;
	size_t exs_evt_length;
} exs_evt_xferfile_t;

typedef struct exs_evt_poll {
	exs_pollfd_t *exs_evt_fds;
	size_t exs_evt_nfds;
} exs_evt_poll_t;

typedef struct exs_event {
	int exs_evt_type;
	int exs_evt_errno;
	int exs_evt_fd;
	exs_ahandle_t exs_evt_ahandle;
	union {
		exs_evt_accept_t exs_evt_accept;
		exs_evt_xfer_t exs_evt_xfer;
		exs_evt_xfermsg_t exs_evt_xfermsg;
		exs_evt_xferfile_t exs_evt_xferfile;
		exs_evt_poll_t exs_evt_poll;
		uint64_t exs_evt_reserved[6];
	} exs_evt_union;
} exs_event_t;

int exs_init(int version);

exs_qhandle_t exs_qcreate(int depth);
int exs_qdelete(exs_qhandle_t q);
int exs_qdequeue(exs_qhandle_t q, exs_event_t *events, int n, struct timeval *timeout);
int exs_qmodify(exs_qhandle_t q, int attr, void *value, size_t len);
int exs_qstatus(exs_qhandle_t q, int attr, void *value, size_t *len);

exs_mhandle_t exs_mregister(void *addr, size_t len, int flags);
int exs_mderegister(exs_mhandle_t mh, int flags);

int exs_socket(int domain, int type, int protocol);
int exs_bind(int fd, const struct sockaddr *addr, socklen_t len);
int exs_listen(int fd, int backlog);
int exs_accept(int fd, exs_acceptaddr_t *addr, int flags, exs_qhandle_t q, exs_ahandle_t ah);
int exs_connect(int fd, const struct sockaddr *addr, socklen_t len, int flags, exs_qhandle_t q, exs_ahandle_t ah);
int exs_shutdown(int fd, int how, exs_qhandle_t q, exs_ahandle_t ah);
int exs_close(int fd);
int exs_close_async(int fd, exs_qhandle_t q, exs_ahandle_t ah);
int exs_getsockname(int fd, struct sockaddr *addr, socklen_t *len);
int exs_getpeername(int fd, struct sockaddr *addr, socklen_t *len);
int exs_fcntl(int fd, int cmd, ...);

int exs_send(int fd, const void *buf, size_t len, int flags, exs_qhandle_t q, exs_ahandle_t ah, exs_mhandle_t mh);
int exs_recv(int fd, void *buf, size_t len, int flags, exs_qhandle_t q, exs_ahandle_t ah, exs_mhandle_t mh);
int exs_send_offset(int fd, const void *buf, size_t len, int flags, exs_qhandle_t q, exs_ahandle_t ah, exs_mhandle_t mh,
		    uint64_t offset);
int exs_recv_offset(int fd, void *buf, size_t len, int flags, exs_qhandle_t q, exs_ahandle_t ah, exs_mhandle_t mh,
		    uint64_t offset);
int exs_sendmsg(int fd, const exs_msghdr_t *msg, int flags, exs_qhandle_t q, exs_ahandle_t ah);
int exs_recvmsg(int fd, exs_msghdr_t *msg, int flags, exs_qhandle_t q, exs_ahandle_t ah);
int exs_sendfile(int fd, exs_xferfile_t *xf, int flags, exs_qhandle_t q, exs_ahandle_t ah);
int exs_poll(exs_pollfd_t *fds, int nfds, int flags, exs_qhandle_t q, exs_ahandle_t ah);
int exs_cancel(int fd, int flags, exs_ahandle_t ah);

#ifdef __cplusplus
}
#endif
#endif
