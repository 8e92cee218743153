/* SPDX-License-Identifier: Apache-2.0
 *
 * prlimit_preload: lets criu read the resource limits of other users' tasks without CAP_SYS_RESOURCE.
 *
 * CRIU asks for each task's limits with prlimit(2). For a task of another uid the kernel wants CAP_SYS_RESOURCE, which some
 * test machines withhold from root; without it no container that runs as a user other than root can be dumped. The same
 * numbers stand in /proc/PID/limits for everybody who may ptrace the task, so this library answers a refused read from
 * there. Setting limits is left as it is.
 *
 * For test stacks only. A node without the capability is misconfigured; thaw reports it.
 *
 * Build: gcc -shared -fPIC -O2 -o prlimit_preload.so prlimit_preload.c -ldl
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Row titles of /proc/PID/limits, in the kernel's words (fs/proc/base.c). */
static const char *const titles[RLIM_NLIMITS] = {
	[RLIMIT_CPU] = "Max cpu time",
	[RLIMIT_FSIZE] = "Max file size",
	[RLIMIT_DATA] = "Max data size",
	[RLIMIT_STACK] = "Max stack size",
	[RLIMIT_CORE] = "Max core file size",
	[RLIMIT_RSS] = "Max resident set",
	[RLIMIT_NPROC] = "Max processes",
	[RLIMIT_NOFILE] = "Max open files",
	[RLIMIT_MEMLOCK] = "Max locked memory",
	[RLIMIT_AS] = "Max address space",
	[RLIMIT_LOCKS] = "Max file locks",
	[RLIMIT_SIGPENDING] = "Max pending signals",
	[RLIMIT_MSGQUEUE] = "Max msgqueue size",
	[RLIMIT_NICE] = "Max nice priority",
	[RLIMIT_RTPRIO] = "Max realtime priority",
	[RLIMIT_RTTIME] = "Max realtime timeout",
};

/* The title column is 25 characters wide and followed by one blank. */
#define TITLE_WIDTH 26

static long (*next_syscall)(long number, ...);

__attribute__((constructor)) static void find_next(void)
{
	next_syscall = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
	if (!next_syscall)
		abort();
}

static int parse_limit(const char *text, rlim64_t *value)
{
	char *end;

	if (strcmp(text, "unlimited") == 0) {
		*value = RLIM64_INFINITY;
		return 0;
	}
	errno = 0;
	*value = strtoull(text, &end, 10);
	return errno || *end ? -1 : 0;
}

/* read_limit fills in out from /proc/PID/limits; 0, or -1 if the limit does not stand there. */
static int read_limit(int pid, unsigned int resource, struct rlimit64 *out)
{
	char path[sizeof("/proc//limits") + 3 * sizeof(int)], line[256], soft[32], hard[32];
	size_t title;
	int found = -1;
	FILE *file;

	if (resource >= RLIM_NLIMITS || !titles[resource])
		return -1;
	title = strlen(titles[resource]);
	snprintf(path, sizeof(path), "/proc/%d/limits", pid);
	file = fopen(path, "re");
	if (!file)
		return -1;
	while (found < 0 && fgets(line, sizeof(line), file)) {
		if (strlen(line) <= TITLE_WIDTH || strncmp(line, titles[resource], title) != 0)
			continue;
		if (sscanf(line + TITLE_WIDTH, "%31s %31s", soft, hard) != 2)
			break;
		if (parse_limit(soft, &out->rlim_cur) == 0 && parse_limit(hard, &out->rlim_max) == 0)
			found = 0;
	}
	fclose(file);
	return found;
}

/* CRIU calls prlimit64 through syscall(2)'s wrapper. */
long syscall(long number, ...)
{
	long a[6], result;
	va_list args;
	int i, error;

	/* The wrapper passes six registers whatever the call takes; so does this. */
	va_start(args, number);
	for (i = 0; i < 6; i++)
		a[i] = va_arg(args, long);
	va_end(args);

	result = next_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
	if (result != -1 || errno != EPERM || number != SYS_prlimit64 || a[2] || !a[3])
		return result;
	error = errno;
	if (read_limit((int)a[0], (unsigned int)a[1], (struct rlimit64 *)a[3]) == 0)
		return 0;
	errno = error;
	return -1;
}
