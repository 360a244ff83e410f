//! The `ioctl` requests that a restricted process may make.
//!
//! The KVM requests are all that vmferry makes on any processor and KVM module, not only those
//! observed on one machine. Source: Linux `include/uapi/linux/kvm.h`, `userfaultfd.h`, `fs.h`,
//! `asm-generic/ioctls.h`.

use kvm_bindings as kvm;

use crate::Work;

/// `_IOC_WRITE` and `_IOC_READ` (`asm-generic/ioctl.h`).
const WRITE: u64 = 1 << 30;
const READ: u64 = 2 << 30;

const fn request<T>(direction: u64, kind: u8, number: u8) -> u64 {
    direction | (size_of::<T>() as u64) << 16 | (kind as u64) << 8 | number as u64
}

const fn io(number: u8) -> u64 {
    (kvm::KVMIO as u64) << 8 | number as u64
}

const fn ior<T>(number: u8) -> u64 {
    request::<T>(READ, kvm::KVMIO as u8, number)
}

const fn iow<T>(number: u8) -> u64 {
    request::<T>(WRITE, kvm::KVMIO as u8, number)
}

const fn iowr<T>(number: u8) -> u64 {
    request::<T>(READ | WRITE, kvm::KVMIO as u8, number)
}

/// Descriptors and terminals: requests of the standard library and the C library.
const PLAIN: &[u64] = &[
    0x5451, // FIOCLEX
    0x5421, // FIONBIO
    0x541b, // FIONREAD
    0x5401, // TCGETS: is it a terminal?
    0x5413, // TIOCGWINSZ
];

/// Finding populated and written pages, in this process or in another one by a descriptor opened
/// before.
const PAGES: &[u64] = &[
    0xc060_6610, // PAGEMAP_SCAN
    0xc068_6611, // PROCMAP_QUERY
];

/// Creating a userfaultfd and protecting pages with it.
const USERFAULTFD: &[u64] = &[
    0xc018_aa06, // UFFDIO_WRITEPROTECT
    0x0000_aa00, // USERFAULTFD_IOC_NEW, of /dev/userfaultfd
];

/// Missing pages, in this process or in another one by a descriptor that it has created.
const FAULTS: &[u64] = &[
    0xc018_aa3f, // UFFDIO_API
    0xc020_aa00, // UFFDIO_REGISTER
    0x8010_aa01, // UFFDIO_UNREGISTER
    0x8010_aa02, // UFFDIO_WAKE
    0xc028_aa03, // UFFDIO_COPY
    0xc020_aa04, // UFFDIO_ZEROPAGE
    0xc020_aa07, // UFFDIO_CONTINUE
];

/// Requests of KVM, the most frequent one first.
const KVM: &[u64] = &[
    io(0x80), // KVM_RUN
    // The system descriptor.
    io(0x00),                        // KVM_GET_API_VERSION
    io(0x01),                        // KVM_CREATE_VM
    iowr::<kvm::kvm_msr_list>(0x02), // KVM_GET_MSR_INDEX_LIST
    io(0x03),                        // KVM_CHECK_EXTENSION
    io(0x04),                        // KVM_GET_VCPU_MMAP_SIZE
    iowr::<kvm::kvm_cpuid2>(0x05),   // KVM_GET_SUPPORTED_CPUID
    // A machine.
    io(0x41),                                      // KVM_CREATE_VCPU
    iow::<kvm::kvm_dirty_log>(0x42),               // KVM_GET_DIRTY_LOG
    iow::<kvm::kvm_userspace_memory_region>(0x46), // KVM_SET_USER_MEMORY_REGION
    io(0x47),                                      // KVM_SET_TSS_ADDR (VMX)
    iow::<u64>(0x48),                              // KVM_SET_IDENTITY_MAP_ADDR (VMX)
    io(0x60),                                      // KVM_CREATE_IRQCHIP
    iow::<kvm::kvm_irq_level>(0x61),               // KVM_IRQ_LINE
    iowr::<kvm::kvm_irqchip>(0x62),                // KVM_GET_IRQCHIP
    ior::<kvm::kvm_irqchip>(0x63),                 // KVM_SET_IRQCHIP
    iow::<kvm::kvm_irqfd>(0x76),                   // KVM_IRQFD
    iow::<kvm::kvm_pit_config>(0x77),              // KVM_CREATE_PIT2
    iow::<kvm::kvm_ioeventfd>(0x79),               // KVM_IOEVENTFD
    iow::<kvm::kvm_clock_data>(0x7b),              // KVM_SET_CLOCK
    ior::<kvm::kvm_clock_data>(0x7c),              // KVM_GET_CLOCK
    ior::<kvm::kvm_pit_state2>(0x9f),              // KVM_GET_PIT2
    iow::<kvm::kvm_pit_state2>(0xa0),              // KVM_SET_PIT2
    iow::<kvm::kvm_enable_cap>(0xa3),              // KVM_ENABLE_CAP
    iowr::<kvm::kvm_clear_dirty_log>(0xc0),        // KVM_CLEAR_DIRTY_LOG
    io(0xc7),                                      // KVM_RESET_DIRTY_RINGS
    // A vCPU.
    ior::<kvm::kvm_regs>(0x81),        // KVM_GET_REGS
    iow::<kvm::kvm_regs>(0x82),        // KVM_SET_REGS
    ior::<kvm::kvm_sregs>(0x83),       // KVM_GET_SREGS
    iow::<kvm::kvm_sregs>(0x84),       // KVM_SET_SREGS
    iowr::<kvm::kvm_msrs>(0x88),       // KVM_GET_MSRS
    iow::<kvm::kvm_msrs>(0x89),        // KVM_SET_MSRS
    ior::<kvm::kvm_lapic_state>(0x8e), // KVM_GET_LAPIC
    iow::<kvm::kvm_lapic_state>(0x8f), // KVM_SET_LAPIC
    iow::<kvm::kvm_cpuid2>(0x90),      // KVM_SET_CPUID2
    iowr::<kvm::kvm_cpuid2>(0x91),     // KVM_GET_CPUID2
    ior::<kvm::kvm_mp_state>(0x98),    // KVM_GET_MP_STATE
    iow::<kvm::kvm_mp_state>(0x99),    // KVM_SET_MP_STATE
    ior::<kvm::kvm_vcpu_events>(0x9f), // KVM_GET_VCPU_EVENTS
    iow::<kvm::kvm_vcpu_events>(0xa0), // KVM_SET_VCPU_EVENTS
    ior::<kvm::kvm_debugregs>(0xa1),   // KVM_GET_DEBUGREGS
    iow::<kvm::kvm_debugregs>(0xa2),   // KVM_SET_DEBUGREGS
    io(0xa2),                          // KVM_SET_TSC_KHZ
    io(0xa3),                          // KVM_GET_TSC_KHZ
    ior::<kvm::kvm_xsave>(0xa4),       // KVM_GET_XSAVE
    iow::<kvm::kvm_xsave>(0xa5),       // KVM_SET_XSAVE
    ior::<kvm::kvm_xcrs>(0xa6),        // KVM_GET_XCRS
    iow::<kvm::kvm_xcrs>(0xa7),        // KVM_SET_XCRS
    ior::<kvm::kvm_sregs2>(0xcc),      // KVM_GET_SREGS2
    iow::<kvm::kvm_sregs2>(0xcd),      // KVM_SET_SREGS2
    ior::<kvm::kvm_xsave>(0xcf),       // KVM_GET_XSAVE2
];

/// The requests that a kind of work needs.
pub fn allowed(work: Work) -> Vec<u64> {
    let of: &[&[u64]] = match work {
        Work::Machine => &[KVM, PLAIN, PAGES, FAULTS, USERFAULTFD],
        Work::MemoryOnly => &[PLAIN, PAGES, FAULTS],
        Work::Connections => &[PLAIN],
    };
    of.concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers are from vmferry's own modules and from a compiled `linux/kvm.h`.
    #[test]
    fn numbers_match_the_kernel_headers() {
        let all = allowed(Work::Machine);
        for known in [
            0xae80,
            0xae01,
            0xc004_ae02,
            0xc008_ae05,
            0x4010_ae42,
            0x4020_ae46,
            0xc018_aec0,
            0xaec7,
            0x4008_ae61,
            0xc208_ae62,
            0x8208_ae63,
            0x4020_ae76,
            0x4040_ae77,
            0x4040_ae79,
            0x4068_aea3,
            0x8090_ae81,
            0x8138_ae83,
            0xc008_ae88,
            0x8400_ae8e,
            0x8040_ae9f,
            0x8070_ae9f,
            0x9000_aea4,
            0x8140_aecc,
        ] {
            assert!(all.contains(&known), "{known:#x}");
        }
        for work in [Work::MemoryOnly, Work::Connections] {
            assert!(allowed(work).iter().all(|request| request >> 8 & 0xff != 0xae), "{work:?}");
        }
    }
}
