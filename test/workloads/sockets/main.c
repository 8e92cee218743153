/* SPDX-License-Identifier: Apache-2.0
 *
 * sockets: two processes that talk over a unix socket pair, and a file that is open but deleted.
 *
 * Ten times a second the parent sends a number to the child, which answers with the sum of all numbers so far, held in its
 * memory. The parent appends the answer to the deleted file, reads the whole file back, and prints
 * "n=N sum=S file=F": S must be N*(N+1)/2, and F, the number of answers in the file, must be N. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static _Noreturn void fail(const char *what)
{
	perror(what);
	exit(1);
}

static _Noreturn void child(int fd)
{
	uint64_t n, sum = 0;

	while (read(fd, &n, sizeof(n)) == sizeof(n)) {
		sum += n;
		if (write(fd, &sum, sizeof(sum)) != sizeof(sum))
			fail("child: write");
	}
	exit(0);
}

/* answers counts the records of the deleted file, or fails if one is not the sum that it must be. */
static uint64_t answers(int file)
{
	uint64_t value, expected = 0, count = 0;

	if (lseek(file, 0, SEEK_SET) < 0)
		fail("lseek");
	while (read(file, &value, sizeof(value)) == sizeof(value)) {
		expected += ++count;
		if (value != expected) {
			fprintf(stderr, "record %llu of the deleted file is wrong\n", (unsigned long long)count);
			exit(1);
		}
	}
	return count;
}

int main(void)
{
	const struct timespec pause = { .tv_nsec = 100 * 1000 * 1000 };
	uint64_t n, sum;
	char path[] = "/tmp/deleted-XXXXXX";
	int pair[2], file;

	if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair))
		fail("socketpair");
	switch (fork()) {
	case -1:
		fail("fork");
	case 0:
		close(pair[0]);
		child(pair[1]);
	}
	close(pair[1]);
	file = mkstemp(path);
	if (file < 0 || unlink(path))
		fail("deleted file");
	for (n = 1;; n++) {
		if (write(pair[0], &n, sizeof(n)) != sizeof(n))
			fail("write");
		if (read(pair[0], &sum, sizeof(sum)) != sizeof(sum))
			fail("read");
		if (lseek(file, 0, SEEK_END) < 0 || write(file, &sum, sizeof(sum)) != sizeof(sum))
			fail("deleted file");
		printf("n=%llu sum=%llu file=%llu\n", (unsigned long long)n, (unsigned long long)sum,
		       (unsigned long long)answers(file));
		fflush(stdout);
		nanosleep(&pause, NULL);
	}
}
