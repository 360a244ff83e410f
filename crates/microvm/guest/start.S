/*
 * Entry points of the bare-metal guest, and its exception and interrupt stubs.
 *
 * start64: every vCPU of the vmferry VMM starts here in long mode at CPL 0, interrupts off,
 *          RDI = vCPU index, CR3 = identity tables made by the VMM.
 * pvh32:   a PVH loader (QEMU) starts one vCPU here in 32-bit mode, EBX = start_info.
 *
 * Ring 0 runs only a few instructions per interrupt, because PVM emulates each of them.
 */
#include "kernel.h"

    .section .note.Xen, "a", @note
    .balign 4
    .long 4                     /* bytes of the name */
    .long 8                     /* bytes of the value */
    .long 18                    /* XEN_ELFNOTE_PHYS32_ENTRY */
    .asciz "Xen"
    .quad pvh32

    .section .text.start, "ax", @progbits
    .code64
    .globl start64
start64:
    cld
    mov %edi, %eax
    shl $12, %rax               /* CPU_PAGE_BYTES */
    lea cpu_pages + CPU_PAGE_BYTES(%rax), %rsp
    xor %ebp, %ebp
    call kernel_main            /* (vcpu), does not return */
    ud2

/* enter_user(entry, stack, vcpu): enters ring 3 with interrupts on. Does not return. */
    .globl enter_user
enter_user:
    mov %rdx, %rax
    push $USER_DS
    push %rsi
    push $0x202                 /* IF */
    push $USER_CS
    push %rdi
    mov %rax, %rdi
    iretq

/* load_descriptors(gdt pointer, idt pointer, tss selector) */
    .globl load_descriptors
load_descriptors:
    lgdt (%rdi)
    lidt (%rsi)
    mov $KERNEL_DS, %eax
    mov %eax, %ss
    xor %eax, %eax
    mov %eax, %ds
    mov %eax, %es
    mov %eax, %fs
    mov %eax, %gs
    pop %rax                    /* the return address goes through the new CS */
    push $KERNEL_CS
    push %rax
    ltr %dx
    lretq

/* A timer tick: counts it and writes EOI. */
    .globl timer_entry
timer_entry:
    push %rax
    mov %rsp, %rax
    and $-CPU_PAGE_BYTES, %rax
    incq CPU_TICKS(%rax)
    mov $LAPIC_BASE, %eax
    movl $0, LAPIC_EOI(%rax)
    pop %rax
    iretq

    .globl spurious_entry
spurious_entry:
    iretq

/*
 * Ring 3 idles by executing `hlt`, which faults. This steps over it, halts until the next interrupt
 * has been handled, and returns. `wrmsr`, `rdmsr` and `rep outsb` fault as well, and are executed
 * here with the registers of ring 3. Any other general protection fault is a bug.
 */
    .globl protection_entry
protection_entry:
    testb $3, 16(%rsp)
    jz panic13
    push %rax
    mov 16(%rsp), %rax
    cmpb $0xf4, (%rax)
    jne 1f
    incq 16(%rsp)
    pop %rax
    add $8, %rsp                /* the error code */
    sti
    hlt
    cli
    iretq
1:  cmpw $0x300f, (%rax)
    jne 2f
    addq $2, 16(%rsp)
    pop %rax
    add $8, %rsp
    wrmsr
    iretq
2:  cmpw $0x320f, (%rax)
    jne 3f
    addq $2, 16(%rsp)
    pop %rax
    add $8, %rsp
    rdmsr
    iretq
3:  cmpw $0x6ef3, (%rax)
    jne 4f
    addq $2, 16(%rsp)
    pop %rax
    add $8, %rsp
    rep outsb
    iretq
4:  pop %rax
panic13:
    push $13
    jmp panic_common

/* A timer tick after a PVH boot: an interrupt counts as several ticks, and KVM may have set the
   flag that no write to the EOI register is needed. */
    .globl pvh_timer_entry
pvh_timer_entry:
    push %rax
    mov %rsp, %rax
    and $-CPU_PAGE_BYTES, %rax
    addq $PVH_TICKS, CPU_TICKS(%rax)
    btrl $0, CPU_EOI(%rax)
    jc 1f
    mov $LAPIC_BASE, %eax
    movl $0, LAPIC_EOI(%rax)
    pop %rax
    iretq
1:  incq CPU_EOIS_SAVED(%rax)
    pop %rax
    iretq

/* An interrupt of the balloon: counts it for the driver in ring 3. */
    .globl balloon_entry
balloon_entry:
    push %rax
    mov %rsp, %rax
    and $-CPU_PAGE_BYTES, %rax
    incq CPU_INTERRUPTS(%rax)
    mov $LAPIC_BASE, %eax
    movl $0, LAPIC_EOI(%rax)
    pop %rax
    iretq

/* Unexpected exceptions: pushes the vector and the error code below the processor's frame. */
    .macro exception vector, has_error
exception_\vector:
    .if \has_error == 0
    push $0
    .endif
    push $\vector
    jmp panic_common
    .endm

    exception 0, 0
    exception 1, 0
    exception 2, 0
    exception 3, 0
    exception 4, 0
    exception 5, 0
    exception 6, 0
    exception 7, 0
    exception 8, 1
    exception 9, 0
    exception 10, 1
    exception 11, 1
    exception 12, 1
    exception 13, 1
    exception 14, 1
    exception 15, 0
    exception 16, 0
    exception 17, 1
    exception 18, 0
    exception 19, 0

panic_common:
    mov %rsp, %rdi
    mov %cr2, %rsi
    and $-16, %rsp
    call exception_panic        /* (frame, cr2), does not return */
    ud2

    .section .rodata
    .balign 8
    .globl exception_entries
exception_entries:
    .quad exception_0, exception_1, exception_2, exception_3, exception_4
    .quad exception_5, exception_6, exception_7, exception_8, exception_9
    .quad exception_10, exception_11, exception_12, protection_entry, exception_14
    .quad exception_15, exception_16, exception_17, exception_18, exception_19

    .data
    .balign 16
    .globl gdt
gdt:
    .quad 0
    .quad 0x00cf9b000000ffff    /* 0x08 ring 0 code, 32 bits */
    .quad 0x00af9b000000ffff    /* 0x10 ring 0 code, 64 bits */
    .quad 0x00cf93000000ffff    /* 0x18 ring 0 data */
    .quad 0x00cffb000000ffff    /* 0x20 ring 3 code, 32 bits */
    .quad 0x00cff3000000ffff    /* 0x28 ring 3 data */
    .quad 0x00affb000000ffff    /* 0x30 ring 3 code, 64 bits */
    .quad 0
    .fill 2 * MAX_VCPUS, 8, 0   /* task state segments */
gdt_end:

/* ---- PVH boot: 32 bits, no paging, EBX = start_info ---- */

    .section .text.start, "ax", @progbits
    .code32
pvh32:
    cli
    cld
    mov $(pvh_stack_top), %esp
    lgdt pvh_gdt_pointer

    /* Identity tables for the first 4 GiB. pvh_main maps the memory above. */
    mov $PML4_ADDRESS, %edi
    xor %eax, %eax
    mov $2048, %ecx             /* PML4 and PDPT */
    rep stosl
    movl $(PDPT_ADDRESS + 7), PML4_ADDRESS
    mov $PDPT_ADDRESS, %edi
    mov $(PAGE_DIRECTORIES_ADDRESS + 7), %eax
    mov $4, %ecx
1:  mov %eax, (%edi)
    add $4096, %eax
    add $8, %edi
    loop 1b
    mov $PAGE_DIRECTORIES_ADDRESS, %edi
    mov $0x87, %eax             /* present, writable, user, 2 MiB */
    mov $2048, %ecx
2:  mov %eax, (%edi)
    movl $0, 4(%edi)
    add $0x200000, %eax
    add $8, %edi
    loop 2b

    call enable_long_mode
    ljmp $KERNEL_CS, $pvh64

/* Enables long mode with the tables at PML4_ADDRESS. The caller then jumps to a 64-bit segment. */
enable_long_mode:
    mov %cr4, %eax
    or $0x20, %eax              /* PAE */
    mov %eax, %cr4
    mov $PML4_ADDRESS, %eax
    mov %eax, %cr3
    mov $0xc0000080, %ecx       /* EFER */
    rdmsr
    or $0x100, %eax             /* LME */
    wrmsr
    mov %cr0, %eax
    or $0x80010001, %eax        /* paging, write protection, protected mode */
    mov %eax, %cr0
    ret

    .code64
pvh64:
    mov $KERNEL_DS, %eax
    mov %eax, %ss
    mov %eax, %ds
    mov %eax, %es
    mov $pvh_stack_top, %esp
    mov %ebx, %edi
    call pvh_main               /* (start_info): fills the boot parameters, starts the others */
    xor %edi, %edi
    jmp start64

/* Secondary vCPUs after INIT and SIPI: real mode at TRAMPOLINE_ADDRESS, where this is copied. */
    .code16
    .globl trampoline, trampoline_end
trampoline:
    cli
    xor %ax, %ax
    mov %ax, %ds
    lgdtl (TRAMPOLINE_ADDRESS + trampoline_gdt_pointer - trampoline)
    mov %cr0, %eax
    or $1, %al
    mov %eax, %cr0
    ljmpl $KERNEL_CS32, $secondary32
    .balign 4
trampoline_gdt_pointer:
    .word gdt_end - gdt - 1
    .long gdt
trampoline_end:

    .code32
secondary32:
    mov $KERNEL_DS, %eax
    mov %eax, %ds
    mov %eax, %es
    mov %eax, %ss
    mov $1, %edi
    lock xadd %edi, vcpus_started
    inc %edi                    /* the boot processor is 0 */
    cmp $MAX_VCPUS, %edi
    jae 1f
    mov %edi, %esp              /* each on its own page */
    shl $12, %esp
    lea cpu_pages + CPU_PAGE_BYTES(%esp), %esp
    call enable_long_mode
    ljmp $KERNEL_CS, $secondary64
1:  cli
    hlt
    jmp 1b

    .code64
secondary64:
    mov %edi, %edi
    jmp start64

    .section .rodata
    .balign 4
pvh_gdt_pointer:
    .word gdt_end - gdt - 1
    .long gdt

    .bss
    .balign 4096
    .globl cpu_pages
cpu_pages:
    .skip CPU_PAGE_BYTES * MAX_VCPUS
    .skip 4096
pvh_stack_top:

    .section .note.GNU-stack, "", @progbits
