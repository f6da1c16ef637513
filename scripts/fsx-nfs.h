/* The header global.h of fsx for scripts/fsx-nfs: the calls of fsx on files below /nfs/ go to libnfs.
 * The server is in NFS_URL. All other files are local. */
#ifndef PAGEMESH_FSX_NFS_H
#define PAGEMESH_FSX_NFS_H

#define _GNU_SOURCE
#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/param.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include <nfsc/libnfs.h>

#define NFS_PREFIX "/nfs/"
/* The numbers of open files of libnfs begin here. */
#define NFS_FD_BASE 1000000
#define NFS_FILES_MAX 64

static struct nfs_context *nfs_server;
static struct nfsfh *nfs_files[NFS_FILES_MAX];

static inline int nfs_result(int64_t result)
{
	if (result >= 0)
		return (int)result;
	errno = (int)-result;
	return -1;
}

static inline struct nfsfh *nfs_file(int fd)
{
	if (fd < NFS_FD_BASE || fd >= NFS_FD_BASE + NFS_FILES_MAX)
		return NULL;
	return nfs_files[fd - NFS_FD_BASE];
}

static inline void nfs_connect(void)
{
	struct nfs_url *url;

	if (nfs_server)
		return;
	nfs_server = nfs_init_context();
	url = nfs_server ? nfs_parse_url_dir(nfs_server, getenv("NFS_URL")) : NULL;
	if (!url || nfs_mount(nfs_server, url->server, url->path)) {
		fprintf(stderr, "cannot mount NFS_URL: %s\n",
			nfs_server ? nfs_get_error(nfs_server) : "no memory");
		exit(99);
	}
}

static inline int fsx_open(const char *path, int flags, int mode)
{
	struct nfsfh *file;
	int at, result;

	if (strncmp(path, NFS_PREFIX, strlen(NFS_PREFIX)))
		return open(path, flags, mode);
	nfs_connect();
	path += strlen(NFS_PREFIX) - 1;
	for (at = 0; at < NFS_FILES_MAX && nfs_files[at]; at++)
		;
	if (at == NFS_FILES_MAX) {
		errno = EMFILE;
		return -1;
	}
	if (flags & O_CREAT) {
		result = nfs_creat(nfs_server, path, mode, &file);
		if (result < 0 && result != -EEXIST)
			return nfs_result(result);
		if (result == 0)
			nfs_close(nfs_server, file);
	}
	result = nfs_open(nfs_server, path, flags & ~O_CREAT, &file);
	if (result < 0)
		return nfs_result(result);
	nfs_files[at] = file;
	return NFS_FD_BASE + at;
}

static inline int fsx_close(int fd)
{
	struct nfsfh *file = nfs_file(fd);

	if (!file)
		return close(fd);
	nfs_files[fd - NFS_FD_BASE] = NULL;
	return nfs_result(nfs_close(nfs_server, file));
}

/* libnfs may transfer less than asked, as the server's limits say. */
static inline ssize_t fsx_read(int fd, void *data, size_t count)
{
	struct nfsfh *file = nfs_file(fd);

	if (!file)
		return read(fd, data, count);
	return nfs_result(nfs_read(nfs_server, file, count, data));
}

static inline ssize_t fsx_write(int fd, const void *data, size_t count)
{
	struct nfsfh *file = nfs_file(fd);

	if (!file)
		return write(fd, data, count);
	return nfs_result(nfs_write(nfs_server, file, count, data));
}

static inline ssize_t fsx_preadv2(int fd, const struct iovec *part, int parts, off_t offset,
				  int flags)
{
	struct nfsfh *file = nfs_file(fd);

	if (!file)
		return preadv2(fd, part, parts, offset, flags);
	return nfs_result(nfs_pread(nfs_server, file, offset, part->iov_len, part->iov_base));
}

static inline ssize_t fsx_pwritev2(int fd, const struct iovec *part, int parts, off_t offset,
				   int flags)
{
	struct nfsfh *file = nfs_file(fd);

	if (!file)
		return pwritev2(fd, part, parts, offset, flags);
	return nfs_result(nfs_pwrite(nfs_server, file, offset, part->iov_len, part->iov_base));
}

static inline off_t fsx_lseek(int fd, off_t offset, int whence)
{
	struct nfsfh *file = nfs_file(fd);
	uint64_t now = 0;
	int result;

	if (!file)
		return lseek(fd, offset, whence);
	result = nfs_lseek(nfs_server, file, offset, whence, &now);
	return result < 0 ? nfs_result(result) : (off_t)now;
}

static inline int fsx_fstat(int fd, struct stat *into)
{
	struct nfsfh *file = nfs_file(fd);
	struct nfs_stat_64 found;
	int result;

	if (!file)
		return fstat(fd, into);
	result = nfs_fstat64(nfs_server, file, &found);
	if (result < 0)
		return nfs_result(result);
	memset(into, 0, sizeof(*into));
	into->st_size = found.nfs_size;
	into->st_mode = found.nfs_mode;
	into->st_blksize = 4096;
	return 0;
}

static inline int fsx_ftruncate(int fd, off_t size)
{
	struct nfsfh *file = nfs_file(fd);

	if (!file)
		return ftruncate(fd, size);
	return nfs_result(nfs_ftruncate(nfs_server, file, size));
}

static inline int fsx_fsync(int fd)
{
	struct nfsfh *file = nfs_file(fd);

	if (!file)
		return fsync(fd);
	return nfs_result(nfs_fsync(nfs_server, file));
}

/* The helpers that fsx expects. */
static inline uint64_t rounddown_64(uint64_t value, uint32_t unit)
{
	return value - value % unit;
}

static inline uint64_t roundup_64(uint64_t value, uint32_t unit)
{
	return rounddown_64(value + unit - 1, unit);
}

#define open(path, flags, ...) fsx_open(path, flags, 0666)
#define close(fd) fsx_close(fd)
#define read(fd, data, count) fsx_read(fd, data, count)
#define write(fd, data, count) fsx_write(fd, data, count)
#define preadv2(fd, part, parts, offset, flags) fsx_preadv2(fd, part, parts, offset, flags)
#define pwritev2(fd, part, parts, offset, flags) fsx_pwritev2(fd, part, parts, offset, flags)
#define lseek(fd, offset, whence) fsx_lseek(fd, offset, whence)
#define fstat(fd, into) fsx_fstat(fd, into)
#define ftruncate(fd, size) fsx_ftruncate(fd, size)
#define fsync(fd) fsx_fsync(fd)

#endif
