// SPDX-License-Identifier: Apache-2.0
//
// victim: a process with missing memory that forks without pause. It hands the
// userfaultfd over on descriptor 3; then it and all its children read pages at random
// and write a line to standard error for each that is not as it must be. It
// does not end.

#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define BASE 0x100000000000UL
#define PAGES 16384UL // as in the test
#define PAGE 4096UL

static uint64_t state;

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
	return x ^ (x >> 31);
}

static void check(int n)
{
	while (n--) {
		uint64_t p = (state = mix(state)) % PAGES;
		volatile uint64_t *m = (uint64_t *)(BASE + p * PAGE);
		uint64_t got = m[state >> 32 & 511];

		if (got != ~p)
			dprintf(2, "wrong: page %lu of process %d is %#lx\n", p, getpid(), got);
	}
}

static int hand_over(int fd)
{
	char byte = 0, control[CMSG_SPACE(sizeof(int))] = {0};
	struct iovec data = {&byte, 1};
	struct msghdr m = {.msg_iov = &data, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);

	c->cmsg_level = SOL_SOCKET;
	c->cmsg_type = SCM_RIGHTS;
	c->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(c), &fd, sizeof(int));
	return sendmsg(3, &m, 0) != 1 || close(fd) || close(3);
}

int main(void)
{
	struct uffdio_api api = {.api = UFFD_API, .features = UFFD_FEATURE_EVENT_FORK | UFFD_FEATURE_EVENT_REMAP |
							      UFFD_FEATURE_EVENT_REMOVE | UFFD_FEATURE_EVENT_UNMAP};
	struct uffdio_register r = {.range = {BASE, PAGES * PAGE}, .mode = UFFDIO_REGISTER_MODE_MISSING};
	int fd = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);

	if (fd < 0 || ioctl(fd, UFFDIO_API, &api) ||
	    mmap((void *)BASE, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED ||
	    ioctl(fd, UFFDIO_REGISTER, &r) || hand_over(fd)) {
		perror("victim");
		return 1;
	}
	for (state = getpid();;) {
		int children = 0;

		while (children < 4 && fork() > 0)
			children++;
		if (children < 4) {
			state = mix(getpid());
			check(20);
			_exit(0);
		}
		check(2);
		while (children--)
			wait(NULL);
	}
}
