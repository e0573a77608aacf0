/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* Prepares memory with anywarp-buffers on the device of `anywarp run`. */
#include <anywarp-buffers.h>
#include <stdio.h>

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *device = list && *list ? ibv_open_device(*list) : NULL;
	struct ibv_pd *pd = device ? ibv_alloc_pd(device) : NULL;
	struct awbuf *buffers = pd ? awbuf_open(pd, NULL) : NULL;
	struct awbuf_buffer buffer;
	char data[100] = { 1 };

	if (!buffers || awbuf_get_send(buffers, data, sizeof data, 0, &buffer) || awbuf_release(&buffer, 0) || awbuf_close(buffers)) {
		perror("anywarp-buffers");
		return 1;
	}
	return 0;
}
