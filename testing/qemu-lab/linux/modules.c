/* Loads the kernel modules in /modules, in the order of their names. */
#define _GNU_SOURCE
#include "guest.h"
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return alphasort(a, b);
}

static int is_file(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

void load_modules(void)
{
    struct dirent **found;
    int count = scandir("/modules", &found, is_file, by_name);
    for (int i = 0; i < count; i++) {
        char path[512];
        snprintf(path, sizeof path, "/modules/%s", found[i]->d_name);
        int file = open(path, O_RDONLY | O_CLOEXEC);
        if (file < 0 || syscall(SYS_finit_module, file, "", 0))
            printf("vmferry-guest failed=module-%s\n", found[i]->d_name);
        close(file);
    }
    mount("devtmpfs", "/dev", "devtmpfs", 0, 0);
}
