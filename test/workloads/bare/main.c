// SPDX-License-Identifier: Apache-2.0
//
// bare: two processes with memory that could be lazy, of which they have touched none, so that no page of theirs is in a
// checkpoint but those of stack and program. Each waits for signals. It is linked with no library, which would have a heap or
// writable data.

#include <linux/mman.h>
#include <sys/syscall.h>

static long call(long number, long a, long b, long c, long d, long e)
{
	register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = 0;
	long result;

	__asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return result;
}

void _start(void)
{
	call(SYS_mmap, 0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	call(SYS_fork, 0, 0, 0, 0, 0);
	for (;;)
		call(SYS_pause, 0, 0, 0, 0, 0);
}
