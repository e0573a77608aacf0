// SPDX-License-Identifier: Apache-2.0 OR MIT
// librpma: a server exposes a memory region, and a client writes, flushes and reads it. After each write the client sends the length,
// and the server checks the region.

#include <errno.h>
#include <inttypes.h>
#include <librpma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define ADDRESS "127.0.0.1"
#define PORT "7204"
#define REGION (8u << 20)
#define MESSAGE 64u

static const size_t lengths[] = { 1, 8, 4096, 65536 + 3, REGION };

/* The state of the server or of the client. */
struct side {
	struct rpma_peer *peer;
	struct rpma_conn *conn;
	uint8_t *region;
	struct rpma_mr_local *region_mr;
	uint8_t *messages; /* one to send, one to receive */
	struct rpma_mr_local *messages_mr;
};

static void must(int rc, const char *what)
{
	if (rc) {
		fprintf(stderr, "%s: %s\n", what, rpma_err_2str(rc));
		exit(1);
	}
}

static void *pages(size_t length)
{
	void *memory = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED) {
		perror("mmap");
		exit(1);
	}
	return memory;
}

static void fill(uint8_t *bytes, size_t length, unsigned int seed)
{
	for (size_t at = 0; at < length; at++)
		bytes[at] = (uint8_t)(at * 31 + at / 251 + seed);
}

static void must_be(const uint8_t *bytes, size_t length, unsigned int seed, const char *where)
{
	for (size_t at = 0; at < length; at++) {
		if (bytes[at] != (uint8_t)(at * 31 + at / 251 + seed)) {
			fprintf(stderr, "%s: byte %zu of %zu is wrong\n", where, at, length);
			exit(1);
		}
	}
}

static void open_side(struct side *side, enum rpma_util_ibv_context_type type, int usage)
{
	struct ibv_context *device;

	must(rpma_utils_get_ibv_context(ADDRESS, type, &device), "rpma_utils_get_ibv_context");
	must(rpma_peer_new(device, &side->peer), "rpma_peer_new");
	side->region = pages(REGION);
	side->messages = pages(2 * MESSAGE);
	must(rpma_mr_reg(side->peer, side->region, REGION, usage, &side->region_mr), "rpma_mr_reg");
	must(rpma_mr_reg(side->peer, side->messages, 2 * MESSAGE, RPMA_MR_USAGE_SEND | RPMA_MR_USAGE_RECV,
			 &side->messages_mr),
	     "rpma_mr_reg");
}

static void close_side(struct side *side)
{
	must(rpma_conn_delete(&side->conn), "rpma_conn_delete");
	must(rpma_mr_dereg(&side->messages_mr), "rpma_mr_dereg");
	must(rpma_mr_dereg(&side->region_mr), "rpma_mr_dereg");
	must(rpma_peer_delete(&side->peer), "rpma_peer_delete");
}

static void must_come(struct rpma_conn *conn, enum rpma_conn_event wanted)
{
	enum rpma_conn_event event;

	must(rpma_conn_next_event(conn, &event), "rpma_conn_next_event");
	if (event != wanted) {
		fprintf(stderr, "event %s instead of %s\n", rpma_utils_conn_event_2str(event),
			rpma_utils_conn_event_2str(wanted));
		exit(1);
	}
}

static void complete(struct side *side, enum ibv_wc_opcode opcode)
{
	struct rpma_cq *cq;
	struct ibv_wc wc;

	int rc;

	must(rpma_conn_get_cq(side->conn, &cq), "rpma_conn_get_cq");
	/* Several completions may raise only one event. */
	while ((rc = rpma_cq_get_wc(cq, 1, &wc, NULL)) == RPMA_E_NO_COMPLETION)
		must(rpma_cq_wait(cq), "rpma_cq_wait");
	must(rc, "rpma_cq_get_wc");
	if (wc.status != IBV_WC_SUCCESS || wc.opcode != opcode) {
		fprintf(stderr, "completion with opcode %d expected: status %s, opcode %d\n", (int)opcode, ibv_wc_status_str(wc.status),
			(int)wc.opcode);
		exit(1);
	}
}

static void receive(struct side *side)
{
	must(rpma_recv(side->conn, side->messages_mr, MESSAGE, MESSAGE, NULL), "rpma_recv");
}

static void say(struct side *side, const void *words, size_t length)
{
	memcpy(side->messages, words, length);
	must(rpma_send(side->conn, side->messages_mr, 0, MESSAGE, RPMA_F_COMPLETION_ALWAYS, NULL), "rpma_send");
	complete(side, IBV_WC_SEND);
}

/* Waits for a message, and returns it. */
static const uint8_t *receive_message(struct side *side)
{
	complete(side, IBV_WC_RECV);
	return side->messages + MESSAGE;
}

/* The server: sends the descriptor of its region, and checks the region after each write of the client. */
static int serve(int ready)
{
	struct rpma_conn_private_data none = { NULL, 0 };
	struct rpma_conn_req *request;
	struct rpma_ep *ep;
	struct side side;
	uint8_t descriptor[MESSAGE] = { 0 };
	size_t size;

	open_side(&side, RPMA_UTIL_IBV_CONTEXT_LOCAL,
		  RPMA_MR_USAGE_WRITE_DST | RPMA_MR_USAGE_READ_SRC | RPMA_MR_USAGE_FLUSH_TYPE_VISIBILITY);
	must(rpma_ep_listen(side.peer, ADDRESS, PORT, &ep), "rpma_ep_listen");
	if (write(ready, "", 1) != 1)
		return 1;
	must(rpma_ep_next_conn_req(ep, NULL, &request), "rpma_ep_next_conn_req");
	must(rpma_conn_req_recv(request, side.messages_mr, MESSAGE, MESSAGE, NULL), "rpma_conn_req_recv");
	must(rpma_mr_get_descriptor_size(side.region_mr, &size), "rpma_mr_get_descriptor_size");
	must(rpma_mr_get_descriptor(side.region_mr, descriptor), "rpma_mr_get_descriptor");
	none.ptr = descriptor;
	none.len = (uint8_t)size;
	must(rpma_conn_req_connect(&request, &none, &side.conn), "rpma_conn_req_connect");
	must_come(side.conn, RPMA_CONN_ESTABLISHED);
	for (unsigned int turn = 0; turn < sizeof lengths / sizeof *lengths; turn++) {
		const uint8_t *message = receive_message(&side);
		uint64_t length;

		memcpy(&length, message, sizeof length);
		must_be(side.region, length, turn, "the region");
		receive(&side);
		say(&side, "checked", 8);
	}
	must_come(side.conn, RPMA_CONN_CLOSED);
	must(rpma_conn_disconnect(side.conn), "rpma_conn_disconnect");
	close_side(&side);
	must(rpma_ep_shutdown(&ep), "rpma_ep_shutdown");
	return 0;
}

static void use(void)
{
	struct rpma_conn_private_data told;
	struct rpma_mr_remote *remote;
	struct rpma_conn_req *request;
	struct side side;
	uint64_t eight;

	open_side(&side, RPMA_UTIL_IBV_CONTEXT_REMOTE,
		  RPMA_MR_USAGE_WRITE_SRC | RPMA_MR_USAGE_READ_DST);
	must(rpma_conn_req_new(side.peer, ADDRESS, PORT, NULL, &request), "rpma_conn_req_new");
	must(rpma_conn_req_connect(&request, NULL, &side.conn), "rpma_conn_req_connect");
	must_come(side.conn, RPMA_CONN_ESTABLISHED);
	must(rpma_conn_get_private_data(side.conn, &told), "rpma_conn_get_private_data");
	must(rpma_mr_remote_from_descriptor(told.ptr, told.len, &remote), "rpma_mr_remote_from_descriptor");

	for (unsigned int turn = 0; turn < sizeof lengths / sizeof *lengths; turn++) {
		uint64_t length = lengths[turn];

		fill(side.region, length, turn);
		must(rpma_write(side.conn, remote, 0, side.region_mr, 0, length, RPMA_F_COMPLETION_ON_ERROR, NULL),
		     "rpma_write");
		must(rpma_flush(side.conn, remote, 0, length, RPMA_FLUSH_TYPE_VISIBILITY, RPMA_F_COMPLETION_ALWAYS,
				NULL),
		     "rpma_flush");
		complete(&side, IBV_WC_RDMA_READ);

		memset(side.region, 0, length);
		must(rpma_read(side.conn, side.region_mr, 0, remote, 0, length, RPMA_F_COMPLETION_ALWAYS, NULL),
		     "rpma_read");
		complete(&side, IBV_WC_RDMA_READ);
		must_be(side.region, length, turn, "the bytes that were read");

		receive(&side);
		say(&side, &length, sizeof length);
		if (memcmp(receive_message(&side), "checked", 8)) {
			fprintf(stderr, "the client received an unexpected message\n");
			exit(1);
		}
	}
	eight = UINT64_C(0x0123456789abcdef);
	memcpy(side.region, &eight, sizeof eight);
	must(rpma_atomic_write(side.conn, remote, 0, (const char *)side.region, RPMA_F_COMPLETION_ALWAYS, NULL),
	     "rpma_atomic_write");
	complete(&side, IBV_WC_RDMA_WRITE);
	memset(side.region, 0, sizeof eight);
	must(rpma_read(side.conn, side.region_mr, 0, remote, 0, sizeof eight, RPMA_F_COMPLETION_ALWAYS, NULL), "rpma_read");
	complete(&side, IBV_WC_RDMA_READ);
	if (memcmp(side.region, &eight, sizeof eight)) {
		fprintf(stderr, "the read after the atomic write returned another value\n");
		exit(1);
	}
	must(rpma_mr_remote_delete(&remote), "rpma_mr_remote_delete");
	must(rpma_conn_disconnect(side.conn), "rpma_conn_disconnect");
	must_come(side.conn, RPMA_CONN_CLOSED);
	close_side(&side);
}

int main(void)
{
	int ready[2], status;
	char byte;
	pid_t server;

	if (pipe(ready) || (server = fork()) < 0) {
		perror("fork");
		return 1;
	}
	if (server == 0) {
		close(ready[0]);
		return serve(ready[1]);
	}
	close(ready[1]);
	if (read(ready[0], &byte, 1) != 1) {
		fprintf(stderr, "the server has not started\n");
		return 1;
	}
	use();
	if (waitpid(server, &status, 0) != server || status != 0) {
		fprintf(stderr, "the server ended with status %#x\n", (unsigned int)status);
		return 1;
	}
	printf("equal %zu\n", sizeof lengths / sizeof *lengths);
	return 0;
}
