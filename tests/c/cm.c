/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * The connection manager. Both ends are on the loopback interface, in most tests in one process, and the kernel chooses each port.
 *
 * TEST_ADDR and TEST_ADDR6 name other addresses of this host, for a device without loopback.
 */
#include "ends.h"

#include <netdb.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

#define BACKLOG 16
#define NOTHING ((struct rdma_conn_param){ 0 })

static int close_event_channel(void *p)
{
	rdma_destroy_event_channel(p);
	return 0;
}

static int close_id(void *p)
{
	struct rdma_cm_id *id = p;

	if (id->qp)
		rdma_destroy_qp(id);
	return rdma_destroy_id(id) ? errno : 0;
}

static int close_ep(void *p)
{
	rdma_destroy_ep(p);
	return 0;
}

static int close_list(void *p)
{
	rdma_freeaddrinfo(p);
	return 0;
}

static int close_fd(void *p)
{
	return close((int)(intptr_t)p);
}

static const char *new_event_channel(struct rdma_event_channel **channel)
{
	*channel = rdma_create_event_channel();
	ENSURE(*channel, "rdma_create_event_channel: %s", strerror(errno));
	keep(close_event_channel, *channel, "event channel");
	return NULL;
}

static const char *new_id(struct rdma_cm_id **id, struct rdma_event_channel *channel, enum rdma_port_space space)
{
	ENSURE(!rdma_create_id(channel, id, NULL, space), "rdma_create_id: %s", strerror(errno));
	keep(close_id, *id, "rdma_cm_id");
	return NULL;
}

struct address {
	struct sockaddr_storage ss;
};

static struct sockaddr *sa(struct address *a)
{
	return (struct sockaddr *)&a->ss;
}

static const char *own_address(struct address *a, int family, uint16_t port)
{
	const char *text = getenv(family == AF_INET ? "TEST_ADDR" : "TEST_ADDR6");

	memset(a, 0, sizeof *a);
	a->ss.ss_family = (sa_family_t)family;
	if (family == AF_INET) {
		struct sockaddr_in *in = (struct sockaddr_in *)&a->ss;

		in->sin_port = htons(port);
		ENSURE(inet_pton(AF_INET, text ? text : "127.0.0.1", &in->sin_addr) == 1, "TEST_ADDR");
	} else {
		struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&a->ss;

		in6->sin6_port = htons(port);
		ENSURE(inet_pton(AF_INET6, text ? text : "::1", &in6->sin6_addr) == 1, "TEST_ADDR6");
	}
	return NULL;
}

/* A copy of an event, which is valid after the event was acknowledged. */
struct event_copy {
	enum rdma_cm_event_type type;
	int status;
	struct rdma_cm_id *id, *listen_id;
	struct rdma_conn_param conn;
	struct rdma_ud_param ud;
	uint8_t data[256];
	size_t len;
};

/* Gets the next event of a channel, of any type. */
static const char *any_event(struct rdma_event_channel *channel, struct event_copy *t, unsigned int ms)
{
	struct rdma_cm_event *event;
	const void *data;

	TRY(readable(channel->fd, ms));
	ENSURE(!rdma_get_cm_event(channel, &event), "rdma_get_cm_event: %s", strerror(errno));
	*t = (struct event_copy){ .type = event->event, .status = event->status, .id = event->id,
			    .listen_id = event->listen_id, .conn = event->param.conn, .ud = event->param.ud };
	if (event->id->ps == RDMA_PS_UDP) {
		data = event->param.ud.private_data;
		t->len = event->param.ud.private_data_len;
	} else {
		data = event->param.conn.private_data;
		t->len = event->param.conn.private_data_len;
	}
	if (event->event == RDMA_CM_EVENT_ADDR_RESOLVED || event->event == RDMA_CM_EVENT_ROUTE_RESOLVED)
		t->len = 0;
	if (t->len && data)
		memcpy(t->data, data, t->len);
	ENSURE(!rdma_ack_cm_event(event), "rdma_ack_cm_event: %s", strerror(errno));
	return NULL;
}

static const char *event(struct rdma_event_channel *channel, enum rdma_cm_event_type type, struct event_copy *out)
{
	struct event_copy t;

	TRY(any_event(channel, &t, WAIT_MS));
	ENSURE(t.type == type, "event %s (status %d), expected %s", rdma_event_str(t.type), t.status,
	       rdma_event_str(type));
	if (out)
		*out = t;
	return NULL;
}

/* Checks that the private data begins with these bytes. A transport may append zeros. */
static const char *data_is(const struct event_copy *t, const char *text, size_t len)
{
	ENSURE(t->len >= len, "%zu bytes of private data, expected %zu", t->len, len);
	ENSURE(!memcmp(t->data, text, len), "the private data is not that of the peer");
	for (size_t i = len; i < t->len; i++)
		ENSURE(!t->data[i], "byte %zu after the private data is %02x", i, t->data[i]);
	return NULL;
}

static struct ibv_qp_init_attr usual_qp(enum ibv_qp_type type)
{
	return (struct ibv_qp_init_attr){
		.qp_type = type,
		.sq_sig_all = 1,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 },
	};
}

static const char *give_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = usual_qp(id->ps == RDMA_PS_UDP ? IBV_QPT_UD : IBV_QPT_RC);

	ENSURE(!rdma_create_qp(id, NULL, &init), "rdma_create_qp: %s", strerror(errno));
	ENSURE(id->qp && id->pd && id->send_cq && id->recv_cq, "rdma_create_qp does not set all queues");
	return NULL;
}

/* A listener, and the two event channels of the ends. */
struct fixture {
	struct rdma_event_channel *server_channel, *client_channel;
	struct rdma_cm_id *listener, *server, *client;
	struct address address;
	int family;
};

static const char *listen_at(struct fixture *s, int family, enum rdma_port_space space)
{
	memset(s, 0, sizeof *s);
	s->family = family;
	TRY(new_event_channel(&s->server_channel));
	TRY(new_event_channel(&s->client_channel));
	TRY(new_id(&s->listener, s->server_channel, space));
	TRY(own_address(&s->address, family, 0));
	ENSURE(!rdma_bind_addr(s->listener, sa(&s->address)), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(!rdma_listen(s->listener, BACKLOG), "rdma_listen: %s", strerror(errno));
	ENSURE(rdma_get_src_port(s->listener), "rdma_get_src_port gives no port");
	return own_address(&s->address, family, ntohs(rdma_get_src_port(s->listener)));
}

/* Resolves the address and the route of a client id. */
static const char *resolve(struct fixture *s, struct rdma_cm_id *id)
{
	ENSURE(!rdma_resolve_addr(id, NULL, sa(&s->address), 2000), "rdma_resolve_addr: %s", strerror(errno));
	ENSURE(rdma_get_peer_addr(id)->sa_family == sa(&s->address)->sa_family && rdma_get_dst_port(id),
	       "rdma_resolve_addr does not show the destination at once");
	TRY(event(s->client_channel, RDMA_CM_EVENT_ADDR_RESOLVED, NULL));
	ENSURE(id->verbs, "no device for a resolved address");
	ENSURE(!rdma_resolve_route(id, 2000), "rdma_resolve_route: %s", strerror(errno));
	return event(s->client_channel, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL);
}

static const char *new_client(struct fixture *s, enum rdma_port_space space)
{
	TRY(new_id(&s->client, s->client_channel, space));
	TRY(resolve(s, s->client));
	return give_qp(s->client);
}

static struct rdma_conn_param params(const char *data, size_t len)
{
	return (struct rdma_conn_param){
		.private_data = data, .private_data_len = (uint8_t)len,
		.responder_resources = 2, .initiator_depth = 2, .retry_count = 7, .rnr_retry_count = 7,
	};
}

/* Waits for a connection request and creates a queue pair for the new id. */
static const char *requested(struct fixture *s, struct event_copy *t)
{
	TRY(event(s->server_channel, RDMA_CM_EVENT_CONNECT_REQUEST, t));
	ENSURE(t->listen_id == s->listener, "the request belongs to another listener");
	ENSURE(t->id != s->listener, "the request has no new id");
	s->server = t->id;
	keep(close_id, s->server, "accepted rdma_cm_id");
	return give_qp(s->server);
}

/* Connects the client, whose queue pair exists. */
static const char *connect_client(struct fixture *s)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct event_copy t;

	ENSURE(!rdma_connect(s->client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(s, &t));
	ENSURE(!rdma_accept(s->server, &p), "rdma_accept: %s", strerror(errno));
	TRY(event(s->client_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	return event(s->server_channel, RDMA_CM_EVENT_ESTABLISHED, NULL);
}

static const char *connect_both(struct fixture *s)
{
	TRY(new_client(s, RDMA_PS_TCP));
	return connect_client(s);
}

static const char *new_buffer(struct region *r, struct rdma_cm_id *id, size_t len)
{
	return new_region(r, id->pd, len, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ);
}

/* Sends one message and one Write in each direction, with the queues of rdma_create_qp. */
static const char *traffic(struct rdma_cm_id *a, struct rdma_cm_id *b)
{
	struct rdma_cm_id *from = a, *to = b;

	for (int way = 0; way < 2; way++, from = b, to = a) {
		struct region src, dst, target;
		struct ibv_sge sge;
		struct ibv_send_wr wr;
		struct ibv_wc wc;

		TRY(new_buffer(&src, from, 5000));
		TRY(new_buffer(&dst, to, 5000));
		TRY(new_buffer(&target, to, 5000));
		fill_pattern(src.at, 5000, (uint32_t)way);
		sge = sge_of(&dst, 0, 5000);
		TRY(post_recv(to->qp, 1, &sge, 1));
		sge = sge_of(&src, 0, 5000);
		wr = rdma_wr(2, IBV_WR_RDMA_WRITE, &sge, 1, &target, 0);
		TRY(post(from->qp, &wr));
		wr = send_wr(3, IBV_WR_SEND, &sge, 1);
		TRY(post(from->qp, &wr));
		TRY(expect_ok(to->recv_cq, 1, IBV_WC_RECV, &wc));
		TRY(expect_ok(from->send_cq, 2, IBV_WC_RDMA_WRITE, NULL));
		TRY(expect_ok(from->send_cq, 3, IBV_WC_SEND, NULL));
		TRY(same_pattern(dst.at, 5000, (uint32_t)way));
		TRY(same_pattern(target.at, 5000, (uint32_t)way));
	}
	return NULL;
}

static const char *post_any_recv(struct rdma_cm_id *id, uint64_t wr_id)
{
	struct region r;
	struct ibv_sge sge;

	TRY(new_buffer(&r, id, 8));
	sge = sge_of(&r, 0, 8);
	return post_recv(id->qp, wr_id, &sge, 1);
}

/* One side disconnects. Both sides get an event, and posted requests are flushed. */
static const char *disconnect(struct fixture *s)
{
	TRY(post_any_recv(s->server, 8));
	TRY(post_any_recv(s->client, 9));
	ENSURE(!rdma_disconnect(s->client), "rdma_disconnect: %s", strerror(errno));
	TRY(event(s->server_channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
	if (rdma_disconnect(s->server)) /* disconnects this side, unless the connection has ended already */
		ENSURE(errno == EINVAL || errno == ENOTCONN, "rdma_disconnect of the other side: %s", strerror(errno));
	TRY(event(s->client_channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
	TRY(expect_status(s->server->recv_cq, 8, IBV_WC_WR_FLUSH_ERR));
	return expect_status(s->client->recv_cq, 9, IBV_WC_WR_FLUSH_ERR);
}

/* Checks that an id with a resolved route has a path record, with the addresses of the id. */
static const char *has_path(struct rdma_cm_id *id)
{
	const struct ibv_sa_path_rec *path = id->route.path_rec;
	const struct rdma_ib_addr *addr = &id->route.addr.addr.ibaddr;

	if (id->verbs->device->transport_type != IBV_TRANSPORT_IB)
		return NULL; /* iWARP has no path records */
	ENSURE(id->route.num_paths >= 1 && path, "%d paths, path record %p", id->route.num_paths, (const void *)path);
	ENSURE(!memcmp(&path->sgid, &addr->sgid, sizeof path->sgid), "the source of the path is another GID");
	ENSURE(!memcmp(&path->dgid, &addr->dgid, sizeof path->dgid), "the destination of the path is another GID");
	ENSURE(path->pkey == addr->pkey && path->mtu && path->rate && path->packet_life_time,
	       "pkey %#x, mtu %u, rate %u, packet lifetime %u", path->pkey, path->mtu, path->rate, path->packet_life_time);
	return NULL;
}

/* An id with a resolved route has a path record, and so has the id of a connection request. */
static const char *path_records(size_t space)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct event_copy t;
	struct fixture s;

	TRY(listen_at(&s, AF_INET, (enum rdma_port_space)space));
	TRY(new_client(&s, (enum rdma_port_space)space));
	TRY(has_path(s.client));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	return space == RDMA_PS_TCP ? has_path(s.server) : NULL;
}

/* RDMA_OPTION_IB_PATH takes the place of rdma_resolve_route: the same event follows, and the id can be connected. */
static const char *set_path(size_t arg)
{
	struct ibv_path_data data = { .flags = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL };
	struct rdma_conn_param p = params(NULL, 0);
	struct event_copy t;
	struct fixture s;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_id(&s.client, s.client_channel, RDMA_PS_TCP));
	ENSURE(rdma_set_option(s.client, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &data, sizeof data) == -1,
	       "the path of a fresh id can be set");
	ENSURE(!rdma_resolve_addr(s.client, NULL, sa(&s.address), 2000), "rdma_resolve_addr: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_ADDR_RESOLVED, NULL));
	TRY(give_qp(s.client));
	data.path.sgid = s.client->route.addr.addr.ibaddr.sgid;
	data.path.dgid = s.client->route.addr.addr.ibaddr.dgid;
	data.path.pkey = s.client->route.addr.addr.ibaddr.pkey;
	data.path.reversible_numpath = 0x81;
	ENSURE(rdma_set_option(s.client, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &data, sizeof data - 1) == -1 &&
	       errno == EINVAL, "a path of another length: %s", strerror(errno));
	data.flags = IBV_PATH_FLAG_ALTERNATE;
	ENSURE(rdma_set_option(s.client, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &data, sizeof data) == -1 && errno == EINVAL,
	       "only an alternate path: %s", strerror(errno));
	data.flags = IBV_PATH_FLAG_GMP | IBV_PATH_FLAG_PRIMARY | IBV_PATH_FLAG_BIDIRECTIONAL;
	ENSURE(!rdma_set_option(s.client, RDMA_OPTION_IB, RDMA_OPTION_IB_PATH, &data, sizeof data), "path: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	ENSURE(!rdma_accept(s.server, &p), "rdma_accept: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	TRY(event(s.server_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	return traffic(s.client, s.server);
}

static const char *connect_and_talk(size_t family)
{
	struct fixture s;

	TRY(listen_at(&s, (int)family, RDMA_PS_TCP));
	TRY(connect_both(&s));
	TRY(traffic(s.client, s.server));
	if (s.server->verbs->device->transport_type == IBV_TRANSPORT_IB)
		ENSURE(rdma_notify(s.server, IBV_EVENT_COMM_EST) == -1 && errno == EISCONN,
		       "rdma_notify of a connected id: %s", strerror(errno));
	return disconnect(&s);
}

/* When both ends have disconnected, and some time is over, another event says that the queue pair may be used again. */
static const char *timewait(size_t arg)
{
	struct fixture s;
	struct event_copy t;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(connect_both(&s));
	if (s.client->verbs->device->transport_type != IBV_TRANSPORT_IB)
		return "\001not on a device of type iWARP";
	TRY(disconnect(&s));
	TRY(not_readable(s.client_channel->fd, QUIET_MS));
	TRY(event(s.client_channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, &t));
	ENSURE(t.id == s.client && !t.status, "status %d", t.status);
	TRY(event(s.server_channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, &t));
	ENSURE(t.id == s.server && !t.status, "status %d", t.status);
	rdma_disconnect(s.client);
	return not_readable(s.client_channel->fd, QUIET_MS);
}

/* A call of rdma_disconnect that failed before there was a connection has no effect on the events after it. */
static const char *no_timewait(size_t arg)
{
	struct fixture s;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_id(&s.client, s.client_channel, RDMA_PS_TCP));
	ENSURE(rdma_disconnect(s.client) == -1 && errno == EINVAL, "rdma_disconnect of a fresh id: %s", strerror(errno));
	TRY(resolve(&s, s.client));
	TRY(give_qp(s.client));
	TRY(connect_client(&s));
	ENSURE(!rdma_disconnect(s.server), "rdma_disconnect: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
	/* RDMA_CM_EVENT_TIMEWAIT_EXIT follows only after this end has disconnected too. */
	return not_readable(s.client_channel->fd, 1500);
}

/* Gives an id the queue pair of another one, with its queues, by the public fields. The other id is destroyed. */
static const char *give_moved_qp(struct rdma_cm_id *id, struct rdma_event_channel *channel, int family)
{
	struct rdma_cm_id *other;
	struct address a;

	ENSURE(!rdma_create_id(channel, &other, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	TRY(own_address(&a, family, 0));
	ENSURE(!rdma_bind_addr(other, sa(&a)), "rdma_bind_addr: %s", strerror(errno));
	TRY(give_qp(other));
	id->qp = other->qp;
	id->pd = other->pd;
	id->send_cq = other->send_cq;
	id->recv_cq = other->recv_cq;
	id->send_cq_channel = other->send_cq_channel;
	id->recv_cq_channel = other->recv_cq_channel;
	other->qp = NULL;
	other->send_cq = other->recv_cq = NULL;
	other->send_cq_channel = other->recv_cq_channel = NULL;
	ENSURE(!rdma_destroy_id(other), "rdma_destroy_id: %s", strerror(errno));
	return NULL;
}

/* The queue pair of a connection is that in the public field `qp`, also if the program has moved it there from another id (as uDAPL does). */
static const char *moved_qp(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct event_copy t;
	struct fixture s;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_id(&s.client, s.client_channel, RDMA_PS_TCP));
	TRY(resolve(&s, s.client));
	TRY(give_moved_qp(s.client, s.client_channel, AF_INET));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(event(s.server_channel, RDMA_CM_EVENT_CONNECT_REQUEST, &t));
	s.server = t.id;
	keep(close_id, s.server, "accepted rdma_cm_id");
	TRY(give_moved_qp(s.server, s.server_channel, AF_INET));
	ENSURE(!rdma_accept(s.server, &p), "rdma_accept: %s", strerror(errno));
	ENSURE(!ibv_query_qp(s.server->qp, &attr, IBV_QP_STATE, &init) && attr.qp_state >= IBV_QPS_RTR,
	       "the queue pair is in state %d after rdma_accept", attr.qp_state);
	TRY(event(s.client_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	TRY(event(s.server_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	TRY(traffic(s.client, s.server));
	return disconnect(&s);
}

static const char *server_disconnects(size_t arg)
{
	struct fixture s;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(connect_both(&s));
	TRY(post_any_recv(s.client, 9));
	ENSURE(!rdma_disconnect(s.server), "rdma_disconnect: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
	if (rdma_disconnect(s.client))
		ENSURE(errno == EINVAL || errno == ENOTCONN, "rdma_disconnect: %s", strerror(errno));
	TRY(expect_status(s.client->recv_cq, 9, IBV_WC_WR_FLUSH_ERR));
	return event(s.server_channel, RDMA_CM_EVENT_DISCONNECTED, NULL);
}

/* One side destroys its id without a disconnect. The other side gets an event. */
static const char *peer_destroys_id(size_t arg)
{
	struct fixture s;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(connect_both(&s));
	TRY(post_any_recv(s.server, 9));
	ENSURE(!close_now(s.client), "rdma_destroy_id: %s", strerror(errno));
	TRY(event(s.server_channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
	if (rdma_disconnect(s.server))
		ENSURE(errno == EINVAL || errno == ENOTCONN, "rdma_disconnect: %s", strerror(errno));
	return expect_status(s.server->recv_cq, 9, IBV_WC_WR_FLUSH_ERR);
}

static const char *private_data(size_t len)
{
	static const char hello[] = "0123456789abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJ", answer[] = "welcome";
	struct rdma_conn_param p = params(hello, len);
	struct fixture s;
	struct event_copy t;

	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_client(&s, RDMA_PS_TCP));
	p.responder_resources = 3;
	p.initiator_depth = 1;
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	TRY(data_is(&t, hello, len));
	ENSURE(t.conn.responder_resources == 1, "responder_resources %u, expected the peer's initiator_depth 1",
	       t.conn.responder_resources);
	ENSURE(t.conn.initiator_depth == 3, "initiator_depth %u, expected the peer's responder_resources 3",
	       t.conn.initiator_depth);
	p = params(answer, len < sizeof answer ? len : sizeof answer);
	p.responder_resources = 1;
	p.initiator_depth = 2;
	ENSURE(!rdma_accept(s.server, &p), "rdma_accept: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_ESTABLISHED, &t));
	TRY(data_is(&t, answer, p.private_data_len));
	ENSURE(t.conn.responder_resources == 2, "responder_resources %u, expected what the peer asked for, 2",
	       t.conn.responder_resources);
	ENSURE(t.conn.initiator_depth == 1, "initiator_depth %u, expected what the peer serves, 1",
	       t.conn.initiator_depth);
	TRY(event(s.server_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	return traffic(s.client, s.server);
}

static const char *only_over_tcp(void)
{
	TRY(open_device());
	return strncmp(ibv_get_device_name(device->device), "anywarp", 7) ? "\001only for a device of user space over TCP"
									   : NULL;
}

static const char *reject(size_t len)
{
	static const char no[] = "no, and this is why";
	struct rdma_conn_param p = params(NULL, 0);
	struct fixture s;
	struct event_copy t;

	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_client(&s, RDMA_PS_TCP));
	TRY(post_any_recv(s.client, 9));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(event(s.server_channel, RDMA_CM_EVENT_CONNECT_REQUEST, &t));
	keep(close_id, t.id, "requested rdma_cm_id");
	ENSURE(!rdma_reject(t.id, len ? no : NULL, (uint8_t)len), "rdma_reject: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_REJECTED, &t));
	ENSURE(t.status, "rejected with status 0");
	/* Over TCP the Reply says how many Reads the peer would have served. */
	if (!only_over_tcp())
		ENSURE(t.conn.initiator_depth, "the rejection does not say how many Reads the peer serves");
	TRY(data_is(&t, no, len));
	TRY(expect_status(s.client->recv_cq, 9, IBV_WC_WR_FLUSH_ERR));
	ENSURE(!close_now(s.client), "rdma_destroy_id: %s", strerror(errno));
	/* The listener still accepts. */
	TRY(connect_both(&s));
	return traffic(s.client, s.server);
}

/* rdma_disconnect flushes the queue pair of a connection that the peer has not answered, and the attempt to connect still ends with an event. */
enum { REJECTS, ACCEPTS, DISCONNECTS };
static const char *disconnect_early(size_t server)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct fixture s;
	struct event_copy t;

	TRY(only_over_tcp());
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_client(&s, RDMA_PS_TCP));
	TRY(post_any_recv(s.client, 9));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	if (server == DISCONNECTS) {
		/* The queue pair of the request fails, and cannot be connected. */
		ENSURE(!rdma_disconnect(s.server), "rdma_disconnect of a request: %s", strerror(errno));
		ENSURE(rdma_accept(s.server, &p) == -1 && errno == EINVAL, "rdma_accept: %s", strerror(errno));
		ENSURE(!rdma_reject(s.server, NULL, 0), "rdma_reject: %s", strerror(errno));
		return event(s.client_channel, RDMA_CM_EVENT_REJECTED, NULL);
	}
	ENSURE(!rdma_disconnect(s.client), "rdma_disconnect: %s", strerror(errno));
	TRY(expect_status(s.client->recv_cq, 9, IBV_WC_WR_FLUSH_ERR));
	if (server == ACCEPTS) {
		ENSURE(!rdma_accept(s.server, &p), "rdma_accept: %s", strerror(errno));
		return event(s.client_channel, RDMA_CM_EVENT_CONNECT_ERROR, NULL);
	}
	ENSURE(!rdma_reject(s.server, NULL, 0), "rdma_reject: %s", strerror(errno));
	return event(s.client_channel, RDMA_CM_EVENT_REJECTED, NULL);
}

/*
 * Without parameters, or with the largest values, rdma_accept takes the numbers of Reads from the request. It ignores the number of
 * retries: the queue pair has that of the request.
 */
static const char *accept_as_requested(size_t with_parameters)
{
	struct rdma_conn_param p = params(NULL, 0), most = {
		.responder_resources = RDMA_MAX_RESP_RES, .initiator_depth = RDMA_MAX_INIT_DEPTH, .rnr_retry_count = 7,
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR };
	struct ibv_qp_init_attr init;
	struct event_copy t;
	struct fixture s;
	int mask, rc;

	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_client(&s, RDMA_PS_TCP));
	p.responder_resources = 3;
	p.initiator_depth = 1;
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	ENSURE(!rdma_init_qp_attr(s.server, &attr, &mask), "rdma_init_qp_attr: %s", strerror(errno));
	ENSURE(attr.max_dest_rd_atomic == 1, "max_dest_rd_atomic %u of a request, expected 1", attr.max_dest_rd_atomic);
	attr.qp_state = IBV_QPS_RTS;
	ENSURE(!rdma_init_qp_attr(s.server, &attr, &mask), "rdma_init_qp_attr: %s", strerror(errno));
	ENSURE(attr.max_rd_atomic == 3, "max_rd_atomic %u of a request, expected 3", attr.max_rd_atomic);
	ENSURE(!rdma_accept(s.server, with_parameters ? &most : NULL), "rdma_accept: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_ESTABLISHED, &t));
	ENSURE(t.conn.initiator_depth == 1 && t.conn.responder_resources == 3, "initiator_depth %u, responder_resources %u",
	       t.conn.initiator_depth, t.conn.responder_resources);
	TRY(event(s.server_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	rc = ibv_query_qp(s.server->qp, &attr, IBV_QP_RETRY_CNT | IBV_QP_MAX_QP_RD_ATOMIC | IBV_QP_MAX_DEST_RD_ATOMIC, &init);
	ENSURE(!rc, "ibv_query_qp: %s", strerror(rc));
	ENSURE(attr.max_dest_rd_atomic == 1 && attr.max_rd_atomic == 3, "max_dest_rd_atomic %u, max_rd_atomic %u",
	       attr.max_dest_rd_atomic, attr.max_rd_atomic);
	ENSURE(attr.retry_cnt == 7, "retry_cnt %u, expected 7", attr.retry_cnt);
	return traffic(s.client, s.server);
}

/* A connection to a port without a listener is refused. */
static const char *refused(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct fixture s;
	struct event_copy t;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_client(&s, RDMA_PS_TCP));
	ENSURE(!close_now(s.listener), "rdma_destroy_id: %s", strerror(errno));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_REJECTED, &t));
	ENSURE(t.status, "refused with status 0");
	return NULL;
}

/* Creates a TCP listener that never accepts and never answers. */
static const char *silent_listener(int *fd, struct address *a)
{
	socklen_t len = sizeof a->ss;

	TRY(own_address(a, AF_INET, 0));
	*fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(*fd >= 0, "socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)*fd, "socket");
	ENSURE(!bind(*fd, sa(a), sizeof(struct sockaddr_in)) && !listen(*fd, 5), "listen: %s", strerror(errno));
	ENSURE(!getsockname(*fd, sa(a), &len), "getsockname: %s", strerror(errno));
	return NULL;
}

/* The peer never answers. The attempt ends with a time-out. */
static const char *never_answered(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct fixture s;
	struct event_copy t;
	int fd;

	(void)arg;
	TRY(only_over_tcp());
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(silent_listener(&fd, &s.address));
	TRY(new_client(&s, RDMA_PS_TCP));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(any_event(s.client_channel, &t, 45000));
	ENSURE(t.type == RDMA_CM_EVENT_UNREACHABLE || t.type == RDMA_CM_EVENT_CONNECT_ERROR,
	       "event %s, expected UNREACHABLE or CONNECT_ERROR", rdma_event_str(t.type));
	ENSURE(t.status < 0, "status %d, expected a negative errno", t.status);
	return NULL;
}

/* The peer answers with bytes that are no MPA Reply. The attempt fails at once. */
static const char *invalid_answer(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct fixture s;
	struct event_copy t;
	int fd, accepted;

	(void)arg;
	TRY(only_over_tcp());
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(silent_listener(&fd, &s.address));
	TRY(new_client(&s, RDMA_PS_TCP));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(readable(fd, WAIT_MS));
	accepted = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(accepted >= 0, "accept: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)accepted, "socket");
	ENSURE(write(accepted, "HTTP/1.1 400 Bad Request\r\n\r\n", 28) == 28, "write: %s", strerror(errno));
	TRY(any_event(s.client_channel, &t, WAIT_MS));
	ENSURE(t.type == RDMA_CM_EVENT_CONNECT_ERROR || t.type == RDMA_CM_EVENT_REJECTED ||
		       t.type == RDMA_CM_EVENT_UNREACHABLE,
	       "event %s, expected an error", rdma_event_str(t.type));
	return NULL;
}

/* Creates queue pairs until all numbers at the port of a queue pair number are used, so that the next number to be freed there is used again. */
static const char *fill_port(uint32_t number)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 1, .max_send_sge = 1 } };
	struct ibv_pd *pd = new_pd();
	struct ibv_qp *qp;

	ENSURE(pd, "ibv_alloc_pd: %s", strerror(errno));
	init.send_cq = init.recv_cq = new_cq(1, NULL);
	ENSURE(init.send_cq, "ibv_create_cq: %s", strerror(errno));
	for (int i = 0; i < 1024; i++) {
		qp = new_qp(pd, &init);
		ENSURE(qp, "ibv_create_qp: %s", strerror(errno));
		if (qp->qp_num >> 8 != number >> 8)
			return NULL;
	}
	return "the numbers of a port do not end";
}

/* Destroys the queue pair of an id. Another id gets a queue pair with the same number. */
static const char *pass_number_on(struct rdma_cm_id *from, struct rdma_cm_id *to)
{
	uint32_t number = from->qp->qp_num;

	TRY(fill_port(number));
	rdma_destroy_qp(from);
	TRY(give_qp(to));
	ENSURE(to->qp->qp_num == number, "number %#x, expected %#x again", to->qp->qp_num, number);
	return NULL;
}

/* An id whose queue pair was destroyed disconnects. The connection of a queue pair that has got its number stays. */
static const char *disconnect_without_queue_pair(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct rdma_cm_id *first;
	struct fixture s;
	struct event_copy t;

	(void)arg;
	TRY(only_over_tcp());
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(connect_both(&s));
	first = s.client;
	TRY(new_id(&s.client, s.client_channel, RDMA_PS_TCP));
	TRY(resolve(&s, s.client));
	TRY(pass_number_on(first, s.client));
	TRY(event(s.server_channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	ENSURE(!rdma_accept(s.server, &p), "rdma_accept: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	TRY(event(s.server_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	ENSURE(!rdma_disconnect(first), "rdma_disconnect: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_DISCONNECTED, &t));
	ENSURE(t.id == first, "another id is disconnected");
	TRY(traffic(s.client, s.server));
	return disconnect(&s);
}

/*
 * The client's queue pair was destroyed before the peer accepts. The client gets an event, and the peer receives a Terminate
 * 2/0/5, also if another queue pair has got the number.
 */
static const char *queue_pair_gone(size_t number_is_used)
{
	static const uint8_t reply[] = "MPA ID Rep Frame\x50\x02\x00\x04\x80\x10\x80\x10";
	struct rdma_conn_param p = params(NULL, 0);
	uint8_t received[256];
	size_t got = 0;
	int fd, accepted;
	struct rdma_cm_id *other;
	struct fixture s;
	struct event_copy t;
	ssize_t n;

	TRY(only_over_tcp());
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(silent_listener(&fd, &s.address));
	TRY(new_client(&s, RDMA_PS_TCP));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(readable(fd, WAIT_MS));
	accepted = accept4(fd, NULL, NULL, SOCK_CLOEXEC);
	ENSURE(accepted >= 0, "accept: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)accepted, "socket");
	ENSURE(recv(accepted, received, 24, MSG_WAITALL) == 24, "no MPA Request arrives");
	if (number_is_used) {
		TRY(new_id(&other, s.client_channel, RDMA_PS_TCP));
		TRY(resolve(&s, other));
		TRY(pass_number_on(s.client, other));
	} else {
		rdma_destroy_qp(s.client);
	}
	ENSURE(write(accepted, reply, 24) == 24, "write: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_CONNECT_ERROR, &t));
	do {
		TRY(readable(accepted, WAIT_MS));
		n = read(accepted, received + got, sizeof received - got);
		ENSURE(n >= 0, "read: %s", strerror(errno));
		got += (size_t)n;
	} while (n);
	/* The length of two bytes and the header of 18 precede the layer, type and code of the Terminate. Byte 3 has the opcode. */
	ENSURE(got >= 24 && (received[3] & 0x0f) == 7, "%zu bytes, expected a Terminate", got);
	ENSURE(received[20] == 0x20 && received[21] == 5, "Terminate 0x%02x 0x%02x, expected 2/0/5", received[20], received[21]);
	return NULL;
}

/*
 * Connections to a listening port from clients that send no MPA Request, or only its beginning. Each of them is closed. A client
 * that sends a whole one is served while they are open.
 */
static const char *other_clients(size_t count)
{
	static const char *const greetings[] = { "", "GET / HTTP/1.0\r\n\r\n", "\x16\x03\x01\x02", "MPA ID Req Frame" };
	static int fds[1000];
	uint64_t end;
	struct fixture s;

	TRY(only_over_tcp());
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	for (size_t i = 0; i < count; i++) {
		const char *text = greetings[i % COUNT(greetings)];

		fds[i] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		ENSURE(fds[i] >= 0, "socket: %s", strerror(errno));
		keep(close_fd, (void *)(intptr_t)fds[i], "socket");
		ENSURE(!connect(fds[i], sa(&s.address), sizeof(struct sockaddr_in)), "connect %zu: %s", i,
		       strerror(errno));
		if (*text)
			ENSURE(write(fds[i], text, strlen(text)) > 0, "write: %s", strerror(errno));
	}
	TRY(connect_both(&s));
	TRY(traffic(s.client, s.server));
	end = now_ms() + 60000;
	for (size_t i = 0; i < count; i++) {
		struct pollfd p = { .fd = fds[i], .events = POLLIN };
		char byte[64];
		ssize_t n;

		ENSURE(now_ms() < end && poll(&p, 1, (int)(end - now_ms())) == 1, "connection %zu is never closed", i);
		n = read(fds[i], byte, sizeof byte);
		ENSURE(n == 0 || (n < 0 && errno == ECONNRESET), "connection %zu gets an answer of %zd bytes", i, n);
	}
	return traffic(s.client, s.server);
}

/* The client destroys its id before the server accepts. The server gets an error or an event. */
static const char *client_gives_up(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct fixture s;
	struct event_copy t;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_client(&s, RDMA_PS_TCP));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	ENSURE(!close_now(s.client), "rdma_destroy_id: %s", strerror(errno));
	sleep_ms(100);
	if (rdma_accept(s.server, &p))
		return NULL; /* the library has detected it already */
	for (;;) {
		TRY(any_event(s.server_channel, &t, 45000));
		if (t.type != RDMA_CM_EVENT_ESTABLISHED)
			break;
	}
	ENSURE(t.type == RDMA_CM_EVENT_UNREACHABLE || t.type == RDMA_CM_EVENT_CONNECT_ERROR ||
		       t.type == RDMA_CM_EVENT_REJECTED || t.type == RDMA_CM_EVENT_DISCONNECTED,
	       "event %s, expected an error", rdma_event_str(t.type));
	return NULL;
}

/* The server destroys the id of the request without an answer. */
static const char *server_gives_up(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct fixture s;
	struct event_copy t;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_client(&s, RDMA_PS_TCP));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	ENSURE(!close_now(s.server), "rdma_destroy_id: %s", strerror(errno));
	TRY(any_event(s.client_channel, &t, 45000));
	ENSURE(t.type == RDMA_CM_EVENT_UNREACHABLE || t.type == RDMA_CM_EVENT_CONNECT_ERROR ||
		       t.type == RDMA_CM_EVENT_REJECTED,
	       "event %s, expected an error", rdma_event_str(t.type));
	return NULL;
}

/* The server destroys its listener before it has read the event of a request. The client is rejected. */
static const char *listener_gives_up(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct fixture s;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_client(&s, RDMA_PS_TCP));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(readable(s.server_channel->fd, WAIT_MS));
	sleep_ms(QUIET_MS);
	ENSURE(!close_now(s.listener), "rdma_destroy_id: %s", strerror(errno));
	return event(s.client_channel, RDMA_CM_EVENT_REJECTED, NULL);
}

/* Many clients connect before the server accepts the first one. */
static const char *many_clients(size_t count)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct rdma_cm_id *clients[64], *servers[64];
	struct fixture s;
	struct event_copy t;

	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	for (size_t i = 0; i < count; i++) {
		TRY(new_client(&s, RDMA_PS_TCP));
		clients[i] = s.client;
		ENSURE(!rdma_connect(clients[i], &p), "rdma_connect %zu: %s", i, strerror(errno));
	}
	for (size_t i = 0; i < count; i++) {
		TRY(requested(&s, &t));
		servers[i] = s.server;
	}
	for (size_t i = count; i-- > 0;)
		ENSURE(!rdma_accept(servers[i], &p), "rdma_accept %zu: %s", i, strerror(errno));
	for (size_t i = 0; i < count; i++) {
		TRY(event(s.server_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
		TRY(event(s.client_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	}
	for (size_t i = 0; i < count; i++) { /* match the requests to the clients by port */
		size_t k = 0;

		while (k < count && rdma_get_dst_port(servers[k]) != rdma_get_src_port(clients[i]))
			k++;
		ENSURE(k < count, "no accepted id has the port of client %zu", i);
		TRY(traffic(clients[i], servers[k]));
	}
	return NULL;
}

static const char *addresses(size_t family)
{
	struct sockaddr_storage *local, *peer;
	struct fixture s;

	TRY(listen_at(&s, (int)family, RDMA_PS_TCP));
	TRY(connect_both(&s));
	ENSURE(rdma_get_dst_port(s.client) == rdma_get_src_port(s.listener),
	       "the destination port of the client is not that of the listener");
	ENSURE(rdma_get_src_port(s.server) == rdma_get_src_port(s.listener),
	       "the source port of the server is not that of the listener");
	local = (struct sockaddr_storage *)rdma_get_local_addr(s.client);
	peer = (struct sockaddr_storage *)rdma_get_peer_addr(s.client);
	ENSURE(local->ss_family == family && peer->ss_family == family, "families %d and %d", local->ss_family,
	       peer->ss_family);
	if (family == AF_INET) {
		const struct sockaddr_in *want = (struct sockaddr_in *)&s.address.ss;

		ENSURE(((struct sockaddr_in *)peer)->sin_addr.s_addr == want->sin_addr.s_addr, "the peer address is another one");
		ENSURE(((struct sockaddr_in *)local)->sin_addr.s_addr == want->sin_addr.s_addr, "the local address is another one");
	} else {
		const struct sockaddr_in6 *want = (struct sockaddr_in6 *)&s.address.ss;

		ENSURE(!memcmp(&((struct sockaddr_in6 *)peer)->sin6_addr, &want->sin6_addr, 16), "the peer address is another one");
		ENSURE(!memcmp(&((struct sockaddr_in6 *)local)->sin6_addr, &want->sin6_addr, 16),
		       "the local address is another one");
	}
	ENSURE(s.client->port_num == 1 && s.client->verbs, "port %u", s.client->port_num);
	return NULL;
}

/* After rdma_migrate_id, later events of the id arrive on the new channel. */
static const char *migrate(size_t arg)
{
	struct rdma_event_channel *other;
	struct fixture s;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(connect_both(&s));
	TRY(new_event_channel(&other));
	ENSURE(!rdma_migrate_id(s.server, other), "rdma_migrate_id: %s", strerror(errno));
	ENSURE(s.server->channel == other, "the id still names its old channel");
	TRY(traffic(s.client, s.server));
	ENSURE(!rdma_disconnect(s.client), "rdma_disconnect: %s", strerror(errno));
	TRY(event(other, RDMA_CM_EVENT_DISCONNECTED, NULL));
	TRY(not_readable(s.server_channel->fd, QUIET_MS));
	/* ids must be destroyed before their channels */
	ENSURE(!close_now(s.server), "rdma_destroy_id: %s", strerror(errno));
	return NULL;
}

/* rdma_create_qp_ex accepts what ibv_create_qp_ex does, and creates missing queues and the protection domain. */
static const char *extended(size_t arg)
{
	struct ibv_qp_init_attr_ex init = {
		.qp_type = IBV_QPT_RC, .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	struct rdma_conn_param p = params(NULL, 0);
	struct ibv_qp_ex *qp;
	struct fixture s;
	struct event_copy t;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_id(&s.client, s.client_channel, RDMA_PS_TCP));
	TRY(resolve(&s, s.client));
	ENSURE(!rdma_create_qp_ex(s.client, &init), "rdma_create_qp_ex: %s", strerror(errno));
	ENSURE(s.client->qp && s.client->pd && s.client->send_cq && s.client->recv_cq, "rdma_create_qp_ex does not set all queues");
	ENSURE(init.pd == s.client->pd && init.send_cq == s.client->send_cq, "the protection domain or the send queue's completion queue is not returned");
	qp = ibv_qp_to_qp_ex(s.client->qp);
	ENSURE(qp, "it is not an extended queue pair");
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	TRY(post_recv(s.server->qp, 1, NULL, 0));
	ENSURE(!rdma_accept(s.server, &p), "rdma_accept: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	ibv_wr_start(qp);
	qp->wr_id = 2;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp);
	ENSURE(!ibv_wr_complete(qp), "ibv_wr_complete");
	TRY(expect_ok(s.server->recv_cq, 1, IBV_WC_RECV, NULL));
	TRY(expect_ok(s.client->send_cq, 2, IBV_WC_SEND, NULL));
	/* The id can have new queues now. A call that fails leaves none behind. */
	rdma_destroy_qp(s.client);
	ENSURE(!s.client->qp && !s.client->send_cq && !s.client->recv_cq, "rdma_destroy_qp does not clear all queues");
	init.comp_mask = init.send_ops_flags = 0;
	init.send_cq = init.recv_cq = NULL;
	init.qp_type = IBV_QPT_UD;
	errno = 0;
	ENSURE(rdma_create_qp_ex(s.client, &init) == -1 && errno == EINVAL, "a queue pair of another type is created");
	ENSURE(!s.client->send_cq && !s.client->recv_cq, "completion queues are left without a queue pair");
	return NULL;
}

/* ---------------------------------------------------------------- without descriptors */

/* Sets a limit that is lower than the number of open descriptors, so that none can be opened. */
static void no_descriptors(struct rlimit *was)
{
	struct rlimit none;

	getrlimit(RLIMIT_NOFILE, was);
	none = *was;
	none.rlim_cur = 3;
	setrlimit(RLIMIT_NOFILE, &none);
}

/*
 * The first event of a process needs descriptors, because the device is opened for it. If there are none, the event stays in the
 * channel. The program gets it later, or destroys the listener without it.
 */
static const char *event_without_descriptors(size_t takes_it_later)
{
	static const char request[] = "MPA ID Req Frame\x40\x01\x00\x00";
	struct address any = { .ss = { .ss_family = AF_INET } };
	struct rdma_cm_event *got;
	struct fixture s = { 0 };
	struct event_copy t;
	struct rlimit was;
	uint8_t reply[64];
	int fd, rc, e;

	/* This test runs in a process of its own, which has no time limit yet. */
	alarm(30);
	TRY(only_over_tcp());
	TRY(new_event_channel(&s.server_channel));
	TRY(new_id(&s.listener, s.server_channel, RDMA_PS_TCP));
	/* An address of the device would open the device now. */
	ENSURE(!rdma_bind_addr(s.listener, sa(&any)), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(!rdma_listen(s.listener, BACKLOG), "rdma_listen: %s", strerror(errno));
	ENSURE(!s.listener->verbs, "the listener has a device already");
	TRY(own_address(&s.address, AF_INET, ntohs(rdma_get_src_port(s.listener))));
	fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ENSURE(fd >= 0, "socket: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)fd, "socket");
	ENSURE(!connect(fd, sa(&s.address), sizeof(struct sockaddr_in)), "connect: %s", strerror(errno));
	ENSURE(write(fd, request, 20) == 20, "write: %s", strerror(errno));
	TRY(readable(s.server_channel->fd, WAIT_MS));
	for (int i = 0; i < 3; i++) {
		no_descriptors(&was);
		rc = rdma_get_cm_event(s.server_channel, &got);
		e = errno;
		setrlimit(RLIMIT_NOFILE, &was);
		ENSURE(rc == -1 && e == EMFILE, "rdma_get_cm_event without descriptors returns %d: %s", rc, strerror(e));
		TRY(readable(s.server_channel->fd, 0));
	}
	if (takes_it_later) {
		TRY(event(s.server_channel, RDMA_CM_EVENT_CONNECT_REQUEST, &t));
		keep(close_id, t.id, "requested rdma_cm_id");
		ENSURE(t.listen_id == s.listener && t.id->verbs, "the request has no listener or no device");
		ENSURE(!close_now(t.id), "rdma_destroy_id: %s", strerror(errno));
	}
	ENSURE(!close_now(s.listener), "rdma_destroy_id: %s", strerror(errno));
	/* The request is answered in both cases: the bit 0x20 of the Reply rejects it. */
	TRY(readable(fd, WAIT_MS));
	ENSURE(recv(fd, reply, 20, MSG_WAITALL) == 20, "no MPA Reply: %s", strerror(errno));
	ENSURE(!memcmp(reply, "MPA ID Rep Frame", 16) && reply[16] & 0x20, "flags 0x%02x do not reject the request", reply[16]);
	TRY(close_all());
	return NULL;
}

/* A step of a synchronous id does not begin if the id cannot get its event. */
static const char *step_without_descriptors(size_t arg)
{
	struct rdma_cm_id *id;
	struct fixture s = { 0 };
	struct rlimit was;
	int rc, e;

	(void)arg;
	alarm(30); /* as above */
	TRY(only_over_tcp());
	TRY(new_id(&id, NULL, RDMA_PS_TCP));
	TRY(own_address(&s.address, AF_INET, 0));
	no_descriptors(&was);
	rc = rdma_bind_addr(id, sa(&s.address));
	e = errno;
	setrlimit(RLIMIT_NOFILE, &was);
	ENSURE(rc == -1 && e == EMFILE, "rdma_bind_addr without descriptors returns %d: %s", rc, strerror(e));
	TRY(own_address(&s.address, AF_INET, 9));
	no_descriptors(&was);
	rc = rdma_resolve_addr(id, NULL, sa(&s.address), 2000);
	e = errno;
	setrlimit(RLIMIT_NOFILE, &was);
	ENSURE(rc == -1 && e == EMFILE, "rdma_resolve_addr without descriptors returns %d: %s", rc, strerror(e));
	ENSURE(!rdma_resolve_addr(id, NULL, sa(&s.address), 2000), "rdma_resolve_addr: %s", strerror(errno));
	ENSURE(id->event && id->event->event == RDMA_CM_EVENT_ADDR_RESOLVED, "rdma_resolve_addr has another event");
	ENSURE(!rdma_resolve_route(id, 2000), "rdma_resolve_route: %s", strerror(errno));
	ENSURE(id->event && id->event->event == RDMA_CM_EVENT_ROUTE_RESOLVED, "rdma_resolve_route has another event");
	TRY(close_all());
	return NULL;
}

/*
 * rdma_get_request needs descriptors for the channel of the new id. If there are none, the request is rejected, and the listener
 * still accepts others.
 */
static const char *request_without_descriptors(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct rdma_cm_id *id = NULL;
	struct fixture s = { 0 };
	struct rlimit was;
	int rc, e;

	(void)arg;
	TRY(only_over_tcp());
	TRY(new_event_channel(&s.client_channel));
	TRY(new_id(&s.listener, NULL, RDMA_PS_TCP));
	TRY(own_address(&s.address, AF_INET, 0));
	ENSURE(!rdma_bind_addr(s.listener, sa(&s.address)), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(!rdma_listen(s.listener, BACKLOG), "rdma_listen: %s", strerror(errno));
	TRY(own_address(&s.address, AF_INET, ntohs(rdma_get_src_port(s.listener))));
	/* There are more requests than the backlog permits without an answer. */
	for (int i = 0; i < BACKLOG + 2; i++) {
		TRY(new_client(&s, RDMA_PS_TCP));
		ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
		TRY(readable(s.listener->channel->fd, WAIT_MS));
		no_descriptors(&was);
		rc = rdma_get_request(s.listener, &id);
		e = errno;
		setrlimit(RLIMIT_NOFILE, &was);
		ENSURE(rc == -1 && e == EMFILE, "rdma_get_request without descriptors returns %d: %s", rc, strerror(e));
		TRY(event(s.client_channel, RDMA_CM_EVENT_REJECTED, NULL));
		ENSURE(!close_now(s.client), "rdma_destroy_id: %s", strerror(errno));
	}
	TRY(new_client(&s, RDMA_PS_TCP));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	ENSURE(!rdma_get_request(s.listener, &id), "rdma_get_request: %s", strerror(errno));
	keep(close_id, id, "requested rdma_cm_id");
	TRY(give_qp(id));
	ENSURE(!rdma_accept(id, &p), "rdma_accept: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	ENSURE(!close_now(id), "rdma_destroy_id: %s", strerror(errno));
	ENSURE(!close_now(s.listener), "rdma_destroy_id: %s", strerror(errno));
	return NULL;
}

/* XRC: one end sends; the other receives with a shared receive queue in the protection domain of the ids. */
static void *xrc_client(void *arg)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_qp_type = IBV_QPT_XRC_SEND }, *info = NULL;
	struct ibv_qp_init_attr init = { .cap = { .max_send_wr = 2, .max_send_sge = 1 }, .sq_sig_all = 1 };
	struct ibv_send_wr wr = send_wr(2, IBV_WR_SEND, NULL, 0);
	static char reason[128];
	struct rdma_cm_id *id = NULL;
	const char *step = "rdma_getaddrinfo";
	struct ibv_wc wc;

	if (!rdma_getaddrinfo("127.0.0.1", arg, &hints, &info)) {
		step = "rdma_create_ep";
		if (!rdma_create_ep(&id, info, NULL, &init)) {
			step = id->recv_cq ? "the sender has a receive completion queue" : "rdma_connect";
			if (!id->recv_cq && !rdma_connect(id, NULL)) {
				step = "post";
				wr.qp_type.xrc.remote_srqn = *(const uint32_t *)id->event->param.conn.private_data;
				if (!post(id->qp, &wr) && rdma_get_send_comp(id, &wc) == 1 && !wc.status)
					step = NULL;
				rdma_disconnect(id);
			}
			rdma_destroy_ep(id);
		}
		rdma_freeaddrinfo(info);
	}
	if (step)
		snprintf(reason, sizeof reason, "%s: %s", step, strerror(errno));
	return step ? reason : NULL;
}

static const char *xrc(size_t arg)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP,
				       .ai_qp_type = IBV_QPT_XRC_RECV }, *info;
	struct ibv_srq_init_attr srq = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_qp_init_attr init = { .cap = { .max_recv_wr = 1, .max_recv_sge = 1 } };
	struct ibv_recv_wr recv = { .wr_id = 1 }, *bad;
	struct rdma_conn_param p = { 0 };
	struct rdma_cm_id *listener, *id;
	pthread_t thread;
	struct ibv_wc wc;
	void *reason;
	char port[8];
	uint32_t number;

	(void)arg;
	ENSURE(!rdma_getaddrinfo(NULL, "0", &hints, &info), "rdma_getaddrinfo");
	ENSURE(!rdma_create_ep(&listener, info, NULL, &init), "rdma_create_ep: %s", strerror(errno));
	rdma_freeaddrinfo(info);
	ENSURE(!rdma_listen(listener, 1), "rdma_listen: %s", strerror(errno));
	snprintf(port, sizeof port, "%u", ntohs(rdma_get_src_port(listener)));
	ENSURE(!pthread_create(&thread, NULL, xrc_client, port), "pthread_create");
	ENSURE(!rdma_get_request(listener, &id), "rdma_get_request: %s", strerror(errno));
	ENSURE(id->qp && id->qp->qp_type == IBV_QPT_XRC_RECV, "the queue pair is not an end that receives XRC");
	ENSURE(!rdma_create_srq(id, NULL, &srq), "rdma_create_srq: %s", strerror(errno));
	ENSURE(id->recv_cq && id->recv_cq->cqe >= 8, "the completion queue has fewer than 8 entries");
	ENSURE(!ibv_get_srq_num(id->srq, &number), "ibv_get_srq_num");
	ENSURE(!ibv_post_srq_recv(id->srq, &recv, &bad), "ibv_post_srq_recv");
	p.private_data = &number;
	p.private_data_len = sizeof number;
	ENSURE(!rdma_accept(id, &p), "rdma_accept: %s", strerror(errno));
	ENSURE(rdma_get_recv_comp(id, &wc) == 1 && wc.wr_id == 1 && !wc.status, "rdma_get_recv_comp: %s", strerror(errno));
	ENSURE(!pthread_join(thread, &reason) && !reason, "client: %s", (char *)reason);
	rdma_disconnect(id);
	/* The completion queue belongs to the shared receive queue, so it outlives the queue pair. */
	rdma_destroy_qp(id);
	ENSURE(id->recv_cq, "the completion queue was destroyed with the queue pair");
	rdma_destroy_srq(id);
	ENSURE(!id->recv_cq && !id->recv_cq_channel, "the completion queue was not destroyed");
	rdma_destroy_ep(id);
	rdma_destroy_ep(listener);
	return NULL;
}

struct mover {
	struct rdma_cm_id *id;
	struct rdma_event_channel *to;
	int rc, done; /* one end of a pipe */
};

static void *move_id(void *arg)
{
	struct mover *m = arg;

	m->rc = rdma_migrate_id(m->id, m->to);
	if (write(m->done, "x", 1) != 1)
		m->rc = -2;
	return NULL;
}

/* rdma_migrate_id waits until the events from the old channel of the id are acknowledged. */
static const char *migrate_waits(size_t arg)
{
	struct rdma_event_channel *other;
	struct rdma_cm_event *held;
	const char *blocked;
	struct mover m;
	pthread_t thread;
	struct fixture s;
	int ends[2];

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_event_channel(&other));
	ENSURE(!pipe(ends), "pipe");
	keep(close_fd, (void *)(intptr_t)ends[0], "pipe");
	keep(close_fd, (void *)(intptr_t)ends[1], "pipe");
	TRY(new_id(&s.client, s.client_channel, RDMA_PS_TCP));
	ENSURE(!rdma_resolve_addr(s.client, NULL, sa(&s.address), 2000), "rdma_resolve_addr: %s", strerror(errno));
	TRY(readable(s.client_channel->fd, WAIT_MS));
	ENSURE(!rdma_get_cm_event(s.client_channel, &held), "rdma_get_cm_event: %s", strerror(errno));
	m = (struct mover){ .id = s.client, .to = other, .done = ends[1] };
	ENSURE(!pthread_create(&thread, NULL, move_id, &m), "pthread_create");
	blocked = not_readable(ends[0], QUIET_MS);
	rdma_ack_cm_event(held);
	ENSURE(!pthread_join(thread, NULL), "pthread_join");
	if (blocked)
		return "rdma_migrate_id returns before the event is acknowledged";
	ENSURE(!m.rc, "rdma_migrate_id returns %d", m.rc);
	ENSURE(!rdma_resolve_route(s.client, 2000), "rdma_resolve_route: %s", strerror(errno));
	TRY(event(other, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL));
	ENSURE(!close_now(s.client), "rdma_destroy_id: %s", strerror(errno));
	return NULL;
}

struct taker {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *ids[BACKLOG];
	int wanted, taken;
};

/*
 * Takes connect requests without sleeping, so that the first one is taken while later ones are still being moved. It continues after
 * a wrong event, because rdma_migrate_id waits for the acknowledgements.
 */
static void *take_requests(void *arg)
{
	struct taker *taker = arg;
	uint64_t end = now_ms() + WAIT_MS;
	const char *reason = NULL;
	struct rdma_cm_event *got;

	while (taker->taken < taker->wanted) {
		if (rdma_get_cm_event(taker->channel, &got)) {
			if (errno != EAGAIN)
				return "rdma_get_cm_event";
			if (now_ms() > end)
				return "not all events arrive";
			continue;
		}
		if (got->event != RDMA_CM_EVENT_CONNECT_REQUEST)
			reason = "another event";
		else if (got->id->channel != taker->channel)
			reason = "the id of a request names a channel that did not have its event";
		taker->ids[taker->taken++] = got->id;
		rdma_ack_cm_event(got);
	}
	return (void *)(uintptr_t)reason;
}

/* A listener moves to another channel while a thread takes its connect requests there. Their ids are in that channel. */
static const char *migrate_requests(size_t rounds)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct taker taker = { .wanted = BACKLOG };
	struct rdma_cm_id *clients[BACKLOG];
	struct fixture s;
	pthread_t thread;
	void *reason;

	TRY(only_over_tcp()); /* the library of rdma-core copies the channel from the listener */
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	for (size_t i = 0; i < rounds; i++) {
		TRY(new_event_channel(&taker.channel));
		ENSURE(!fcntl(taker.channel->fd, F_SETFL, fcntl(taker.channel->fd, F_GETFL) | O_NONBLOCK), "fcntl: %s", strerror(errno));
		for (int n = 0; n < taker.wanted; n++) {
			TRY(new_client(&s, RDMA_PS_TCP));
			clients[n] = s.client;
			ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
		}
		sleep_ms(20); /* most of the requests are in the old channel now */
		ENSURE(!pthread_create(&thread, NULL, take_requests, &taker), "pthread_create");
		sleep_ms(1);
		ENSURE(!rdma_migrate_id(s.listener, taker.channel), "rdma_migrate_id: %s", strerror(errno));
		ENSURE(s.listener->channel == taker.channel, "the listener still names its old channel");
		ENSURE(!pthread_join(thread, &reason), "pthread_join");
		for (int n = 0; n < taker.taken; n++)
			keep(close_id, taker.ids[n], "requested rdma_cm_id");
		ENSURE(!reason, "round %zu: %s", i, (char *)reason);
		for (int n = 0; n < taker.taken; n++) {
			ENSURE(!close_now(taker.ids[n]), "rdma_destroy_id: %s", strerror(errno));
			TRY(event(s.client_channel, RDMA_CM_EVENT_REJECTED, NULL));
		}
		taker.taken = 0;
		for (int n = 0; n < taker.wanted; n++)
			ENSURE(!close_now(clients[n]), "rdma_destroy_id: %s", strerror(errno));
	}
	return close_now(s.listener) ? "rdma_destroy_id" : NULL;
}

/* rdma_get_cm_event on a non-blocking channel without events does not block. */
static const char *nonblocking_channel(size_t arg)
{
	struct rdma_event_channel *channel;
	struct rdma_cm_event *got;

	(void)arg;
	TRY(new_event_channel(&channel));
	ENSURE(!fcntl(channel->fd, F_SETFL, fcntl(channel->fd, F_GETFL) | O_NONBLOCK), "fcntl: %s", strerror(errno));
	ENSURE(rdma_get_cm_event(channel, &got) == -1 && errno == EAGAIN, "rdma_get_cm_event: %s", strerror(errno));
	return not_readable(channel->fd, 0);
}

/* The client of `synchronous`: connects, sends one message, disconnects. */
static void *blocking_client(void *arg)
{
	struct fixture *s = arg;
	struct rdma_conn_param p = params("sync", 4);
	struct rdma_cm_id *id;
	struct region r;
	struct ibv_sge sge;
	struct ibv_send_wr wr;

	if (rdma_create_id(NULL, &id, NULL, RDMA_PS_TCP))
		return "rdma_create_id";
	if (rdma_resolve_addr(id, NULL, sa(&s->address), 2000))
		return "rdma_resolve_addr";
	if (rdma_resolve_route(id, 2000))
		return "rdma_resolve_route";
	if (give_qp(id) || new_buffer(&r, id, 100))
		return "rdma_create_qp";
	fill_pattern(r.at, 100, 33);
	if (rdma_connect(id, &p))
		return "rdma_connect";
	if (!id->event || id->event->event != RDMA_CM_EVENT_ESTABLISHED)
		return "a synchronous id shows no event";
	sge = sge_of(&r, 0, 100);
	wr = send_wr(1, IBV_WR_SEND, &sge, 1);
	if (post(id->qp, &wr) || expect_ok(id->send_cq, 1, IBV_WC_SEND, NULL))
		return "ibv_post_send";
	if (rdma_disconnect(id))
		return "rdma_disconnect";
	close_now(r.mr);
	rdma_destroy_qp(id);
	return rdma_destroy_id(id) ? "rdma_destroy_id" : NULL;
}

/* Ids without an event channel. Each call returns when its event has arrived. */
static const char *synchronous(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct rdma_cm_id *listener, *id;
	struct fixture s = { 0 };
	struct region r;
	struct ibv_sge sge;
	pthread_t thread;
	void *result;

	(void)arg;
	TRY(new_id(&listener, NULL, RDMA_PS_TCP));
	ENSURE(listener->channel, "a synchronous id has no channel of its own");
	TRY(own_address(&s.address, AF_INET, 0));
	ENSURE(!rdma_bind_addr(listener, sa(&s.address)), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(!rdma_listen(listener, 1), "rdma_listen: %s", strerror(errno));
	TRY(own_address(&s.address, AF_INET, ntohs(rdma_get_src_port(listener))));
	ENSURE(!pthread_create(&thread, NULL, blocking_client, &s), "pthread_create");
	ENSURE(!rdma_get_request(listener, &id), "rdma_get_request: %s", strerror(errno));
	ENSURE(id->event && id->event->event == RDMA_CM_EVENT_CONNECT_REQUEST, "the new id shows no event");
	ENSURE(id->event->param.conn.private_data_len >= 4 && !memcmp(id->event->param.conn.private_data, "sync", 4),
	       "the private data is not that of the peer");
	TRY(give_qp(id));
	TRY(new_region(&r, id->pd, 100, IBV_ACCESS_LOCAL_WRITE));
	sge = sge_of(&r, 0, 100);
	TRY(post_recv(id->qp, 5, &sge, 1));
	ENSURE(!rdma_accept(id, &p), "rdma_accept: %s", strerror(errno));
	TRY(expect_ok(id->recv_cq, 5, IBV_WC_RECV, NULL));
	TRY(same_pattern(r.at, 100, 33));
	rdma_disconnect(id); /* both sides disconnect; for the second one the connection may have ended */
	ENSURE(!pthread_join(thread, &result), "pthread_join");
	ENSURE(!result, "client: %s", (const char *)result);
	close_now(r.mr);
	rdma_destroy_qp(id);
	ENSURE(!rdma_destroy_id(id), "rdma_destroy_id: %s", strerror(errno));
	return NULL;
}

struct endpoint_fixture {
	const char *node;
	char service[8];
	bool own_memory;
};

static void *endpoint_client(void *arg)
{
	struct endpoint_fixture *s = arg;
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *list;
	struct ibv_qp_init_attr init = usual_qp(IBV_QPT_RC);
	struct rdma_cm_id *id;
	struct ibv_mr *mr;
	struct ibv_wc wc;
	static uint8_t word[16];

	init.cap.max_inline_data = 16;
	if (rdma_getaddrinfo(s->node, s->service, &hints, &list))
		return "rdma_getaddrinfo";
	if (rdma_create_ep(&id, list, NULL, &init))
		return "rdma_create_ep";
	rdma_freeaddrinfo(list);
	mr = rdma_reg_msgs(id, word, sizeof word);
	if (!mr)
		return "rdma_reg_msgs";
	if (rdma_post_recv(id, (void *)7, word, sizeof word, mr))
		return "rdma_post_recv";
	if (rdma_connect(id, NULL))
		return "rdma_connect";
	if (rdma_post_send(id, (void *)8, "hello", 5, NULL, IBV_SEND_INLINE))
		return "rdma_post_send";
	if (rdma_get_send_comp(id, &wc) != 1 || wc.wr_id != 8 || wc.status)
		return "rdma_get_send_comp";
	if (rdma_get_recv_comp(id, &wc) != 1 || wc.wr_id != 7 || wc.status || wc.byte_len != 7)
		return "rdma_get_recv_comp";
	if (memcmp(word, "welcome", 7))
		return "other words";
	rdma_disconnect(id);
	rdma_dereg_mr(mr);
	rdma_destroy_ep(id);
	return NULL;
}

/* rdma_create_ep on both sides, with the functions of rdma_verbs.h. */
static const char *endpoints(size_t own_pd)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP }, *list;
	struct ibv_qp_init_attr init = usual_qp(IBV_QPT_RC);
	struct endpoint_fixture s = { .node = getenv("TEST_ADDR") ? getenv("TEST_ADDR") : "127.0.0.1" };
	struct rdma_cm_id *listener, *id;
	struct ibv_context **devices;
	struct ibv_pd *pd = NULL;
	struct ibv_mr *mr;
	struct ibv_wc wc;
	static uint8_t word[16];
	pthread_t thread;
	void *result;
	int rc;

	init.cap.max_inline_data = 16;
	if (own_pd) {
		devices = rdma_get_devices(NULL);
		ENSURE(devices && devices[0], "rdma_get_devices: %s", strerror(errno));
		pd = ibv_alloc_pd(devices[0]);
		rdma_free_devices(devices);
		ENSURE(pd, "ibv_alloc_pd: %s", strerror(errno));
		keep(close_pd, pd, "protection domain");
	}
	rc = rdma_getaddrinfo(own_pd ? NULL : s.node, "0", &hints, &list);
	ENSURE(!rc, "rdma_getaddrinfo: %s", rc == -1 ? strerror(errno) : gai_strerror(rc));
	keep(close_list, list, "address list");
	ENSURE(!rdma_create_ep(&listener, list, pd, &init), "rdma_create_ep: %s", strerror(errno));
	keep(close_ep, listener, "endpoint");
	ENSURE(!own_pd || listener->pd == pd, "the listener does not show its protection domain");
	ENSURE(!rdma_listen(listener, 0), "rdma_listen: %s", strerror(errno));
	snprintf(s.service, sizeof s.service, "%u", ntohs(rdma_get_src_port(listener)));
	ENSURE(!pthread_create(&thread, NULL, endpoint_client, &s), "pthread_create");
	ENSURE(!rdma_get_request(listener, &id), "rdma_get_request: %s", strerror(errno));
	ENSURE(id->qp, "rdma_get_request creates no queue pair although rdma_create_ep had its attributes");
	mr = rdma_reg_msgs(own_pd ? listener : id, word, sizeof word);
	ENSURE(mr, "rdma_reg_msgs: %s", strerror(errno));
	ENSURE(!rdma_post_recv(id, (void *)1, word, sizeof word, mr), "rdma_post_recv: %s", strerror(errno));
	ENSURE(!rdma_accept(id, NULL), "rdma_accept: %s", strerror(errno));
	ENSURE(rdma_get_recv_comp(id, &wc) == 1, "rdma_get_recv_comp: %s", strerror(errno));
	ENSURE(wc.status == IBV_WC_SUCCESS && wc.byte_len == 5 && !memcmp(word, "hello", 5), "status %d, %u bytes",
	       wc.status, wc.byte_len);
	ENSURE(!rdma_post_send(id, (void *)2, "welcome", 7, NULL, IBV_SEND_INLINE), "rdma_post_send: %s",
	       strerror(errno));
	ENSURE(rdma_get_send_comp(id, &wc) == 1 && wc.status == IBV_WC_SUCCESS, "rdma_get_send_comp: status %d",
	       wc.status);
	rdma_disconnect(id);
	ENSURE(!pthread_join(thread, &result), "pthread_join");
	ENSURE(!result, "client: %s", (const char *)result);
	ENSURE(!rdma_dereg_mr(mr), "rdma_dereg_mr: %s", strerror(errno));
	rdma_destroy_ep(id);
	return NULL;
}

/* Requests the queue pair of a listener of datagrams. */
static void *datagram_client(void *arg)
{
	struct fixture *s = arg;
	struct rdma_cm_id *id;

	if (rdma_create_id(NULL, &id, NULL, RDMA_PS_UDP))
		return "rdma_create_id";
	if (rdma_resolve_addr(id, NULL, sa(&s->address), 2000))
		return "rdma_resolve_addr";
	if (rdma_resolve_route(id, 2000))
		return "rdma_resolve_route";
	if (give_qp(id))
		return "rdma_create_qp";
	if (rdma_connect(id, NULL))
		return "rdma_connect";
	rdma_destroy_qp(id);
	return rdma_destroy_id(id) ? "rdma_destroy_id" : NULL;
}

/* The listener of an accepted datagram request can be destroyed: no event follows, so rdma_accept acknowledges that of the request. */
static const char *datagram_endpoints(size_t arg)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_UDP }, *list;
	struct ibv_qp_init_attr init = usual_qp(IBV_QPT_UD);
	const char *node = getenv("TEST_ADDR") ? getenv("TEST_ADDR") : "127.0.0.1";
	struct rdma_cm_id *listener, *id;
	struct fixture s = { 0 };
	pthread_t thread;
	void *result;
	int rc;

	(void)arg;
	rc = rdma_getaddrinfo(node, "0", &hints, &list);
	ENSURE(!rc, "rdma_getaddrinfo: %s", rc == -1 ? strerror(errno) : gai_strerror(rc));
	keep(close_list, list, "address list");
	ENSURE(!rdma_create_ep(&listener, list, NULL, &init), "rdma_create_ep: %s", strerror(errno));
	ENSURE(!rdma_listen(listener, 0), "rdma_listen: %s", strerror(errno));
	TRY(own_address(&s.address, AF_INET, ntohs(rdma_get_src_port(listener))));
	ENSURE(!pthread_create(&thread, NULL, datagram_client, &s), "pthread_create");
	ENSURE(!rdma_get_request(listener, &id), "rdma_get_request: %s", strerror(errno));
	ENSURE(id->qp && id->event, "rdma_get_request gives no queue pair or no event");
	ENSURE(!rdma_accept(id, NULL), "rdma_accept: %s", strerror(errno));
	ENSURE(!id->event, "the event of the request is not acknowledged");
	ENSURE(!pthread_join(thread, &result), "pthread_join");
	ENSURE(!result, "client: %s", (const char *)result);
	rdma_destroy_ep(listener);
	rdma_destroy_ep(id);
	return NULL;
}

static const char *one_lookup(const char *what, const char *node, const char *service, struct rdma_addrinfo *hints,
			      struct rdma_addrinfo **list)
{
	int rc = rdma_getaddrinfo(node, service, hints, list);

	ENSURE(!rc, "%s: rdma_getaddrinfo: %s", what, rc == -1 ? strerror(errno) : gai_strerror(rc));
	ENSURE(*list, "%s: rdma_getaddrinfo gives no result", what);
	keep(close_list, *list, "address list");
	return NULL;
}

/* The private data of rdma_create_ep precedes that of rdma_connect. Together they may have 255 bytes. */
static const char *connect_data(size_t arg)
{
	struct rdma_addrinfo *list;
	struct ibv_qp_init_attr init = usual_qp(IBV_QPT_RC);
	struct rdma_conn_param p = params("def", 3);
	static char abc[] = "abc", much[253];
	char service[8];
	struct fixture s;
	struct event_copy t;
	int rc;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	snprintf(service, sizeof service, "%u", ntohs(rdma_get_src_port(s.listener)));
	TRY(one_lookup("listener", getenv("TEST_ADDR") ? getenv("TEST_ADDR") : "127.0.0.1", service, NULL, &list));
	list->ai_connect = abc;
	list->ai_connect_len = 3;
	rc = rdma_create_ep(&s.client, list, NULL, &init);
	list->ai_connect = NULL;
	list->ai_connect_len = 0;
	ENSURE(!rc, "rdma_create_ep: %s", strerror(errno));
	keep(close_ep, s.client, "endpoint");
	ENSURE(!rdma_migrate_id(s.client, s.client_channel), "rdma_migrate_id: %s", strerror(errno));
	if (!only_over_tcp()) {
		p.private_data = much;
		p.private_data_len = sizeof much;
		ENSURE(rdma_connect(s.client, &p) == -1 && errno == EINVAL, "rdma_connect with 256 bytes: %s", strerror(errno));
		p = params("def", 3);
	}
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	TRY(data_is(&t, "abcdef", 6));
	p = params("ok", 2);
	ENSURE(!rdma_accept(s.server, &p), "rdma_accept: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_ESTABLISHED, &t));
	return data_is(&t, "ok", 2);
}

/* The variants of rdma_getaddrinfo that programs use. */
static const char *lookups(size_t arg)
{
	struct rdma_addrinfo hints = { 0 }, *list;
	struct address own;
	const struct sockaddr_in *in;

	(void)arg;
	TRY(own_address(&own, AF_INET, 4711));
	TRY(one_lookup("node and service, no hints", getenv("TEST_ADDR") ? getenv("TEST_ADDR") : "127.0.0.1", "4711",
		       NULL, &list));
	in = (struct sockaddr_in *)list->ai_dst_addr;
	ENSURE(in && in->sin_family == AF_INET && in->sin_port == htons(4711), "destination");
	ENSURE(list->ai_dst_len == sizeof *in, "the destination has another length");

	hints = (struct rdma_addrinfo){ .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP };
	TRY(one_lookup("service of a passive side", NULL, "4711", &hints, &list));
	ENSURE(list->ai_src_addr && list->ai_src_len, "no source for a passive side");
	ENSURE(list->ai_flags & RAI_PASSIVE && list->ai_port_space == RDMA_PS_TCP, "flags %#x, port space %#x",
	       list->ai_flags, list->ai_port_space);
	ENSURE(list->ai_qp_type == IBV_QPT_RC, "type %d for RDMA_PS_TCP", list->ai_qp_type);

	hints = (struct rdma_addrinfo){ .ai_port_space = RDMA_PS_UDP };
	TRY(one_lookup("datagrams", getenv("TEST_ADDR") ? getenv("TEST_ADDR") : "127.0.0.1", "4711", &hints, &list));
	ENSURE(list->ai_qp_type == IBV_QPT_UD, "type %d for RDMA_PS_UDP", list->ai_qp_type);

	hints = (struct rdma_addrinfo){ .ai_flags = RAI_NUMERICHOST | RAI_FAMILY, .ai_family = AF_INET,
					.ai_port_space = RDMA_PS_TCP };
	TRY(one_lookup("numeric", "127.0.0.1", "4711", &hints, &list));
	ENSURE(list->ai_family == AF_INET, "family %d", list->ai_family);
	ENSURE(rdma_getaddrinfo("no-number", "4711", &hints, &list), "a host name is accepted with RAI_NUMERICHOST");

	hints = (struct rdma_addrinfo){ .ai_qp_type = IBV_QPT_UD, .ai_port_space = RDMA_PS_IB };
	TRY(one_lookup("datagrams of RDMA_PS_IB", "127.0.0.1", "4711", &hints, &list));
	ENSURE(list->ai_qp_type == IBV_QPT_UD && list->ai_port_space == RDMA_PS_IB, "type %d, port space %#x",
	       list->ai_qp_type, list->ai_port_space);
	hints = (struct rdma_addrinfo){ .ai_port_space = RDMA_PS_IB };
	TRY(one_lookup("RDMA_PS_IB", "127.0.0.1", "4711", &hints, &list));
	ENSURE(list->ai_qp_type == IBV_QPT_RC, "type %d for RDMA_PS_IB", list->ai_qp_type);
	hints = (struct rdma_addrinfo){ .ai_qp_type = IBV_QPT_UD, .ai_port_space = RDMA_PS_TCP };
	ENSURE(rdma_getaddrinfo("127.0.0.1", "4711", &hints, &list) == EAI_SOCKTYPE,
	       "datagram queue pairs are accepted for RDMA_PS_TCP");
	hints = (struct rdma_addrinfo){ .ai_flags = RAI_FAMILY, .ai_family = AF_UNIX };
	ENSURE(rdma_getaddrinfo("127.0.0.1", "4711", &hints, &list) == EAI_FAMILY, "another family is accepted");

	hints = (struct rdma_addrinfo){ .ai_flags = RAI_NOROUTE, .ai_port_space = RDMA_PS_TCP };
	TRY(one_lookup("no route", "127.0.0.1", "4711", &hints, &list));

	hints = (struct rdma_addrinfo){ .ai_port_space = RDMA_PS_TCP, .ai_dst_addr = sa(&own),
					.ai_dst_len = sizeof(struct sockaddr_in) };
	TRY(one_lookup("addresses in the hints only", NULL, NULL, &hints, &list));
	in = (struct sockaddr_in *)list->ai_dst_addr;
	ENSURE(in && in->sin_port == htons(4711), "the destination in the hints is ignored");

	hints = (struct rdma_addrinfo){ .ai_flags = RAI_PASSIVE, .ai_port_space = RDMA_PS_TCP };
	TRY(one_lookup("hints without addresses", NULL, NULL, &hints, &list));
	ENSURE(!list->ai_src_addr && list->ai_port_space == RDMA_PS_TCP, "an address that nobody gave");
	ENSURE(rdma_getaddrinfo(NULL, NULL, NULL, &list) == -1 && errno == EINVAL, "no arguments: %s", strerror(errno));

	rdma_freeaddrinfo(NULL);
	return NULL;
}

/* Datagrams of RDMA_PS_IB, in which the type of the queue pair decides how ids connect. */
static const char *ib_datagrams(size_t arg)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE, .ai_qp_type = IBV_QPT_UD, .ai_port_space = RDMA_PS_IB }, *list;
	struct ibv_qp_init_attr init = usual_qp(IBV_QPT_UD);
	struct rdma_conn_param p = params("hello", 5);
	const char *node = getenv("TEST_ADDR") ? getenv("TEST_ADDR") : "127.0.0.1";
	struct rdma_cm_id *listener, *server, *client;
	struct rdma_event_channel *channel;
	struct rdma_cm_event *got;
	char service[8];

	(void)arg;
	TRY(new_event_channel(&channel));
	TRY(one_lookup("passive side", node, "0", &hints, &list));
	ENSURE(!rdma_create_ep(&listener, list, NULL, &init), "rdma_create_ep: %s", strerror(errno));
	keep(close_ep, listener, "listener");
	ENSURE(!rdma_listen(listener, 0), "rdma_listen: %s", strerror(errno));
	snprintf(service, sizeof service, "%u", ntohs(rdma_get_src_port(listener)));
	hints.ai_flags = 0;
	TRY(one_lookup("active side", node, service, &hints, &list));
	ENSURE(!rdma_create_ep(&client, list, NULL, &init), "rdma_create_ep: %s", strerror(errno));
	keep(close_ep, client, "client");
	ENSURE(!rdma_migrate_id(client, channel), "rdma_migrate_id: %s", strerror(errno));
	ENSURE(!rdma_connect(client, &p), "rdma_connect: %s", strerror(errno));
	TRY(readable(listener->channel->fd, WAIT_MS));
	ENSURE(!rdma_get_request(listener, &server), "rdma_get_request: %s", strerror(errno));
	keep(close_ep, server, "server");
	ENSURE(server->event->param.ud.private_data_len >= 5 && !memcmp(server->event->param.ud.private_data, "hello", 5),
	       "the private data is not that of the peer");
	ENSURE(!rdma_accept(server, &p), "rdma_accept: %s", strerror(errno));
	TRY(readable(channel->fd, WAIT_MS));
	ENSURE(!rdma_get_cm_event(channel, &got), "rdma_get_cm_event: %s", strerror(errno));
	ENSURE(got->event == RDMA_CM_EVENT_ESTABLISHED, "event %s, status %d", rdma_event_str(got->event), got->status);
	ENSURE(got->param.ud.qp_num == server->qp->qp_num && got->param.ud.qkey == RDMA_UDP_QKEY, "queue pair %#x, Q_Key %#x",
	       got->param.ud.qp_num, got->param.ud.qkey);
	ENSURE(!rdma_ack_cm_event(got), "rdma_ack_cm_event: %s", strerror(errno));
	return NULL;
}

/* Calls in a wrong state or with a wrong address return an error. */
static const char *misuse(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id, *other;
	struct fixture s;
	struct address a;

	(void)arg;
	TRY(only_over_tcp()); /* crashes the library of rdma-core 44 */
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_event_channel(&channel));
	TRY(new_id(&id, channel, RDMA_PS_TCP));
	ENSURE(rdma_connect(id, &p) == -1 && errno == EINVAL, "rdma_connect of a fresh id: %s", strerror(errno));
	ENSURE(rdma_accept(id, &p) == -1 && errno == EINVAL, "rdma_accept of a fresh id: %s", strerror(errno));
	ENSURE(rdma_resolve_route(id, 100) == -1 && errno == EINVAL, "rdma_resolve_route of a fresh id: %s",
	       strerror(errno));
	ENSURE(rdma_disconnect(id) == -1 && errno == EINVAL, "rdma_disconnect of a fresh id: %s", strerror(errno));
	ENSURE(rdma_establish(id) == -1 && errno == EINVAL, "rdma_establish of a fresh id: %s", strerror(errno));
	ENSURE(rdma_notify(id, IBV_EVENT_COMM_EST) == -1 && errno == EINVAL, "rdma_notify of a fresh id: %s", strerror(errno));
	ENSURE(rdma_bind_addr(id, sa(&s.address)) == -1 && errno == EADDRINUSE, "rdma_bind_addr to a used port: %s",
	       strerror(errno));
	memset(&a, 0, sizeof a);
	a.ss.ss_family = AF_INET;
	inet_pton(AF_INET, "192.0.2.1", &((struct sockaddr_in *)&a.ss)->sin_addr);
	ENSURE(rdma_bind_addr(id, sa(&a)) == -1 && errno == EADDRNOTAVAIL, "rdma_bind_addr to a foreign address: %s",
	       strerror(errno));
	a.ss.ss_family = 250;
	ENSURE(rdma_bind_addr(id, sa(&a)) == -1, "rdma_bind_addr accepts an unknown family");
	ENSURE(rdma_resolve_addr(id, sa(&a), sa(&s.address), 100) == -1 && errno == EINVAL,
	       "rdma_resolve_addr from an unknown family: %s", strerror(errno));
	TRY(own_address(&a, AF_INET6, 0));
	ENSURE(rdma_resolve_addr(id, sa(&a), sa(&s.address), 100) == -1 && errno == EINVAL,
	       "rdma_resolve_addr from an address of another family: %s", strerror(errno));
	ENSURE(!rdma_get_dst_port(id) && !rdma_get_peer_addr(id)->sa_family, "a destination that was refused is shown");
	ENSURE(rdma_create_id(channel, &other, NULL, (enum rdma_port_space)0x1234) == -1 && errno == EINVAL,
	       "rdma_create_id of an unknown port space: %s", strerror(errno));
	/* the id can still be used for a connection */
	s.client_channel = channel;
	TRY(resolve(&s, id));
	ENSURE(rdma_resolve_addr(id, NULL, sa(&s.address), 100) == -1 && errno == EINVAL,
	       "rdma_resolve_addr twice: %s", strerror(errno));
	ENSURE(rdma_connect(id, NULL) == -1 && errno == EINVAL, "rdma_connect without a queue pair: %s", strerror(errno));
	TRY(give_qp(id));
	ENSURE(!rdma_connect(id, &p), "rdma_connect: %s", strerror(errno));
	return event(s.server_channel, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
}

/* A wildcard listener accepts at all addresses. A second listener at its port is refused. */
static const char *wildcard(size_t family)
{
	struct address any = { 0 };
	struct rdma_cm_id *second;
	struct fixture s;

	memset(&s, 0, sizeof s);
	TRY(new_event_channel(&s.server_channel));
	TRY(new_event_channel(&s.client_channel));
	TRY(new_id(&s.listener, s.server_channel, RDMA_PS_TCP));
	any.ss.ss_family = (sa_family_t)family;
	ENSURE(!rdma_bind_addr(s.listener, sa(&any)), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(!rdma_listen(s.listener, BACKLOG), "rdma_listen: %s", strerror(errno));
	TRY(own_address(&s.address, (int)family, ntohs(rdma_get_src_port(s.listener))));
	TRY(new_id(&second, s.server_channel, RDMA_PS_TCP));
	ENSURE(rdma_bind_addr(second, sa(&s.address)) == -1 && errno == EADDRNOTAVAIL,
	       "rdma_bind_addr to a port of a wildcard listener: %s", strerror(errno));
	TRY(connect_both(&s));
	return traffic(s.client, s.server);
}

/* rdma_set_option sets the timeout of the queue pair, and refuses an unknown option. Options of ECE are checked. */
static const char *options(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct ibv_ece ece = { .vendor_id = 0x15b3, .options = 1 };
	uint8_t timeout = 17, tos = 8;
	struct fixture s;
	struct event_copy t;
	int rc = 0;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_id(&s.client, s.client_channel, RDMA_PS_TCP));
	ENSURE(!rdma_set_option(s.client, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &tos, sizeof tos), "TOS: %s",
	       strerror(errno));
	ENSURE(!rdma_set_option(s.client, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof timeout),
	       "ACK_TIMEOUT: %s", strerror(errno));
	ENSURE(rdma_set_option(s.client, RDMA_OPTION_ID, 999, &tos, sizeof tos) == -1, "an unknown option is accepted");
	ENSURE(rdma_set_option(s.client, RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, &rc, sizeof rc) == -1 && errno == EINVAL,
	       "TOS of another length: %s", strerror(errno));
	ENSURE(rdma_set_option(s.client, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &tos, sizeof tos) == -1 && errno == EINVAL,
	       "REUSEADDR of another length: %s", strerror(errno));
	ENSURE(!rdma_set_local_ece(s.client, &ece), "rdma_set_local_ece: %s", strerror(errno));
	ENSURE(!rdma_get_remote_ece(s.client, &ece) && !ece.vendor_id && !ece.options, "rdma_get_remote_ece");
	ENSURE(rdma_set_local_ece(s.client, &ece) == -1 && errno == EINVAL, "ECE options without a vendor are accepted");
	TRY(resolve(&s, s.client));
	TRY(give_qp(s.client));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	ENSURE(!rdma_accept(s.server, &p), "rdma_accept: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	TRY(event(s.server_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	rc = ibv_query_qp(s.client->qp, &attr, IBV_QP_TIMEOUT | IBV_QP_STATE, &init);
	ENSURE(!rc, "ibv_query_qp: %s", strerror(rc));
	ENSURE(attr.qp_state == IBV_QPS_RTS, "state %d", attr.qp_state);
	ENSURE(attr.timeout == 17, "timeout %u, expected 17", attr.timeout);
	return NULL;
}

/* Moves a queue pair of the program to a state, with the attributes of rdma_init_qp_attr. */
static const char *move_qp(struct rdma_cm_id *id, struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };
	int mask = 0, rc;

	ENSURE(!rdma_init_qp_attr(id, &attr, &mask), "rdma_init_qp_attr to state %d: %s", state, strerror(errno));
	rc = ibv_modify_qp(qp, &attr, mask);
	ENSURE(!rc, "ibv_modify_qp to state %d with mask %#x: %s", state, mask, strerror(rc));
	return NULL;
}

static const char *own_qp(struct rdma_cm_id *id, struct end *e)
{
	struct ibv_qp_init_attr init = usual_qp(IBV_QPT_RC);

	memset(e, 0, sizeof *e);
	e->pd = ibv_alloc_pd(id->verbs);
	ENSURE(e->pd, "ibv_alloc_pd: %s", strerror(errno));
	keep(close_pd, e->pd, "protection domain");
	e->scq = ibv_create_cq(id->verbs, 32, NULL, NULL, 0);
	ENSURE(e->scq, "ibv_create_cq: %s", strerror(errno));
	keep(close_cq, e->scq, "completion queue");
	e->rcq = ibv_create_cq(id->verbs, 32, NULL, NULL, 0);
	ENSURE(e->rcq, "ibv_create_cq: %s", strerror(errno));
	keep(close_cq, e->rcq, "completion queue");
	init.send_cq = e->scq;
	init.recv_cq = e->rcq;
	e->qp = new_qp(e->pd, &init);
	ENSURE(e->qp, "ibv_create_qp: %s", strerror(errno));
	return move_qp(id, e->qp, IBV_QPS_INIT);
}

/* The program creates the queue pairs and moves them through their states. rdma_establish tells the peer that the connection works. */
static const char *establish(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct ibv_send_wr wr = send_wr(2, IBV_WR_SEND, NULL, 0);
	struct end client, server;
	struct fixture s;
	struct event_copy t;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_id(&s.client, s.client_channel, RDMA_PS_TCP));
	TRY(resolve(&s, s.client));
	TRY(own_qp(s.client, &client));
	p.qp_num = client.qp->qp_num;
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(event(s.server_channel, RDMA_CM_EVENT_CONNECT_REQUEST, &t));
	s.server = t.id;
	keep(close_id, s.server, "accepted rdma_cm_id");
	TRY(own_qp(s.server, &server));
	TRY(post_recv(server.qp, 1, NULL, 0));
	TRY(move_qp(s.server, server.qp, IBV_QPS_RTR));
	TRY(move_qp(s.server, server.qp, IBV_QPS_RTS));
	p.qp_num = server.qp->qp_num;
	ENSURE(!rdma_accept(s.server, &p), "rdma_accept: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_CONNECT_RESPONSE, NULL));
	TRY(move_qp(s.client, client.qp, IBV_QPS_RTR));
	TRY(move_qp(s.client, client.qp, IBV_QPS_RTS));
	ENSURE(!rdma_establish(s.client), "rdma_establish: %s", strerror(errno));
	TRY(event(s.server_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	TRY(post(client.qp, &wr));
	TRY(expect_ok(server.rcq, 1, IBV_WC_RECV, NULL));
	TRY(expect_ok(client.scq, 2, IBV_WC_SEND, NULL));
	ENSURE(!rdma_disconnect(s.client), "rdma_disconnect: %s", strerror(errno));
	return event(s.server_channel, RDMA_CM_EVENT_DISCONNECTED, NULL);
}

/*
 * Creates a queue pair of which only the number is used, as UCX does. The connections of the test exchange private data in
 * both directions.
 */
static const char *dummy_qp(struct rdma_cm_id *id, struct rdma_conn_param *p)
{
	struct ibv_qp_init_attr init = usual_qp(IBV_QPT_UD);
	struct ibv_cq *cq = ibv_create_cq(id->verbs, 1, NULL, NULL, 0);
	struct ibv_qp *qp;

	ENSURE(cq, "ibv_create_cq: %s", strerror(errno));
	keep(close_cq, cq, "completion queue");
	init.send_cq = init.recv_cq = cq;
	qp = ibv_create_qp(id->pd, &init);
	ENSURE(qp, "ibv_create_qp: %s", strerror(errno));
	keep(close_qp, qp, "queue pair");
	p->qp_num = qp->qp_num;
	return NULL;
}

enum connection_end { CLIENT_DISCONNECTS, SERVER_DISCONNECTS, CLIENT_GOES, SERVER_GOES, CLIENT_GOES_EARLY, SERVER_REJECTS };

static const char *dummy_qp_connection(size_t how)
{
	struct rdma_conn_param ask = { .private_data = "question", .private_data_len = 8 };
	struct rdma_conn_param answer = { .private_data = "answer", .private_data_len = 6 };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR };
	struct rdma_event_channel *other;
	struct fixture s;
	struct event_copy t;
	int mask;

	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(new_id(&s.client, s.client_channel, RDMA_PS_TCP));
	TRY(resolve(&s, s.client));
	TRY(dummy_qp(s.client, &ask));
	ENSURE(!rdma_connect(s.client, &ask), "rdma_connect: %s", strerror(errno));
	TRY(event(s.server_channel, RDMA_CM_EVENT_CONNECT_REQUEST, &t));
	TRY(data_is(&t, "question", 8));
	s.server = t.id;
	keep(close_id, s.server, "accepted rdma_cm_id");
	ENSURE(!rdma_init_qp_attr(s.server, &attr, &mask), "rdma_init_qp_attr: %s", strerror(errno));
	ENSURE(attr.ah_attr.is_global, "the peer's address has no GID");
	if (how == SERVER_REJECTS) {
		ENSURE(!rdma_reject(s.server, "no", 2), "rdma_reject: %s", strerror(errno));
		TRY(event(s.client_channel, RDMA_CM_EVENT_REJECTED, &t));
		return data_is(&t, "no", 2);
	}
	TRY(dummy_qp(s.server, &answer));
	ENSURE(!rdma_accept(s.server, &answer), "rdma_accept: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_CONNECT_RESPONSE, &t));
	TRY(data_is(&t, "answer", 6));
	if (how == CLIENT_GOES_EARLY) {
		/* The client ends before the server is connected: the server gets RDMA_CM_EVENT_CONNECT_ERROR. */
		ENSURE(!close_now(s.client), "rdma_destroy_id: %s", strerror(errno));
		return event(s.server_channel, RDMA_CM_EVENT_CONNECT_ERROR, NULL);
	}
	TRY(not_readable(s.server_channel->fd, QUIET_MS));
	ENSURE(!rdma_establish(s.client), "rdma_establish: %s", strerror(errno));
	TRY(event(s.server_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	switch ((enum connection_end)how) {
	case CLIENT_DISCONNECTS:
		ENSURE(!rdma_disconnect(s.client), "rdma_disconnect: %s", strerror(errno));
		TRY(event(s.client_channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
		TRY(event(s.server_channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
		break;
	case SERVER_DISCONNECTS:
		/* Through another channel, which is how UCX handles the requests of its listeners. */
		TRY(new_event_channel(&other));
		ENSURE(!rdma_migrate_id(s.server, other), "rdma_migrate_id: %s", strerror(errno));
		ENSURE(!rdma_disconnect(s.server), "rdma_disconnect: %s", strerror(errno));
		TRY(event(s.client_channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
		TRY(event(other, RDMA_CM_EVENT_DISCONNECTED, NULL));
		ENSURE(!rdma_migrate_id(s.server, s.server_channel), "rdma_migrate_id: %s", strerror(errno));
		break;
	case CLIENT_GOES:
		ENSURE(!close_now(s.client), "rdma_destroy_id: %s", strerror(errno));
		TRY(event(s.server_channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
		break;
	case SERVER_GOES:
		ENSURE(!close_now(s.server), "rdma_destroy_id: %s", strerror(errno));
		TRY(event(s.client_channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
		break;
	default:
		break;
	}
	return NULL;
}

/* Datagrams: the accepting side sends the number and the Q_Key of its queue pair. The event has these and the peer's address. */
static const char *datagrams(size_t family)
{
	struct rdma_conn_param p = params("udp", 3);
	struct region src, dst;
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct ibv_ah *ah;
	struct ibv_wc wc;
	struct fixture s;
	struct event_copy t;

	TRY(listen_at(&s, (int)family, RDMA_PS_UDP));
	TRY(new_client(&s, RDMA_PS_UDP));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	TRY(data_is(&t, "udp", 3));
	TRY(new_buffer(&dst, s.server, 200));
	sge = sge_of(&dst, 0, 200);
	TRY(post_recv(s.server->qp, 1, &sge, 1));
	p = params("ack", 3);
	p.qp_num = s.server->qp->qp_num;
	ENSURE(!rdma_accept(s.server, &p), "rdma_accept: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_ESTABLISHED, &t));
	TRY(data_is(&t, "ack", 3));
	ENSURE(t.ud.qp_num == s.server->qp->qp_num, "qp_num %#x, expected %#x", t.ud.qp_num, s.server->qp->qp_num);
	ENSURE(t.ud.qkey == RDMA_UDP_QKEY, "qkey %#x, expected %#x", t.ud.qkey, RDMA_UDP_QKEY);
	ah = ibv_create_ah(s.client->pd, &t.ud.ah_attr);
	ENSURE(ah, "ibv_create_ah with the address of the event: %s", strerror(errno));
	keep(close_ah, ah, "address handle");
	TRY(new_buffer(&src, s.client, 100));
	fill_pattern(src.at, 100, 3);
	sge = sge_of(&src, 0, 100);
	wr = send_wr(2, IBV_WR_SEND, &sge, 1);
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = t.ud.qp_num;
	wr.wr.ud.remote_qkey = t.ud.qkey;
	TRY(post(s.client->qp, &wr));
	TRY(expect_ok(s.client->send_cq, 2, IBV_WC_SEND, NULL));
	TRY(expect_ok(s.server->recv_cq, 1, IBV_WC_RECV, &wc));
	ENSURE(wc.byte_len == 140 && wc.src_qp == s.client->qp->qp_num, "byte_len %u, src_qp %#x", wc.byte_len,
	       wc.src_qp);
	return same_pattern(dst.at + 40, 100, 3);
}

/*
 * A wildcard listener answers from the address that the request was sent to, although the host would choose another one. The id of the
 * request has that address too.
 */
static const char *datagrams_wildcard(size_t family)
{
	struct rdma_conn_param p = params("udp", 3);
	struct address any = { 0 };
	struct sockaddr_in *local;
	struct fixture s;
	struct event_copy t;

	if (getenv("TEST_ADDR"))
		SKIP("only with the addresses of the loopback interface");
	memset(&s, 0, sizeof s);
	TRY(new_event_channel(&s.server_channel));
	TRY(new_event_channel(&s.client_channel));
	TRY(new_id(&s.listener, s.server_channel, RDMA_PS_UDP));
	any.ss.ss_family = (sa_family_t)family;
	ENSURE(!rdma_bind_addr(s.listener, sa(&any)), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(!rdma_listen(s.listener, BACKLOG), "rdma_listen: %s", strerror(errno));
	TRY(own_address(&s.address, AF_INET, ntohs(rdma_get_src_port(s.listener))));
	inet_pton(AF_INET, "127.0.0.2", &((struct sockaddr_in *)&s.address.ss)->sin_addr);
	TRY(new_client(&s, RDMA_PS_UDP));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	ENSURE(!rdma_accept(s.server, &p), "rdma_accept: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_ESTABLISHED, &t));
	ENSURE(t.ud.qp_num == s.server->qp->qp_num, "qp_num %#x, expected %#x", t.ud.qp_num, s.server->qp->qp_num);
	local = (struct sockaddr_in *)rdma_get_local_addr(s.server);
	ENSURE(!memcmp(local, sa(&s.address), offsetof(struct sockaddr_in, sin_zero)),
	       "the id of the request has another address than the request was sent to");
	return NULL;
}

static const char *datagrams_rejected(size_t arg)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct fixture s;
	struct event_copy t;

	(void)arg;
	TRY(listen_at(&s, AF_INET, RDMA_PS_UDP));
	TRY(new_client(&s, RDMA_PS_UDP));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(event(s.server_channel, RDMA_CM_EVENT_CONNECT_REQUEST, &t));
	keep(close_id, t.id, "requested rdma_cm_id");
	ENSURE(!rdma_reject(t.id, "no", 2), "rdma_reject: %s", strerror(errno));
	TRY(any_event(s.client_channel, &t, WAIT_MS));
	ENSURE(t.type == RDMA_CM_EVENT_UNREACHABLE || t.type == RDMA_CM_EVENT_REJECTED,
	       "event %s, expected a rejection", rdma_event_str(t.type));
	return NULL;
}

/*
 * The server destroys the id of the request without an answer, or the listener before it has got the request. The client is
 * rejected at once, and its request is not repeated.
 */
static const char *datagrams_not_answered(size_t gets_request)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct fixture s;
	struct event_copy t;
	uint64_t start;

	TRY(listen_at(&s, AF_INET, RDMA_PS_UDP));
	TRY(new_client(&s, RDMA_PS_UDP));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	if (gets_request) {
		TRY(event(s.server_channel, RDMA_CM_EVENT_CONNECT_REQUEST, &t));
		ENSURE(!rdma_destroy_id(t.id), "rdma_destroy_id: %s", strerror(errno));
	} else {
		TRY(readable(s.server_channel->fd, WAIT_MS));
		sleep_ms(QUIET_MS);
		ENSURE(!close_now(s.listener), "rdma_destroy_id: %s", strerror(errno));
	}
	start = now_ms();
	TRY(any_event(s.client_channel, &t, WAIT_MS));
	ENSURE(t.type == RDMA_CM_EVENT_UNREACHABLE || t.type == RDMA_CM_EVENT_REJECTED,
	       "event %s, expected a rejection", rdma_event_str(t.type));
	ENSURE(t.status > 0, "status %d is an error, expected the reason of a rejection", t.status);
	ENSURE(now_ms() - start < 2000, "rejected after %llu ms", (unsigned long long)(now_ms() - start));
	return not_readable(s.server_channel->fd, 300);
}

/* Without a listener the request fails soon, and the event says that the peer does not support the service. */
static const char *datagrams_refused(size_t is_bound)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct fixture s;
	struct event_copy t;

	TRY(listen_at(&s, AF_INET, RDMA_PS_UDP));
	TRY(new_client(&s, RDMA_PS_UDP));
	ENSURE(!close_now(s.listener), "rdma_destroy_id: %s", strerror(errno));
	if (is_bound) {
		TRY(new_id(&s.listener, s.server_channel, RDMA_PS_UDP));
		ENSURE(!rdma_bind_addr(s.listener, sa(&s.address)), "rdma_bind_addr: %s", strerror(errno));
	}
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(any_event(s.client_channel, &t, WAIT_MS));
	ENSURE(t.type == RDMA_CM_EVENT_UNREACHABLE, "event %s, expected UNREACHABLE", rdma_event_str(t.type));
	ENSURE(t.status == 1, "status %d, expected that of a service that is not supported", t.status);
	return NULL;
}

/* A request cannot be answered after its listener was destroyed, however often it is tried. */
static const char *datagrams_without_listener(size_t accepts)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct fixture s;
	struct event_copy t;

	TRY(listen_at(&s, AF_INET, RDMA_PS_UDP));
	TRY(new_client(&s, RDMA_PS_UDP));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(requested(&s, &t));
	p.qp_num = s.server->qp->qp_num;
	ENSURE(!close_now(s.listener), "rdma_destroy_id: %s", strerror(errno));
	for (int i = 0; i < 3; i++) {
		errno = 0;
		ENSURE((accepts ? rdma_accept(s.server, &p) : rdma_reject(s.server, NULL, 0)) == -1 && errno == ENOTCONN,
		       "try %d: %s", i, strerror(errno));
	}
	return NULL;
}

/* A datagram of a member reaches all other members, and none that has left the group. */
static const char *multicast(size_t members)
{
	struct rdma_event_channel *channel;
	struct rdma_cm_id *ids[8];
	struct address own, group = { 0 };
	struct region src, dst[8];
	struct ibv_send_wr wr;
	struct ibv_sge sge;
	struct ibv_ah *ah;
	struct ibv_wc wc;
	struct event_copy t;

	group.ss.ss_family = AF_INET;
	inet_pton(AF_INET, "239.77.3.4", &((struct sockaddr_in *)&group.ss)->sin_addr);
	TRY(new_event_channel(&channel));
	TRY(own_address(&own, AF_INET, 0));
	for (size_t i = 0; i < members; i++) {
		TRY(new_id(&ids[i], channel, RDMA_PS_UDP));
		ENSURE(!rdma_bind_addr(ids[i], sa(&own)), "rdma_bind_addr: %s", strerror(errno));
		TRY(give_qp(ids[i]));
		TRY(new_buffer(&dst[i], ids[i], 200));
		sge = sge_of(&dst[i], 0, 200);
		TRY(post_recv(ids[i]->qp, i, &sge, 1));
		ENSURE(!rdma_join_multicast(ids[i], sa(&group), NULL), "rdma_join_multicast: %s", strerror(errno));
		TRY(event(channel, RDMA_CM_EVENT_MULTICAST_JOIN, &t));
		ENSURE(t.ud.qp_num == 0xffffff, "qp_num %#x of a group", t.ud.qp_num);
	}
	ah = ibv_create_ah(ids[members - 1]->pd, &t.ud.ah_attr);
	ENSURE(ah, "ibv_create_ah of a group: %s", strerror(errno));
	keep(close_ah, ah, "address handle");
	TRY(new_buffer(&src, ids[members - 1], 100));
	fill_pattern(src.at, 100, 4);
	sge = sge_of(&src, 0, 100);
	wr = send_wr(50, IBV_WR_SEND, &sge, 1);
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = t.ud.qp_num;
	wr.wr.ud.remote_qkey = t.ud.qkey;
	TRY(post(ids[members - 1]->qp, &wr));
	TRY(expect_ok(ids[members - 1]->send_cq, 50, IBV_WC_SEND, NULL));
	for (size_t i = 0; i + 1 < members; i++) { /* the sender may or may not receive it */
		TRY(expect_ok(ids[i]->recv_cq, i, IBV_WC_RECV, &wc));
		ENSURE(wc.src_qp == ids[members - 1]->qp->qp_num, "src_qp %#x", wc.src_qp);
		TRY(same_pattern(dst[i].at + 40, 100, 4));
	}
	ENSURE(!rdma_leave_multicast(ids[0], sa(&group)), "rdma_leave_multicast: %s", strerror(errno));
	sge = sge_of(&dst[0], 0, 200);
	TRY(post_recv(ids[0]->qp, 60, &sge, 1));
	sge = sge_of(&src, 0, 100);
	TRY(post(ids[members - 1]->qp, &wr));
	TRY(expect_ok(ids[members - 1]->send_cq, 50, IBV_WC_SEND, NULL));
	return no_wc(ids[0]->recv_cq, QUIET_MS);
}

/*
 * Groups of an id without a queue pair: the event names the group, and the program attaches its queue pair itself. A group is left once
 * for each time that it was joined, whether the queue pair exists or not.
 */
static const char *multicast_without_queue_pair(size_t arg)
{
	struct rdma_cm_join_mc_attr_ex attr = { .comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS };
	struct rdma_event_channel *channel;
	struct address own, group = { 0 };
	struct rdma_cm_id *id, *unbound, *stream;
	union ibv_gid gid = { .raw = { [10] = 0xff, [11] = 0xff, [12] = 239, [13] = 77, [14] = 3, [15] = 5 } };
	struct event_copy t;
	struct ibv_qp *qp;

	(void)arg;
	group.ss.ss_family = AF_INET;
	memcpy(&((struct sockaddr_in *)&group.ss)->sin_addr, &gid.raw[12], 4);
	TRY(new_event_channel(&channel));
	TRY(own_address(&own, AF_INET, 0));
	TRY(new_id(&unbound, channel, RDMA_PS_UDP));
	ENSURE(rdma_join_multicast(unbound, sa(&group), NULL) == -1 && errno == EINVAL, "an unbound id joins: %s", strerror(errno));
	TRY(new_id(&stream, channel, RDMA_PS_TCP));
	ENSURE(!rdma_bind_addr(stream, sa(&own)), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(rdma_join_multicast(stream, sa(&group), NULL) == -1 && errno == EINVAL, "an id of connections joins: %s",
	       strerror(errno));

	TRY(new_id(&id, channel, RDMA_PS_UDP));
	ENSURE(!rdma_bind_addr(id, sa(&own)), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(rdma_leave_multicast(id, sa(&group)) == -1 && errno == EADDRNOTAVAIL, "rdma_leave_multicast before the join: %s",
	       strerror(errno));
	ENSURE(!rdma_join_multicast(id, sa(&group), NULL), "rdma_join_multicast: %s", strerror(errno));
	TRY(event(channel, RDMA_CM_EVENT_MULTICAST_JOIN, &t));
	ENSURE(!t.status && t.ud.qp_num == 0xffffff && t.ud.qkey == RDMA_UDP_QKEY, "status %d, qp_num %#x, qkey %#x", t.status,
	       t.ud.qp_num, t.ud.qkey);
	ENSURE(!memcmp(&t.ud.ah_attr.grh.dgid, &gid, sizeof gid), "another group");
	TRY(give_qp(id));
	qp = id->qp;
	ENSURE(!ibv_attach_mcast(qp, &gid, 0) && !ibv_detach_mcast(qp, &gid, 0), "the queue pair cannot be attached");
	ENSURE(!rdma_leave_multicast(id, sa(&group)), "rdma_leave_multicast: %s", strerror(errno));
	ENSURE(rdma_leave_multicast(id, sa(&group)) == -1 && errno == EADDRNOTAVAIL, "rdma_leave_multicast again: %s",
	       strerror(errno));

	/* Only a full member is attached. */
	attr.addr = sa(&group);
	attr.join_flags = RDMA_MC_JOIN_FLAG_SENDONLY_FULLMEMBER;
	ENSURE(!rdma_join_multicast_ex(id, &attr, NULL), "rdma_join_multicast_ex: %s", strerror(errno));
	TRY(event(channel, RDMA_CM_EVENT_MULTICAST_JOIN, &t));
	ENSURE(ibv_detach_mcast(qp, &gid, 0), "a member that only sends is attached");
	ENSURE(!rdma_leave_multicast(id, sa(&group)), "rdma_leave_multicast: %s", strerror(errno));
	attr.join_flags = RDMA_MC_JOIN_FLAG_FULLMEMBER;
	ENSURE(!rdma_join_multicast_ex(id, &attr, NULL), "rdma_join_multicast_ex: %s", strerror(errno));
	TRY(event(channel, RDMA_CM_EVENT_MULTICAST_JOIN, &t));
	ENSURE(!ibv_detach_mcast(qp, &gid, 0), "a full member is not attached");
	ENSURE(!ibv_attach_mcast(qp, &gid, 0), "the queue pair cannot be attached");
	/* If the group is joined twice, the queue pair stays attached when it is left once. */
	ENSURE(!rdma_join_multicast_ex(id, &attr, NULL), "rdma_join_multicast_ex: %s", strerror(errno));
	TRY(event(channel, RDMA_CM_EVENT_MULTICAST_JOIN, &t));
	ENSURE(!rdma_leave_multicast(id, sa(&group)), "rdma_leave_multicast: %s", strerror(errno));
	ENSURE(!ibv_detach_mcast(qp, &gid, 0), "a full member is not attached");
	rdma_destroy_qp(id);
	ENSURE(!rdma_leave_multicast(id, sa(&group)), "rdma_leave_multicast without the queue pair: %s", strerror(errno));

	attr.join_flags = RDMA_MC_JOIN_FLAG_RESERVED;
	ENSURE(rdma_join_multicast_ex(id, &attr, NULL) == -1 && errno == EINVAL, "an unknown flag: %s", strerror(errno));
	attr.join_flags = RDMA_MC_JOIN_FLAG_FULLMEMBER;
	attr.comp_mask = RDMA_CM_JOIN_MC_ATTR_ADDRESS;
	ENSURE(rdma_join_multicast_ex(id, &attr, NULL) == -1 && errno == EINVAL, "no flags: %s", strerror(errno));
	attr.comp_mask = RDMA_CM_JOIN_MC_ATTR_JOIN_FLAGS;
	ENSURE(rdma_join_multicast_ex(id, &attr, NULL) == -1 && errno == EINVAL, "no address: %s", strerror(errno));
	attr.comp_mask |= RDMA_CM_JOIN_MC_ATTR_ADDRESS | RDMA_CM_JOIN_MC_ATTR_RESERVED;
	ENSURE(rdma_join_multicast_ex(id, &attr, NULL) == -1 && errno == ENOTSUP, "an unknown field: %s", strerror(errno));
	return not_readable(channel->fd, 0);
}

/*
 * When the peer disconnects, the program gets the event. With RoCE its queue pair stays as it is, with its receives, until it disconnects
 * too. With iWARP the queue pair has failed.
 */
static const char *peer_disconnects(size_t destroys)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	struct fixture s;
	bool iwarp;

	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	TRY(connect_both(&s));
	iwarp = s.server->verbs->device->transport_type == IBV_TRANSPORT_IWARP;
	TRY(post_recv(s.server->qp, 1, NULL, 0));
	if (destroys)
		ENSURE(!close_now(s.client), "rdma_destroy_id: %s", strerror(errno));
	else
		ENSURE(!rdma_disconnect(s.client), "rdma_disconnect: %s", strerror(errno));
	TRY(event(s.server_channel, RDMA_CM_EVENT_DISCONNECTED, NULL));
	if (!iwarp) {
		TRY(no_wc(s.server->recv_cq, QUIET_MS));
		ENSURE(!ibv_query_qp(s.server->qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_RTS, "state %d",
		       attr.qp_state);
		TRY(post_recv(s.server->qp, 2, NULL, 0));
		ENSURE(!rdma_disconnect(s.server), "rdma_disconnect: %s", strerror(errno));
	}
	ENSURE(!ibv_query_qp(s.server->qp, &attr, IBV_QP_STATE, &init) && attr.qp_state == IBV_QPS_ERR, "state %d", attr.qp_state);
	for (uint64_t id = 1; id <= (iwarp ? 1 : 2); id++)
		TRY(expect_status(s.server->recv_cq, id, IBV_WC_WR_FLUSH_ERR));
	return not_readable(s.server_channel->fd, QUIET_MS);
}

/* Sequential connections through one listener. */
static const char *sequential(size_t count)
{
	struct fixture s;

	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	for (size_t i = 0; i < count; i++) {
		TRY(connect_both(&s));
		TRY(disconnect(&s));
		ENSURE(!close_now(s.client), "rdma_destroy_id: %s", strerror(errno));
		ENSURE(!close_now(s.server), "rdma_destroy_id: %s", strerror(errno));
	}
	return NULL;
}

/* A queue pair can be created so that it does not receive what it sends to its groups. Others of the process receive it. */
static const char *own_multicast_blocked(size_t arg)
{
	struct ibv_qp_init_attr_ex blocks = {
		.qp_type = IBV_QPT_UD, .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_CREATE_FLAGS, .create_flags = IBV_QP_CREATE_BLOCK_SELF_MCAST_LB,
	};
	struct rdma_event_channel *channel;
	struct address own, group = { 0 };
	struct rdma_cm_id *ids[2];
	struct event_copy t;

	(void)arg;
	group.ss.ss_family = AF_INET;
	inet_pton(AF_INET, "239.77.3.6", &((struct sockaddr_in *)&group.ss)->sin_addr);
	TRY(new_event_channel(&channel));
	TRY(own_address(&own, AF_INET, 0));
	for (int i = 0; i < 2; i++) {
		TRY(new_id(&ids[i], channel, RDMA_PS_UDP));
		ENSURE(!rdma_bind_addr(ids[i], sa(&own)), "rdma_bind_addr: %s", strerror(errno));
		if (i == 0)
			ENSURE(!rdma_create_qp_ex(ids[i], &blocks), "rdma_create_qp_ex: %s", strerror(errno));
		else
			TRY(give_qp(ids[i]));
		ENSURE(!rdma_join_multicast(ids[i], sa(&group), NULL), "rdma_join_multicast: %s", strerror(errno));
		TRY(event(channel, RDMA_CM_EVENT_MULTICAST_JOIN, &t));
	}
	for (int from = 0; from < 2; from++) {
		struct ibv_ah *ah = ibv_create_ah(ids[from]->pd, &t.ud.ah_attr);
		struct region src, dst[2];
		struct ibv_send_wr wr;
		struct ibv_sge sge;

		ENSURE(ah, "ibv_create_ah of a group: %s", strerror(errno));
		keep(close_ah, ah, "address handle");
		TRY(new_buffer(&src, ids[from], 100));
		fill_pattern(src.at, 100, from + 1);
		for (int i = from; i < 2; i++) {
			TRY(new_buffer(&dst[i], ids[i], 200));
			sge = sge_of(&dst[i], 0, 200);
			TRY(post_recv(ids[i]->qp, i, &sge, 1));
		}
		sge = sge_of(&src, 0, 100);
		wr = send_wr(50, IBV_WR_SEND, &sge, 1);
		wr.wr.ud.ah = ah;
		wr.wr.ud.remote_qpn = t.ud.qp_num;
		wr.wr.ud.remote_qkey = t.ud.qkey;
		TRY(post(ids[from]->qp, &wr));
		TRY(expect_ok(ids[from]->send_cq, 50, IBV_WC_SEND, NULL));
		TRY(expect_ok(ids[1]->recv_cq, 1, IBV_WC_RECV, NULL));
		TRY(same_pattern(dst[1].at + 40, 100, from + 1));
		/* The first queue pair has a receive posted. It is for the datagram of the second one. */
		if (from == 0)
			TRY(no_wc(ids[0]->recv_cq, QUIET_MS));
		else
			TRY(expect_ok(ids[0]->recv_cq, 0, IBV_WC_RECV, NULL));
	}
	return NULL;
}

/* No event follows of a group that was left before its event was read. */
static const char *multicast_left(size_t arg)
{
	struct rdma_event_channel *channel;
	struct address own, group = { 0 };
	struct rdma_cm_id *id;
	struct event_copy t;

	(void)arg;
	group.ss.ss_family = AF_INET;
	inet_pton(AF_INET, "239.77.3.9", &((struct sockaddr_in *)&group.ss)->sin_addr);
	TRY(new_event_channel(&channel));
	TRY(own_address(&own, AF_INET, 0));
	TRY(new_id(&id, channel, RDMA_PS_UDP));
	ENSURE(!rdma_bind_addr(id, sa(&own)), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(!rdma_join_multicast(id, sa(&group), NULL), "rdma_join_multicast: %s", strerror(errno));
	ENSURE(!rdma_leave_multicast(id, sa(&group)), "rdma_leave_multicast: %s", strerror(errno));
	TRY(not_readable(channel->fd, QUIET_MS));
	ENSURE(!rdma_join_multicast(id, sa(&group), NULL), "rdma_join_multicast: %s", strerror(errno));
	return event(channel, RDMA_CM_EVENT_MULTICAST_JOIN, &t);
}

/* The device list of rdma_get_devices. */
static const char *devices(size_t arg)
{
	struct ibv_context **list;
	int n = 0;

	(void)arg;
	list = rdma_get_devices(&n);
	ENSURE(list && n >= 1 && list[0], "rdma_get_devices: %d devices", n);
	ENSURE(!list[n], "the list has no end");
	rdma_free_devices(list);
	for (int type = 0; type <= RDMA_CM_EVENT_TIMEWAIT_EXIT; type++)
		ENSURE(rdma_event_str((enum rdma_cm_event_type)type)[0], "event %d has no name", type);
	return NULL;
}

/* ---------------------------------------------------------------- a peer in another process */

#define PART 8192u
/* Together more than the memory that two processes share for one direction. */
#define PARTS 40u

struct hello {
	uint64_t address;
	uint32_t rkey;
	uint16_t port;
};

static int end_process(void *pid)
{
	kill((pid_t)(intptr_t)pid, SIGKILL);
	waitpid((pid_t)(intptr_t)pid, NULL, 0);
	return 0;
}

/* Connects to the port that the other process sends, and waits for the end of the connection. */
static const char *peer_process(int fd)
{
	struct rdma_conn_param p = params(NULL, 0);
	struct region target;
	struct fixture s = { 0 };
	struct hello hello;

	ENSURE(read(fd, &hello, sizeof hello) == (ssize_t)sizeof hello, "the other process has ended");
	TRY(new_event_channel(&s.client_channel));
	TRY(own_address(&s.address, AF_INET, hello.port));
	TRY(new_client(&s, RDMA_PS_TCP));
	ENSURE(!rdma_connect(s.client, &p), "rdma_connect: %s", strerror(errno));
	TRY(event(s.client_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	TRY(new_buffer(&target, s.client, PART));
	hello = (struct hello){ .address = (uintptr_t)target.at, .rkey = target.mr->rkey };
	ENSURE(write(fd, &hello, sizeof hello) == (ssize_t)sizeof hello, "write: %s", strerror(errno));
	return event(s.client_channel, RDMA_CM_EVENT_DISCONNECTED, NULL);
}

/* A connection to a process that is stopped ends although the memory that both share is full. */
static const char *disconnect_stopped_peer(size_t arg)
{
	struct ibv_qp_init_attr init = usual_qp(IBV_QPT_RC);
	struct rdma_conn_param p = params(NULL, 0);
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE, .num_sge = 1 };
	struct ibv_sge sge;
	struct region source;
	struct event_copy t;
	struct fixture s;
	struct hello hello = { 0 };
	uint64_t begin;
	int pair[2], status;
	pid_t pid;

	(void)arg;
	ENSURE(!socketpair(AF_UNIX, SOCK_STREAM, 0, pair), "socketpair: %s", strerror(errno));
	fflush(stdout);
	/* Neither process has used the library yet. */
	pid = fork();
	if (pid == 0) {
		const char *reason;

		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(pair[0]);
		reason = peer_process(pair[1]);
		if (reason)
			printf("# the peer: %s\n", reason);
		fflush(stdout);
		_exit(reason != NULL);
	}
	close(pair[1]);
	ENSURE(pid > 0, "fork: %s", strerror(errno));
	keep(end_process, (void *)(intptr_t)pid, "process");
	TRY(listen_at(&s, AF_INET, RDMA_PS_TCP));
	hello.port = ntohs(rdma_get_src_port(s.listener));
	ENSURE(write(pair[0], &hello, sizeof hello) == (ssize_t)sizeof hello, "write: %s", strerror(errno));
	TRY(event(s.server_channel, RDMA_CM_EVENT_CONNECT_REQUEST, &t));
	s.server = t.id;
	keep(close_id, s.server, "accepted rdma_cm_id");
	init.cap.max_send_wr = PARTS;
	ENSURE(!rdma_create_qp(s.server, NULL, &init), "rdma_create_qp: %s", strerror(errno));
	ENSURE(!rdma_accept(s.server, &p), "rdma_accept: %s", strerror(errno));
	TRY(event(s.server_channel, RDMA_CM_EVENT_ESTABLISHED, NULL));
	TRY(readable(pair[0], WAIT_MS));
	ENSURE(read(pair[0], &hello, sizeof hello) == (ssize_t)sizeof hello, "the peer has ended");
	close(pair[0]);

	TRY(new_buffer(&source, s.server, PART));
	wr.sg_list = &sge;
	wr.wr.rdma.remote_addr = hello.address;
	wr.wr.rdma.rkey = hello.rkey;
	/* The stream moves to shared memory after some requests. */
	sge = sge_of(&source, 0, 8);
	for (uint64_t i = 0; i < 200; i++) {
		wr.wr_id = i;
		TRY(post(s.server->qp, &wr));
		TRY(expect_ok(s.server->send_cq, i, IBV_WC_RDMA_WRITE, NULL));
	}
	ENSURE(!kill(pid, SIGSTOP) && waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status),
	       "the peer does not stop");
	sge = sge_of(&source, 0, PART);
	for (uint64_t i = 0; i < PARTS; i++) {
		wr.wr_id = i;
		TRY(post(s.server->qp, &wr));
	}
	begin = now_ms();
	ENSURE(!rdma_disconnect(s.server), "rdma_disconnect: %s", strerror(errno));
	TRY(any_event(s.server_channel, &t, 5000));
	ENSURE(t.type == RDMA_CM_EVENT_DISCONNECTED, "event %s", rdma_event_str(t.type));
	printf("# disconnected after %u ms\n", (unsigned int)(now_ms() - begin));
	for (uint64_t i = 0; i < PARTS; i++) {
		struct ibv_wc wc;

		TRY(next_wc(s.server->send_cq, &wc, WAIT_MS));
		ENSURE(wc.wr_id == i && wc.status != IBV_WC_SUCCESS, "request %u completes with %s",
		       (unsigned int)wc.wr_id, ibv_wc_status_str(wc.status));
	}
	ENSURE(!kill(pid, SIGCONT), "kill: %s", strerror(errno));
	ENSURE(waitpid(pid, &status, 0) == pid && status == 0, "the peer ends with status 0x%x", status);
	forget((void *)(intptr_t)pid);
	return NULL;
}

static const struct test tests[] = {
	{ "devices", devices, 0, 0, false },
	{ "connect", connect_and_talk, AF_INET, 0, false },
	{ "connect_ipv6", connect_and_talk, AF_INET6, 0, false },
	{ "moved_qp", moved_qp, 0, 0, false },
	{ "timewait", timewait, 0, 0, false },
	{ "timewait_of_one_end", no_timewait, 0, 0, false },
	{ "path_records", path_records, RDMA_PS_TCP, 0, false },
	{ "path_records_datagrams", path_records, RDMA_PS_UDP, 0, false },
	{ "set_path", set_path, 0, 0, false },
	{ "server_disconnects", server_disconnects, 0, 0, false },
	{ "peer_destroys_id", peer_destroys_id, 0, 0, false },
	{ "disconnect_stopped_peer", disconnect_stopped_peer, 0, 0, true },
	{ "private_data_0", private_data, 0, 0, false },
	{ "private_data_5", private_data, 5, 0, false },
	{ "private_data_56", private_data, 56, 0, false },
	{ "reject_0", reject, 0, 0, false },
	{ "reject_19", reject, 19, 0, false },
	{ "dummy_qp_client_disconnects", dummy_qp_connection, CLIENT_DISCONNECTS, 0, false },
	{ "dummy_qp_server_disconnects", dummy_qp_connection, SERVER_DISCONNECTS, 0, false },
	{ "dummy_qp_client_destroyed", dummy_qp_connection, CLIENT_GOES, 0, false },
	{ "dummy_qp_server_destroyed", dummy_qp_connection, SERVER_GOES, 0, false },
	{ "dummy_qp_client_destroyed_early", dummy_qp_connection, CLIENT_GOES_EARLY, 0, false },
	{ "dummy_qp_server_rejects", dummy_qp_connection, SERVER_REJECTS, 0, false },
	{ "disconnect_before_reject", disconnect_early, REJECTS, 0, false },
	{ "disconnect_before_accept", disconnect_early, ACCEPTS, 0, false },
	{ "disconnect_of_a_request", disconnect_early, DISCONNECTS, 0, false },
	{ "accept_without_parameters", accept_as_requested, 0, 0, false },
	{ "accept_most", accept_as_requested, 1, 0, false },
	{ "refused", refused, 0, 0, false },
	{ "never_answered", never_answered, 0, 0, false },
	{ "invalid_answer", invalid_answer, 0, 0, false },
	{ "queue_pair_gone", queue_pair_gone, 0, 0, false },
	{ "queue_pair_gone_number_used", queue_pair_gone, 1, 0, true },
	{ "disconnect_without_queue_pair", disconnect_without_queue_pair, 0, 0, true },
	{ "other_clients_100", other_clients, 100, 120, false },
	{ "client_gives_up", client_gives_up, 0, 0, false },
	{ "server_gives_up", server_gives_up, 0, 0, false },
	{ "listener_gives_up", listener_gives_up, 0, 0, false },
	{ "many_clients", many_clients, 16, 0, false },
	{ "addresses", addresses, AF_INET, 0, false },
	{ "addresses_ipv6", addresses, AF_INET6, 0, false },
	{ "extended", extended, 0, 0, false },
	{ "xrc", xrc, 0, 0, false },
	{ "migrate", migrate, 0, 0, false },
	{ "migrate_waits", migrate_waits, 0, 0, false },
	{ "migrate_requests", migrate_requests, 50, 0, false },
	{ "nonblocking_channel", nonblocking_channel, 0, 0, false },
	{ "synchronous", synchronous, 0, 0, false },
	{ "endpoints", endpoints, 0, 0, false },
	{ "endpoints_with_protection_domain", endpoints, 1, 0, false },
	{ "datagram_endpoints", datagram_endpoints, 0, 0, false },
	{ "ib_datagrams", ib_datagrams, 0, 0, false },
	{ "connect_data", connect_data, 0, 0, false },
	{ "event_later_without_descriptors", event_without_descriptors, 1, 0, true },
	{ "event_never_without_descriptors", event_without_descriptors, 0, 0, true },
	{ "step_without_descriptors", step_without_descriptors, 0, 0, true },
	{ "request_without_descriptors", request_without_descriptors, 0, 0, false },
	{ "lookups", lookups, 0, 0, false },
	{ "misuse", misuse, 0, 0, false },
	{ "wildcard", wildcard, AF_INET, 0, false },
	{ "wildcard_ipv6", wildcard, AF_INET6, 0, false },
	{ "options", options, 0, 0, false },
	{ "establish", establish, 0, 0, false },
	{ "datagrams", datagrams, AF_INET, 0, false },
	{ "datagrams_ipv6", datagrams, AF_INET6, 0, false },
	{ "datagrams_wildcard", datagrams_wildcard, AF_INET, 0, false },
	{ "datagrams_wildcard_ipv6", datagrams_wildcard, AF_INET6, 0, false },
	{ "datagrams_rejected", datagrams_rejected, 0, 0, false },
	{ "datagrams_refused", datagrams_refused, 0, 0, false },
	{ "datagrams_refused_by_a_bound_port", datagrams_refused, 1, 0, false },
	{ "datagrams_not_answered", datagrams_not_answered, 1, 0, false },
	{ "datagrams_listener_destroyed", datagrams_not_answered, 0, 0, false },
	{ "datagrams_accepted_without_listener", datagrams_without_listener, 1, 0, false },
	{ "datagrams_rejected_without_listener", datagrams_without_listener, 0, 0, false },
	{ "multicast", multicast, 3, 0, false },
	{ "multicast_without_queue_pair", multicast_without_queue_pair, 0, 0, false },
	{ "multicast_left", multicast_left, 0, 0, false },
	{ "own_multicast_blocked", own_multicast_blocked, 0, 0, false },
	{ "peer_disconnects", peer_disconnects, 0, 0, false },
	{ "peer_destroys", peer_disconnects, 1, 0, false },
	{ "sequential", sequential, 100, 0, false },
};

int main(int argc, char **argv)
{
	return run_tests(tests, COUNT(tests), argc, argv);
}
