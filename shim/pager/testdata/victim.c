// SPDX-License-Identifier: Apache-2.0
//
// victim: a process whose memory the pager's tests fill. It registers anonymous
// memory with a userfaultfd as CRIU does, hands that over on descriptor 3, and
// then does to its memory what its arguments say, checking every byte against
// what must be there. It exits with 0 if all was right.
//
//	victim BASE PAGES SCENARIO SEED STEPS [FIFO]
//
// With a FIFO nothing is registered: the victim fills its memory itself, and goes
// on when something is written to the FIFO. So it can be dumped; without that, it
// shows that the victim itself is right.
//
// What the checkpoint holds is a function that the test knows as well: see class
// and expect.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define WORDS (PAGE / 8)
#define THREADS 4

static uint64_t base, pages, seed, steps;

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
	return x ^ (x >> 31);
}

// class of page p: 0 is dumped as zero, 1 is not in the checkpoint, else data.
static int class(uint64_t p) { return mix(p >> 2) % 8; }

static uint64_t word(uint64_t p, uint64_t w) { return mix(p * WORDS + w); }

#define die(...)                                                        \
	do {                                                            \
		fprintf(stderr, "victim %d: ", getpid());               \
		fprintf(stderr, __VA_ARGS__);                           \
		fprintf(stderr, " (errno %d)\n", errno);                \
		_exit(1);                                               \
	} while (0)

// What a page of an arena must be.
enum { NONE, ORIGINAL, ZERO, STAMP };
struct vpage {
	uint8_t kind;
	uint64_t value; // page number, or stamp
};

static void is_words(uint64_t addr, uint64_t value, int original)
{
	volatile uint64_t *m = (uint64_t *)addr;
	uint64_t want;

	for (uint64_t w = 0; w < WORDS; w++) {
		want = original ? word(value, w) : value;
		if (m[w] != want)
			die("page %lx word %lu is %lx, want %lx (%s %lu)", addr, w, m[w], want,
			    original ? "page" : "value", value);
	}
}

static void expect(uint64_t addr, struct vpage v)
{
	switch (v.kind) {
	case ORIGINAL:
		if (class(v.value) > 1)
			is_words(addr, v.value, 1);
		else
			is_words(addr, 0, 0);
		break;
	case ZERO:
		is_words(addr, 0, 0);
		break;
	case STAMP:
		is_words(addr, v.value, 0);
		break;
	}
}

static struct vpage original(uint64_t p) { return (struct vpage){ORIGINAL, p}; }

static uint64_t rnd(uint64_t *state) { return *state = mix(*state); }

// ---- scenarios that only read ----

static void scenario_read(void)
{
	for (uint64_t p = 0; p < pages; p++)
		expect(base + p * PAGE, original(p));
}

static void *random_reader(void *arg)
{
	uint64_t state = seed * 1000 + (uintptr_t)arg;

	for (uint64_t i = 0; i < pages; i++) {
		uint64_t p = rnd(&state) % pages;
		expect(base + p * PAGE, original(p));
	}
	return NULL;
}

static void scenario_threads(void)
{
	enum { N = 32 };
	pthread_t t[N];

	for (uintptr_t i = 0; i < N; i++)
		if (pthread_create(&t[i], NULL, random_reader, (void *)i))
			die("thread");
	for (int i = 0; i < N; i++)
		pthread_join(t[i], NULL);
	scenario_read();
}

static int by_value(const void *a, const void *b)
{
	uint64_t x = *(uint64_t *)a, y = *(uint64_t *)b;
	return x < y ? -1 : x > y;
}

// Touches a page in steps, in an order without neighbours, and prints how often it waited and for how many nanoseconds: median
// and 99th percentile.
static void scenario_latency(void)
{
	uint64_t stride = steps, n = pages / stride, *took = calloc(n, sizeof(*took)), k = 0, state = seed;

	for (uint64_t i = 0; i < n; i++) {
		struct timespec a, b;
		uint64_t p = (i * 7919 % n) * stride;
		volatile uint64_t *m = (uint64_t *)(base + p * PAGE);

		(void)rnd(&state);
		if (class(p) <= 1)
			continue;
		clock_gettime(CLOCK_MONOTONIC, &a);
		(void)*m;
		clock_gettime(CLOCK_MONOTONIC, &b);
		took[k++] = (b.tv_sec - a.tv_sec) * 1000000000UL + b.tv_nsec - a.tv_nsec;
	}
	qsort(took, k, sizeof(*took), by_value);
	printf("%lu %lu %lu\n", k, took[k / 2], took[k * 99 / 100]);
}

// Forks at once and everywhere; each generation checks all it inherited.
static void scenario_forks(void)
{
	int depth = 0;
	pid_t c[3];

again:
	for (int i = 0; i < 3; i++) {
		c[i] = fork();
		if (c[i] < 0)
			die("fork");
		if (c[i] == 0) {
			if (++depth < 3)
				goto again;
			scenario_read();
			_exit(0);
		}
	}
	scenario_read();
	for (int i = 0; i < 3; i++) {
		int st;
		if (waitpid(c[i], &st, 0) != c[i] || st)
			die("child at depth %d: status %x", depth, st);
	}
	if (depth)
		_exit(0);
}

// Forks children that exit, exec or are killed with faults outstanding.
static void scenario_exits(void)
{
	for (uint64_t i = 0; i < steps; i++) {
		uint64_t p = mix(seed + i) % pages;
		pid_t c = fork();
		int st;

		if (c < 0)
			die("fork");
		if (c == 0) {
			pthread_t t;
			pthread_create(&t, NULL, random_reader, (void *)i);
			expect(base + p * PAGE, original(p));
			if (i % 3 == 0)
				execl("/bin/true", "true", NULL);
			if (i % 3 == 1)
				for (;;)
					pause();
			_exit(0);
		}
		if (i % 3 == 1)
			kill(c, 9);
		if (waitpid(c, &st, 0) != c || (i % 3 != 1 && st))
			die("child %lu: status %x", i, st);
	}
	scenario_read();
}

// Waits until it is killed, with threads that wait for pages that never come.
static void scenario_hang(void)
{
	pthread_t t;
	for (uintptr_t i = 0; i < 8; i++)
		pthread_create(&t, NULL, random_reader, (void *)i);
	for (;;)
		pause();
}

// ---- threads that wait for memory that another one gives up ----

// waiter lets the kernel read a page, because that fails where the program
// would be killed.
static void *waiter(void *arg)
{
	int p[2];
	uint64_t got = ~0UL;
	ssize_t n;

	if (pipe(p))
		die("pipe");
	n = write(p[1], arg, sizeof(got));
	if (n < 0)
		return (void *)(intptr_t)-errno;
	if (n != sizeof(got) || read(p[0], &got, n) != n)
		die("pipe");
	return (void *)(got == 0 ? 0UL : 1UL);
}

// For each of the ways to give memory up: a thread waits for a page whose chunk
// does not come, and must go on all the same.
static void scenario_giveup(void)
{
	uint64_t p = 0;
	void *away = (void *)(base + 2 * pages * PAGE);

	for (int way = 0; way < 3; way++) {
		pthread_t t;
		void *result, *m;
		intptr_t want = -EFAULT;
		char go;

		for (p += 4; class(p) <= 1;)
			p += 4;
		m = (void *)(base + p * PAGE);
		if (pthread_create(&t, NULL, waiter, m))
			die("thread");
		if (read(3, &go, 1) != 1) // the test sees that the chunk was asked for
			die("no go");
		switch (way) {
		case 0:
			want = 0;
			if (madvise(m, 4 * PAGE, MADV_DONTNEED))
				die("madvise");
			break;
		case 1:
			if (munmap(m, 4 * PAGE))
				die("munmap");
			break;
		case 2:
			if (mremap(m, 4 * PAGE, 4 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, away) != away)
				die("mremap");
			break;
		}
		if (pthread_join(t, &result))
			die("join");
		if ((intptr_t)result != want)
			die("way %d: %ld, want %ld", way, (intptr_t)result, want);
	}
	if (write(3, "", 1) != 1)
		die("write");
	for (int i = 0; i < 4; i++)
		expect((uint64_t)away + i * PAGE, original(p + i));
}

// ---- torture ----

// An arena is a piece of address space that one thread does things to. It starts
// with a part of the registered memory in its first quarter.
struct arena {
	uint64_t at, n;
	struct vpage *v;
	// What the thread is doing, for children that are forked by others meanwhile.
	// They see what it did up to some moment and nothing that it did later: of a
	// move, the memory at one place or the other; of a write, any part of it.
	_Atomic int busy; // 0 nothing, 1 moving, 2 anything else, 3 writing to page from
	uint64_t from, to, len;
	uint64_t stamp;
};
static struct arena arenas[THREADS];
static int depth;

static uint64_t addr(struct arena *a, uint64_t p) { return a->at + p * PAGE; }

// mapped tells how many pages from p on are of one mapping state.
static uint64_t extent(struct arena *a, uint64_t p, int mapped, uint64_t max)
{
	uint64_t n = 0;
	while (p + n < a->n && n < max && (a->v[p + n].kind != NONE) == mapped)
		n++;
	return n;
}

static int is_mapped(uint64_t at)
{
	unsigned char c;
	return mincore((void *)at, PAGE, &c) == 0;
}

static void check_arena(struct arena *a)
{
	for (uint64_t p = 0; p < a->n; p++)
		expect(addr(a, p), a->v[p]);
}

// check_other checks another thread's arena in a child. Only what the thread was
// not working on is certain.
static void check_other(struct arena *a)
{
	int busy = atomic_load(&a->busy);

	if (busy == 2)
		return;
	for (uint64_t p = 0; p < a->n; p++) {
		if (busy == 3 && p == a->from)
			continue;
		if (busy != 1) {
			expect(addr(a, p), a->v[p]);
			continue;
		}
		if (p >= a->to && p < a->to + a->len)
			continue; // what was there is perhaps replaced
		if (p < a->from || p >= a->from + a->len) {
			expect(addr(a, p), a->v[p]);
		} else if (is_mapped(addr(a, p))) {
			expect(addr(a, p), a->v[p]);
		} else {
			expect(addr(a, p - a->from + a->to), a->v[p]);
		}
	}
}

// vma_end returns the end of the mapping that an address is in.
static uint64_t vma_end(uint64_t at)
{
	FILE *f = fopen("/proc/self/maps", "r");
	char line[512];
	uint64_t lo, hi;

	while (f && fgets(line, sizeof(line), f))
		if (sscanf(line, "%lx-%lx", &lo, &hi) == 2 && lo <= at && at < hi) {
			fclose(f);
			return hi;
		}
	die("no mapping at %lx", at);
}

// failed_move finds out how far a move came that failed. The kernel moves one
// mapping after the other, unmapping the destination first.
static void failed_move(struct arena *a, uint64_t p, uint64_t q, uint64_t n, uint64_t k)
{
	for (uint64_t j = 0; j < n || j < k; j++) {
		if (j < n && !is_mapped(addr(a, p + j))) {
			if (j < k && is_mapped(addr(a, q + j)))
				a->v[q + j] = a->v[p + j];
			a->v[p + j].kind = NONE;
		}
		if (j < k && !is_mapped(addr(a, q + j)))
			a->v[q + j].kind = NONE;
	}
}

static void torture(struct arena *a, uint64_t state, uint64_t count);

static void child(struct arena *a, uint64_t state)
{
	pid_t c = fork();
	int st;

	if (c < 0)
		die("fork");
	if (c == 0) {
		depth++;
		for (int i = 0; i < THREADS; i++)
			if (&arenas[i] != a)
				check_other(&arenas[i]);
		torture(a, state, 40);
		check_arena(a);
		_exit(0);
	}
	// The parent goes on for a little, against the child.
	torture(a, mix(state), 10);
	if (waitpid(c, &st, 0) != c || st)
		die("child: status %x", st);
}

static void torture(struct arena *a, uint64_t state, uint64_t count)
{
	for (uint64_t i = 0; i < count; i++) {
		uint64_t p = rnd(&state) % a->n, most = 1 + rnd(&state) % (1UL << rnd(&state) % 7);
		uint64_t n = extent(a, p, 1, most), q, k;
		struct vpage *v = &a->v[p];
		void *m = (void *)addr(a, p), *r;

		if (n == 0)
			continue;
		switch (rnd(&state) % 16) {
		case 0: // unmap
			atomic_store(&a->busy, 2);
			if (munmap(m, n * PAGE))
				die("munmap");
			memset(v, 0, n * sizeof(*v));
			break;
		case 1:
		case 2:
		case 3: // move to anywhere, over whatever is there, growing or shrinking
			q = rnd(&state) % a->n;
			k = rnd(&state) % 3 == 0 ? 1 + rnd(&state) % 40 : n;
			if (q + k > a->n || q + n > a->n || (q < p + n && p < q + k))
				break;
			a->from = p, a->to = q, a->len = n;
			atomic_store(&a->busy, k == n ? 1 : 2);
			r = mremap(m, n * PAGE, k * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, (void *)addr(a, q));
			if (r == MAP_FAILED) {
				if (errno != EFAULT) // more than one mapping
					die("mremap");
				failed_move(a, p, q, n, k);
				break;
			}
			for (uint64_t j = 0; j < k; j++)
				a->v[q + j] = j < n ? v[j] : (struct vpage){ZERO, 0};
			memset(v, 0, n * sizeof(*v));
			break;
		case 4: // grow in place
			k = extent(a, p + n, 0, 8);
			if (k == 0 || (p + n < a->n && a->v[p + n].kind != NONE))
				break;
			atomic_store(&a->busy, 2);
			r = mremap(m, n * PAGE, (n + k) * PAGE, 0);
			if (r == MAP_FAILED)
				break;
			for (uint64_t j = n; j < n + k; j++)
				v[j] = (struct vpage){ZERO, 0};
			break;
		case 5:
		case 6: // throw away
			atomic_store(&a->busy, 2);
			if (madvise(m, n * PAGE, MADV_DONTNEED))
				die("madvise");
			for (uint64_t j = 0; j < n; j++)
				v[j] = (struct vpage){ZERO, 0};
			break;
		case 7: // map fresh memory over it
			if (rnd(&state) % 4)
				break;
			atomic_store(&a->busy, 2);
			r = mmap(m, n * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
			if (r == MAP_FAILED)
				die("mmap");
			for (uint64_t j = 0; j < n; j++)
				v[j] = (struct vpage){ZERO, 0};
			break;
		case 8: // split the mapping and join it again
			if (mprotect(m, n * PAGE, PROT_READ))
				die("mprotect");
			expect(addr(a, p), v[0]);
			if (mprotect(m, n * PAGE, PROT_READ | PROT_WRITE))
				die("mprotect");
			break;
		case 9: // move, keeping the old mapping, which is empty then
			k = (vma_end(addr(a, p)) - addr(a, p)) / PAGE;
			n = n < k ? n : k; // after a failure nobody could tell what moved
			q = rnd(&state) % a->n;
			if (q + n > a->n || (q < p + n && p < q + n))
				break;
			atomic_store(&a->busy, 2);
			r = mremap(m, n * PAGE, n * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, (void *)addr(a, q));
			if (r == MAP_FAILED)
				die("mremap, keeping the old mapping");
			for (uint64_t j = 0; j < n; j++) {
				a->v[q + j] = v[j];
				v[j] = (struct vpage){ZERO, 0};
			}
			break;
		case 10:
			if (depth < 2 && rnd(&state) % 8 == 0)
				child(a, rnd(&state));
			break;
		case 11:
		case 12: // write a whole page
			a->stamp += THREADS;
			a->from = p;
			atomic_store(&a->busy, 3);
			for (uint64_t w = 0; w < WORDS; w++)
				((volatile uint64_t *)m)[w] = a->stamp;
			v[0] = (struct vpage){STAMP, a->stamp};
			break;
		default:
			for (uint64_t j = 0; j < n; j++)
				expect(addr(a, p + j), v[j]);
		}
		atomic_store(&a->busy, 0);
	}
}

static void *tormentor(void *arg)
{
	struct arena *a = arg;
	torture(a, mix(seed * THREADS + (a - arenas)), steps);
	return NULL;
}

static void scenario_torture(void)
{
	pthread_t t[THREADS];

	for (int i = 0; i < THREADS; i++)
		if (pthread_create(&t[i], NULL, tormentor, &arenas[i]))
			die("thread");
	for (int i = 0; i < THREADS; i++)
		pthread_join(t[i], NULL);
	for (int i = 0; i < THREADS; i++)
		check_arena(&arenas[i]);
}

// ---- set-up ----

static void send_fd(int sock, int fd)
{
	char c = 0, buf[CMSG_SPACE(sizeof(int))] = {0};
	struct iovec io = {&c, 1};
	struct msghdr m = {.msg_iov = &io, .msg_iovlen = 1, .msg_control = buf, .msg_controllen = sizeof(buf)};
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);

	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(h), &fd, sizeof(fd));
	if (sendmsg(sock, &m, 0) != 1)
		die("sendmsg");
}

int main(int argc, char **argv)
{
	struct uffdio_api api = {
		.api = UFFD_API,
		.features = UFFD_FEATURE_EVENT_FORK | UFFD_FEATURE_EVENT_REMAP |
			    UFFD_FEATURE_EVENT_UNMAP | UFFD_FEATURE_EVENT_REMOVE,
	};
	char *scenario, go;
	int fd, native = argc == 7;

	if (argc != 6 && !native)
		die("arguments");
	base = strtoull(argv[1], NULL, 0);
	pages = strtoull(argv[2], NULL, 0);
	scenario = argv[3];
	seed = strtoull(argv[4], NULL, 0);
	steps = strtoull(argv[5], NULL, 0);

	fd = native ? -1 : syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
	if (!native && (fd < 0 || ioctl(fd, UFFDIO_API, &api)))
		die("userfaultfd");
	// One arena a thread, four times as large as what is in it at the start.
	for (int i = 0; i < THREADS; i++) {
		struct arena *a = &arenas[i];
		uint64_t share = pages / THREADS;
		int spread = !strcmp(scenario, "torture");

		a->n = spread ? 4 * share : share;
		a->at = base + i * a->n * PAGE;
		a->v = calloc(a->n, sizeof(*a->v));
		a->stamp = i;
		for (uint64_t p = 0; p < share; p++)
			a->v[p] = original(i * share + p);
		if (mmap((void *)a->at, share * PAGE, PROT_READ | PROT_WRITE,
			 MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != (void *)a->at)
			die("mmap");
		if (native) {
			for (uint64_t p = 0; p < share; p++)
				for (uint64_t w = 0; w < WORDS && class(i * share + p) > 1; w++)
					((uint64_t *)(a->at + p * PAGE))[w] = word(i * share + p, w);
			continue;
		}
		struct uffdio_register reg = {.range = {a->at, share * PAGE}, .mode = UFFDIO_REGISTER_MODE_MISSING};
		if (ioctl(fd, UFFDIO_REGISTER, &reg))
			die("register");
	}
	if (native) {
		printf("waiting\n");
		fflush(stdout);
		int fifo = open(argv[6], O_RDONLY);
		if (fifo < 0 || read(fifo, &go, 1) != 1)
			die("no go");
		close(fifo);
	} else {
		send_fd(3, fd);
		if (read(3, &go, 1) != 1)
			die("no go");
		if (strcmp(scenario, "giveup"))
			close(3);
	}
	close(fd);

	if (!strcmp(scenario, "read"))
		scenario_read();
	else if (!strcmp(scenario, "threads"))
		scenario_threads();
	else if (!strcmp(scenario, "latency"))
		scenario_latency();
	else if (!strcmp(scenario, "forks"))
		scenario_forks();
	else if (!strcmp(scenario, "exits"))
		scenario_exits();
	else if (!strcmp(scenario, "giveup"))
		scenario_giveup();
	else if (!strcmp(scenario, "hang"))
		scenario_hang();
	else if (!strcmp(scenario, "torture"))
		scenario_torture();
	else
		die("scenario %s", scenario);
	if (native) {
		printf("right\n");
		fflush(stdout);
		pause();
	}
	return 0;
}
