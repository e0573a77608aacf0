/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/* CRC32C, for programs that build packets themselves. */
#ifndef CRC_H
#define CRC_H

#include <stddef.h>
#include <stdint.h>

static uint32_t crc_table[256];

static uint32_t crc32c(const uint8_t *at, size_t len)
{
	uint32_t crc = ~0u;

	if (!crc_table[1])
		for (uint32_t n = 0; n < 256; n++) {
			uint32_t c = n;

			for (int bit = 0; bit < 8; bit++)
				c = c >> 1 ^ (c & 1 ? 0x82f63b78u : 0);
			crc_table[n] = c;
		}
	for (size_t i = 0; i < len; i++)
		crc = crc >> 8 ^ crc_table[(crc ^ at[i]) & 0xff];
	return ~crc;
}

#endif
