/* SPDX-License-Identifier: Apache-2.0 OR MIT */
#ifndef _SYS_EXS_H
#define _SYS_EXS_H
#include <exs.h>
#endif
