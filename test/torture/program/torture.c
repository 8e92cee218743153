// SPDX-License-Identifier: Apache-2.0
//
// torture: does random things to its memory and checks every byte that it reads
// against a model of what must be there.
//
//	torture SEED BEFORE AFTER
//
// Each thread does BEFORE steps; then the program writes the line "ready" and waits
// for SIGUSR1 (with the bit RUNNING of the seed's plan it goes on with steps while it
// waits). It can be dumped there, restored, and told to go on. Each thread then does
// AFTER steps. At the end all memory is checked, and the program writes "OK SEED". The
// first difference is written to standard error: address, what was there, what should be,
// and the step; then the exit status is 1. The processes that were forked before "ready"
// and go on after it do and check the same.
//
// # The model
//
// A thread has an arena: a piece of address space in which only that thread changes
// mappings. Each page has a struct page. Its content is 16 blocks; a block is zero (stamp
// 0) or filled with a pattern that follows from its stamp. What the operations do to
// the model is what the manual pages say:
//
//   - mmap, munmap, MADV_DONTNEED: zero, nothing, zero.
//   - mremap: the pages go along with their protection and advice; those it grows by are
//     zero, with MREMAP_DONTUNMAP the old place becomes zero. A move of several mappings
//     that fails half-way is followed by looking at what is mapped.
//   - MADV_FREE: the page is as before or zero, whole, until it is written to. Once it
//     was seen as zero it is zero. A write keeps either; which one is read back then.
//   - fork: the child has the same, but nothing where MADV_DONTFORK was advised, and
//     zeros where MADV_WIPEONFORK was.
//   - other advice, mlock, mprotect: content stays.
//
// A fork is quiet (no thread is within an operation, the child checks all arenas) or wild
// (the others go on, the child checks and uses its own thread's arena only, because a child
// of a fork may see a later write of another thread to one page and not an earlier one to
// another).
//
// # What is left out
//
//   - vfork before SIGUSR1 while running: CRIU cannot dump two processes that share memory.
//     (Neither can it dump a process with threads at the moment in which it exits. That
//     happens now and then, and is not counted as a failure.)
//   - kill before SIGUSR1: CRIU gives a restore up if a task that it has let go kills one
//     that it is about to let go ("Unable to detach").
//   - MADV_REMOVE on private memory (the kernel refuses it); it is done to shared memory.
//   - MADV_GUARD_INSTALL after "ready": filling removes guards that were installed after
//     the restore, of which a fault handler does not learn.
//   - hugetlb pages, which machines have none of by default.
//   - Growing locked memory with mremap where it has to move: the kernel (6.18 and before)
//     touches the new pages before it reports the move, and refuses to fill pages until it
//     has (do_mremap: mm_populate before notify_uffd). No fault handler can end that wait.
//   - MADV_WIPEONFORK when the checkpoint can have been. A fault handler does not learn of the advice: where memory
//     came lazily, the child gets the dumped content and not zeros.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define BLOCK 256UL
#define BLOCKS (PAGE / BLOCK)
#define BASE 0x100000000000UL
#define APART 0x10000000UL
#define PAGES 1024 // of an arena
#define ROM 512	   // pages that never change
#define SHARED 64  // pages of shared memory
#define HEAP 64	   // pages above the initial break
#define MAXTHREADS 4
#define LONG 3 // children of a process that outlive the checkpoint

#ifndef MADV_COLD
#define MADV_COLD 20
#define MADV_PAGEOUT 21
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif

// The plan of a seed: which kinds of things happen at all.
enum {
	RUNNING = 1,	 // goes on while it waits
	FORKADVICE = 2,	 // MADV_DONTFORK, MADV_WIPEONFORK
	HUGE = 4,	 // arenas are advised to use huge pages from the beginning
	ALARM = 8,	 // a timer's signals, whose handler reads
	LOCK = 16,	 // mlock
	FORKS = 32,	 // processes that outlive the checkpoint
};
static uint64_t seed, plan, before, after;
static int threads;

struct page {
	uint32_t stamp[BLOCKS];
	uint8_t mapped, prot, freed, nofork, wipe;
};

struct arena {
	uint64_t at;
	uint64_t rnd;
	uint64_t step;
	const char *op;
	int id;
	int pipe[2];
	struct page page[PAGES];
};
static struct arena arenas[MAXTHREADS];
static struct page shared[SHARED], heap[HEAP];
static uint64_t rom_at, shared_at, heap_at, heap_pages;
static uint64_t guard_at; // three pages, the one in the middle a guard; 0: the kernel has none
static int depth;	 // forks between the first process and this one
static int mine_only = -1; // the one arena that is known after a wild fork
static pid_t children[LONG];
static int nchildren;

// What all processes share.
struct common {
	_Atomic int go;
	_Atomic int expected, arrived;
	_Atomic int failed;
};
static struct common *common;

static pthread_rwlock_t busy = PTHREAD_RWLOCK_INITIALIZER; // read: within an operation
static __thread struct arena *self;

static uint64_t mix(uint64_t x)
{
	x += 0x9e3779b97f4a7c15;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
	return x ^ (x >> 31);
}

static uint64_t rnd(struct arena *a) { return a->rnd = mix(a->rnd); }

__attribute__((format(printf, 1, 2), noreturn)) static void die(const char *format, ...)
{
	char line[512];
	int e = errno, n;
	va_list args;

	n = snprintf(line, sizeof(line), "torture: seed %lu process %d depth %d thread %d step %lu %s: ", seed, getpid(),
		     depth, self ? self->id : -1, self ? self->step : 0, self && self->op ? self->op : "-");
	va_start(args, format);
	n += vsnprintf(line + n, sizeof(line) - n, format, args);
	va_end(args);
	n += snprintf(line + n, sizeof(line) - n, " (errno %d)\n", e);
	if (write(2, line, n) != n) {
	}
	common->failed = 1;
	_exit(1);
}

// ---- content ----

static uint64_t word(uint32_t stamp, uint64_t w)
{
	return stamp ? stamp * 0x9e3779b97f4a7c15 ^ w * 0x0123456789abcdef : 0;
}

static void fill(void *block, uint32_t stamp)
{
	uint64_t *m = block;

	for (uint64_t w = 0; w < BLOCK / 8; w++)
		m[w] = word(stamp, w);
}

// differs returns the index of the first wrong word, or -1.
static int differs(const volatile uint64_t *m, uint32_t stamp, uint64_t *got)
{
	for (uint64_t w = 0; w < BLOCK / 8; w++)
		if ((*got = m[w]) != word(stamp, w))
			return w;
	return -1;
}

static void check_block(const void *m, uint64_t addr, uint32_t stamp)
{
	uint64_t got;
	int w = differs(m, stamp, &got);

	if (w >= 0)
		die("at %#lx got %#lx want %#lx (stamp %#x block %lu)", addr + w * 8, got, word(stamp, w), stamp,
		    (addr & (PAGE - 1)) / BLOCK);
}

static int any(struct page *p)
{
	for (uint64_t b = 0; b < BLOCKS; b++)
		if (p->stamp[b])
			return 1;
	return 0;
}

static void zero(struct page *p)
{
	memset(p->stamp, 0, sizeof(p->stamp));
	p->freed = 0;
}

// resolve finds out what a page is that was given to MADV_FREE. It is all that it was
// or zero. but is a block that was written since, or -1.
static void resolve(struct page *p, uint64_t at, int but)
{
	for (int b = 0; b < (int)BLOCKS; b++) {
		if (b == but || !p->stamp[b])
			continue;
		if (*(volatile uint64_t *)(at + b * BLOCK) == word(p->stamp[b], 0)) {
			if (but >= 0)
				p->freed = 0;
			return;
		}
		for (int c = 0; c < (int)BLOCKS; c++)
			if (c != but)
				p->stamp[c] = 0;
		p->freed = 0;
		return;
	}
	if (but >= 0)
		p->freed = 0;
}

static void check_page(struct page *p, uint64_t at)
{
	if (p->freed)
		resolve(p, at, -1);
	for (uint64_t b = 0; b < BLOCKS; b++) {
		uint64_t got;

		if (p->freed && differs((void *)(at + b * BLOCK), p->stamp[b], &got) >= 0)
			resolve(p, at, -1); // it went between two reads
		check_block((void *)(at + b * BLOCK), at + b * BLOCK, p->stamp[b]);
	}
}

static void wrote(struct page *p, uint64_t at, int block, uint32_t stamp)
{
	p->stamp[block] = stamp;
	if (p->freed)
		resolve(p, at, block);
}

static void check_rom(uint64_t i)
{
	for (uint64_t b = 0; b < BLOCKS; b++)
		check_block((void *)(rom_at + i * PAGE + b * BLOCK), rom_at + i * PAGE + b * BLOCK,
			    i % 8 == 7 ? 0 : i * BLOCKS + b + 1);
}

// check_guard lets the kernel read, because that fails where the program would be killed.
static void check_guard(void)
{
	int fd[2];

	if (!guard_at)
		return;
	if (pipe(fd))
		die("pipe");
	for (uint64_t b = 0; b < BLOCKS; b++) {
		check_block((void *)(guard_at + b * BLOCK), guard_at + b * BLOCK, b + 1);
		check_block((void *)(guard_at + 2 * PAGE + b * BLOCK), guard_at + 2 * PAGE + b * BLOCK, b + 1);
	}
	if (write(fd[1], (void *)(guard_at + PAGE), 1) >= 0 || errno != EFAULT)
		die("guard %#lx is gone", guard_at + PAGE);
	close(fd[0]);
	close(fd[1]);
}

static uint64_t addr(struct arena *a, uint64_t p) { return a->at + p * PAGE; }

// check_arena checks all pages and leaves the protection as it is.
static void check_arena(struct arena *a)
{
	for (uint64_t p = 0; p < PAGES; p++) {
		struct page *v = &a->page[p];

		if (!v->mapped)
			continue;
		if (!(v->prot & PROT_READ) && mprotect((void *)addr(a, p), PAGE, PROT_READ))
			die("mprotect %#lx", addr(a, p));
		check_page(v, addr(a, p));
		if (!(v->prot & PROT_READ) && mprotect((void *)addr(a, p), PAGE, v->prot))
			die("mprotect %#lx", addr(a, p));
	}
}

static void check_all(void)
{
	for (int i = 0; i < threads; i++)
		if (mine_only < 0 || i == mine_only)
			check_arena(&arenas[i]);
	if (mine_only <= 0)
		for (uint64_t p = 0; p < heap_pages; p++)
			check_page(&heap[p], heap_at + p * PAGE);
	if (depth == 0)
		for (uint64_t p = 0; p < SHARED; p++)
			check_page(&shared[p], shared_at + p * PAGE);
	for (uint64_t i = 0; i < ROM; i++)
		check_rom(i);
	check_guard();
}

// ---- operations ----

// extent tells how many pages from p on, at most max, are mapped and alike.
static uint64_t extent(struct arena *a, uint64_t p, uint64_t max)
{
	uint64_t n = 0;

	while (p + n < PAGES && n < max && a->page[p + n].mapped)
		n++;
	return n;
}

static int is_mapped(uint64_t at)
{
	unsigned char c;
	return mincore((void *)at, PAGE, &c) == 0;
}

static uint64_t some(struct arena *a) { return 1 + rnd(a) % (1UL << rnd(a) % 8); }

static void op_mmap(struct arena *a)
{
	uint64_t p = rnd(a) % PAGES, n = some(a);
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | (rnd(a) % 8 ? 0 : MAP_POPULATE) | (rnd(a) % 4 ? 0 : MAP_NORESERVE);

	a->op = "mmap";
	if (p + n > PAGES)
		n = PAGES - p;
	if (mmap((void *)addr(a, p), n * PAGE, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED)
		die("mmap %#lx %lu", addr(a, p), n);
	for (uint64_t i = p; i < p + n; i++)
		a->page[i] = (struct page){.mapped = 1, .prot = PROT_READ | PROT_WRITE};
}

static void op_munmap(struct arena *a)
{
	uint64_t p = rnd(a) % PAGES, n = some(a);

	a->op = "munmap";
	if (p + n > PAGES)
		n = PAGES - p;
	if (munmap((void *)addr(a, p), n * PAGE))
		die("munmap %#lx %lu", addr(a, p), n);
	memset(&a->page[p], 0, n * sizeof(struct page));
}

// failed_move finds out how far a move came.
static void failed_move(struct arena *a, uint64_t p, uint64_t q, uint64_t n, uint64_t k)
{
	for (uint64_t j = 0; j < n || j < k; j++) {
		if (j < n && !is_mapped(addr(a, p + j))) {
			if (j < k && is_mapped(addr(a, q + j)))
				a->page[q + j] = a->page[p + j];
			memset(&a->page[p + j], 0, sizeof(struct page));
		}
		if (j < k && !is_mapped(addr(a, q + j)))
			memset(&a->page[q + j], 0, sizeof(struct page));
	}
}

static void op_mremap(struct arena *a)
{
	uint64_t p = rnd(a) % PAGES, n = extent(a, p, some(a)), k = n, q = rnd(a) % PAGES;
	int kind = rnd(a) % 8, flags = MREMAP_MAYMOVE | MREMAP_FIXED;
	struct page grown, old[512];
	void *r;

	if (n == 0)
		return;
	grown = (struct page){.mapped = 1, .prot = a->page[p + n - 1].prot, .nofork = a->page[p + n - 1].nofork, .wipe = a->page[p + n - 1].wipe};
	switch (kind) {
	case 0: // grow in place
		a->op = "mremap grow";
		for (k = 0; k < 16 && p + n + k < PAGES && !a->page[p + n + k].mapped; k++)
			;
		if (k == 0)
			return;
		k = 1 + rnd(a) % k;
		if (mremap((void *)addr(a, p), n * PAGE, (n + k) * PAGE, 0) == MAP_FAILED)
			return; // several mappings
		for (uint64_t j = p + n; j < p + n + k; j++)
			a->page[j] = grown;
		return;
	case 1: // shrink in place
		a->op = "mremap shrink";
		k = 1 + rnd(a) % n;
		if (mremap((void *)addr(a, p), n * PAGE, k * PAGE, 0) == MAP_FAILED) {
			for (uint64_t j = p; j < p + n; j++)
				if (!is_mapped(addr(a, j)))
					memset(&a->page[j], 0, sizeof(struct page));
			return;
		}
		memset(&a->page[p + k], 0, (n - k) * sizeof(struct page));
		return;
	case 2:
	case 3:
		a->op = "mremap dontunmap";
		flags |= MREMAP_DONTUNMAP;
		break;
	case 4: // and grow or shrink
		a->op = "mremap resize";
		k = some(a);
		munlock((void *)addr(a, p), n * PAGE); // see "what is left out"
		break;
	default:
		a->op = "mremap";
	}
	if (q + k > PAGES || q + n > PAGES || (q < p + n && p < q + k))
		return;
	if (flags & MREMAP_DONTUNMAP) {
		// So that what is mapped there shows how far a move came that failed.
		if (munmap((void *)addr(a, q), k * PAGE))
			die("munmap %#lx %lu", addr(a, q), k);
		memset(&a->page[q], 0, k * sizeof(struct page));
	}
	memcpy(old, &a->page[p], n * sizeof(struct page));
	r = mremap((void *)addr(a, p), n * PAGE, k * PAGE, flags, (void *)addr(a, q));
	if (r == MAP_FAILED) {
		if (errno != EFAULT && errno != EINVAL && errno != EAGAIN && errno != ENOMEM)
			die("mremap %#lx %lu to %#lx %lu", addr(a, p), n, addr(a, q), k);
		for (uint64_t j = 0; flags & MREMAP_DONTUNMAP && j < n; j++) {
			if (!is_mapped(addr(a, q + j)))
				return;
			a->page[q + j] = old[j];
			zero(&a->page[p + j]);
		}
		if (!(flags & MREMAP_DONTUNMAP))
			failed_move(a, p, q, n, k);
		return;
	}
	for (uint64_t j = 0; j < k; j++)
		a->page[q + j] = j < n ? old[j] : grown;
	for (uint64_t j = 0; j < n; j++) {
		if (flags & MREMAP_DONTUNMAP)
			zero(&a->page[p + j]);
		else
			memset(&a->page[p + j], 0, sizeof(struct page));
	}
}

static void op_mprotect(struct arena *a)
{
	static const int prots[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE};
	uint64_t p = rnd(a) % PAGES, n = extent(a, p, some(a));
	int prot = prots[rnd(a) % 4];

	a->op = "mprotect";
	if (n == 0)
		return;
	if (mprotect((void *)addr(a, p), n * PAGE, prot))
		die("mprotect %#lx %lu", addr(a, p), n);
	for (uint64_t j = p; j < p + n; j++)
		a->page[j].prot = prot;
}

static void op_discard(struct arena *a)
{
	uint64_t p = rnd(a) % PAGES, n = extent(a, p, some(a));
	int kind = rnd(a) % 2;

	a->op = kind ? "MADV_FREE" : "MADV_DONTNEED";
	if (n == 0)
		return;
	munlock((void *)addr(a, p), n * PAGE); // locked memory cannot be discarded
	if (madvise((void *)addr(a, p), n * PAGE, kind ? MADV_FREE : MADV_DONTNEED))
		die("madvise %#lx %lu", addr(a, p), n);
	for (uint64_t j = p; j < p + n; j++) {
		if (!kind)
			zero(&a->page[j]);
		else if (any(&a->page[j]))
			a->page[j].freed = 1;
	}
}

// Advice that changes no content. That it is refused is no error.
static void op_advice(struct arena *a)
{
	static const int advices[] = {MADV_HUGEPAGE, MADV_NOHUGEPAGE, MADV_COLLAPSE, MADV_COLLAPSE, MADV_POPULATE_READ, MADV_POPULATE_WRITE, MADV_COLD, MADV_PAGEOUT, MADV_PAGEOUT, MADV_WILLNEED, MADV_RANDOM, MADV_NORMAL};
	uint64_t p = rnd(a) % PAGES, n = extent(a, p, some(a)), i = rnd(a) % (sizeof(advices) / sizeof(*advices));

	a->op = "advice";
	if (n)
		madvise((void *)addr(a, p), n * PAGE, advices[i]);
}

static void op_fork_advice(struct arena *a)
{
	uint64_t p = rnd(a) % PAGES, n = extent(a, p, some(a));
	static const int advices[] = {MADV_DONTFORK, MADV_DOFORK, MADV_WIPEONFORK, MADV_KEEPONFORK};
	int kind = rnd(a) % 4;

	a->op = "fork advice";
	if (common->arrived && kind == 2)
		kind = 3; // see "what is left out"
	if (n == 0 || !(plan & FORKADVICE))
		return;
	if (madvise((void *)addr(a, p), n * PAGE, advices[kind]))
		die("madvise %#lx %lu advice %d", addr(a, p), n, advices[kind]);
	for (uint64_t j = p; j < p + n; j++) {
		if (kind < 2)
			a->page[j].nofork = kind == 0;
		else
			a->page[j].wipe = kind == 2;
	}
}

static void op_lock(struct arena *a)
{
	uint64_t p = rnd(a) % PAGES, n = extent(a, p, some(a));

	a->op = "mlock";
	if (n == 0 || !(plan & LOCK))
		return;
	if (rnd(a) % 2)
		mlock((void *)addr(a, p), n * PAGE); // refused where there is no access
	else
		munlock((void *)addr(a, p), n * PAGE);
}

static void op_write(struct arena *a)
{
	uint64_t p = rnd(a) % PAGES, n = extent(a, p, some(a)), one = rnd(a) % 2;

	a->op = "write";
	for (uint64_t j = p; j < p + n; j++) {
		if (!(a->page[j].prot & PROT_WRITE))
			continue;
		for (uint64_t b = 0; b < BLOCKS; b++) {
			uint32_t stamp = rnd(a) | 1;

			if (one && b != stamp / 2 % BLOCKS)
				continue;
			fill((void *)(addr(a, j) + b * BLOCK), stamp);
			wrote(&a->page[j], addr(a, j), b, stamp);
		}
	}
}

static void op_read(struct arena *a)
{
	uint64_t p = rnd(a) % PAGES, n = extent(a, p, some(a));

	a->op = "read";
	for (uint64_t j = p; j < p + n; j++)
		if (a->page[j].prot & PROT_READ)
			check_page(&a->page[j], addr(a, j));
}

static void transfer(int fd, int out, void *m)
{
	for (uint64_t done = 0; done < PAGE;) {
		ssize_t k = out ? write(fd, (char *)m + done, PAGE - done) : read(fd, (char *)m + done, PAGE - done);

		if (k < 0 && errno == EINTR)
			continue;
		if (k <= 0)
			die("pipe: %#lx", (uint64_t)m);
		done += k;
	}
}

// The kernel reads or writes a page.
static void op_kernel(struct arena *a)
{
	uint64_t p = rnd(a) % PAGES;
	struct page *v = &a->page[p];
	uint64_t buf[PAGE / 8];

	a->op = "kernel";
	if (!v->mapped || v->freed)
		return;
	if (v->prot & PROT_WRITE && rnd(a) % 2) {
		for (uint64_t b = 0; b < BLOCKS; b++) {
			v->stamp[b] = rnd(a) | 1;
			fill(buf + b * BLOCK / 8, v->stamp[b]);
		}
		transfer(a->pipe[1], 1, buf);
		transfer(a->pipe[0], 0, (void *)addr(a, p));
	} else if (v->prot & PROT_READ) {
		transfer(a->pipe[1], 1, (void *)addr(a, p));
		transfer(a->pipe[0], 0, buf);
		for (uint64_t b = 0; b < BLOCKS; b++)
			check_block(buf + b * BLOCK / 8, addr(a, p) + b * BLOCK, v->stamp[b]);
	}
}

// The heap belongs to the first thread.
static void op_brk(struct arena *a)
{
	uint64_t n = rnd(a) % HEAP, p;

	a->op = "brk";
	if (a->id)
		return;
	if (rnd(a) % 4 == 0) {
		if ((uint64_t)syscall(SYS_brk, heap_at + n * PAGE) != heap_at + n * PAGE)
			die("brk %#lx", heap_at + n * PAGE);
		for (p = heap_pages; p < n; p++)
			zero(&heap[p]);
		heap_pages = n;
	}
	if (heap_pages == 0)
		return;
	p = rnd(a) % heap_pages;
	check_page(&heap[p], heap_at + p * PAGE);
	p = rnd(a) % heap_pages;
	for (uint64_t b = 0; b < BLOCKS; b++) {
		heap[p].stamp[b] = rnd(a) | 1;
		fill((void *)(heap_at + p * PAGE + b * BLOCK), heap[p].stamp[b]);
	}
}

// Shared memory belongs to the first thread of the first process.
static void op_shared(struct arena *a)
{
	uint64_t p = rnd(a) % SHARED, n = 1 + rnd(a) % 8;

	a->op = "shared";
	if (a->id || depth)
		return;
	if (p + n > SHARED)
		n = SHARED - p;
	switch (rnd(a) % 4) {
	case 0:
		if (madvise((void *)(shared_at + p * PAGE), n * PAGE, MADV_REMOVE))
			die("MADV_REMOVE %#lx", shared_at + p * PAGE);
		for (uint64_t j = p; j < p + n; j++)
			zero(&shared[j]);
		break;
	case 1: // content stays
		if (madvise((void *)(shared_at + p * PAGE), n * PAGE, MADV_DONTNEED))
			die("MADV_DONTNEED %#lx", shared_at + p * PAGE);
		break;
	case 2:
		for (uint64_t b = 0; b < BLOCKS; b++) {
			shared[p].stamp[b] = rnd(a) | 1;
			fill((void *)(shared_at + p * PAGE + b * BLOCK), shared[p].stamp[b]);
		}
	}
	for (uint64_t j = p; j < p + n; j++)
		check_page(&shared[j], shared_at + j * PAGE);
}

// Frames with a page of content each, to a depth; inner is called at the bottom.
static void __attribute__((noinline)) descend(struct arena *a, int levels, void (*inner)(void))
{
	uint64_t frame[PAGE / 8];
	uint32_t stamp = rnd(a) | 1;

	for (uint64_t b = 0; b < BLOCKS; b++)
		fill(frame + b * BLOCK / 8, stamp + b);
	if (levels > 0)
		descend(a, levels - 1, inner);
	else if (inner)
		inner();
	for (uint64_t b = 0; b < BLOCKS; b++)
		check_block(frame + b * BLOCK / 8, (uint64_t)frame + b * BLOCK, stamp + b);
}

static void op_stack(struct arena *a)
{
	a->op = "stack";
	descend(a, rnd(a) % 100, NULL);
}

static void steps(struct arena *a, uint64_t n);

static void *helper(void *arg)
{
	self = arg;
	steps(self, 15);
	return NULL;
}

// Another thread takes over for some steps.
static void op_thread(struct arena *a)
{
	pthread_t t;
	int e;

	a->op = "thread";
	if ((e = pthread_create(&t, NULL, helper, a))) {
		errno = e;
		die("pthread_create");
	}
	if ((e = pthread_join(t, NULL))) {
		errno = e;
		die("pthread_join");
	}
}

static void wait_child(pid_t c, const char *what, int want)
{
	int st;

	while (waitpid(c, &st, 0) != c)
		if (errno != EINTR)
			die("waitpid");
	if (st != want)
		die("%s child %d: status %#x, want %#x", what, c, st, want);
}

static void op_exec(struct arena *a)
{
	pid_t c;

	a->op = "vfork";
	if (plan & RUNNING && !common->go)
		return;
	c = vfork();
	if (c < 0)
		die("vfork");
	if (c == 0) {
		execl("/proc/self/exe", "torture", "exit", NULL);
		_exit(99);
	}
	wait_child(c, "vfork", 7 << 8);
}

static void *toucher(void *arg)
{
	uint64_t state = (uint64_t)arg;

	for (;;)
		check_rom((state = mix(state)) % ROM);
	return NULL;
}

// forked makes the model that of a child.
static void forked(struct arena *a, int wild)
{
	if (wild)
		mine_only = a->id;
	depth++;
	nchildren = 0;
	pthread_rwlock_init(&busy, NULL);
	for (int i = 0; i < threads; i++) {
		for (uint64_t p = 0; p < PAGES; p++) {
			struct page *v = &arenas[i].page[p];

			if (v->nofork)
				memset(v, 0, sizeof(*v));
			else if (v->wipe)
				zero(v);
		}
	}
	if (pipe(a->pipe))
		die("pipe");
	a->rnd = mix(a->rnd ^ depth ^ 0x5eed);
}

static pid_t fork_child(struct arena *a, int *wild)
{
	pid_t c;

	*wild = mine_only >= 0 || rnd(a) % 2;
	if (!*wild) {
		pthread_rwlock_unlock(&busy);
		pthread_rwlock_wrlock(&busy);
	}
	c = fork();
	if (c < 0)
		die("fork");
	if (c == 0) {
		forked(a, *wild);
		pthread_rwlock_rdlock(&busy);
		return 0;
	}
	if (!*wild) {
		pthread_rwlock_unlock(&busy);
		pthread_rwlock_rdlock(&busy);
	}
	return c;
}

static void op_fork(struct arena *a)
{
	int kind = rnd(a) % 8, wild;
	uint64_t n = rnd(a) % 60;
	pthread_t t;
	pid_t c;

	a->op = "fork";
	if (depth >= 3)
		return;
	if (kind == 3 && !common->go)
		kind = 0; // see "what is left out"
	c = fork_child(a, &wild);
	if (c) {
		if (rnd(a) % 2)
			steps(a, rnd(a) % 20);
		if (kind == 3)
			kill(c, SIGKILL);
		wait_child(c, "forked", kind == 3 ? SIGKILL : kind == 2 ? 7 << 8 : 0);
		return;
	}
	switch (kind) {
	case 0: // exits, execs or dies while threads wait for pages
	case 1:
	case 2:
	case 3:
		for (uint64_t i = 0; i < 1 + n % 4; i++)
			if (pthread_create(&t, NULL, toucher, (void *)rnd(a)))
				die("pthread_create");
		steps(a, n % 4);
		if (kind == 2) {
			execl("/proc/self/exe", "torture", "exit", NULL);
			_exit(99);
		}
		if (kind == 3)
			for (;;)
				pause();
		_exit(0);
	default:
		if (kind == 7)
			check_all();
		steps(a, n);
		a->op = "end of child";
		check_all();
		_exit(0);
	}
}

// steps does n operations; a thread's own and those of children and helpers are nested.
static void steps(struct arena *a, uint64_t n)
{
	static void (*const ops[])(struct arena *) = {
		op_mmap, op_mmap, op_munmap, op_munmap, op_mremap, op_mremap, op_mremap, op_mremap, op_mremap, op_mprotect, op_mprotect,
		op_discard, op_discard, op_discard, op_advice, op_advice, op_fork_advice, op_lock, op_write, op_write, op_write, op_write,
		op_write, op_read, op_read, op_read, op_read, op_kernel, op_kernel, op_brk, op_stack, op_shared,
	};
	static __thread int nested;

	for (uint64_t i = 0; i < n; i++) {
		uint64_t r = rnd(a) % 256;

		a->step++;
		// Nested calls hold it already. Helper threads do not: their creator does, and waits.
		if (!nested++)
			pthread_rwlock_rdlock(&busy);
		if (r < 3)
			op_fork(a);
		else if (r < 5 && nested == 1) {
			// Not within the lock: a fork that waits for it would wait for the helper's
			// lock, and that for the fork.
			pthread_rwlock_unlock(&busy);
			op_thread(a);
			pthread_rwlock_rdlock(&busy);
		} else if (r < 7)
			op_exec(a);
		else if (r < 16) {
			a->op = "rom";
			check_rom(rnd(a) % ROM);
		} else
			ops[r % (sizeof(ops) / sizeof(*ops))](a);
		if (!--nested)
			pthread_rwlock_unlock(&busy);
	}
}

// ---- the checkpoint ----

static void on_go(int sig)
{
	(void)sig;
	common->go = 1;
	syscall(SYS_futex, &common->go, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void on_alarm(int sig)
{
	int e = errno;
	static _Atomic uint64_t n;

	(void)sig;
	check_rom(mix(n++) % ROM);
	errno = e;
}

static void wait_go(void)
{
	while (!common->go)
		syscall(SYS_futex, &common->go, FUTEX_WAIT, 0, NULL, NULL, 0);
}

static void arrive(void)
{
	if (++common->arrived == common->expected && write(1, "ready\n", 6) != 6)
		die("write");
}

static void wait_at_checkpoint(struct arena *a)
{
	arrive();
	if (plan & RUNNING) {
		while (!common->go)
			steps(a, 1);
		return;
	}
	a->op = "stack over the checkpoint";
	descend(a, rnd(a) % 60, wait_go);
}

static void end(struct arena *a)
{
	steps(a, after);
	a->op = "end";
}

// A child that outlives the checkpoint, with children of its own.
static void grow_tree(struct arena *a)
{
	for (int i = 0; i < LONG && depth < 3; i++) {
		int wild;
		pid_t c;

		if (rnd(a) % 3 == 0)
			continue;
		common->expected++;
		pthread_rwlock_rdlock(&busy);
		c = fork_child(a, &wild);
		pthread_rwlock_unlock(&busy);
		if (c) {
			children[nchildren++] = c;
			continue;
		}
		steps(a, rnd(a) % (before + 1));
		if (rnd(a) % 2)
			grow_tree(a);
		wait_at_checkpoint(a);
		end(a);
		check_all();
		for (int j = 0; j < nchildren; j++)
			wait_child(children[j], "long", 0);
		_exit(0);
	}
}

static void *worker(void *arg)
{
	struct arena *a = self = arg;

	if (plan & ALARM) {
		stack_t alt = {.ss_size = 64 * 1024};

		alt.ss_sp = mmap(NULL, alt.ss_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (alt.ss_sp == MAP_FAILED || sigaltstack(&alt, NULL))
			die("sigaltstack");
	}
	steps(a, before);
	if (a->id == 0 && plan & FORKS)
		grow_tree(a);
	wait_at_checkpoint(a);
	end(a);
	return NULL;
}

static void *map(uint64_t at, uint64_t pages, int flags)
{
	void *m = mmap((void *)at, pages * PAGE, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS | (at ? MAP_FIXED : 0), -1, 0);

	if (m == MAP_FAILED)
		die("mmap");
	return m;
}

int main(int argc, char **argv)
{
	struct sigaction go = {.sa_handler = on_go, .sa_flags = SA_RESTART};
	struct sigaction alarm = {.sa_handler = on_alarm, .sa_flags = SA_RESTART | SA_ONSTACK};
	pthread_t t[MAXTHREADS];
	char line[64];
	int n;

	if (argc == 2 && !strcmp(argv[1], "exit"))
		return 7;
	if (argc != 4) {
		dprintf(2, "usage: torture SEED BEFORE AFTER\n");
		return 2;
	}
	close_range(3, ~0U, 0); // of those who started it
	seed = strtoull(argv[1], NULL, 10);
	before = strtoull(argv[2], NULL, 10);
	after = strtoull(argv[3], NULL, 10);
	plan = mix(seed) >> 8 & 63;
	threads = 1 + (mix(seed) >> 16) % MAXTHREADS;
	common = map(0, 1, MAP_SHARED);
	common->expected = threads;
	// The library's heap has room for all that it will ever want, so that the break is ours.
	mallopt(M_TRIM_THRESHOLD, INT_MAX);
	mallopt(M_MMAP_THRESHOLD, INT_MAX);
	free(malloc(1 << 20));
	heap_at = ((uint64_t)sbrk(0) + PAGE - 1) & ~(PAGE - 1);
	if (brk((void *)heap_at))
		die("brk");
	if (sigaction(SIGUSR1, &go, NULL) || sigaction(SIGALRM, &alarm, NULL))
		die("sigaction");
	rom_at = (uint64_t)map(BASE - APART, ROM, MAP_PRIVATE);
	for (uint64_t i = 0; i < ROM; i++)
		for (uint64_t b = 0; b < BLOCKS && i % 8 != 7; b++)
			fill((void *)(rom_at + i * PAGE + b * BLOCK), i * BLOCKS + b + 1);
	guard_at = (uint64_t)map(BASE - APART + 2 * ROM * PAGE, 3, MAP_PRIVATE);
	for (uint64_t b = 0; b < BLOCKS; b++) {
		fill((void *)(guard_at + b * BLOCK), b + 1);
		fill((void *)(guard_at + 2 * PAGE + b * BLOCK), b + 1);
	}
	if (madvise((void *)(guard_at + PAGE), PAGE, MADV_GUARD_INSTALL))
		guard_at = 0;
	shared_at = (uint64_t)map(0, SHARED, MAP_SHARED);
	for (int i = 0; i < threads; i++) {
		struct arena *a = &arenas[i];

		a->id = i;
		a->at = BASE + i * APART;
		a->rnd = mix(seed * MAXTHREADS + i);
		if (pipe(a->pipe))
			die("pipe");
		map(a->at, PAGES, MAP_PRIVATE);
		if (plan & HUGE)
			madvise((void *)a->at, PAGES * PAGE, MADV_HUGEPAGE);
		for (int p = 0; p < PAGES; p++)
			a->page[p] = (struct page){.mapped = 1, .prot = PROT_READ | PROT_WRITE};
		for (int p = 0; p < PAGES * 3 / 4; p++)
			for (uint64_t b = 0; b < BLOCKS; b++) {
				a->page[p].stamp[b] = rnd(a) | 1;
				fill((void *)(addr(a, p) + b * BLOCK), a->page[p].stamp[b]);
			}
	}
	if (plan & ALARM) {
		struct itimerval every = {{0, 1500}, {0, 1500}};

		if (setitimer(ITIMER_REAL, &every, NULL))
			die("setitimer");
	}
	for (int i = 1; i < threads; i++)
		if (pthread_create(&t[i], NULL, worker, &arenas[i]))
			die("pthread_create");
	worker(&arenas[0]);
	for (int i = 1; i < threads; i++)
		pthread_join(t[i], NULL);
	check_all();
	for (int i = 0; i < nchildren; i++)
		wait_child(children[i], "long", 0);
	if (common->failed)
		return 1;
	n = snprintf(line, sizeof(line), "OK %lu\n", seed);
	return write(1, line, n) != n;
}
