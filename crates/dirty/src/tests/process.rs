//! userfaultfd on the memory of another process.

use std::os::unix::fs::FileExt;

use vmferry_kit::HugePages;
use vmferry_memory::{Backing, MemoryKind, PageSet, SlotId};

use super::child::{Order, Writer, writer_of_memfd};
use super::{check, follow, memory, runs};
use crate::{DirtyLog, DirtyLogError, UffdLog};

const PAGES: u64 = 3000;

/// A log of a writer.
fn log_of(writer: &Writer) -> UffdLog {
    let ranges = vec![(SlotId(0), writer.range.clone())];
    UffdLog::of_process(writer.pid(), writer.userfaultfd(), ranges, writer.memory.clone())
        .expect("this test needs userfaultfd")
}

fn run(writer: Writer, order: Order) {
    let log = log_of(&writer);
    let memory = writer.memory.clone();
    let writer = std::cell::RefCell::new(writer);
    writer.borrow_mut().order(order);
    let wait = || writer.borrow_mut().wait();
    let followed = follow(&memory, &log, 30, wait, || writer.borrow_mut().order(Order::Rest));
    check(&memory, followed);
    assert!(!writer.borrow().is_registered());
}

#[test]
fn userfaultfd_follows_another_process() {
    run(writer_of_memfd(PAGES), Order::Write);
}

/// A file's page stays in the file when it leaves a page table, but the mark of a write is lost
/// with the entry.
#[test]
fn userfaultfd_follows_another_process_whose_pages_leave_its_page_table() {
    run(writer_of_memfd(PAGES), Order::WriteAndDrop);
}

#[test]
fn userfaultfd_follows_another_process_on_huge_pages() {
    let _pool = HugePages::reserve(4);
    run(Writer::start(memory(4 * 512, MemoryKind::Hugetlb)), Order::Write);
}

#[test]
fn page_that_was_written_and_dropped_is_reported_once() {
    let mut writer = writer_of_memfd(PAGES);
    let log = log_of(&writer);
    log.start().unwrap();
    let mut pages = PageSet::for_memory(&writer.memory);
    writer.order(Order::Drop40);
    log.collect(&mut pages).unwrap();
    assert_eq!(runs(&pages), [(40, 1)]);
    pages.clear_all();
    log.collect(&mut pages).unwrap();
    assert_eq!(runs(&pages), []);
}

#[test]
fn process_that_ended_is_an_error() {
    let mut writer = writer_of_memfd(PAGES);
    let log = log_of(&writer);
    let mut pages = PageSet::for_memory(&writer.memory);
    writer.order(Order::Write);
    log.start().unwrap();
    writer.wait();
    log.collect(&mut pages).unwrap();
    assert!(!pages.is_empty());
    writer.wait();
    writer.kill();
    let pid = writer.pid();
    for _ in 0..2 {
        let error = log.collect(&mut pages).unwrap_err();
        let gone = matches!(error, DirtyLogError::ProcessGone { pid: of, .. } if of == pid);
        assert!(gone, "{error}");
        assert!(error.to_string().contains(&pid.to_string()), "{error}");
    }
    log.stop().unwrap();
    let error = log.start().unwrap_err();
    assert!(matches!(error, DirtyLogError::ProcessGone { .. }), "{error}");
}

#[test]
fn process_after_exec_is_an_error() {
    let mut writer = writer_of_memfd(PAGES);
    let log = log_of(&writer);
    log.start().unwrap();
    writer.exec();
    let error = log.collect(&mut PageSet::for_memory(&writer.memory)).unwrap_err();
    assert!(matches!(error, DirtyLogError::ProcessGone { .. }), "{error}");
    log.stop().unwrap();
}

#[test]
fn dropped_log_leaves_nothing_registered() {
    let mut writer = writer_of_memfd(PAGES);
    let log = log_of(&writer);
    writer.order(Order::Write);
    assert!(!writer.is_registered());
    log.start().unwrap();
    writer.wait();
    assert!(writer.is_registered());
    drop(log);
    assert!(!writer.is_registered());
    writer.wait();
}

/// Whether the error names the slot, the addresses and `what`.
fn names(error: &DirtyLogError, writer: &Writer, first: u64, what: &str) -> bool {
    let at = writer.range.start + first * 4096;
    let text = error.to_string();
    text.contains(&format!("slot 0 at {at:#x}..{:#x}", at + 8 * 4096)) && text.contains(what)
}

#[test]
fn memory_unmapped_or_remapped_by_the_process_is_an_error() {
    let mut writer = writer_of_memfd(PAGES);
    let log = log_of(&writer);
    let mut pages = PageSet::for_memory(&writer.memory);
    log.start().unwrap();
    writer.order(Order::Unmap);
    let error = log.collect(&mut pages).unwrap_err();
    assert!(names(&error, &writer, 16, "not mapped"), "{error}");
    writer.order(Order::Remap);
    let error = log.collect(&mut pages).unwrap_err();
    assert!(names(&error, &writer, 16, "mapped again"), "{error}");
    log.stop().unwrap();

    // After another start the log is complete again, and misses nothing.
    log.start().unwrap();
    pages.clear_all();
    log.collect(&mut pages).unwrap();
    assert_eq!(runs(&pages), []);
    writer.order(Order::Move);
    let error = log.collect(&mut pages).unwrap_err();
    assert!(names(&error, &writer, 32, "not mapped"), "{error}");
    drop(log);
    assert!(!writer.is_registered());
}

/// Pages in a hole of the file are not protected, but a new mapping is detected anyway.
#[test]
fn new_mapping_of_a_part_without_data_is_an_error() {
    let memory = memory(PAGES, MemoryKind::Memfd);
    memory.write_at(2000 * 4096, &[1]).unwrap();
    let mut writer = Writer::start(memory);
    let log = log_of(&writer);
    log.start().unwrap();
    writer.order(Order::Unmap);
    writer.order(Order::Remap);
    let error = log.collect(&mut PageSet::for_memory(&writer.memory)).unwrap_err();
    assert!(names(&error, &writer, 16, "mapped again"), "{error}");
}

#[test]
fn removed_region_may_be_remapped() {
    let mut writer = writer_of_memfd(PAGES);
    let log = log_of(&writer);
    let mut pages = PageSet::for_memory(&writer.memory);
    let at = |page: u64| writer.range.start + page * 4096;
    let part = at(16)..at(24);
    log.start().unwrap();
    log.remove_region(part.clone()).unwrap();
    writer.order(Order::Unmap);
    log.collect(&mut pages).unwrap();
    assert_eq!(runs(&pages), []);
    let error = log.add_region(SlotId(0), 16, part.clone()).unwrap_err();
    assert!(names(&error, &writer, 16, "not mapped"), "{error}");
    writer.order(Order::Remap);
    log.collect(&mut pages).unwrap();
    assert_eq!(runs(&pages), [], "it is not in the log");
    log.add_region(SlotId(0), 16, part).unwrap();
    log.collect(&mut pages).unwrap();
    assert_eq!(runs(&pages), [(16, 8)], "all that is populated");
    pages.clear_all();
    log.collect(&mut pages).unwrap();
    assert_eq!(runs(&pages), []);
    writer.order(Order::Drop40);
    writer.order(Order::Write);
    writer.wait();
    writer.order(Order::Rest);
    log.collect(&mut pages).unwrap();
    assert!(pages.bitmap(SlotId(0)).is_set(40) && pages.count() > 100);
    log.stop().unwrap();
    assert!(!writer.is_registered());
}

/// A punched page may be reported. A page that is written after it was punched must be reported.
#[test]
fn page_written_after_a_hole_punch_is_reported() {
    let mut writer = writer_of_memfd(PAGES);
    let log = log_of(&writer);
    let mut pages = PageSet::for_memory(&writer.memory);
    log.start().unwrap();
    writer.memory.punch().unwrap();
    log.collect(&mut pages).unwrap();
    pages.clear_all();
    writer.order(Order::Drop40);
    log.collect(&mut pages).unwrap();
    assert!(pages.bitmap(SlotId(0)).is_set(40));
    let Backing::File { file, .. } = writer.memory.slots()[0].backing() else { unreachable!() };
    let mut byte = [0];
    file.read_exact_at(&mut byte, 40 * 4096).unwrap();
    assert_eq!(byte, [40]);
}
