//! KVM's logs under a real guest: a few instructions that increment one word in each page of 896
//! KiB, for ever.

use std::os::unix::thread::JoinHandleExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kvm_bindings::{kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vmferry_memory::{GuestMemory, MemoryKind, PageSet, SlotId};

use super::{check, follow, memory};
use crate::{DirtyLog, DirtyLogError, KvmBitmapLog, KvmClearLog, KvmSlot, UffdLog};

const PAGES: u64 = 250;
/// The counter in the first page that the guest writes.
const COUNTER: u64 = 0x1_0000;

/// Real mode, at address 0:
/// `0: mov ax, 0x1000; 3: mov ds, ax; inc word [0]; add ax, 0x100; cmp ax, 0xf000; jb 3; jmp 0`
const CODE: [u8; 19] = [
    0xb8, 0x00, 0x10, 0x8e, 0xd8, 0xff, 0x06, 0x00, 0x00, 0x05, 0x00, 0x01, 0x3d, 0x00, 0xf0, 0x72,
    0xf2, 0xeb, 0xed,
];

struct Machine {
    vm: Arc<VmFd>,
    vcpu: VcpuFd,
    memory: GuestMemory,
    slot: KvmSlot,
}

/// A machine, or `None`, loudly, where there is no KVM. Where there is one it must serve.
fn machine(test: &str, kind: MemoryKind) -> Option<Machine> {
    if !std::path::Path::new("/dev/kvm").exists() {
        eprintln!("SKIPPED: {test}: /dev/kvm is missing");
        return None;
    }
    let vm = Arc::new(Kvm::new().unwrap().create_vm().unwrap());
    let memory = memory(PAGES, kind);
    memory.write_at(0, &CODE).unwrap();
    let host_address = memory.slots()[0].host_address() as u64;
    let bytes = PAGES * 4096;
    let slot = KvmSlot { slot: SlotId(0), kvm_slot: 3, gpa: 0, bytes, host_address };
    let region = kvm_userspace_memory_region {
        slot: slot.kvm_slot,
        flags: 0,
        guest_phys_addr: 0,
        memory_size: bytes,
        userspace_addr: host_address,
    };
    // SAFETY: `memory` maps the range, and `Machine` drops it after the machine.
    unsafe { vm.set_user_memory_region(region) }.unwrap();
    let vcpu = vm.create_vcpu(0).unwrap();
    let mut sregs = vcpu.get_sregs().unwrap();
    sregs.cs.base = 0;
    sregs.cs.selector = 0;
    vcpu.set_sregs(&sregs).unwrap();
    vcpu.set_regs(&kvm_regs { rip: 0, rflags: 2, ..kvm_regs::default() }).unwrap();
    Some(Machine { vm, vcpu, memory, slot })
}

extern "C" fn nothing(_signal: libc::c_int) {}

fn run(test: &str, kind: MemoryKind, log: impl FnOnce(&Machine) -> Box<dyn DirtyLog>) {
    let Some(machine) = machine(test, kind) else { return };
    let log = log(&machine);
    // SAFETY: the handler does nothing; without it the signal would end the process.
    unsafe { libc::signal(libc::SIGUSR1, nothing as *const () as libc::sighandler_t) };
    let Machine { vm: _vm, mut vcpu, memory, .. } = machine;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let running = std::thread::spawn(move || {
        while !stopped.load(Ordering::Acquire) {
            match vcpu.run() {
                Ok(exit) => panic!("unexpected exit {exit:?}"),
                Err(error) => assert_eq!(error.errno(), libc::EINTR),
            }
        }
    });
    let counter = || {
        let mut bytes = [0; 2];
        memory.read_at(COUNTER, &mut bytes).unwrap();
        u16::from_le_bytes(bytes)
    };
    let wait = || {
        let before = counter();
        while counter().wrapping_sub(before) < 2 {
            assert!(!running.is_finished(), "the guest has stopped");
            std::thread::yield_now();
        }
    };
    let followed = follow(&memory, log.as_ref(), 30, wait, || {
        stop.store(true, Ordering::Release);
        // A signal that comes just before KVM_RUN is lost, so it is sent until it has worked.
        while !running.is_finished() {
            // SAFETY: the thread is not joined yet, so its handle is valid.
            unsafe { libc::pthread_kill(running.as_pthread_t(), libc::SIGUSR1) };
            std::thread::yield_now();
        }
    });
    running.join().unwrap();
    check(&memory, followed);
}

#[test]
fn the_bitmap_follows_a_guest() {
    run("the_bitmap_follows_a_guest", MemoryKind::Private, |machine| {
        Box::new(KvmBitmapLog::new(Arc::clone(&machine.vm), vec![machine.slot]))
    });
}

#[test]
fn the_bitmap_with_manual_clear_follows_a_guest() {
    run("the_bitmap_with_manual_clear_follows_a_guest", MemoryKind::Memfd, |machine| {
        Box::new(KvmClearLog::new(Arc::clone(&machine.vm), vec![machine.slot]).unwrap())
    });
}

#[test]
fn userfaultfd_follows_a_guest() {
    for kind in [MemoryKind::Private, MemoryKind::Memfd] {
        run("userfaultfd_follows_a_guest", kind, |machine| {
            Box::new(UffdLog::new(&machine.memory).unwrap())
        });
    }
}

#[test]
fn one_log_after_the_other_on_one_machine() {
    run("one_log_after_the_other_on_one_machine", MemoryKind::Private, |machine| {
        let slots = vec![machine.slot];
        let clear = KvmClearLog::new(Arc::clone(&machine.vm), slots.clone()).unwrap();
        clear.start().unwrap();
        clear.stop().unwrap();
        // Manual clear left on would make the bitmap log see every page for ever.
        let bitmap = KvmBitmapLog::new(Arc::clone(&machine.vm), slots);
        bitmap.start().unwrap();
        let mut pages = PageSet::for_memory(&machine.memory);
        bitmap.collect(&mut pages).unwrap();
        bitmap.stop().unwrap();
        Box::new(bitmap)
    });
}

#[test]
fn bits_beyond_a_slot_are_refused() {
    let Some(machine) = machine("bits_beyond_a_slot_are_refused", MemoryKind::Private) else {
        return;
    };
    let log = KvmClearLog::new(Arc::clone(&machine.vm), vec![machine.slot]).unwrap();
    log.start().unwrap();
    log.rearm(SlotId(0), 3, &[u64::MAX]).unwrap();
    for (first_word, words) in [(4, 1), (3, 2), (usize::MAX, 1)] {
        let error = log.rearm(SlotId(0), first_word, &vec![1; words]).unwrap_err();
        assert!(matches!(error, DirtyLogError::OutOfSlot { .. }), "{error}");
    }
    assert!(matches!(log.rearm(SlotId(9), 0, &[1]), Err(DirtyLogError::NoSuchSlot { .. })));
}
