/*
 * The bare-metal guest's kernel: as little of ring 0 as there can be.
 *
 * Each vCPU comes through kernel_main once, gets its descriptors, its LAPIC timer and a ring 3
 * stack, and leaves for user_main, where the workload runs for ever. Back in ring 0 there are only
 * the timer tick and the idle halt, both in start.S. Nothing here uses floating point, `syscall`
 * or `int`: KVM on PVM emulates ring 0 and knows neither.
 */
#include <stddef.h>
#include <stdint.h>

#include "balloon.h"
#include "kernel.h"
#include "report.h"
#include "workload.h"

struct boot_parameters {
    uint64_t magic;
    uint32_t version;
    uint32_t vcpus;
    uint64_t low_bytes;  /* RAM from 0, at most 3 GiB */
    uint64_t high_bytes; /* RAM from 4 GiB */
    uint64_t has_display; /* 1 if the slots from DISPLAY_ADDRESS exist */
    uint64_t balloon_address; /* registers of a virtio-mmio balloon; 0 if there is none */
};
_Static_assert(sizeof(struct boot_parameters) == 48, "the VMM writes it");

struct table_pointer {
    uint16_t limit;
    uint64_t base;
} __attribute__((packed));

struct gate {
    uint16_t offset_low, selector;
    uint8_t stack, type;
    uint16_t offset_middle;
    uint32_t offset_high, reserved;
};
_Static_assert(sizeof(struct gate) == 16, "an IDT entry");

struct task_state {
    uint32_t reserved0;
    uint64_t rsp[3];
    uint64_t reserved1, ist[7], reserved2;
    uint16_t reserved3, io_bitmap;
} __attribute__((packed));
_Static_assert(sizeof(struct task_state) == 104, "a 64-bit TSS");

struct exception_frame {
    uint64_t vector, error, rip, cs, rflags, rsp, ss;
};

extern uint64_t gdt[GDT_ENTRIES];
extern uint8_t cpu_pages[MAX_VCPUS][CPU_PAGE_BYTES];
extern void (*const exception_entries[20])(void);
extern uint8_t trampoline[], trampoline_end[];
void timer_entry(void);
void spurious_entry(void);
void balloon_entry(void);
void load_descriptors(const struct table_pointer *gdt, const struct table_pointer *idt, uint16_t tss);
_Noreturn void enter_user(void (*entry)(uint32_t), const void *stack_top, uint32_t vcpu);

uint32_t vcpus_started; /* secondary vCPUs, counted by start.S */

/* One per vCPU: all of them start at once, and none may see a gate that another is still writing. */
static struct gate idts[MAX_VCPUS][IDT_ENTRIES] __attribute__((aligned(16)));
static struct task_state task_states[MAX_VCPUS] __attribute__((aligned(16)));
static uint8_t user_stacks[MAX_VCPUS][USER_STACK_BYTES] __attribute__((aligned(16)));
static volatile uint32_t workload_ready;

static inline void out8(uint16_t port, uint8_t value)
{
    __asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

static inline void lapic_write(uint32_t offset, uint32_t value)
{
    *(volatile uint32_t *)(uintptr_t)(LAPIC_BASE + offset) = value;
}

static volatile struct boot_parameters *boot_parameters(void)
{
    uintptr_t address = BOOT_PARAMETERS_ADDRESS;
    __asm__("" : "+r"(address)); /* not a constant: GCC takes low constants for null pointers */
    return (volatile struct boot_parameters *)address;
}

/* The compiler may call these wherever it copies or clears a structure. */
void *memcpy(void *to, const void *from, size_t bytes)
{
    void *start = to;
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
    return start;
}

void *memset(void *to, int value, size_t bytes)
{
    void *start = to;
    __asm__ volatile("rep stosb" : "+D"(to), "+c"(bytes) : "a"(value) : "memory");
    return start;
}

/* ---- ring 3 ---- */

static uint64_t kernel_ticks(uint32_t vcpu)
{
    return *(volatile uint64_t *)(cpu_pages[vcpu] + CPU_TICKS);
}

/* Until the next interrupt: `hlt` faults in ring 3, and start.S halts in ring 0. */
static inline void idle(void)
{
    __asm__ volatile("hlt" : : : "memory");
}

static _Noreturn void user_main(uint32_t vcpu)
{
    volatile struct boot_parameters *boot = boot_parameters();
    struct guest_view view = {
        .low_base = 0,
        .high_base = 1ull << 32,
        .low_bytes = boot->low_bytes,
        .high_bytes = boot->high_bytes,
        .display_base = boot->has_display ? DISPLAY_ADDRESS : 0,
        .still_base = boot->has_display ? STILL_ADDRESS : 0,
    };

    if (vcpu == 0) {
        workload_init(&view, boot->vcpus);
        balloon_init(&view, boot->balloon_address, (volatile uint64_t *)(cpu_pages[0] + CPU_INTERRUPTS));
        __atomic_store_n(&workload_ready, 1, __ATOMIC_RELEASE);
    }
    while (!__atomic_load_n(&workload_ready, __ATOMIC_ACQUIRE))
        idle();
    for (;;) {
        int is_idle = workload_step(&view, vcpu, kernel_ticks(vcpu));
        if (vcpu == 0)
            is_idle &= balloon_step(&view, kernel_ticks(vcpu));
        if (is_idle)
            idle();
    }
}

/* ---- ring 0 ---- */

static void serial_text(const char *text)
{
    for (; *text; text++)
        out8(0x3f8, (uint8_t)*text);
}

static void serial_hex(uint64_t value)
{
    char text[17];
    for (int digit = 0; digit < 16; digit++)
        text[digit] = "0123456789abcdef"[(value >> (60 - 4 * digit)) & 15];
    text[16] = 0;
    serial_text(text);
}

static _Noreturn void halt(void)
{
    for (;;)
        __asm__ volatile("cli; hlt");
}

static _Noreturn void panic(void)
{
    serial_text("\r\n");
    out8(PVPANIC_PORT, PVPANIC_PANICKED);
    halt();
}

_Noreturn void exception_panic(const struct exception_frame *frame, uint64_t cr2)
{
    static uint8_t panicking;

    /* What broke one vCPU often breaks all: the first one tells the story. */
    if (__atomic_exchange_n(&panicking, 1, __ATOMIC_SEQ_CST))
        halt();
    serial_text("vmferry guest: exception ");
    serial_hex(frame->vector);
    serial_text(" error ");
    serial_hex(frame->error);
    serial_text(" rip ");
    serial_hex(frame->rip);
    serial_text(" cs ");
    serial_hex(frame->cs);
    serial_text(" cr2 ");
    serial_hex(cr2);
    panic();
}

static void set_gate(struct gate *gate, void (*entry)(void))
{
    uint64_t offset = (uint64_t)entry;
    *gate = (struct gate){
        .offset_low = (uint16_t)offset,
        .selector = KERNEL_CS,
        .type = 0x8e, /* present, DPL 0, interrupt gate */
        .offset_middle = (uint16_t)(offset >> 16),
        .offset_high = (uint32_t)(offset >> 32),
    };
}

static void load_tables(uint32_t vcpu)
{
    struct gate *idt = idts[vcpu];
    struct task_state *task = &task_states[vcpu];
    uint64_t base = (uint64_t)task;
    uint64_t limit = sizeof *task - 1;
    uint16_t selector = (uint16_t)(FIRST_TSS + 16 * vcpu);
    struct table_pointer gdt_pointer = {sizeof gdt - 1, (uint64_t)gdt};
    struct table_pointer idt_pointer = {sizeof idts[vcpu] - 1, (uint64_t)idt};

    for (unsigned vector = 0; vector < 20; vector++)
        set_gate(&idt[vector], exception_entries[vector]);
    set_gate(&idt[VECTOR_TIMER], timer_entry);
    set_gate(&idt[VECTOR_BALLOON], balloon_entry);
    set_gate(&idt[VECTOR_SPURIOUS], spurious_entry);

    task->rsp[0] = (uint64_t)cpu_pages[vcpu] + CPU_PAGE_BYTES;
    task->io_bitmap = sizeof *task; /* beyond the limit: ring 3 has no ports */
    gdt[selector / 8] = (limit & 0xffff) | (base & 0xffffff) << 16 | 0x89ull << 40 | (base >> 24 & 0xff) << 56;
    gdt[selector / 8 + 1] = base >> 32;
    load_descriptors(&gdt_pointer, &idt_pointer, selector);
}

/* One tick per millisecond on KVM, whose LAPIC counts nanoseconds. */
static void start_timer(void)
{
    lapic_write(0x0f0, 0x100 | VECTOR_SPURIOUS); /* software enable */
    lapic_write(0x080, 0);                       /* accept every priority */
    lapic_write(0x3e0, 0xb);                     /* divide by 1 */
    lapic_write(0x350, 0x10000);                 /* LINT0, LINT1 masked */
    lapic_write(0x360, 0x10000);
    lapic_write(0x320, 0x20000 | VECTOR_TIMER);  /* periodic */
    lapic_write(0x380, 1000000);
}

static void ioapic_write(uint32_t index, uint32_t value)
{
    *(volatile uint32_t *)(uintptr_t)IOAPIC_BASE = index;
    *(volatile uint32_t *)(uintptr_t)(IOAPIC_BASE + 0x10) = value;
}

/* Edge-triggered, active high, to vCPU 0, by its APIC identifier. */
static void route_balloon(void)
{
    ioapic_write(0x10 + 2 * BALLOON_PIN + 1, 0);
    ioapic_write(0x10 + 2 * BALLOON_PIN, VECTOR_BALLOON);
}

_Noreturn void kernel_main(uint32_t vcpu)
{
    volatile struct boot_parameters *boot = boot_parameters();

    if (vcpu >= MAX_VCPUS)
        halt();
    if (vcpu == 0) {
        out8(0x21, 0xff); /* both PICs masked: interrupts come from the LAPIC alone */
        out8(0xa1, 0xff);
        if (boot->magic != BOOT_MAGIC || boot->version != BOOT_VERSION) {
            serial_text("vmferry guest: bad boot parameters");
            panic();
        }
        serial_text("vmferry guest\r\n");
    }
    load_tables(vcpu);
    start_timer();
    if (vcpu == 0 && boot->balloon_address)
        route_balloon();
    enter_user(user_main, user_stacks[vcpu] + USER_STACK_BYTES - 8, vcpu);
}

/* ---- PVH boot ---- */

struct start_info {
    uint32_t magic, version, flags, modules;
    uint64_t module_list, command_line, rsdp, memory_map;
    uint32_t memory_map_entries, reserved;
};

struct memory_map_entry {
    uint64_t address, bytes;
    uint32_t type, reserved;
};

/* Maps RAM above 4 GiB, whose first 4 GiB of tables start.S has made. */
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

/* INIT and SIPI to all others, who count themselves; those not there after 20 ms do not exist. */
static uint32_t start_secondaries(void)
{
    volatile uint8_t *to = (volatile uint8_t *)TRAMPOLINE_ADDRESS;
    volatile uint32_t *now = (volatile uint32_t *)(uintptr_t)(LAPIC_BASE + 0x390);

    for (uint8_t *from = trampoline; from < trampoline_end; from++)
        *to++ = *from;
    lapic_write(0x0f0, 0x100 | VECTOR_SPURIOUS);
    lapic_write(0x3e0, 0xb);
    lapic_write(0x320, 0x10000 | VECTOR_TIMER); /* masked, one shot: a stopwatch in nanoseconds */
    lapic_write(0x300, 0xc4500);                /* INIT to all but self */
    lapic_write(0x380, 10000000);
    while (*now)
        __asm__ volatile("pause");
    lapic_write(0x300, 0xc4600 | TRAMPOLINE_ADDRESS >> 12);
    lapic_write(0x380, 20000000);
    while (*now)
        __asm__ volatile("pause");
    return __atomic_load_n(&vcpus_started, __ATOMIC_ACQUIRE);
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

    boot->low_bytes = low_bytes & ~4095ull;
    boot->high_bytes = high_bytes & ~4095ull;
    boot->has_display = 0;
    boot->balloon_address = 0;
    boot->version = BOOT_VERSION;
    boot->vcpus = 1;
    boot->magic = BOOT_MAGIC;
    /* Secondaries go straight to ring 3 and wait there until vCPU 0 has made the workload. */
    uint32_t secondaries = start_secondaries();
    boot->vcpus = 1 + (secondaries < MAX_VCPUS ? secondaries : MAX_VCPUS - 1);
}
