//! Trap: faults of the kernel, which a userfaultfd with `UFFD_USER_MODE_ONLY` does not report.

use std::io::{self, Write};
use std::os::fd::AsRawFd;

use vmferry_faults::{FaultDescriptor, FaultRange, FaultRanges};
use vmferry_kit::need_kvm;
use vmferry_kvm_lab::{LabError, LabOptions, Machine};
use vmferry_memory::userfaultfd::{FaultOrigin, create};
use vmferry_memory::{GuestMemory, MemoryKind, PAGE_SIZE};

use crate::support::{Contents, PAGE, SLOT, memory, page, pending, register, while_served};

const PAGES: u64 = 1024;
const KINDS: [MemoryKind; 2] = [MemoryKind::Private, MemoryKind::Memfd];

/// What this crate never does, for the negative controls.
fn register_for_user_mode_only(memory: &GuestMemory) -> FaultRanges {
    let userfaultfd = create(FaultOrigin::UserMode).unwrap();
    let descriptor = FaultDescriptor::set_up(userfaultfd, PAGE).unwrap();
    descriptor.register_slot(&memory.slots()[0], 0..PAGES).unwrap();
    let start = memory.slots()[0].host_address() as u64;
    let addresses = start..start + PAGES * PAGE;
    let range = FaultRange { slot: SLOT, first_page: 0, addresses, share: 0, descriptor };
    FaultRanges::of(vec![range]).unwrap()
}

/// Has the kernel write bytes of a pipe into a page.
fn read_into(memory: &GuestMemory, first: u64, bytes: &[u8]) -> io::Result<usize> {
    let (from, mut to) = io::pipe().unwrap();
    to.write_all(bytes).unwrap();
    let at = memory.slots()[0].host_address().wrapping_add((first * PAGE) as usize);
    // SAFETY: the page is the test's own memory, to which no reference exists.
    let count = unsafe { libc::read(from.as_raw_fd(), at.cast(), bytes.len()) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

fn content(memory: &GuestMemory, first: u64) -> [u8; PAGE_SIZE] {
    let mut content = [0; PAGE_SIZE];
    memory.copy_out(page(first), &mut content).unwrap();
    content
}

#[test]
fn system_call_into_a_missing_page_waits_for_it() {
    for kind in KINDS {
        let memory = memory(PAGES, kind);
        let ranges = register(&memory, 2);
        let contents = Contents::of(1);
        let (read, faults) =
            while_served(&ranges, contents, || read_into(&memory, 9, b"from a pipe"));
        assert_eq!((read.unwrap(), faults), (11, 1));
        let mut expected = contents.page(9);
        expected[..11].copy_from_slice(b"from a pipe");
        assert_eq!(content(&memory, 9), expected);
    }
}

/// The negative control: the system call fails, and no fault is reported.
#[test]
fn system_call_into_a_missing_page_fails_in_user_mode_only() {
    for kind in KINDS {
        let memory = memory(PAGES, kind);
        let ranges = register_for_user_mode_only(&memory);
        let error = read_into(&memory, 9, b"from a pipe").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
        assert_eq!(pending(&ranges), 0);
        let ((), faults) = while_served(&ranges, Contents::of(1), || {
            assert_eq!(content(&memory, 9), Contents::of(1).page(9));
        });
        assert_eq!(faults, 1, "a fault of user mode is reported");
    }
}

/// The guest increments the first word of each page: it must have read the right word.
#[test]
fn guest_on_kvm_waits_for_its_pages() {
    need_kvm();
    for kind in KINDS {
        let memory = memory(PAGES, kind);
        let machine = Machine::over(memory.clone(), 2, LabOptions::default()).unwrap();
        let ranges = register(&memory, 2);
        let contents = Contents::of(2);
        let pages = [700, 3, 512, 513, 1023];
        let (written, faults) = while_served(&ranges, contents, || {
            std::thread::scope(|scope| {
                let other = scope.spawn(|| machine.write_pages(1, SLOT, [600, 511]));
                let written = machine.write_pages(0, SLOT, pages);
                written.and(other.join().unwrap())
            })
        });
        written.unwrap();
        assert!(faults >= 7, "{faults}");
        let expected = |page: u64, vcpu: usize| {
            let mut expected = contents.page(page);
            let word: &mut [u8; 8] = (&mut expected[8 * vcpu..][..8]).try_into().unwrap();
            *word = u64::from_le_bytes(*word).wrapping_add(1).to_le_bytes();
            expected
        };
        for page in pages {
            assert_eq!(content(&memory, page), expected(page, 0), "page {page}");
        }
        for page in [600, 511] {
            assert_eq!(content(&memory, page), expected(page, 1), "page {page}");
        }
    }
}

/// The negative control: the vCPU leaves the guest with an error, and no fault is reported.
#[test]
fn guest_on_kvm_fails_in_user_mode_only() {
    need_kvm();
    for kind in KINDS {
        let memory = memory(PAGES, kind);
        let machine = Machine::over(memory.clone(), 1, LabOptions::default()).unwrap();
        let ranges = register_for_user_mode_only(&memory);
        let (written, faults) =
            while_served(&ranges, Contents::of(2), || machine.write_pages(0, SLOT, [700]));
        let error = written.unwrap_err();
        assert!(matches!(error, LabError::Exit { .. }), "{error}");
        assert_eq!(faults, 0);
    }
}
