/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * A link between two network namespaces that drops and delays packets:
 *
 *   relay NAMESPACE NAMESPACE LOSS_PPM DELAY_US SEED
 *
 * Creates a point-to-point device "wire" in each namespace, prints "up" when both exist, and forwards packets until it
 * gets a signal or its standard input ends. Then it prints how many packets arrived, and how many it dropped. Each IP
 * packet is dropped or kept independently of the others. The devices have no offloads, so the kernel has fragmented longer
 * datagrams already.
 *
 * The delay applies to each direction. Packets keep their order, and the queue is bounded, as in a router.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

#define LONGEST 9216
#define ROOM (64u << 10) /* packets in transit in one direction */

struct packet {
	uint64_t due;
	uint32_t len;
	uint8_t data[LONGEST];
};

struct direction {
	int from, to;
	uint64_t random, arrived, lost, full, refused;
	uint32_t head, tail; /* never reset; the index in the ring is modulo ROOM */
	struct packet *ring;
};

static volatile sig_atomic_t ended;

static void on_signal(int number)
{
	(void)number;
	ended = 1;
}

static void fail(const char *what)
{
	fprintf(stderr, "relay: %s: %s\n", what, strerror(errno));
	exit(1);
}

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int device(const char *space)
{
	struct ifreq request = { .ifr_name = "wire", .ifr_flags = IFF_TUN | IFF_NO_PI };
	char path[256];
	int ns, fd;

	snprintf(path, sizeof(path), "/run/netns/%s", space);
	ns = open(path, O_RDONLY | O_CLOEXEC);
	if (ns < 0 || setns(ns, CLONE_NEWNET))
		fail(path);
	close(ns);
	fd = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
	if (fd < 0 || ioctl(fd, TUNSETIFF, &request))
		fail("/dev/net/tun");
	return fd;
}

static uint64_t roll(uint64_t *state)
{
	uint64_t x = *state += 0x9e3779b97f4a7c15u;

	x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
	x = (x ^ x >> 27) * 0x94d049bb133111ebu;
	return x ^ x >> 31;
}

/* Reads packets that have arrived. The number is limited, so that the other direction does not wait. */
static void take(struct direction *d, uint64_t ppm, uint64_t delay)
{
	for (int i = 0; i < 64; i++) {
		struct packet *p = &d->ring[d->head % ROOM];
		static uint8_t none[LONGEST];
		uint8_t *at = d->head - d->tail < ROOM ? p->data : none;
		ssize_t n = read(d->from, at, LONGEST);

		if (n <= 0)
			return;
		d->arrived++;
		if (roll(&d->random) % 1000000 < ppm) {
			d->lost++;
		} else if (at == none) {
			d->full++;
		} else {
			p->len = (uint32_t)n;
			p->due = now() + delay;
			d->head++;
		}
	}
}

static void give(struct direction *d, uint64_t at)
{
	while (d->tail != d->head && d->ring[d->tail % ROOM].due <= at) {
		struct packet *p = &d->ring[d->tail++ % ROOM];

		if (write(d->to, p->data, p->len) < 0)
			d->refused++;
	}
}

int main(int argc, char **argv)
{
	struct direction d[2] = { 0 };
	uint64_t ppm, delay;

	if (argc != 6) {
		fprintf(stderr, "usage: relay NAMESPACE NAMESPACE LOSS_PPM DELAY_US SEED\n");
		return 2;
	}
	ppm = strtoull(argv[3], NULL, 10);
	delay = strtoull(argv[4], NULL, 10) * 1000;
	signal(SIGTERM, on_signal);
	signal(SIGINT, on_signal);
	d[0].from = d[1].to = device(argv[1]);
	d[1].from = d[0].to = device(argv[2]);
	for (int i = 0; i < 2; i++) {
		d[i].random = strtoull(argv[5], NULL, 10) + (uint64_t)i;
		d[i].ring = calloc(ROOM, sizeof(struct packet));
		if (!d[i].ring)
			fail("memory");
	}
	printf("up\n");
	fflush(stdout);
	while (!ended) {
		struct pollfd fds[3] = { { .fd = d[0].from, .events = POLLIN }, { .fd = d[1].from, .events = POLLIN },
					 { .fd = STDIN_FILENO, .events = POLLIN } };
		uint64_t at = now(), next = UINT64_MAX;
		struct timespec wait;

		for (int i = 0; i < 2; i++)
			if (d[i].tail != d[i].head && d[i].ring[d[i].tail % ROOM].due < next)
				next = d[i].ring[d[i].tail % ROOM].due;
		next = next == UINT64_MAX ? 1000000000u : next > at ? next - at : 0;
		wait = (struct timespec){ (time_t)(next / 1000000000u), (long)(next % 1000000000u) };
		if (ppoll(fds, 3, &wait, NULL) < 0 && errno != EINTR)
			fail("ppoll");
		if (fds[2].revents)
			break;
		for (int i = 0; i < 2; i++) {
			if (fds[i].revents & POLLIN)
				take(&d[i], ppm, delay);
			give(&d[i], now());
		}
	}
	for (int i = 0; i < 2; i++)
		printf("%s: arrived %" PRIu64 " lost %" PRIu64 " full %" PRIu64 " refused %" PRIu64 "\n", i ? "back" : "forth", d[i].arrived,
		       d[i].lost, d[i].full, d[i].refused);
	return 0;
}
