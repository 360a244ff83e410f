/* Sends datagrams to the host (10.0.2.2 in QEMU's user network) and checks the answers. */
#include "guest.h"
#include <arpa/inet.h>
#include <net/if.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>

#define WORDS 64

_Atomic uint64_t net_replies, net_lost;

static struct sockaddr_in address(const char *text, uint16_t port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    inet_pton(AF_INET, text, &address.sin_addr);
    return address;
}

static int bring_up(int any)
{
    struct ifreq request;
    struct sockaddr_in ours = address("10.0.2.15", 0), mask = address("255.255.255.0", 0);
    memset(&request, 0, sizeof request);
    strcpy(request.ifr_name, "eth0");
    memcpy(&request.ifr_addr, &ours, sizeof ours);
    if (ioctl(any, SIOCSIFADDR, &request))
        return -1;
    memcpy(&request.ifr_netmask, &mask, sizeof mask);
    if (ioctl(any, SIOCSIFNETMASK, &request) || ioctl(any, SIOCGIFFLAGS, &request))
        return -1;
    request.ifr_flags |= IFF_UP | IFF_RUNNING;
    return ioctl(any, SIOCSIFFLAGS, &request);
}

static void *work(void *argument)
{
    int any = socket(AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in host = address("10.0.2.2", (uint16_t)(uintptr_t)argument);
    struct timeval patience = {1, 0};
    if (any < 0 || bring_up(any) || connect(any, (struct sockaddr *)&host, sizeof host)) {
        printf("vmferry-guest failed=no-network\n");
        return 0;
    }
    setsockopt(any, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    for (uint64_t number = 1;; number++) {
        uint64_t sent[WORDS], got[WORDS];
        for (unsigned word = 0; word < WORDS; word++)
            sent[word] = word ? expected(number, 0, word) : number;
        if (send(any, sent, sizeof sent, 0) != sizeof sent) {
            net_lost++;
            continue;
        }
        /* A late answer belongs to an earlier number, which was counted as lost. */
        for (;;) {
            ssize_t size = recv(any, got, sizeof got, 0);
            if (size < 0) {
                net_lost++;
                break;
            }
            if (size == sizeof got && got[0] < number)
                continue;
            corruptions += size != sizeof got || memcmp(sent, got, sizeof got);
            net_replies++;
            break;
        }
        struct timespec pause = {0, 2000000};
        nanosleep(&pause, 0);
    }
    return 0;
}

void start_network(uint64_t port)
{
    pthread_t thread;
    if (pthread_create(&thread, 0, work, (void *)(uintptr_t)port))
        printf("vmferry-guest failed=no-network\n");
}
