//! The handler is in another process than the memory.

use vmferry_faults::{FaultError, Wake};
use vmferry_memory::{Backing, GuestMemory, MemoryKind, SlotLayout};

use crate::child::{Other, Role, shared};
use crate::support::{
    Contents, SLOT, memory, page, pending, place_all, populated, register, while_served,
    wrong_pages,
};

const PAGES: u64 = 2000;

/// This process faults, the other one handles.
fn handled_elsewhere(kind: MemoryKind) {
    let memory = memory(PAGES, kind);
    let ranges = register(&memory, 1);
    let _handler = Other::with_descriptor(Role::Handler, &ranges, 5);
    assert!(wrong_pages(&memory, Contents::of(5), 0).is_empty());
}

#[test]
fn handler_in_another_process_serves_private_memory() {
    handled_elsewhere(MemoryKind::Private);
}

#[test]
fn handler_in_another_process_serves_a_memfd() {
    handled_elsewhere(MemoryKind::Memfd);
}

/// As with QEMU: the memory is mapped in both processes, and the other one owns the descriptor.
#[test]
fn memfd_mapped_in_two_processes_has_its_contents_in_both() {
    let memory = shared(PAGES);
    let contents = Contents::of(6);
    let mut owner = Other::owner(&memory, contents.seed);
    let said = owner.said("OWNS");
    let ranges = owner.ranges(&said, PAGES);
    let (wrong, _) = while_served(&ranges, contents, || {
        std::thread::scope(|scope| {
            scope.spawn(|| place_all(&ranges, PAGES, contents));
            owner.said("WRONG")
        })
    });
    assert_eq!(wrong, [0]);
    assert_eq!(populated(&memory), [(0, PAGES)]);
    assert!(wrong_pages(&memory, contents, 2).is_empty());
}

/// The negative control of the test above.
#[test]
fn wrong_page_is_detected_by_another_process() {
    let memory = shared(PAGES);
    let contents = Contents { seed: 7, wrong: Some(1234) };
    let mut owner = Other::owner(&memory, contents.seed);
    let said = owner.said("OWNS");
    let ranges = owner.ranges(&said, PAGES);
    let (wrong, _) = while_served(&ranges, contents, || owner.said("WRONG"));
    assert_eq!(wrong, [2], "once in each of two threads");
    assert_eq!(wrong_pages(&memory, contents, 2), [1234]);
}

#[test]
fn process_that_has_ended_is_an_error_of_placing() {
    let memory = shared(PAGES);
    let mut owner = Other::owner(&memory, 8);
    let said = owner.said("OWNS");
    let ranges = owner.ranges(&said, PAGES);
    owner.kill();
    let error = ranges.place(page(7), &[1; 4096], Wake::Now).unwrap_err();
    let at = said[1] + 7 * 4096;
    assert!(matches!(error, FaultError::ProcessGone { at: of } if of == at), "{error}");
    let error = ranges.unregister().unwrap_err();
    assert!(error.to_string().contains("has ended"), "{error}");
    assert_eq!(populated(&memory), []);
    // What it was about to read may be pending, and harms nobody.
    pending(&ranges);
    ranges.wake_all().unwrap();
}

/// A file that is mapped twice in one process: only the registered mapping faults, and both have
/// the page.
#[test]
fn page_placed_in_one_mapping_is_in_the_other() {
    let memory = shared(PAGES);
    let Backing::File { file, .. } = memory.slots()[0].backing() else { unreachable!() };
    let layout = SlotLayout { slot: SLOT, gpa: 0, pages: PAGES };
    let file = file.try_clone().unwrap();
    let other = GuestMemory::map_files(vec![(layout, file, 0)]).unwrap();
    let ranges = register(&memory, 2);
    place_all(&ranges, PAGES, Contents::of(9));
    assert!(wrong_pages(&other, Contents::of(9), 0).is_empty());
    assert_eq!(pending(&ranges), 0);
}
