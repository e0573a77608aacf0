/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Included by tests of extended sockets, after check.h and exs.h. */
#ifndef EXS_EVENTS_H
#define EXS_EVENTS_H

/* Waits for an event, and removes it from the queue. */
static const char *next_event(exs_qhandle_t q, exs_event_t *e)
{
	struct timeval wait = { 10, 0 };
	int n;

	do
		n = exs_qdequeue(q, e, 1, &wait);
	while (n < 0 && errno == EINTR);
	ENSURE(n == 1, "no event: %d (%s)", n, strerror(errno));
	return NULL;
}

#endif
