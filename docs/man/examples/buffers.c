/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* A buffer that is sent repeatedly. The first time it is copied or registered. Later sends use a registration that was kept. */
#include <anywarp-buffers.h>
#include <stdio.h>
#include <stdlib.h>

int main(void)
{
	static const char *const done[] = { "", "copied", "registered", "kept" };
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *device = list && *list ? ibv_open_device(*list) : NULL;
	struct ibv_pd *pd = device ? ibv_alloc_pd(device) : NULL;
	struct awbuf *buffers = pd ? awbuf_open(pd, NULL) : NULL;
	size_t length = 4 << 20;
	char *data = calloc(1, length);
	struct awbuf_stats stats;

	if (!buffers || !data) {
		perror("awbuf_open");
		return 1;
	}
	for (int i = 0; i < 4; i++) {
		struct awbuf_buffer buffer;

		if (awbuf_get_send(buffers, data, length, 0, &buffer)) {
			perror("awbuf_get_send");
			return 1;
		}
		/* Here buffer.addr, buffer.length and buffer.lkey are used in a request, which completes. */
		printf("%zu bytes: %s\n", buffer.length, done[buffer.how]);
		if (awbuf_release(&buffer, 0))
			return 1;
	}
	free(data);
	if (awbuf_query(buffers, &stats, sizeof stats))
		return 1;
	printf("critical size %llu, found %llu times\n", (unsigned long long)stats.critical_size, (unsigned long long)stats.hits);
	if (awbuf_close(buffers) || ibv_dealloc_pd(pd) || ibv_close_device(device))
		return 1;
	ibv_free_device_list(list);
	return 0;
}
