//! The workloads `freed` and `churn`, and the heap that they use.

use super::*;
use crate::account::{AccountError, BLOCK_BYTES, FreeAccount};

const HEAP: u64 = 0x40_0000;
const CHURN: u64 = 0x41_0000;
const BLOCKS: u64 = 0x48_0000;
const BUFFERS: u64 = 0x60_0000;
const BITMAPS: u64 = 0x80_0000;
const BLOCK_PAGES: u64 = BLOCK_BYTES / PAGE;
const POISON: u64 = 0xaaaa_aaaa_aaaa_aaaa;

fn large(command_line: &str, vcpus: u32, memory_bytes: u64) -> Workload {
    let mut workload = Workload::with_layout(command_line, vcpus, &[(0, memory_bytes)]);
    workload.step_until("populated", |workload| workload.report().populated);
    workload
}

fn account(workload: &Workload) -> FreeAccount {
    FreeAccount::read(&workload.memory).unwrap().unwrap()
}

/// `struct churn_buffer` of every live buffer: address, pages, pages rewritten, generation.
fn buffers(workload: &Workload) -> Vec<(u64, u64, u64, u64)> {
    let mut all = Vec::new();
    for vcpu in 0..u64::from(workload.vcpus) {
        // `slots` of `struct churn_state`
        let slots = workload.word(CHURN + vcpu * PAGE + 48) & 0xffff_ffff;
        for slot in 0..slots {
            let entry = BUFFERS + vcpu * (256 << 10) + slot * 16;
            let (word, generation) = (workload.word(entry), workload.word(entry + 8));
            let pages = word >> 32 & 0xffff;
            if pages > 0 {
                all.push(((word & 0xffff_ffff) * PAGE, pages, word >> 48, generation));
            }
        }
    }
    all
}

#[test]
fn freed_pages_are_written_once_and_then_free() {
    for (line, vcpus, memory_mib, blocks) in
        [("freed=8", 1, 32, 2), ("freed=61 fill=1,text", 3, 96, 16), ("freed=33 poison", 4, 64, 9)]
    {
        let workload = large(line, vcpus, memory_mib * MIB);
        let account = account(&workload);
        assert_eq!(account.used.count(), blocks * BLOCK_PAGES, "{line}");
        assert_eq!(account.pages.count(), u64::from(account.blocks) * BLOCK_PAGES);
        assert_eq!((account.whole, account.split, account.hinted), (0, 0, 0));
        let populated = workload.memory.populated().unwrap();
        let mut written = populated.clone();
        written.set_to_intersection(&populated, &account.pages);
        assert!(written == account.used, "{line}: only freed pages may be written");
        for page in
            account.used.bitmap(SlotId(0)).runs().flat_map(|(page, pages)| page..page + pages)
        {
            let bytes = workload.page(page * PAGE);
            let poison = bytes.iter().all(|byte| *byte == 0xaa);
            assert_eq!(poison, line.contains("poison"), "{page}");
            assert!(poison || is_incompressible(&bytes), "{page}");
        }
    }
}

/// Whether all words differ, as in a page of incompressible fill.
fn is_incompressible(page: &[u8]) -> bool {
    page.chunks(8).collect::<BTreeSet<_>>().len() == page.len() / 8
}

#[test]
fn heap_begins_after_the_fixed_pages_and_continues_at_4_gib() {
    let slots = [(0, 25 * MIB), (HIGH_RAM, 15 * MIB)];
    for (line, blocks, first) in [
        ("idle", 5, 16 * MIB),
        ("hot=1", 4, 20 * MIB),
        ("fill=9,zero", 3, HIGH_RAM),
        ("fill=9,zero read=1 hot=1", 2, HIGH_RAM + 4 * MIB),
        ("fill=24,zero", 0, 0),
    ] {
        let account = account(&Workload::with_layout(line, 1, &slots));
        assert_eq!(account.blocks, blocks, "{line}");
        let run = account.pages.runs().next();
        let found = run.map(|run| {
            let page = run.first * PAGE;
            if run.slot == SlotId(0) { page } else { HIGH_RAM + page }
        });
        assert_eq!(found, (blocks > 0).then_some(first), "{line}");
        assert!(account.used.is_empty());
    }
}

#[test]
fn churn_buffers_match_the_account_and_their_size_varies() {
    for (line, vcpus, mib) in [
        ("churn=40,rate=400000", 2, 40),
        ("churn=24,rate=400000 poison freed=40", 3, 24),
        ("hot=2,rate=9000 churn=20,rate=200000", 1, 20),
    ] {
        let mut workload = large(line, vcpus, 80 * MIB);
        let share = mib * MIB / PAGE;
        let (mut least, mut most) = (share, 0);
        for _ in 0..300 {
            let account = account(&workload);
            let allocated = u64::from(account.blocks) * BLOCK_PAGES - account.pages.count();
            let live: u64 = buffers(&workload).iter().map(|buffer| buffer.1).sum();
            assert_eq!(allocated, live, "{line}");
            for (gpa, pages, ..) in buffers(&workload) {
                let bitmap = account.pages.bitmap(SlotId(0));
                assert!((gpa / PAGE..gpa / PAGE + pages).all(|page| !bitmap.is_set(page)));
            }
            (least, most) = (least.min(live), most.max(live));
            (0..20).for_each(|_| workload.tick());
        }
        let report = workload.check_all();
        assert_eq!(report.corruptions, 0, "{line}: {report:?}");
        assert!(least < share * 8 / 10 && least > share * 5 / 10, "{line}: {least} of {share}");
        assert!(most > share * 95 / 100 && most <= share, "{line}: {most} of {share}");
        assert!(report.buffers_freed > 20, "{report:?}");
        let live = report.buffers_allocated - report.buffers_freed;
        assert_eq!(live, buffers(&workload).len() as u64);
    }
}

#[test]
fn churn_buffers_share_no_page() {
    let mut workload = large("churn=30,rate=300000", 3, 64 * MIB);
    for _ in 0..50 {
        (0..10).for_each(|_| workload.tick());
        let mut seen = BTreeSet::new();
        for (gpa, pages, ..) in buffers(&workload) {
            for page in gpa / PAGE..gpa / PAGE + pages {
                assert!(seen.insert(page), "{page}");
            }
            assert_eq!(gpa / BLOCK_BYTES, (gpa + pages * PAGE - 1) / BLOCK_BYTES);
        }
    }
}

#[test]
fn churn_check_finds_any_changed_byte() {
    for byte in [0, 7, 8, 1777, 4095] {
        let mut workload = large("churn=8,rate=40000", 2, 64 * MIB);
        (0..20).for_each(|_| workload.tick());
        // The last page of the largest buffer, which no job is about to write.
        let (gpa, pages, ..) = *buffers(&workload).iter().max_by_key(|buffer| buffer.1).unwrap();
        let page = gpa + (pages - 1) * PAGE;
        let generation = workload.word(page);
        workload.flip(page + byte);
        let report = workload.check_all();
        let first = report.first_corruption.expect("found");
        assert_eq!(first.gpa, page);
        assert_eq!(first.expected ^ first.found, 0x10 << (byte % 8 * 8), "{first:?}");
        assert!(byte > 7 || first.expected == generation);
    }
}

#[test]
fn churn_check_finds_a_stale_or_missing_page() {
    for arrived in [true, false] {
        let mut workload = large("churn=8", 1, 64 * MIB);
        let gpa = buffers(&workload)[0].0;
        let (stale, old) = (workload.page(gpa), workload.word(gpa));
        workload.step_until("of another generation", |workload| {
            workload.word(gpa) != old && buffers(workload).iter().any(|buffer| buffer.0 == gpa)
        });
        assert_eq!(workload.report().corruptions, 0);
        let newer = workload.word(gpa);
        let content = if arrived { stale } else { vec![0; PAGE_SIZE] };
        workload.memory.write_at(gpa, &content).unwrap();
        workload.step_until("found", |workload| workload.report().corruptions > 0);
        let first = workload.report().first_corruption.unwrap();
        let found = if arrived { old } else { 0 };
        assert_eq!((first.gpa, first.expected, first.found), (gpa, newer, found));
    }
}

#[test]
fn poison_check_finds_a_changed_free_page_on_allocation() {
    for byte in [0, 2048, 4095] {
        let mut workload = large("freed=48 churn=40,rate=200000 poison", 1, 64 * MIB);
        (0..50).for_each(|_| workload.tick());
        let free = account(&workload).used;
        let page = free.bitmap(SlotId(0)).runs().next().unwrap().0 * PAGE;
        assert_eq!(workload.word(page), POISON);
        workload.flip(page + byte);
        workload.step_until("found", |workload| workload.report().corruptions > 0);
        let first = workload.report().first_corruption.unwrap();
        assert_eq!((first.gpa, first.expected), (page, POISON));
        let wrong = if byte < 8 || byte / 8 == 511 {
            POISON ^ 0x10 << (byte % 8 * 8)
        } else {
            POISON ^ 0x10
        };
        assert_eq!(first.found, wrong);
    }
}

#[test]
fn free_pages_are_checked_only_with_poison() {
    let mut workload = large("freed=48 churn=40", 1, 64 * MIB);
    let free = account(&workload).used;
    free.bitmap(SlotId(0)).runs().for_each(|(page, _)| workload.flip(page * PAGE));
    assert_eq!(workload.check_all().corruptions, 0);
    // Never-used memory is zero, and is not checked until it has been freed once.
    let mut workload = large("churn=40,rate=300000 poison", 2, 128 * MIB);
    (0..2000).for_each(|_| workload.tick());
    let report = workload.check_all();
    assert!(report.corruptions == 0 && report.buffers_freed > 100, "{report:?}");
}

#[test]
fn churn_survives_sizes_that_fill_or_exceed_the_heap() {
    // More than fits into the blocks of each vCPU. The VMM refuses such sizes, and the guest
    // survives them.
    for (line, vcpus) in [
        ("churn=16,rate=90000", 8),
        ("churn=16,rate=90000 poison", 3),
        ("churn=99999,rate=90000", 2),
        ("freed=99999", 2),
    ] {
        let mut workload = Workload::populated(line, vcpus);
        (0..300).for_each(|_| workload.tick());
        assert_eq!(workload.check_all().corruptions, 0, "{line}");
    }
}

#[test]
fn churn_rate_is_not_exceeded() {
    let mut workload = large("churn=8,rate=5000", 2, 64 * MIB);
    workload.tick();
    let before = workload.report().churn_work;
    (0..1000).for_each(|_| workload.tick());
    let work = workload.report().churn_work - before;
    assert!(work.abs_diff(5000) < 100, "{work}");
}

#[test]
fn account_that_is_inconsistent_is_an_error() {
    let workload = large("freed=8 churn=8", 1, 64 * MIB);
    let saved = workload.page(HEAP);
    let bad = |gpa: u64, word: u64| {
        let old = workload.word(gpa);
        workload.set_word(gpa, word);
        let result = FreeAccount::read(&workload.memory);
        workload.set_word(gpa, old);
        result
    };
    let header = |result| matches!(result, Err(AccountError::Header { .. }));
    assert!(header(bad(HEAP + 8, 1 | 8 << 52)), "bytes of a block");
    assert!(header(bad(HEAP + 16, 65_537)), "blocks");
    assert!(header(bad(HEAP + 16, 3 | 4 << 32)), "low blocks");
    assert!(header(bad(HEAP + 24, 16 * MIB + 4096)), "the first block");
    assert!(header(bad(HEAP + 40, 0)), "where the blocks are");
    assert!(header(bad(HEAP + 48, u64::MAX)), "where the bitmaps are");
    let outside = |result| matches!(result, Err(AccountError::Outside { .. }));
    assert!(outside(bad(HEAP + 16, 65_536 | 65_536 << 32)), "too many blocks");
    assert!(outside(bad(HEAP + 24, 0xffff_ffff_ffc0_0000)), "the first block");
    assert!(matches!(bad(BLOCKS, 6), Err(AccountError::State { block: 0, state: 6 })));
    assert!(matches!(bad(HEAP, 0), Ok(None)), "not our guest");
    assert!(saved == workload.page(HEAP));
    assert!(bad(HEAP, workload.word(HEAP)).unwrap().is_some());
}

/// Sets every word of the state of the heap and its workloads to several bad values. No address
/// outside the memory is used, and nothing hangs.
#[test]
fn heap_stays_in_memory_with_any_word_in_its_state() {
    let mut workload = large("freed=16 churn=12,rate=20000 poison pressure", 2, 64 * MIB);
    (0..100).for_each(|_| workload.tick());
    let pages = [HEAP, CHURN, CHURN + PAGE, BLOCKS, BUFFERS, BITMAPS, GUEST_REPORT, VCPU_REPORT];
    let saved = pages.map(|page| (page, workload.page(page)));
    for (page, words) in [
        (HEAP, 26),
        (CHURN, 13),
        (CHURN + PAGE, 13),
        (BLOCKS, 24),
        (BUFFERS, 40),
        (BITMAPS, 48),
        (GUEST_REPORT, 11),
    ] {
        for word in 0..words {
            for value in [0, 1, 7, 1 << 16, 1 << 32, 1 << 48, u64::MAX >> 12, u64::MAX] {
                workload.set_word(page + 8 * word, value);
                (0..3).for_each(|_| workload.tick());
                workload.report();
                // An error or not, but no panic.
                let _ = FreeAccount::read(&workload.memory);
                for (page, bytes) in &saved {
                    workload.memory.write_at(*page, bytes).unwrap();
                }
            }
        }
    }
}
