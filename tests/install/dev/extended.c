// SPDX-License-Identifier: Apache-2.0 OR MIT
// Loads the library of extended sockets and creates a queue.
#include <exs.h>
#include <stdio.h>

int main(void)
{
	if (exs_init(EXS_VERSION)) {
		perror("exs_init");
		return 1;
	}
	exs_qhandle_t queue = exs_qcreate(1);
	if (queue == EXS_QHANDLE_INVALID || exs_qdelete(queue)) {
		perror("exs_qcreate");
		return 1;
	}
	return 0;
}
