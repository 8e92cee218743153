// SPDX-License-Identifier: Apache-2.0
//
// crowd: many threads or processes that want the same memory at once.
//
//	crowd threads|processes|storm N
//
// It writes "ready", waits for SIGUSR1, does what its name says with N threads or
// processes while a timer's signals interrupt them, checks every byte, and writes
// "OK". The first difference is written to standard error.
//
//	threads    N threads read all pages, each from another one on, half of them in the same order
//	processes  N children, which were there before, have pages of their own and inherited ones
//	storm      N forks at once; the children read, exec, exit or are killed while they read

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define PAGES 2048UL
#define OWN 16UL // pages that each process writes for itself

static uint8_t *memory;
static atomic_int *arrived, *go;
static uint64_t me; // 0: the first process

static uint64_t word(uint64_t owner, uint64_t page, uint64_t w)
{
	return page % 9 == 8 ? 0 : (owner << 40 | page << 16 | w) * 0x9e3779b97f4a7c15;
}

static void die(const char *what, uint64_t at, uint64_t got, uint64_t want)
{
	char line[200];
	int n = snprintf(line, sizeof(line), "torture: %s process %lu at %#lx got %#lx want %#lx (errno %d)\n", what, me, at, got, want, errno);

	if (write(2, line, n) != n) {
	}
	_exit(1);
}

static void put(uint64_t owner, uint64_t page)
{
	uint64_t *m = (uint64_t *)(memory + page * PAGE);

	for (uint64_t w = 0; w < PAGE / 8; w++)
		m[w] = word(owner, page, w);
}

static void check(uint64_t page)
{
	volatile uint64_t *m = (uint64_t *)(memory + page * PAGE);
	uint64_t owner = page < OWN ? me : 0, got;

	for (uint64_t w = 0; w < PAGE / 8; w++)
		if ((got = m[w]) != word(owner, page, w))
			die("content", (uint64_t)&m[w], got, word(owner, page, w));
}

static void check_from(uint64_t first)
{
	for (uint64_t i = 0; i < PAGES; i++)
		check((first + i) % PAGES);
}

static void on_alarm(int sig)
{
	static _Atomic uint64_t n;
	int e = errno;

	(void)sig;
	check(n++ * 7919 % PAGES);
	errno = e;
}

static void on_go(int sig)
{
	(void)sig;
	*go = 1;
}

static void wait_go(void)
{
	while (!*go)
		usleep(1000);
}

static void *reader(void *arg)
{
	uint64_t i = (uint64_t)arg;

	wait_go();
	check_from(i % 2 ? i * 37 % PAGES : 0);
	return NULL;
}

static void timer(void)
{
	struct itimerval every = {{0, 1000}, {0, 1000}};

	if (setitimer(ITIMER_REAL, &every, NULL))
		die("setitimer", 0, 0, 0);
}

static void await_child(pid_t c, int want)
{
	int st;

	while (waitpid(c, &st, 0) != c)
		if (errno != EINTR)
			die("waitpid", c, 0, 0);
	if (st != want)
		die("child", c, st, want);
}

static void say(const char *what)
{
	if (write(1, what, strlen(what)) < 0)
		die("write", 0, 0, 0);
}

static void threads(uint64_t n)
{
	pthread_t t[n];
	pthread_attr_t small;

	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 128 << 10);
	for (uint64_t i = 0; i < n; i++)
		if (pthread_create(&t[i], &small, reader, (void *)i))
			die("pthread_create", i, 0, 0);
	timer();
	say("ready\n");
	for (uint64_t i = 0; i < n; i++)
		pthread_join(t[i], NULL);
}

static void processes(uint64_t n)
{
	pid_t c[n];

	for (uint64_t i = 0; i < n; i++) {
		if ((c[i] = fork()) < 0)
			die("fork", i, 0, 0);
		if (c[i])
			continue;
		me = i + 1;
		for (uint64_t p = 0; p < OWN; p++)
			put(me, p);
		++*arrived;
		wait_go();
		check_from(i % 4 ? 0 : i * 11 % PAGES);
		_exit(0);
	}
	while (*arrived < (int)n)
		usleep(1000);
	say("ready\n");
	wait_go();
	check_from(0);
	for (uint64_t i = 0; i < n; i++)
		await_child(c[i], 0);
}

static void storm(uint64_t n)
{
	pid_t c[n];

	timer();
	say("ready\n");
	wait_go();
	for (uint64_t i = 0; i < n; i++) {
		if ((c[i] = fork()) < 0)
			die("fork", i, 0, 0);
		if (c[i])
			continue;
		if (i % 4 == 1)
			check(i % PAGES);
		else if (i % 8 != 2)
			check_from(i * 13 % PAGES);
		if (i % 4 == 2) {
			execl("/proc/self/exe", "crowd", "exit", NULL);
			_exit(99);
		}
		for (; i % 4 == 3;)
			check_from(i);
		_exit(0);
	}
	check_from(0);
	for (uint64_t i = 0; i < n; i++) {
		if (i % 4 == 3)
			kill(c[i], SIGKILL);
		await_child(c[i], i % 4 == 3 ? SIGKILL : i % 4 == 2 ? 7 << 8 : 0);
	}
}

int main(int argc, char **argv)
{
	struct sigaction alarm = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
	struct sigaction started = {.sa_handler = on_go, .sa_flags = SA_RESTART};
	uint64_t n = argc == 3 ? strtoull(argv[2], NULL, 10) : 0;

	if (argc == 2 && !strcmp(argv[1], "exit"))
		return 7;
	close_range(3, ~0U, 0); // of those who started it
	memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	arrived = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED || arrived == MAP_FAILED || n == 0 || n > 10000)
		return 2;
	go = arrived + 1;
	for (uint64_t p = 0; p < PAGES; p++)
		put(0, p);
	sigaction(SIGALRM, &alarm, NULL);
	sigaction(SIGUSR1, &started, NULL);
	if (!strcmp(argv[1], "threads"))
		threads(n);
	else if (!strcmp(argv[1], "processes"))
		processes(n);
	else if (!strcmp(argv[1], "storm"))
		storm(n);
	else
		return 2;
	check_from(0);
	say("OK \n");
	return 0;
}
