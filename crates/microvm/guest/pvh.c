/*
 * PVH boot. It does the work of vmferry's VMM, so that any VMM that loads an ELF with a PVH note
 * can start the guest, such as QEMU with `-kernel`. It needs no device that is specific to one VMM.
 */
#include <stddef.h>

#include "machine.h"
#include "paravirt.h"
#include "report.h"

extern uint8_t trampoline[], trampoline_end[];

uint32_t booted_by_pvh;
uint32_t vcpus_started; /* secondary vCPUs, counted by start.S */

struct start_info {
    uint32_t magic, version, flags, modules;
    uint64_t module_list, command_line, rsdp, memory_map;
    uint32_t memory_map_entries, reserved;
};

struct memory_map_entry {
    uint64_t address, bytes;
    uint32_t type, reserved;
};

/* Maps RAM above 4 GiB. start.S has mapped the first 4 GiB. */
static void map_high_memory(uint64_t high_bytes)
{
    uint64_t *pdpt = (uint64_t *)PDPT_ADDRESS;
    uint64_t gib = 4 + ((high_bytes + (1u << 30) - 1) >> 30);

    for (uint64_t index = 4; index < gib && index < 512; index++) {
        uint64_t *directory = (uint64_t *)(PAGE_DIRECTORIES_ADDRESS + index * 4096);
        for (uint64_t entry = 0; entry < 512; entry++)
            directory[entry] = index << 30 | entry << 21 | 0x87;
        pdpt[index] = (uint64_t)directory | 7;
    }
}

/* QEMU's configuration ports (docs/specs/fw_cfg.rst). */
#define FW_CFG_SELECTOR 0x510
#define FW_CFG_DATA 0x511
#define FW_CFG_SIGNATURE 0
#define FW_CFG_NB_CPUS 5

static uint32_t fw_cfg_read(uint16_t key, unsigned bytes)
{
    uint32_t value = 0;

    __asm__ volatile("outw %0, %1" : : "a"(key), "Nd"((uint16_t)FW_CFG_SELECTOR));
    for (unsigned index = 0; index < bytes; index++)
        value |= (uint32_t)in8(FW_CFG_DATA) << 8 * index;
    return value;
}

/* Number of secondary vCPUs, or 0 if it is unknown. */
static uint32_t count_secondaries(void)
{
    if (fw_cfg_read(FW_CFG_SIGNATURE, 4) != 0x554d4551) /* "QEMU" */
        return 0;
    return fw_cfg_read(FW_CFG_NB_CPUS, 2) - 1;
}

/* Waits with the LAPIC's timer, which is masked and counts nanoseconds. */
static void wait_ns(uint32_t nanoseconds)
{
    volatile uint32_t *now = (volatile uint32_t *)(uintptr_t)(LAPIC_BASE + 0x390);

    lapic_write(0x380, nanoseconds);
    while (*now)
        __asm__ volatile("pause");
}

/*
 * Sends INIT and SIPI to all other vCPUs, which count themselves. If their number is unknown, those
 * that have not started after 20 ms do not exist.
 */
static uint32_t start_secondaries(void)
{
    volatile uint8_t *to = (volatile uint8_t *)TRAMPOLINE_ADDRESS;
    uint32_t expected = count_secondaries(), started;

    for (uint8_t *from = trampoline; from < trampoline_end; from++)
        *to++ = *from;
    lapic_write(0x0f0, 0x100 | VECTOR_SPURIOUS);
    lapic_write(0x3e0, 0xb);
    lapic_write(0x320, 0x10000 | VECTOR_TIMER); /* masked, one shot */
    lapic_write(0x300, 0xc4500);                /* INIT to all but self */
    wait_ns(10000000);
    lapic_write(0x300, 0xc4600 | TRAMPOLINE_ADDRESS >> 12);
    do {
        wait_ns(20000000);
        started = __atomic_load_n(&vcpus_started, __ATOMIC_ACQUIRE);
    } while (started < expected && started < MAX_VCPUS - 1);
    return started;
}

/* The workload must start with zeros, but firmware may have used this memory. */
static void clear(uint64_t from, uint64_t end)
{
    for (volatile uint64_t *at = (volatile uint64_t *)from; at < (volatile uint64_t *)end; at++)
        *at = 0;
}

void pvh_main(const struct start_info *info)
{
    volatile struct boot_parameters *boot = boot_parameters();
    const struct memory_map_entry *map = (const struct memory_map_entry *)info->memory_map;
    const char *from = (const char *)info->command_line;
    volatile char *to = (volatile char *)COMMAND_LINE_ADDRESS;
    uint64_t low_bytes = 0, high_bytes = 0;
    unsigned length = 0;

    for (uint32_t index = 0; index < info->memory_map_entries; index++) {
        uint64_t end = map[index].address + map[index].bytes;
        if (map[index].type != 1)
            continue;
        if (map[index].address >= 1ull << 32)
            high_bytes = end - (1ull << 32) > high_bytes ? end - (1ull << 32) : high_bytes;
        else if (end > low_bytes)
            low_bytes = end;
    }
    for (; from && from[length] && length < COMMAND_LINE_BYTES - 1; length++)
        to[length] = from[length];
    to[length] = 0;
    map_high_memory(high_bytes);
    clear(REPORT_ADDRESS, BALLOON_REPORT_ADDRESS + 4096);
    clear(HEARTBEAT_ADDRESS, HEARTBEAT_ADDRESS + HEARTBEAT_PAGES * 4096);

    boot->low_bytes = low_bytes & ~4095ull;
    boot->high_bytes = high_bytes & ~4095ull;
    boot->has_display = 0;
    boot->balloon_address = 0;
    boot->version = BOOT_VERSION;
    boot->vcpus = 1;
    boot->magic = BOOT_MAGIC;
    paravirt_find();
    booted_by_pvh = 1;
    /* Secondary vCPUs wait in ring 3 until vCPU 0 has initialized the workload. */
    uint32_t secondaries = start_secondaries();
    boot->vcpus = 1 + (secondaries < MAX_VCPUS ? secondaries : MAX_VCPUS - 1);
}
