/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A network namespace for one test process. */
#ifndef NETWORK_H
#define NETWORK_H

#include "check.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

/* Moves the process into a new network namespace, whose loopback interface has the address 127.0.0.1 and, if it is not null, `other`. */
static const char *own_network(const char *other)
{
	struct ifreq lo = { .ifr_name = "lo" }, second = { .ifr_name = "lo:1" };
	struct sockaddr_in *at = (struct sockaddr_in *)&second.ifr_addr;
	int fd;

	if (unshare(CLONE_NEWNET) && unshare(CLONE_NEWUSER | CLONE_NEWNET))
		SKIP("network namespaces are not permitted");
	fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	ENSURE(fd >= 0 && !ioctl(fd, SIOCGIFFLAGS, &lo), "lo: %s", strerror(errno));
	lo.ifr_flags |= IFF_UP;
	ENSURE(!ioctl(fd, SIOCSIFFLAGS, &lo), "lo: %s", strerror(errno));
	if (other) {
		at->sin_family = AF_INET;
		inet_pton(AF_INET, other, &at->sin_addr);
		ENSURE(!ioctl(fd, SIOCSIFADDR, &second), "%s at lo: %s", other, strerror(errno));
	}
	close(fd);
	return NULL;
}

#endif
