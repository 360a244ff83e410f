/*
 * The kernel of the bare-metal guest, with a minimum of ring 0 code.
 *
 * Each vCPU runs kernel_main once. It sets up the descriptors, the LAPIC timer and a ring 3 stack,
 * and enters user_main, which runs the workload without end. Later only interrupts and the idle
 * halt run in ring 0, both in start.S. Ring 0 uses no floating point, `syscall` or `int`, which KVM
 * on PVM does not emulate.
 */
#include <stddef.h>
#include <stdint.h>

#include "balloon.h"
#include "machine.h"
#include "network.h"
#include "paravirt.h"
#include "report.h"
#include "serial_report.h"
#include "workload.h"

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
extern void (*const exception_entries[20])(void);
void timer_entry(void);
void pvh_timer_entry(void);
void spurious_entry(void);
void balloon_entry(void);
void load_descriptors(const struct table_pointer *gdt, const struct table_pointer *idt,
                      uint16_t tss);
_Noreturn void enter_user(void (*entry)(uint32_t), const void *stack_top, uint32_t vcpu);

/* One per vCPU, because all vCPUs start at once and must not see a gate that is being written. */
static struct gate idts[MAX_VCPUS][IDT_ENTRIES] __attribute__((aligned(16)));
static struct task_state task_states[MAX_VCPUS] __attribute__((aligned(16)));
static uint8_t user_stacks[MAX_VCPUS][USER_STACK_BYTES] __attribute__((aligned(16)));
static volatile uint32_t workload_ready;

/* The compiler may call these to copy or clear a structure. */
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

/* Waits for the next interrupt: `hlt` faults in ring 3, and start.S then halts in ring 0. */
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
        balloon_init(&view, boot->balloon_address,
                     (volatile uint64_t *)(cpu_pages[0] + CPU_INTERRUPTS));
        network_init();
        __atomic_store_n(&workload_ready, 1, __ATOMIC_RELEASE);
    }
    while (!__atomic_load_n(&workload_ready, __ATOMIC_ACQUIRE))
        idle();
    for (;;) {
        int is_idle = workload_step(&view, vcpu, kernel_ticks(vcpu));
        if (vcpu == 0)
            is_idle &= balloon_step(&view, kernel_ticks(vcpu));
        paravirt_step(&view, vcpu, kernel_ticks(vcpu));
        if (vcpu == 0) {
            network_step(&view, kernel_ticks(vcpu));
            serial_report_step(&view, kernel_ticks(vcpu));
        }
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

    /* A fault often hits all vCPUs. Only the first one reports it. */
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
    set_gate(&idt[VECTOR_TIMER], booted_by_pvh ? pvh_timer_entry : timer_entry);
    set_gate(&idt[VECTOR_BALLOON], balloon_entry);
    set_gate(&idt[VECTOR_SPURIOUS], spurious_entry);

    task->rsp[0] = (uint64_t)cpu_pages[vcpu] + CPU_PAGE_BYTES;
    task->io_bitmap = sizeof *task; /* beyond the limit: ring 3 has no ports */
    gdt[selector / 8] =
        (limit & 0xffff) | (base & 0xffffff) << 16 | 0x89ull << 40 | (base >> 24 & 0xff) << 56;
    gdt[selector / 8 + 1] = base >> 32;
    load_descriptors(&gdt_pointer, &idt_pointer, selector);
}

/* Starts the timer, with a tick of a millisecond on KVM, whose LAPIC counts nanoseconds. */
static void start_timer(void)
{
    lapic_write(0x0f0, 0x100 | VECTOR_SPURIOUS); /* software enable */
    lapic_write(0x080, 0);                       /* accept every priority */
    lapic_write(0x3e0, 0xb);                     /* divide by 1 */
    lapic_write(0x350, 0x10000);                 /* LINT0, LINT1 masked */
    lapic_write(0x360, 0x10000);
    lapic_write(0x320, 0x20000 | VECTOR_TIMER);  /* periodic */
    lapic_write(0x380, 1000000 * (booted_by_pvh ? PVH_TICKS : 1));
}

static void ioapic_write(uint32_t index, uint32_t value)
{
    *(volatile uint32_t *)(uintptr_t)IOAPIC_BASE = index;
    *(volatile uint32_t *)(uintptr_t)(IOAPIC_BASE + 0x10) = value;
}

/* Routes the balloon's interrupt to vCPU 0: edge-triggered, active high, by APIC ID. */
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
        out8(0x21, 0xff); /* masks both PICs: interrupts come only from the LAPIC */
        out8(0xa1, 0xff);
        if (boot->magic != BOOT_MAGIC || boot->version != BOOT_VERSION) {
            serial_text("vmferry guest: bad boot parameters");
            panic();
        }
        serial_text("vmferry guest\r\n");
    }
    load_tables(vcpu);
    paravirt_enable(vcpu);
    start_timer();
    if (vcpu == 0 && boot->balloon_address)
        route_balloon();
    enter_user(user_main, user_stacks[vcpu] + USER_STACK_BYTES - 8, vcpu);
}
