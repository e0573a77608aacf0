/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Addresses and interfaces of the host that appear and disappear: the GID table, the port state, and the events.
 *
 * The test changes them in a network namespace of this process, which ends with the process.
 */
#define _GNU_SOURCE
#include "ends.h"

#include <fcntl.h>
#include <net/if.h>
#include <rdma/rdma_cma.h>
#include <sched.h>

static bool apart; /* this process has its own network namespace */

static bool write_to(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);
	bool good = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);

	if (fd >= 0)
		close(fd);
	return good;
}

/*
 * Creates the namespaces. Must run before the device is opened, because a process with several threads cannot create a
 * user namespace.
 */
static bool own_namespace(void)
{
	char map[64];

	if (geteuid() == 0 && !unshare(CLONE_NEWNET))
		return true;
	snprintf(map, sizeof map, "0 %u 1", geteuid());
	return !unshare(CLONE_NEWUSER | CLONE_NEWNET) && write_to("/proc/self/uid_map", map);
}

static const char *shell(const char *command)
{
	int status = system(command);

	ENSURE(status == 0, "%s: status %d", command, status);
	return NULL;
}

/* Resets the interfaces before each test: lo, and a veth pair with v0 as one end. */
static const char *fresh(void)
{
	if (!apart)
		SKIP("no network namespace of our own");
	TRY(shell("ip link del v0 2>/dev/null; ip addr flush dev lo scope host; ip link set lo up; "
		  "ip addr replace 127.0.0.1/8 dev lo; ip link add v0 type veth peer name v1 && "
		  "ip link set v0 addrgenmode none && ip link set v1 addrgenmode none && "
		  "ip link set v0 up && ip link set v1 up"));
	TRY(open_device());
	/* Discards the events that this caused. */
	for (;;) {
		struct pollfd p = { .fd = device->async_fd, .events = POLLIN };
		struct ibv_async_event event;

		if (poll(&p, 1, (int)QUIET_MS) != 1)
			return NULL;
		ENSURE(!ibv_get_async_event(device, &event), "ibv_get_async_event: %s", strerror(errno));
		ibv_ack_async_event(&event);
	}
}

/*
 * Checks the next event. Skips repeated GID_CHANGE events, because several addresses of one interface may be added one
 * by one.
 */
static const char *expect_event(enum ibv_event_type type)
{
	struct ibv_async_event event;

	do {
		TRY(readable(device->async_fd, WAIT_MS));
		ENSURE(!ibv_get_async_event(device, &event), "ibv_get_async_event: %s", strerror(errno));
		ibv_ack_async_event(&event);
	} while (event.event_type == IBV_EVENT_GID_CHANGE && type != IBV_EVENT_GID_CHANGE);
	ENSURE(event.event_type == type, "%s, expected %s", ibv_event_type_str(event.event_type),
	       ibv_event_type_str(type));
	ENSURE(event.element.port_num == PORT, "port %d", event.element.port_num);
	return NULL;
}

static const char *no_event(void)
{
	return not_readable(device->async_fd, QUIET_MS);
}

static const char *port_is(enum ibv_port_state state)
{
	struct ibv_port_attr attr;
	int rc = ibv_query_port(device, PORT, &attr);

	ENSURE(!rc, "ibv_query_port: %s", strerror(rc));
	ENSURE(attr.state == state, "the port is %s, expected %s", ibv_port_state_str(attr.state),
	       ibv_port_state_str(state));
	return NULL;
}

/* Returns the index of an address in the GID table, -1 if it is not there, or less if two ways to query the table differ. */
static int index_of(const char *ip)
{
	struct ibv_gid_entry entries[256], entry;
	union ibv_gid wanted = { 0 }, gid;
	int place = -1;
	ssize_t count;

	wanted.raw[10] = wanted.raw[11] = 0xff;
	inet_pton(AF_INET, ip, wanted.raw + 12);
	count = ibv_query_gid_table(device, entries, COUNT(entries), 0);
	for (ssize_t i = 0; i < count; i++)
		if (!memcmp(&entries[i].gid, &wanted, sizeof wanted))
			place = (int)entries[i].gid_index;
	for (int i = 0; i < port_attr.gid_tbl_len; i++) {
		static const union ibv_gid none;
		int rc = ibv_query_gid_ex(device, PORT, (uint32_t)i, &entry, 0);

		if (ibv_query_gid(device, PORT, i, &gid))
			return -2;
		if (rc == ENODATA && !memcmp(&gid, &none, sizeof gid))
			continue;
		if (rc || memcmp(&gid, &entry.gid, sizeof gid) || (i == place) != !memcmp(&gid, &wanted, sizeof gid))
			return -3;
	}
	return place;
}

/* An address vector is refused if the GID table has no address at its source index. */
static const char *source(uint8_t index, bool good)
{
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = PORT, .grh = { .sgid_index = index, .hop_limit = 1 } };
	struct ibv_pd *pd = new_pd();
	struct ibv_ah *ah;

	ENSURE(pd, "ibv_alloc_pd: %s", strerror(errno));
	attr.grh.dgid = local_gid;
	errno = 0;
	ah = ibv_create_ah(pd, &attr);
	if (ah)
		keep(close_ah, ah, "address handle");
	ENSURE(!!ah == good, "ibv_create_ah from index %u: %s", index, strerror(errno));
	return NULL;
}

static const char *gid_table(size_t arg)
{
	int first, second;

	(void)arg;
	TRY(fresh());
	ENSURE(index_of("127.0.0.1") == 0, "127.0.0.1 is at %d", index_of("127.0.0.1"));
	TRY(shell("ip addr add 10.99.0.1/24 dev v0"));
	/* A query right after the change returns the new address, even if the device was not yet notified. */
	first = index_of("10.99.0.1");
	ENSURE(first > 0, "10.99.0.1 is at %d", first);
	TRY(expect_event(IBV_EVENT_GID_CHANGE));
	TRY(shell("ip addr add 10.99.0.2/24 dev v0"));
	TRY(expect_event(IBV_EVENT_GID_CHANGE));
	second = index_of("10.99.0.2");
	ENSURE(second > 0 && second != first, "10.99.0.2 is at %d", second);
	TRY(source((uint8_t)first, true));
	TRY(shell("ip addr add 10.98.0.1/24 dev v1; ip addr del 10.99.0.2/24 dev v0"));
	TRY(expect_event(IBV_EVENT_GID_CHANGE));
	while (index_of("10.99.0.2") != -1 || index_of("10.98.0.1") == -1)
		TRY(expect_event(IBV_EVENT_GID_CHANGE));
	ENSURE(index_of("10.99.0.1") == first, "10.99.0.1 moved from index %d to %d", first, index_of("10.99.0.1"));
	TRY(fresh());
	ENSURE(index_of("10.99.0.1") == -1, "10.99.0.1 is still there");
	TRY(source((uint8_t)first, false));
	TRY(shell("ip addr add 10.99.0.3/24 dev v0"));
	TRY(expect_event(IBV_EVENT_GID_CHANGE));
	ENSURE(index_of("10.99.0.3") <= first, "10.99.0.3 is at index %d, though %d is free", index_of("10.99.0.3"), first);
	TRY(port_is(IBV_PORT_ACTIVE));
	return no_event();
}

/* An address keeps its index when its interface gets another name, and when one of two interfaces with this address loses it. */
static const char *interface_changes(size_t arg)
{
	struct ibv_gid_entry entry;
	int index;

	(void)arg;
	TRY(fresh());
	TRY(shell("ip addr add 10.98.0.6/24 dev v0; ip addr add 10.99.0.7/24 dev v0; ip addr add 10.99.0.7/32 dev v1"));
	index = index_of("10.99.0.7");
	ENSURE(index > 1, "10.99.0.7 is at %d", index);
	TRY(shell("ip addr del 10.98.0.6/24 dev v0"));
	/* A kernel before 6.2 renames only interfaces that are down. */
	if (!system("ip link set v0 name w0 2>/dev/null && ip link set v1 name w1")) {
		ENSURE(index_of("10.99.0.7") == index, "10.99.0.7 moved by a rename from index %d to %d", index, index_of("10.99.0.7"));
		TRY(shell("ip link set w0 name v0; ip link set w1 name v1"));
	}
	TRY(shell("ip addr del 10.99.0.7/24 dev v0"));
	ENSURE(index_of("10.99.0.7") == index, "10.99.0.7, now only of v1, moved from index %d to %d", index, index_of("10.99.0.7"));
	ENSURE(!ibv_query_gid_ex(device, PORT, (uint32_t)index, &entry, 0) && entry.ndev_ifindex == if_nametoindex("v1"),
	       "interface %u, v1 is %u", entry.ndev_ifindex, if_nametoindex("v1"));
	TRY(shell("ip addr add 10.99.0.7/24 dev v0; ip addr del 10.99.0.7/32 dev v1"));
	ENSURE(index_of("10.99.0.7") == index, "10.99.0.7, now only of v0, moved from index %d to %d", index, index_of("10.99.0.7"));
	ENSURE(!ibv_query_gid_ex(device, PORT, (uint32_t)index, &entry, 0) && entry.ndev_ifindex == if_nametoindex("v0"),
	       "interface %u, v0 is %u", entry.ndev_ifindex, if_nametoindex("v0"));
	return expect_event(IBV_EVENT_GID_CHANGE);
}

static const char *interface_down(size_t arg)
{
	(void)arg;
	TRY(fresh());
	TRY(shell("ip addr add 10.99.0.5/24 dev v0"));
	TRY(expect_event(IBV_EVENT_GID_CHANGE));
	TRY(port_is(IBV_PORT_ACTIVE));
	TRY(shell("ip link set lo down"));
	TRY(expect_event(IBV_EVENT_PORT_ERR));
	TRY(expect_event(IBV_EVENT_GID_CHANGE));
	TRY(expect_event(IBV_EVENT_LID_CHANGE)); /* the LID follows from the first address */
	TRY(port_is(IBV_PORT_DOWN));
	ENSURE(index_of("127.0.0.1") == -1, "127.0.0.1 is at %d", index_of("127.0.0.1"));
	TRY(shell("ip link set lo up"));
	TRY(expect_event(IBV_EVENT_PORT_ACTIVE));
	TRY(expect_event(IBV_EVENT_GID_CHANGE));
	TRY(expect_event(IBV_EVENT_LID_CHANGE));
	ENSURE(index_of("127.0.0.1") == 0, "127.0.0.1 is at %d", index_of("127.0.0.1"));
	return port_is(IBV_PORT_ACTIVE);
}

/* Gets the next event of a channel, and its id and status. */
static const char *next_cm_event(struct rdma_event_channel *channel, enum rdma_cm_event_type type, struct rdma_cm_id **id, int *status)
{
	struct rdma_cm_event *event;
	enum rdma_cm_event_type got;

	TRY(readable(channel->fd, WAIT_MS));
	ENSURE(!rdma_get_cm_event(channel, &event), "rdma_get_cm_event: %s", strerror(errno));
	got = event->event;
	*id = event->id;
	*status = event->status;
	rdma_ack_cm_event(event);
	ENSURE(got == type, "event %s (status %d), expected %s", rdma_event_str(got), *status, rdma_event_str(type));
	return NULL;
}

static const char *cm_event(struct rdma_event_channel *channel, enum rdma_cm_event_type type, struct rdma_cm_id *id)
{
	struct rdma_cm_id *got;
	int status;

	TRY(next_cm_event(channel, type, &got, &status));
	ENSURE(got == id, "event %s for another id", rdma_event_str(type));
	return NULL;
}

static int close_event_channel(void *p)
{
	rdma_destroy_event_channel(p);
	return 0;
}

static int close_fd(void *p)
{
	return close((int)(intptr_t)p);
}

static int close_id(void *p)
{
	return rdma_destroy_id(p);
}

/* The MAC address of an interface changes: identifiers bound to its address get an event, others do not. */
static const char *mac_address_changes(size_t arg)
{
	struct sockaddr_in here = { .sin_family = AF_INET }, peer = { .sin_family = AF_INET, .sin_port = htons(9) };
	struct sockaddr_in other = { .sin_family = AF_INET };
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id, *elsewhere;

	(void)arg;
	TRY(fresh());
	TRY(shell("ip addr add 10.99.0.1/24 dev v0; ip addr add 10.98.0.1/24 dev v1"));
	inet_pton(AF_INET, "10.99.0.1", &here.sin_addr);
	inet_pton(AF_INET, "10.99.0.7", &peer.sin_addr);
	inet_pton(AF_INET, "10.98.0.1", &other.sin_addr);
	channel = rdma_create_event_channel();
	ENSURE(channel, "rdma_create_event_channel: %s", strerror(errno));
	keep(close_event_channel, channel, "event channel");
	ENSURE(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(close_id, id, "rdma_cm_id");
	ENSURE(!rdma_create_id(channel, &elsewhere, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(close_id, elsewhere, "rdma_cm_id");
	ENSURE(!rdma_bind_addr(elsewhere, (struct sockaddr *)&other), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(!rdma_resolve_addr(id, (struct sockaddr *)&here, (struct sockaddr *)&peer, 1000), "rdma_resolve_addr: %s",
	       strerror(errno));
	TRY(cm_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED, id));
	ENSURE(index_of("10.99.0.1") > 0 && index_of("10.98.0.1") > 0, "the addresses are not in the GID table");
	TRY(shell("ip link set v0 address 02:00:00:00:00:42"));
	TRY(cm_event(channel, RDMA_CM_EVENT_ADDR_CHANGE, id));
	return not_readable(channel->fd, QUIET_MS);
}

/* Whether an address is the IPv6 address `ip` on interface v0. */
static bool is_at_v0(const struct sockaddr *addr, const struct in6_addr *ip)
{
	const struct sockaddr_in6 *in6 = (const struct sockaddr_in6 *)addr;

	return in6->sin6_family == AF_INET6 && !memcmp(&in6->sin6_addr, ip, sizeof *ip) &&
	       in6->sin6_scope_id == if_nametoindex("v0");
}

/*
 * A connection to a link-local address, which is complete only with its interface. Datagrams cannot be sent to such an address, because
 * a GID names no interface.
 */
static const char *link_local(size_t arg)
{
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp_init_attr same = init; /* rdma_create_qp stores the completion queues that it creates. */
	struct sockaddr_in6 any = { .sin6_family = AF_INET6 }, peer = any;
	struct rdma_cm_id *listener, *client, *server, *datagrams, *got;
	struct rdma_event_channel *channel;
	struct rdma_conn_param p = { 0 };
	int status;

	(void)arg;
	TRY(fresh());
	TRY(shell("ip addr add fe80::7/64 dev v0 nodad"));
	inet_pton(AF_INET6, "fe80::7", &peer.sin6_addr);
	peer.sin6_scope_id = if_nametoindex("v0");
	channel = rdma_create_event_channel();
	ENSURE(channel, "rdma_create_event_channel: %s", strerror(errno));
	keep(close_event_channel, channel, "event channel");
	ENSURE(!rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(close_id, listener, "rdma_cm_id");
	ENSURE(!rdma_bind_addr(listener, (struct sockaddr *)&any), "rdma_bind_addr: %s", strerror(errno));
	ENSURE(!rdma_listen(listener, 1), "rdma_listen: %s", strerror(errno));
	peer.sin6_port = rdma_get_src_port(listener);

	ENSURE(!rdma_create_id(channel, &client, NULL, RDMA_PS_TCP), "rdma_create_id: %s", strerror(errno));
	keep(close_id, client, "rdma_cm_id");
	ENSURE(!rdma_resolve_addr(client, NULL, (struct sockaddr *)&peer, 1000), "rdma_resolve_addr: %s", strerror(errno));
	TRY(cm_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED, client));
	ENSURE(!rdma_resolve_route(client, 1000), "rdma_resolve_route: %s", strerror(errno));
	TRY(cm_event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, client));
	ENSURE(is_at_v0(rdma_get_local_addr(client), &peer.sin6_addr), "another local address");
	ENSURE(!rdma_create_qp(client, NULL, &init), "rdma_create_qp: %s", strerror(errno));
	ENSURE(!rdma_connect(client, &p), "rdma_connect: %s", strerror(errno));
	TRY(next_cm_event(channel, RDMA_CM_EVENT_CONNECT_REQUEST, &server, &status));
	keep(close_id, server, "accepted rdma_cm_id");
	ENSURE(!rdma_create_qp(server, NULL, &same), "rdma_create_qp: %s", strerror(errno));
	ENSURE(!rdma_accept(server, &p), "rdma_accept: %s", strerror(errno));
	for (int i = 0; i < 2; i++)
		TRY(next_cm_event(channel, RDMA_CM_EVENT_ESTABLISHED, &got, &status));
	ENSURE(is_at_v0(rdma_get_local_addr(client), &peer.sin6_addr), "another local address of a connection");
	ENSURE(is_at_v0(rdma_get_local_addr(server), &peer.sin6_addr), "another local address of the peer");
	ENSURE(is_at_v0(rdma_get_peer_addr(server), &peer.sin6_addr), "another remote address of the peer");
	rdma_destroy_qp(client);
	rdma_destroy_qp(server);

	channel = rdma_create_event_channel();
	ENSURE(channel, "rdma_create_event_channel: %s", strerror(errno));
	keep(close_event_channel, channel, "event channel");
	ENSURE(!rdma_create_id(channel, &datagrams, NULL, RDMA_PS_UDP), "rdma_create_id: %s", strerror(errno));
	keep(close_id, datagrams, "rdma_cm_id");
	ENSURE(!rdma_resolve_addr(datagrams, NULL, (struct sockaddr *)&peer, 1000), "rdma_resolve_addr: %s", strerror(errno));
	TRY(next_cm_event(channel, RDMA_CM_EVENT_ADDR_ERROR, &got, &status));
	ENSURE(got == datagrams && status == -EADDRNOTAVAIL, "status %d", status);
	return NULL;
}

/*
 * Waits for a UDP packet from an address and checks the hop limit and traffic class of its IP header. Ignores other
 * packets.
 */
static const char *seen(int raw, const char *from, uint8_t hops, uint8_t class)
{
	uint64_t end = now_ms() + WAIT_MS;
	uint8_t packet[256];
	struct in_addr source;

	inet_pton(AF_INET, from, &source);
	while (now_ms() < end) {
		ssize_t n;

		TRY(readable(raw, WAIT_MS));
		n = recv(raw, packet, sizeof packet, 0);
		ENSURE(n >= 28, "a packet of %zd bytes", n);
		if (!memcmp(packet + 12, &source, 4) && packet[8] == hops && packet[1] == class)
			return NULL;
	}
	ENSURE(false, "no packet from %s with hop limit %u and class %#x", from, hops, class);
}

/* Packets of UD and UC have the source address, hop limit and traffic class of the address vector. */
static const char *packets(size_t type)
{
	const struct want w = { .type = (enum ibv_qp_type)type };
	struct ibv_send_wr wr = send_wr(1, IBV_WR_SEND, NULL, 0);
	struct ibv_ah_attr vector;
	struct region grh = { 0 };
	struct ibv_wc wc;
	struct pair p;
	int raw, rc;

	TRY(fresh());
	TRY(shell("ip addr add 10.99.0.1/24 dev v0; ip addr add 10.99.0.2/24 dev v0"));
	ENSURE(index_of("10.99.0.2") > 0 && index_of("10.99.0.1") > 0, "the addresses are not in the GID table");
	raw = socket(AF_INET, SOCK_RAW, IPPROTO_UDP);
	ENSURE(raw >= 0, "a raw socket in the network namespace: %s", strerror(errno));
	keep(close_fd, (void *)(intptr_t)raw, "raw socket");
	TRY(open_end(&p.a, &w));
	TRY(open_end(&p.b, &w));
	TRY(new_region(&grh, p.b.pd, 40, IBV_ACCESS_LOCAL_WRITE));
	struct ibv_sge sge = sge_of(&grh, 0, 40);

	/* From the second address to the first. */
	vector = address_of(&local_gid, 0, false);
	ENSURE(!ibv_query_gid(device, PORT, index_of("10.99.0.1"), &vector.grh.dgid), "ibv_query_gid");
	vector.grh.sgid_index = (uint8_t)index_of("10.99.0.2");
	vector.grh.hop_limit = 33;
	vector.grh.traffic_class = 0x28;
	TRY(to_init(p.a.qp, &w));
	TRY(to_init(p.b.qp, &w));
	if (type == IBV_QPT_UC) {
		for (int way = 0; way < 2; way++) {
			struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .ah_attr = vector,
						    .dest_qp_num = (way ? p.a : p.b).qp->qp_num };

			if (way) { /* the reverse direction */
				attr.ah_attr.grh.sgid_index = (uint8_t)index_of("10.99.0.1");
				ENSURE(!ibv_query_gid(device, PORT, index_of("10.99.0.2"), &attr.ah_attr.grh.dgid),
				       "ibv_query_gid");
			}
			rc = ibv_modify_qp((way ? p.b : p.a).qp, &attr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU |
					   IBV_QP_DEST_QPN | IBV_QP_RQ_PSN);
			ENSURE(!rc, "ibv_modify_qp to RTR: %s", strerror(rc));
		}
	} else {
		TRY(to_rtr(p.a.qp, 0, &w));
		TRY(to_rtr(p.b.qp, 0, &w));
		wr.wr.ud.ah = ibv_create_ah(p.a.pd, &vector);
		ENSURE(wr.wr.ud.ah, "ibv_create_ah: %s", strerror(errno));
		keep(close_ah, wr.wr.ud.ah, "address handle");
		wr.wr.ud.remote_qpn = p.b.qp->qp_num;
		wr.wr.ud.remote_qkey = QKEY;
	}
	TRY(to_rts(p.a.qp, &w));
	TRY(to_rts(p.b.qp, &w));
	TRY(post_recv(p.b.qp, 2, &sge, 1));
	TRY(post(p.a.qp, &wr));
	TRY(expect_ok(p.b.rcq, 2, IBV_WC_RECV, &wc));
	TRY(expect_ok(p.a.scq, 1, IBV_WC_SEND, NULL));
	if (type == IBV_QPT_UD) {
		/* The address vector of the reply has the two addresses of the datagram, swapped. */
		ENSURE(!ibv_init_ah_from_wc(device, PORT, &wc, (struct ibv_grh *)grh.at, &vector), "ibv_init_ah_from_wc");
		ENSURE(vector.grh.dgid.raw[15] == 2, "the source address of the datagram is another one");
		ENSURE(vector.grh.sgid_index == index_of("10.99.0.1"), "the destination address of the datagram is another one");
	}
	return seen(raw, "10.99.0.2", 33, 0x28);
}

static const struct test tests[] = {
	{ "gid_table", gid_table, 0, 0, false },
	{ "interface_changes", interface_changes, 0, 0, false },
	{ "interface_down", interface_down, 0, 0, false },
	{ "mac_address_changes", mac_address_changes, 0, 0, false },
	{ "link_local", link_local, 0, 0, false },
	{ "packets_ud", packets, IBV_QPT_UD, 0, false },
	{ "packets_uc", packets, IBV_QPT_UC, 0, false },
};

int main(int argc, char **argv)
{
	apart = own_namespace();
	return run_tests(tests, COUNT(tests), argc, argv);
}
