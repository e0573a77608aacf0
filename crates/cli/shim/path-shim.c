/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * Shows the device as files, for programs that look for device files instead of using libibverbs.
 *
 *   /dev/infiniband/anywarp0    behaves like /dev/null: a character device that everyone may read and write
 *   /sys/class/infiniband/...   is a small tree that contains only anywarp0; /sys/class/infiniband_verbs is another tree
 *
 * This preload library replaces the functions that take a path. Other paths are passed to the next library unchanged. The
 * tree consists of real files, so a folder that is opened here can be read, traversed and passed on by functions that are
 * not replaced. The tree is created on first use, in a folder of the user, and is kept. There is no constructor, no thread
 * and no state except cached values. If the tree cannot be created, paths below /sys are not replaced.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <limits.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

#define DEVICE "anywarp0"
/* The version of the tree's layout, to be changed when its files change. */
#define LAYOUT "4"
#define EXPORT __attribute__((visibility("default")))

/* The number of entries of the port's GID table. */
#define GIDS 64

/* The function of this name in the libraries after this one. */
#define NEXT(name)                                                                             \
	({                                                                                     \
		static void *next_;                                                            \
		void *found_ = __atomic_load_n(&next_, __ATOMIC_RELAXED);                      \
		if (!found_) {                                                                 \
			found_ = dlsym(RTLD_NEXT, #name);                                      \
			__atomic_store_n(&next_, found_, __ATOMIC_RELAXED);                    \
		}                                                                              \
		(__typeof__(&name))found_;                                                     \
	})

/* ---------------------------------------------------------------- the tree */

/* Direct system calls: creating the tree must not use the replaced functions below. */
static int raw_open(const char *path, int flags)
{
	return (int)syscall(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC, 0644);
}

/* Creates the folder `path` unless it exists. Returns whether it is a folder that only this user may write. */
static bool own_folder(const char *path)
{
	struct statx s;

	if (mkdir(path, 0755) && errno != EEXIST)
		return false;
	if (syscall(SYS_statx, AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, STATX_TYPE | STATX_MODE | STATX_UID, &s))
		return false;
	return S_ISDIR(s.stx_mode) && s.stx_uid == geteuid() && !(s.stx_mode & 022);
}

/* Writes `dir/name` atomically, unless it exists. Returns whether it exists afterwards. */
static bool put_file(const char *dir, const char *name, const char *text)
{
	char path[PATH_MAX], fresh[PATH_MAX];
	size_t len = strlen(text);
	int fd;

	if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path ||
	    snprintf(fresh, sizeof fresh, "%s.%ld", path, (long)getpid()) >= (int)sizeof fresh)
		return false;
	fd = raw_open(path, O_RDONLY);
	if (fd >= 0) {
		close(fd);
		return true;
	}
	fd = raw_open(fresh, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW);
	if (fd < 0)
		return false;
	if (write(fd, text, len) != (ssize_t)len || write(fd, "\n", 1) != 1) {
		close(fd);
		unlink(fresh);
		return false;
	}
	close(fd);
	return !rename(fresh, path);
}

static bool put_folder(const char *dir, const char *name)
{
	char path[PATH_MAX];

	return snprintf(path, sizeof path, "%s/%s", dir, name) < (int)sizeof path &&
	       (!mkdir(path, 0755) || errno == EEXIST);
}

static bool put_link(const char *dir, const char *name, const char *target)
{
	char path[PATH_MAX];

	return snprintf(path, sizeof path, "%s/%s", dir, name) < (int)sizeof path &&
	       (!symlink(target, path) || errno == EEXIST);
}

/*
 * A file of the kernel that can be opened, and whose read fails with EINVAL: the loopback interface has no speed. The files of `gid_attrs` for
 * indexes without a GID are links to it, because the kernel's are like that, and programs that search for a GID end their search there.
 */
#define UNREADABLE "/sys/class/net/lo/speed"

static bool is_unreadable(void)
{
	char c;
	int fd = raw_open(UNREADABLE, O_RDONLY);
	bool is = fd >= 0 && read(fd, &c, 1) < 0 && errno == EINVAL;

	if (fd >= 0)
		close(fd);
	return is;
}

/* Converts an interface address to a GID. Returns false for other families than IPv4 and IPv6. */
static bool gid_of(const struct sockaddr *addr, uint8_t gid[16])
{
	memset(gid, 0, 16);
	if (addr && addr->sa_family == AF_INET) {
		gid[10] = gid[11] = 0xff;
		memcpy(gid + 12, &((const struct sockaddr_in *)(const void *)addr)->sin_addr, 4);
		return true;
	}
	if (addr && addr->sa_family == AF_INET6) {
		memcpy(gid, &((const struct sockaddr_in6 *)(const void *)addr)->sin6_addr, 16);
		return true;
	}
	return false;
}

/*
 * Returns the priority of an address in the GID table, or 0 if the address gets no GID. The address with the highest priority
 * is GID 0; of several with the same priority, the first one in the list of the kernel comes first. As in the device, the order
 * is: the address in ANYWARP_ADDR, then IPv4 before IPv6, and the loopback interface last.
 */
#define BEST 5
static int rank(const struct ifaddrs *i, const uint8_t gid[16], const uint8_t *wanted)
{
	bool v4 = i->ifa_addr->sa_family == AF_INET;

	if (!(i->ifa_flags & IFF_UP) || (!v4 && gid[0] == 0xfe && (gid[1] & 0xc0) == 0x80) ||
	    (v4 && gid[12] == 169 && gid[13] == 254))
		return 0;
	if (wanted && !memcmp(gid, wanted, 16))
		return BEST;
	return (i->ifa_flags & IFF_LOOPBACK ? 1 : 3) + v4;
}

/* An entry of the GID table. */
struct gid {
	uint8_t raw[16];
	char interface[IF_NAMESIZE];
};

/* Creates the GID table as the device does: the best addresses first, without duplicates. Returns its length. */
static int gid_table(struct gid table[GIDS])
{
	const char *variable = secure_getenv("ANYWARP_ADDR");
	uint8_t wanted[16] = { [10] = 0xff, [11] = 0xff }, raw[16];
	bool is_wanted = variable && (inet_pton(AF_INET, variable, wanted + 12) == 1 ||
				      inet_pton(AF_INET6, variable, wanted) == 1);
	struct ifaddrs *list;
	int n = 0;

	if (getifaddrs(&list))
		return 0;
	for (int best = BEST; best > 0; best--) {
		for (struct ifaddrs *i = list; i && n < GIDS; i = i->ifa_next) {
			bool is_new = gid_of(i->ifa_addr, raw) && rank(i, raw, is_wanted ? wanted : NULL) == best;

			for (int g = 0; is_new && g < n; g++)
				is_new = memcmp(table[g].raw, raw, 16);
			if (!is_new)
				continue;
			memcpy(table[n].raw, raw, 16);
			snprintf(table[n].interface, sizeof table[n].interface, "%s", i->ifa_name);
			n++;
		}
	}
	freeifaddrs(list);
	return n;
}

static void gid_text(char text[40], const uint8_t gid[16])
{
	for (size_t i = 0; i < 16; i++)
		snprintf(text + (i / 2) * 5 + (i % 2) * 2, 4, "%02x%s", gid[i], i % 2 && i < 15 ? ":" : "");
}

/* Creates the node GUID as the device does: from the hardware address of the interface, or else from the end of the GID. */
static void guid_text(char text[20], const uint8_t gid[16], const char *interface)
{
	char path[64 + IF_NAMESIZE], line[32] = "";
	unsigned int mac[6] = { 0 };
	uint8_t guid[8];
	int fd;

	snprintf(path, sizeof path, "/sys/class/net/%s/address", interface);
	fd = raw_open(path, O_RDONLY);
	if (fd >= 0) {
		ssize_t n = read(fd, line, sizeof line - 1);

		line[n > 0 ? n : 0] = 0;
		close(fd);
	}
	if (sscanf(line, "%2x:%2x:%2x:%2x:%2x:%2x", mac, mac + 1, mac + 2, mac + 3, mac + 4, mac + 5) == 6 &&
	    (mac[0] | mac[1] | mac[2] | mac[3] | mac[4] | mac[5])) {
		/* Convert EUI-48 to EUI-64. */
		guid[0] = (uint8_t)(mac[0] ^ 2);
		guid[1] = (uint8_t)mac[1];
		guid[2] = (uint8_t)mac[2];
		guid[3] = 0xff;
		guid[4] = 0xfe;
		guid[5] = (uint8_t)mac[3];
		guid[6] = (uint8_t)mac[4];
		guid[7] = (uint8_t)mac[5];
	} else {
		memcpy(guid, gid + 8, 8);
		guid[0] |= 2;
	}
	snprintf(text, 20, "%02x%02x:%02x%02x:%02x%02x:%02x%02x", guid[0], guid[1], guid[2], guid[3], guid[4], guid[5], guid[6],
		 guid[7]);
}

/* Creates the LID as the device does. */
static unsigned int lid_of(const uint8_t gid[16])
{
	unsigned int low = ((unsigned int)gid[14] << 8 | gid[15]) & 0xbfff;

	return low ? low : 1;
}

/* Creates the files below `top` that do not exist. */
static bool fill_tree(const char *top, const struct gid *table, int n)
{
	static const uint8_t none[16];
	char text[40], name[48], net[64], guid[20], lid[16];
	char dev[PATH_MAX], verbs[PATH_MAX];
	bool unreadable;

	if (snprintf(dev, sizeof dev, "%s/infiniband/" DEVICE, top) >= (int)sizeof dev ||
	    snprintf(verbs, sizeof verbs, "%s/infiniband_verbs/" DEVICE, top) >= (int)sizeof verbs)
		return false;
	snprintf(net, sizeof net, "/sys/class/net/%s", table[0].interface);
	snprintf(name, sizeof name, "device/net/%s", table[0].interface);
	guid_text(guid, table[0].raw, table[0].interface);
	snprintf(lid, sizeof lid, "0x%x", lid_of(table[0].raw));
	if (!put_folder(top, "infiniband_verbs") || !put_file(top, "infiniband_verbs/abi_version", "6") ||
	    !put_folder(top, "infiniband_verbs/" DEVICE) || !put_file(verbs, "abi_version", "1") ||
	    !put_file(verbs, "ibdev", DEVICE) || !put_file(verbs, "dev", "1:3") || !put_folder(top, "infiniband") ||
	    !put_folder(top, "infiniband/" DEVICE))
		return false;
	if (!put_file(dev, "node_type", "1: CA") || !put_file(dev, "node_desc", "anywarp") ||
	    !put_file(dev, "node_guid", guid) || !put_file(dev, "sys_image_guid", guid) ||
	    !put_file(dev, "fw_ver", ANYWARP_VERSION) || !put_file(dev, "hw_rev", "1") || !put_file(dev, "hca_type", "anywarp") ||
	    !put_folder(dev, "device") || !put_folder(dev, "device/net") || !put_link(dev, name, net) ||
	    !put_folder(dev, "device/infiniband_verbs") || !put_folder(dev, "device/infiniband_verbs/" DEVICE) ||
	    !put_file(dev, "device/numa_node", "-1") || !put_folder(dev, "ports") || !put_folder(dev, "ports/1") ||
	    !put_file(dev, "ports/1/state", "4: ACTIVE") || !put_file(dev, "ports/1/phys_state", "5: LinkUp") ||
	    !put_file(dev, "ports/1/rate", "100 Gb/sec (4X EDR)") || !put_file(dev, "ports/1/lid", lid) ||
	    !put_file(dev, "ports/1/lid_mask_count", "0") || !put_file(dev, "ports/1/sm_lid", "0x0") ||
	    !put_file(dev, "ports/1/sm_sl", "0") || !put_file(dev, "ports/1/link_layer", "Ethernet") || !put_file(dev, "ports/1/cap_mask", "0x00010000") ||
	    !put_folder(dev, "ports/1/pkeys") || !put_file(dev, "ports/1/pkeys/0", "0xffff") || !put_folder(dev, "ports/1/gids") ||
	    !put_folder(dev, "ports/1/gid_attrs") || !put_folder(dev, "ports/1/gid_attrs/types") ||
	    !put_folder(dev, "ports/1/gid_attrs/ndevs"))
		return false;
	/* Without such a file these entries are left out, so that opening one fails with ENOENT. */
	unreadable = is_unreadable();
	for (int i = 0; i < GIDS; i++) {
		const char *const attrs[] = { "types", "ndevs" };

		gid_text(text, i < n ? table[i].raw : none);
		snprintf(name, sizeof name, "ports/1/gids/%d", i);
		if (!put_file(dev, name, text))
			return false;
		for (int a = 0; a < 2; a++) {
			snprintf(name, sizeof name, "ports/1/gid_attrs/%s/%d", attrs[a], i);
			if (i < n ? !put_file(dev, name, a ? table[i].interface : "RoCE v2") : unreadable && !put_link(dev, name, UNREADABLE))
				return false;
		}
	}
	return true;
}

/* Returns the folder that replaces /sys/class for infiniband and infiniband_verbs, or NULL if it cannot be created. */
static const char *tree(void)
{
	static char made[PATH_MAX / 2];
	static int state; /* 0: not tried yet, 1: `made` is being written, 2: created, 3: cannot be created */
	char top[PATH_MAX / 2];
	const char *base = secure_getenv("XDG_RUNTIME_DIR");
	struct gid table[GIDS];
	int n, none = 0, known = __atomic_load_n(&state, __ATOMIC_ACQUIRE);
	uint32_t sum = 2166136261u;
	bool good;

	if (known >= 2)
		return known == 2 ? made : NULL;
	n = gid_table(table);
	good = n > 0;
	/* A host with other addresses uses another tree. */
	for (int g = 0; g < n; g++) {
		for (size_t i = 0; i < 16; i++)
			sum = (sum ^ table[g].raw[i]) * 16777619u;
		for (const char *c = table[g].interface; *c; c++)
			sum = (sum ^ (uint8_t)*c) * 16777619u;
	}
	/* Another version of anywarp also uses another tree. */
	for (const char *c = ANYWARP_VERSION " " LAYOUT; *c; c++)
		sum = (sum ^ (uint8_t)*c) * 16777619u;
	if (good && (!base || base[0] != '/' || access(base, W_OK)))
		base = "/tmp";
	good = good && snprintf(top, sizeof top, "%s/anywarp-%ld-%s-%08x", base, (long)geteuid(), n ? table[0].interface : "", sum) <
			       (int)sizeof top;
	good = good && own_folder(top) && fill_tree(top, table, n);
	if (!good)
		top[0] = 0;
	if (__atomic_compare_exchange_n(&state, &none, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
		memcpy(made, top, sizeof made);
		__atomic_store_n(&state, good ? 2 : 3, __ATOMIC_RELEASE);
	} else {
		while ((known = __atomic_load_n(&state, __ATOMIC_ACQUIRE)) == 1)
			; /* this does not take long: the other thread only copies a path */
	}
	return __atomic_load_n(&state, __ATOMIC_ACQUIRE) == 2 ? made : NULL;
}

/* ---------------------------------------------------------------- the paths */

/* Returns what follows `prefix` in `path`, if `path` is equal to it or below it. */
static const char *below(const char *path, const char *prefix, size_t len)
{
	if (strncmp(path, prefix, len) || (path[len] && path[len] != '/'))
		return NULL;
	return path + len;
}

#define BELOW(path, prefix) below(path, prefix, sizeof prefix - 1)

/* Returns the path to use for `path`: itself, /dev/null, or a path in the tree, which is written to `room`. */
static const char *shown(const char *path, char room[PATH_MAX])
{
	const char *rest, *top;
	int saved;

	if (!path || path[0] != '/' || (path[1] != 's' && path[1] != 'd'))
		return path;
	rest = BELOW(path, "/dev/infiniband/" DEVICE);
	if (rest)
		return *rest ? path : "/dev/null";
	rest = path + sizeof "/sys/class" - 1;
	if (!BELOW(path, "/sys/class/infiniband") && !BELOW(path, "/sys/class/infiniband_verbs"))
		return path;
	saved = errno;
	top = tree();
	errno = saved;
	if (!top || snprintf(room, PATH_MAX, "%s%s", top, rest) >= PATH_MAX)
		return path;
	return room;
}

#define SHOWN(path)          \
	char room_[PATH_MAX]; \
	path = shown(path, room_)

/* ---------------------------------------------------------------- opening */

/* The mode argument exists only if the call may create a file. */
#define MODE(flags, last)                                           \
	({                                                          \
		mode_t mode_ = 0;                                   \
		if (((flags) & O_CREAT) || ((flags) & O_TMPFILE) == O_TMPFILE) { \
			va_list args_;                              \
			va_start(args_, last);                      \
			mode_ = va_arg(args_, mode_t);              \
			va_end(args_);                              \
		}                                                   \
		mode_;                                              \
	})

EXPORT int open(const char *path, int flags, ...)
{
	mode_t mode = MODE(flags, flags);

	SHOWN(path);
	return NEXT(open)(path, flags, mode);
}

EXPORT int open64(const char *path, int flags, ...)
{
	mode_t mode = MODE(flags, flags);

	SHOWN(path);
	return NEXT(open64)(path, flags, mode);
}

EXPORT int openat(int dir, const char *path, int flags, ...)
{
	mode_t mode = MODE(flags, flags);

	SHOWN(path);
	return NEXT(openat)(dir, path, flags, mode);
}

EXPORT int openat64(int dir, const char *path, int flags, ...)
{
	mode_t mode = MODE(flags, flags);

	SHOWN(path);
	return NEXT(openat64)(dir, path, flags, mode);
}

/* Variants that programs call if they were compiled with _FORTIFY_SOURCE. */
int __open_2(const char *path, int flags);
int __open64_2(const char *path, int flags);
int __openat_2(int dir, const char *path, int flags);
int __openat64_2(int dir, const char *path, int flags);

EXPORT int __open_2(const char *path, int flags)
{
	SHOWN(path);
	return NEXT(__open_2)(path, flags);
}

EXPORT int __open64_2(const char *path, int flags)
{
	SHOWN(path);
	return NEXT(__open64_2)(path, flags);
}

EXPORT int __openat_2(int dir, const char *path, int flags)
{
	SHOWN(path);
	return NEXT(__openat_2)(dir, path, flags);
}

EXPORT int __openat64_2(int dir, const char *path, int flags)
{
	SHOWN(path);
	return NEXT(__openat64_2)(dir, path, flags);
}

EXPORT FILE *fopen(const char *path, const char *mode)
{
	SHOWN(path);
	return NEXT(fopen)(path, mode);
}

EXPORT FILE *fopen64(const char *path, const char *mode)
{
	SHOWN(path);
	return NEXT(fopen64)(path, mode);
}

EXPORT DIR *opendir(const char *path)
{
	SHOWN(path);
	return NEXT(opendir)(path);
}

EXPORT int scandir(const char *path, struct dirent ***list, int (*filter)(const struct dirent *),
		   int (*compare)(const struct dirent **, const struct dirent **))
{
	SHOWN(path);
	return NEXT(scandir)(path, list, filter, compare);
}

EXPORT int scandir64(const char *path, struct dirent64 ***list, int (*filter)(const struct dirent64 *),
		     int (*compare)(const struct dirent64 **, const struct dirent64 **))
{
	SHOWN(path);
	return NEXT(scandir64)(path, list, filter, compare);
}

/* If the working directory is changed to a folder of the tree, the kernel resolves relative paths from that folder. */
EXPORT int chdir(const char *path)
{
	SHOWN(path);
	return NEXT(chdir)(path);
}

/* ---------------------------------------------------------------- looking */

/*
 * Before glibc 2.33 there was no function stat, only __xstat with a version. Since then __xstat exists for old programs only.
 * Each function below calls the next one of its name, or the other one if the C library does not have it.
 */
int __xstat(int version, const char *path, struct stat *s);
int __lxstat(int version, const char *path, struct stat *s);
int __fxstatat(int version, int dir, const char *path, struct stat *s, int flags);
int __xstat64(int version, const char *path, struct stat64 *s);
int __lxstat64(int version, const char *path, struct stat64 *s);
int __fxstatat64(int version, int dir, const char *path, struct stat64 *s, int flags);

#ifdef __x86_64__
#define STAT_VERSION 1
#else
#define STAT_VERSION 0
#endif

#define NEW_STAT(name, old, type)                                                                  \
	EXPORT int name(const char *restrict path, struct type *restrict s)                        \
	{                                                                                          \
		SHOWN(path);                                                                       \
		return NEXT(name) ? NEXT(name)(path, s) : NEXT(old)(STAT_VERSION, path, s);        \
	}

#define OLD_STAT(old, name, type)                                                                  \
	EXPORT int old(int version, const char *path, struct type *s)                              \
	{                                                                                          \
		SHOWN(path);                                                                       \
		if (NEXT(old))                                                                     \
			return NEXT(old)(version, path, s);                                        \
		if (version != STAT_VERSION) {                                                     \
			errno = EINVAL;                                                            \
			return -1;                                                                 \
		}                                                                                  \
		return NEXT(name)(path, s);                                                        \
	}

#define NEW_STAT_AT(name, old, type)                                                               \
	EXPORT int name(int dir, const char *restrict path, struct type *restrict s, int flags)    \
	{                                                                                          \
		SHOWN(path);                                                                       \
		return NEXT(name) ? NEXT(name)(dir, path, s, flags)                                \
				  : NEXT(old)(STAT_VERSION, dir, path, s, flags);                  \
	}

#define OLD_STAT_AT(old, name, type)                                                               \
	EXPORT int old(int version, int dir, const char *path, struct type *s, int flags)          \
	{                                                                                          \
		SHOWN(path);                                                                       \
		if (NEXT(old))                                                                     \
			return NEXT(old)(version, dir, path, s, flags);                            \
		if (version != STAT_VERSION) {                                                     \
			errno = EINVAL;                                                            \
			return -1;                                                                 \
		}                                                                                  \
		return NEXT(name)(dir, path, s, flags);                                            \
	}

NEW_STAT(stat, __xstat, stat)
NEW_STAT(lstat, __lxstat, stat)
NEW_STAT(stat64, __xstat64, stat64)
NEW_STAT(lstat64, __lxstat64, stat64)
NEW_STAT_AT(fstatat, __fxstatat, stat)
NEW_STAT_AT(fstatat64, __fxstatat64, stat64)
OLD_STAT(__xstat, stat, stat)
OLD_STAT(__lxstat, lstat, stat)
OLD_STAT(__xstat64, stat64, stat64)
OLD_STAT(__lxstat64, lstat64, stat64)
OLD_STAT_AT(__fxstatat, fstatat, stat)
OLD_STAT_AT(__fxstatat64, fstatat64, stat64)

EXPORT int statx(int dir, const char *restrict path, int flags, unsigned int mask, struct statx *restrict s)
{
	SHOWN(path);
	return NEXT(statx)(dir, path, flags, mask, s);
}

EXPORT int access(const char *path, int mode)
{
	SHOWN(path);
	return NEXT(access)(path, mode);
}

EXPORT int faccessat(int dir, const char *path, int mode, int flags)
{
	SHOWN(path);
	return NEXT(faccessat)(dir, path, mode, flags);
}

EXPORT int euidaccess(const char *path, int mode)
{
	SHOWN(path);
	return NEXT(euidaccess)(path, mode);
}

EXPORT int eaccess(const char *path, int mode)
{
	SHOWN(path);
	return NEXT(eaccess)(path, mode);
}

EXPORT ssize_t getxattr(const char *path, const char *name, void *to, size_t size)
{
	SHOWN(path);
	return NEXT(getxattr)(path, name, to, size);
}

EXPORT ssize_t lgetxattr(const char *path, const char *name, void *to, size_t size)
{
	SHOWN(path);
	return NEXT(lgetxattr)(path, name, to, size);
}

EXPORT ssize_t readlink(const char *restrict path, char *restrict to, size_t size)
{
	SHOWN(path);
	return NEXT(readlink)(path, to, size);
}

EXPORT ssize_t readlinkat(int dir, const char *restrict path, char *restrict to, size_t size)
{
	SHOWN(path);
	return NEXT(readlinkat)(dir, path, to, size);
}

EXPORT char *realpath(const char *restrict path, char *restrict to)
{
	SHOWN(path);
	return NEXT(realpath)(path, to);
}

char *__realpath_chk(const char *path, char *to, size_t size);

EXPORT char *__realpath_chk(const char *path, char *to, size_t size)
{
	SHOWN(path);
	return NEXT(__realpath_chk)(path, to, size);
}

EXPORT char *canonicalize_file_name(const char *path)
{
	SHOWN(path);
	return NEXT(canonicalize_file_name)(path);
}
