// SPDX-License-Identifier: Apache-2.0 OR MIT
// One end of a connection between two implementations, for tests that the distribution's programs cannot do. The same
// program runs at both ends, with the same options:
//
//   peer server|client ADDRESS PORT [KEY=VALUE…]
//
//   data=N        bytes of private data in request and reply                                    (default 0)
//   ird=N ord=N   Reads that this end serves and issues at the same time                        (1)
//   size=N        bytes of each message, Write and Read                                         (1000)
//   rounds=N      Write, Read, Send from the client, and the same from the server               (2)
//   bad=WHAT      a protocol violation after the rounds: write-bounds, write-stag, read-stag, send-long, send-none,
//                 invalidated (a Write to memory that a Send has invalidated)
//   by=END        the end that violates the protocol: client, server                            (client)
//   rest=1        operations that siw lacks: atomics, Writes with immediate data, invalidating and soliciting Sends (0)
//   end=HOW       disconnect, abort (the client dies in the middle of a Write)                  (disconnect)
//   reject=1      the server rejects the connection
//
// Prints one line for each event. Compares all received data with the sent data.

#include <endian.h>
#include <errno.h>
#include <netdb.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { DEADLINE = 12000, DEPTH = 16, ROOM = 4096 };

struct hello { // the first message of each end
    uint64_t addr;
    uint32_t rkey, size;
};

static struct {
    bool server, reject, rest;
    const char *address, *port, *bad, *by, *end;
    int data, ird, ord, size, rounds;
} opt = {.bad = "", .by = "client", .end = "disconnect", .ird = 1, .ord = 1, .size = 1000, .rounds = 2};

static struct rdma_event_channel *channel;
static struct rdma_cm_id *id;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mine, *work, *box; // memory for the peer; for sends and Reads; for receives
static struct hello peer;
static int reads; // the maximum of outstanding Reads

static void fail(const char *format, ...) {
    va_list list;
    va_start(list, format);
    printf("WRONG: ");
    vprintf(format, list);
    printf("\n");
    va_end(list);
    exit(1);
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static void fill(void *to, int n, int seed) {
    for (int i = 0; i < n; i++) ((uint8_t *)to)[i] = (uint8_t)((i + i / 251 + seed) * 7 + 1);
}

static void compare(const void *what, int n, int seed, const char *name) {
    for (int i = 0; i < n; i++) {
        uint8_t want = (uint8_t)((i + i / 251 + seed) * 7 + 1), got = ((const uint8_t *)what)[i];
        if (got != want) fail("%s: byte %d of %d is %02x, not %02x", name, i, n, got, want);
    }
}

static bool is_siw(void) { return !strncmp(ibv_get_device_name(id->verbs->device), "siw", 3); }

// ------------------------------------------------------------------ events and completions

static struct rdma_cm_event *next_event(void) {
    struct pollfd p = {.fd = channel->fd, .events = POLLIN};
    if (poll(&p, 1, DEADLINE) != 1) fail("no event");
    struct rdma_cm_event *event;
    if (rdma_get_cm_event(channel, &event)) fail("rdma_get_cm_event: %s", strerror(errno));
    return event;
}

static struct rdma_cm_event *await(enum rdma_cm_event_type type) {
    struct rdma_cm_event *event = next_event();
    if (event->event != type)
        fail("%s (%d) in place of %s", rdma_event_str(event->event), event->status, rdma_event_str(type));
    return event;
}

static void await_only(enum rdma_cm_event_type type) { rdma_ack_cm_event(await(type)); }

static struct ibv_wc next_wc(const char *what) {
    struct ibv_wc wc;
    for (int64_t end = now() + DEADLINE; now() < end; usleep(100)) {
        int n = ibv_poll_cq(cq, 1, &wc);
        if (n < 0) fail("ibv_poll_cq");
        if (n == 1 && wc.wr_id != 3) return wc;
    }
    fail("no completion of %s", what);
    abort();
}

static struct ibv_wc good_wc(const char *what) {
    struct ibv_wc wc = next_wc(what);
    if (wc.status) fail("%s: %s", what, ibv_wc_status_str(wc.status));
    return wc;
}

// ------------------------------------------------------------------ work requests

// Unsignaled requests have wr_id 3, and their completions are ignored. If the connection ends right after such a request was sent, siw
// may report the request as failed. It may also report the receive of an answer before the request that was answered.

static void receive(int size) {
    struct ibv_sge sge = {.addr = (uintptr_t)box->addr, .length = (uint32_t)size, .lkey = box->lkey};
    struct ibv_recv_wr wr = {.wr_id = 1, .sg_list = &sge, .num_sge = 1}, *bad;
    if (ibv_post_recv(id->qp, &wr, &bad)) fail("ibv_post_recv");
}

static void post(enum ibv_wr_opcode opcode, int from, int size, uint64_t to, uint32_t rkey, bool unsignaled) {
    struct ibv_sge sge = {.addr = (uintptr_t)work->addr + (uint64_t)from, .length = (uint32_t)size, .lkey = work->lkey};
    struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = 1, .opcode = opcode}, *bad;
    wr.wr_id = unsignaled ? 3 : 2;
    wr.send_flags = unsignaled ? 0 : IBV_SEND_SIGNALED;
    wr.wr.rdma.remote_addr = to;
    wr.wr.rdma.rkey = rkey;
    if (opcode == IBV_WR_SEND_WITH_INV) wr.invalidate_rkey = rkey;
    int e = ibv_post_send(id->qp, &wr, &bad);
    if (e) fail("ibv_post_send: %s", strerror(e));
}

// Waits for two completions in any order: those of our Send and of the answer.
static void both(const char *what, uint32_t length) {
    for (int i = 0; i < 2; i++) {
        struct ibv_wc wc = good_wc(what);
        if (wc.wr_id == 1 && wc.byte_len != length) fail("%s: %u bytes, not %u", what, wc.byte_len, length);
    }
}

static void exchange_hellos(void) {
    struct hello us = {.addr = (uintptr_t)mine->addr, .rkey = mine->rkey, .size = (uint32_t)opt.size};
    if (opt.server) {
        good_wc("the client's first message");
        memcpy(&peer, box->addr, sizeof(peer));
        receive(opt.size);
    }
    memcpy(work->addr, &us, sizeof(us));
    post(IBV_WR_SEND, 0, sizeof(us), 0, 0, opt.server);
    if (opt.server) return;
    both("the server's first message", sizeof(us));
    memcpy(&peer, box->addr, sizeof(peer));
    receive(opt.size);
}

// A Write to the peer, as many concurrent Reads of its data as allowed, and a Send.
static void send_round(int round) {
    int seed = 2 * round + opt.server;
    fill(work->addr, opt.size, seed);
    post(IBV_WR_RDMA_WRITE, 0, opt.size, peer.addr, peer.rkey, false);
    good_wc("the Write");
    if (reads) {
        int each = opt.size / reads, n = reads;
        memset((char *)work->addr + opt.size, 0, (size_t)opt.size);
        if (each == 0) each = opt.size, n = 1;
        for (int i = 0; i < n; i++) {
            int size = i == n - 1 ? opt.size - i * each : each;
            post(IBV_WR_RDMA_READ, opt.size + i * each, size, peer.addr + (uint64_t)(i * each), peer.rkey, false);
        }
        for (int i = 0; i < n; i++) good_wc("the Read");
        compare((char *)work->addr + opt.size, opt.size, seed, "the data of the Read");
    }
    post(IBV_WR_SEND, 0, opt.size, 0, 0, opt.server);
}

static void check_round(int round) {
    int seed = 2 * round + !opt.server;
    compare(box->addr, opt.size, seed, "the message");
    compare(mine->addr, opt.size, seed, "the data of the Write");
    receive(opt.size);
}

// The client's last message, after which the server disconnects.
static void finish(void) {
    if (opt.server) {
        good_wc("the last message");
        if (rdma_disconnect(id)) fail("rdma_disconnect: %s", strerror(errno));
    } else {
        post(IBV_WR_SEND, 0, opt.size < 8 ? opt.size : 8, 0, 0, true);
    }
}

static void run_rounds(void) {
    for (int round = 0; round < opt.rounds; round++) {
        if (opt.server) {
            good_wc("the client's message");
            check_round(round);
            send_round(round);
        } else {
            send_round(round);
            both("the server's message", (uint32_t)opt.size);
            check_round(round);
        }
    }
    printf("rounds %d of %d bytes, %d reads at once\n", opt.rounds, opt.size, reads);
}

// ------------------------------------------------------------------ operations that siw lacks

static struct ibv_mr *region(int size, int access);

static const struct {
    enum ibv_wr_opcode opcode;
    bool solicited;
} rest[] = {{IBV_WR_RDMA_WRITE_WITH_IMM, false}, {IBV_WR_RDMA_WRITE_WITH_IMM, true}, {IBV_WR_SEND, true},
            {IBV_WR_SEND_WITH_INV, false},       {IBV_WR_SEND_WITH_INV, true}};
enum { REST = sizeof(rest) / sizeof(rest[0]) };

static uint64_t atomic(enum ibv_wr_opcode opcode, uint64_t compare_add, uint64_t swap) {
    struct ibv_sge sge = {.addr = (uintptr_t)work->addr, .length = 8, .lkey = work->lkey};
    struct ibv_send_wr wr = {.wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = opcode}, *bad;
    wr.send_flags = IBV_SEND_SIGNALED;
    wr.wr.atomic.remote_addr = peer.addr;
    wr.wr.atomic.rkey = peer.rkey;
    wr.wr.atomic.compare_add = compare_add;
    wr.wr.atomic.swap = swap;
    if (ibv_post_send(id->qp, &wr, &bad)) fail("ibv_post_send of an atomic");
    good_wc("the atomic");
    return *(uint64_t *)work->addr;
}

static void do_the_rest(void) {
    uint32_t keys[REST];
    post(IBV_WR_SEND, 0, 8, 0, 0, true);
    good_wc("the server's keys");
    memcpy(keys, box->addr, sizeof(keys));
    receive(opt.size);
    uint64_t was = atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, 5, 0);
    if (was != 1000) fail("fetch and add: %llu, not 1000", (unsigned long long)was);
    was = atomic(IBV_WR_ATOMIC_CMP_AND_SWP, 1005, 7);
    if (was != 1005) fail("compare and swap: %llu, not 1005", (unsigned long long)was);
    was = atomic(IBV_WR_ATOMIC_FETCH_AND_ADD, 0, 0);
    if (was != 7) fail("the value after the swap: %llu, not 7", (unsigned long long)was);
    for (int i = 0; i < REST; i++) {
        struct ibv_sge sge = {.addr = (uintptr_t)work->addr, .length = 40, .lkey = work->lkey};
        struct ibv_send_wr wr = {.wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = rest[i].opcode}, *bad;
        wr.send_flags = IBV_SEND_SIGNALED | (rest[i].solicited ? IBV_SEND_SOLICITED : 0);
        wr.wr.rdma.remote_addr = peer.addr + 8;
        wr.wr.rdma.rkey = peer.rkey;
        if (wr.opcode == IBV_WR_SEND_WITH_INV) wr.invalidate_rkey = keys[i];
        if (wr.opcode == IBV_WR_RDMA_WRITE_WITH_IMM) wr.imm_data = htobe32(0xabcd00 + (uint32_t)i);
        if (ibv_post_send(id->qp, &wr, &bad)) fail("ibv_post_send of request %d", i);
        good_wc("a request of rest=1");
    }
}

// Binds a type 2 window, which a peer may invalidate.
static uint32_t window(void) {
    struct ibv_mr *mr = region(64, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_MW_BIND);
    struct ibv_mw *mw = ibv_alloc_mw(pd, IBV_MW_TYPE_2);
    if (!mw) fail("ibv_alloc_mw: %s", strerror(errno));
    struct ibv_send_wr wr = {.wr_id = 2, .opcode = IBV_WR_BIND_MW, .send_flags = IBV_SEND_SIGNALED}, *bad;
    wr.bind_mw.mw = mw;
    wr.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
    wr.bind_mw.bind_info = (struct ibv_mw_bind_info){mr, (uintptr_t)mr->addr, 64, IBV_ACCESS_REMOTE_WRITE};
    if (ibv_post_send(id->qp, &wr, &bad)) fail("ibv_post_send of a bind");
    good_wc("the bind");
    return wr.bind_mw.rkey;
}

static void take_the_rest(void) {
    uint32_t *keys = work->addr;
    good_wc("the client's message that it is ready");
    receive(opt.size);
    for (int i = 0; i < REST; i++) {
        keys[i] = window();
        receive(opt.size);
    }
    *(uint64_t *)mine->addr = 1000;
    post(IBV_WR_SEND, 0, REST * sizeof(*keys), 0, 0, true);
    for (int i = 0; i < REST; i++) {
        struct ibv_wc wc = good_wc("a message of rest=1");
        bool imm = rest[i].opcode == IBV_WR_RDMA_WRITE_WITH_IMM, inv = rest[i].opcode == IBV_WR_SEND_WITH_INV;
        if (wc.opcode != (imm ? IBV_WC_RECV_RDMA_WITH_IMM : IBV_WC_RECV)) fail("message %d: opcode %d", i, wc.opcode);
        if (imm && (!(wc.wc_flags & IBV_WC_WITH_IMM) || be32toh(wc.imm_data) != 0xabcd00 + (uint32_t)i))
            fail("message %d: flags %x, immediate data %x", i, wc.wc_flags, be32toh(wc.imm_data));
        if (inv && (!(wc.wc_flags & IBV_WC_WITH_INV) || wc.invalidated_rkey != keys[i]))
            fail("message %d: flags %x, invalidated %x", i, wc.wc_flags, wc.invalidated_rkey);
    }
    printf("rest=1 passed\n");
}

// ------------------------------------------------------------------ protocol violations

// The server sent the last message. It must wait until the client has posted its next receive.
static void ready(void) {
    if (strcmp(opt.by, "server") != 0) return;
    if (opt.server) {
        good_wc("the client's message that it is ready");
        receive(opt.size);
    } else {
        post(IBV_WR_SEND, 0, 8, 0, 0, true);
    }
}

static void misbehave(void) {
    // siw sends no Terminate while it is sending other data, and does not report when it has sent its last message. So this
    // end waits.
    if (!is_siw()) usleep(100000);
    fill(work->addr, 2 * opt.size, 1);
    if (!strcmp(opt.bad, "write-bounds"))
        post(IBV_WR_RDMA_WRITE, 0, opt.size, peer.addr + (uint64_t)opt.size, peer.rkey, false);
    else if (!strcmp(opt.bad, "write-stag"))
        post(IBV_WR_RDMA_WRITE, 0, 8, peer.addr, peer.rkey ^ 0x55500, false);
    else if (!strcmp(opt.bad, "read-stag"))
        post(IBV_WR_RDMA_READ, 0, 8, peer.addr, peer.rkey ^ 0x55500, false);
    else if (!strcmp(opt.bad, "send-long"))
        post(IBV_WR_SEND, 0, opt.size + 8, 0, 0, false);
    else if (!strcmp(opt.bad, "send-none")) {
        post(IBV_WR_SEND, 0, 8, 0, 0, true);
        post(IBV_WR_SEND, 0, 8, 0, 0, false);
    } else if (!strcmp(opt.bad, "invalidated")) {
        post(IBV_WR_SEND_WITH_INV, 0, 8, 0, peer.rkey, false);
        good_wc("the Send with Invalidate");
        post(IBV_WR_RDMA_WRITE, 0, 8, peer.addr, peer.rkey, false);
    } else
        fail("bad=%s is unknown", opt.bad);
}

// Waits until all posted requests have completed and the connection has ended. The queue pair must be in ERR.
static void await_the_end(bool culprit) {
    int receives = !strcmp(opt.end, "disconnect") && !*opt.bad && opt.server ? 0 : 1, requests = culprit ? 1 : 0;
    await_only(RDMA_CM_EVENT_DISCONNECTED);
    printf("disconnected\n");
    bool siw = is_siw();
    struct ibv_wc wc;
    for (int64_t end = now() + (siw ? 1000 : DEADLINE); receives + requests > 0; usleep(100)) {
        if (now() > end) {
            // siw does not always flush the requests of a queue pair that it has terminated.
            if (!siw) fail("posted requests do not complete");
            printf("siw keeps %d receives and %d requests\n", receives, requests);
            break;
        }
        if (ibv_poll_cq(cq, 1, &wc) != 1 || wc.wr_id == 3) continue;
        printf("%s: %s\n", wc.wr_id == 1 ? "receive" : "request", ibv_wc_status_str(wc.status));
        *(wc.wr_id == 1 ? &receives : &requests) -= 1;
    }
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    if (ibv_query_qp(id->qp, &attr, IBV_QP_STATE, &init)) fail("ibv_query_qp");
    // siw reports RESET in every state.
    if (attr.qp_state != IBV_QPS_ERR && !siw) fail("the queue pair is in state %d", attr.qp_state);
    printf("over\n");
    if (!culprit) {
        const uint8_t *guard = (uint8_t *)mine->addr + opt.size;
        for (int i = 0; i < ROOM; i++)
            if (guard[i] != 0xee) fail("byte %d behind the registered memory was changed", i);
    }
}

// ------------------------------------------------------------------ the connection

static struct ibv_mr *region(int size, int access) {
    void *at = aligned_alloc(4096, ((size_t)size + 8191) & ~(size_t)4095);
    memset(at, 0xee, (size_t)size);
    struct ibv_mr *mr = ibv_reg_mr(pd, at, (size_t)size, access);
    if (!mr) fail("ibv_reg_mr: %s", strerror(errno));
    return mr;
}

static void prepare(void) {
    pd = ibv_alloc_pd(id->verbs);
    cq = ibv_create_cq(id->verbs, 256, NULL, NULL, 0);
    struct ibv_qp_init_attr attr = {.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC};
    attr.cap = (struct ibv_qp_cap){.max_send_wr = 160, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1};
    if (!pd || !cq || rdma_create_qp(id, pd, &attr)) fail("rdma_create_qp: %s", strerror(errno));
    // The bytes after the registered ones must not change.
    char *at = aligned_alloc(4096, ((size_t)opt.size + ROOM + 8191) & ~(size_t)4095);
    memset(at, 0xee, (size_t)opt.size + ROOM);
    mine = ibv_reg_mr(pd, at, (size_t)opt.size,
                      IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
                          (opt.rest ? IBV_ACCESS_REMOTE_ATOMIC : 0));
    if (!mine) fail("ibv_reg_mr: %s", strerror(errno));
    work = region(2 * opt.size + 64, IBV_ACCESS_LOCAL_WRITE);
    box = region(opt.size + 64, IBV_ACCESS_LOCAL_WRITE);
    receive(opt.size < 64 ? 64 : opt.size);
}

static void check_private_data(struct rdma_cm_event *event, int seed) {
    if (event->param.conn.private_data_len != opt.data)
        fail("%d bytes of private data, not %d", event->param.conn.private_data_len, opt.data);
    compare(event->param.conn.private_data, opt.data, seed, "the private data");
}

static struct rdma_conn_param param(void *data, int seed) {
    fill(data, opt.data, seed);
    return (struct rdma_conn_param){.private_data = opt.data ? data : NULL,
                                    .private_data_len = (uint8_t)opt.data,
                                    .responder_resources = (uint8_t)opt.ird,
                                    .initiator_depth = (uint8_t)opt.ord,
                                    .retry_count = 7,
                                    .rnr_retry_count = 7};
}

static void depths(struct rdma_cm_event *event, const char *what) {
    printf("%s: ird %d ord %d, %d bytes of private data\n", what, event->param.conn.responder_resources,
           event->param.conn.initiator_depth, event->param.conn.private_data_len);
}

static void serve(struct rdma_addrinfo *info) {
    struct rdma_cm_id *listener;
    uint8_t data[256];
    if (rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP) || rdma_bind_addr(listener, info->ai_src_addr) ||
        rdma_listen(listener, 4))
        fail("rdma_listen: %s", strerror(errno));
    struct rdma_cm_event *event = await(RDMA_CM_EVENT_CONNECT_REQUEST);
    id = event->id;
    depths(event, "request");
    check_private_data(event, 1);
    int theirs = event->param.conn.initiator_depth; // our Reads that the client serves
    rdma_ack_cm_event(event);
    struct rdma_conn_param p = param(data, 2);
    if (opt.reject) {
        if (rdma_reject(id, p.private_data, p.private_data_len)) fail("rdma_reject");
        return;
    }
    prepare();
    if (rdma_accept(id, &p)) fail("rdma_accept: %s", strerror(errno));
    await_only(RDMA_CM_EVENT_ESTABLISHED);
    reads = opt.ord < theirs ? opt.ord : theirs;
}

static void ask(struct rdma_addrinfo *info) {
    uint8_t data[256];
    if (rdma_create_id(channel, &id, NULL, RDMA_PS_TCP) || rdma_resolve_addr(id, NULL, info->ai_dst_addr, 2000))
        fail("rdma_resolve_addr: %s", strerror(errno));
    await_only(RDMA_CM_EVENT_ADDR_RESOLVED);
    if (rdma_resolve_route(id, 2000)) fail("rdma_resolve_route: %s", strerror(errno));
    await_only(RDMA_CM_EVENT_ROUTE_RESOLVED);
    prepare();
    struct rdma_conn_param p = param(data, 1);
    if (rdma_connect(id, &p)) fail("rdma_connect: %s", strerror(errno));
    if (opt.reject) {
        struct rdma_cm_event *event = await(RDMA_CM_EVENT_REJECTED);
        // siw loses the private data of the peer if the connection ends at the same time.
        if (event->param.conn.private_data_len || !is_siw()) check_private_data(event, 2);
        printf("rejected\n");
        rdma_ack_cm_event(event);
        return;
    }
    struct rdma_cm_event *event = await(RDMA_CM_EVENT_ESTABLISHED);
    depths(event, "reply");
    check_private_data(event, 2);
    reads = opt.ord < event->param.conn.initiator_depth ? opt.ord : event->param.conn.initiator_depth;
    rdma_ack_cm_event(event);
}

static int number(const char *value, int most) {
    char *end;
    long n = strtol(value, &end, 10);
    if (*end || n < 0 || n > most) fail("%s: not a number up to %d", value, most);
    return (int)n;
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc < 4) fail("usage: peer server|client ADDRESS PORT [KEY=VALUE…]");
    opt.server = !strcmp(argv[1], "server");
    opt.address = argv[2];
    opt.port = argv[3];
    for (int i = 4; i < argc; i++) {
        char *value = strchr(argv[i], '=');
        if (!value) fail("%s: not KEY=VALUE", argv[i]);
        *value++ = 0;
        if (!strcmp(argv[i], "data")) opt.data = number(value, 255);
        else if (!strcmp(argv[i], "ird")) opt.ird = number(value, 255);
        else if (!strcmp(argv[i], "ord")) opt.ord = number(value, 255);
        else if (!strcmp(argv[i], "size")) opt.size = number(value, 16 << 20);
        else if (!strcmp(argv[i], "rounds")) opt.rounds = number(value, 1000);
        else if (!strcmp(argv[i], "bad")) opt.bad = value;
        else if (!strcmp(argv[i], "by")) opt.by = value;
        else if (!strcmp(argv[i], "end")) opt.end = value;
        else if (!strcmp(argv[i], "rest")) opt.rest = number(value, 1);
        else if (!strcmp(argv[i], "reject")) opt.reject = number(value, 1);
        else fail("%s: no such key", argv[i]);
    }
    bool culprit = opt.server == !strcmp(opt.by, "server");
    struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP, .ai_flags = opt.server ? RAI_PASSIVE : 0}, *info;
    if (rdma_getaddrinfo(opt.address, opt.port, &hints, &info)) fail("rdma_getaddrinfo: %s", strerror(errno));
    channel = rdma_create_event_channel();
    if (!channel) fail("rdma_create_event_channel: %s", strerror(errno));
    if (opt.server) serve(info);
    else ask(info);
    if (opt.reject) return 0;
    exchange_hellos();
    if (opt.rest && opt.server) take_the_rest();
    else if (opt.rest) do_the_rest();
    run_rounds();
    if (*opt.bad) {
        ready();
        if (culprit) misbehave();
        await_the_end(culprit);
        return 0;
    }
    if (!strcmp(opt.end, "abort") && !opt.server) {
        post(IBV_WR_RDMA_WRITE, 0, opt.size, peer.addr, peer.rkey, false);
        _exit(0);
    }
    if (!strcmp(opt.end, "disconnect")) finish();
    await_the_end(false);
    return 0;
}
