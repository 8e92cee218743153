#include <fcntl.h>
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>
int main(void) {
	unsigned char *p = mmap((void *)0x700000003000, 96 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	for (int i = 0; i < 96; i++)
		for (int k = 0; k < 4096; k++)
			if (i % 8 != 7) p[i * 4096 + k] = i * 31 + k * k;
	for (int i = 7; i < 96; i += 8) p[i * 4096] = 0; /* present, zero */
	int s = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(8080)};
	bind(s, (void *)&a, sizeof a);
	listen(s, 5);
	if (fork() == 0) strcpy((char *)p, "child");
	int f = open("/written", 0101, 0644);
	write(f, "hello\n", 6);
	for (;;) pause();
}
