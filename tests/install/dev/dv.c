// SPDX-License-Identifier: Apache-2.0 OR MIT
// Finds anywarp's device without a launcher, because the program is linked with its library.
#include <infiniband/anywarpdv.h>
#include <infiniband/verbs.h>
#include <stdio.h>

int main(void)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	int found = 0;
	for (int i = 0; devices && devices[i]; i++)
		found += anywarpdv_is_supported(devices[i]);
	if (devices)
		ibv_free_device_list(devices);
	printf("%d devices of anywarp\n", found);
	return found == 0;
}
