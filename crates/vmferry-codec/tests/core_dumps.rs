//! Copies of what a guest knows are in no core dump: a child that holds some crashes, and its dump
//! is searched.

#[path = "../../vmferry-memory/tests/dumps/mod.rs"]
mod dumps;

use std::sync::Arc;

use dumps::{PAGES, is_kept_out, order, pattern, undo};
use vmferry_codec::{EncodedFrame, HotPages};
use vmferry_memory::{PAGE_SIZE, SlotId};

#[test]
fn hot_pages_are_in_no_core_dump() {
    is_kept_out("hot");
}

#[test]
fn frames_that_were_not_sent_are_in_no_core_dump() {
    is_kept_out("frame");
}

/// Not a test of its own: what the tests above let crash.
#[test]
fn the_child() {
    let Some((kind, undone)) = order() else { return };
    let (hot, mut frame) = (Arc::new(HotPages::new(4 << 20)), EncodedFrame::new());
    // Where a page is made that is then kept, and forgotten before the end.
    let mut page = Box::new([0; PAGE_SIZE]);
    for number in 0..PAGES {
        page[..64].copy_from_slice(&pattern(number));
        match kind.as_str() {
            "hot" => {
                hot.delta(SlotId(0), number, 1, 0, 1, &page[..], &mut Vec::new(), 0);
            }
            "frame" => {
                let pages = frame.pages_mut(PAGES as usize);
                pages[number as usize * PAGE_SIZE..][..PAGE_SIZE].copy_from_slice(&page[..]);
            }
            other => unreachable!("{other}"),
        }
    }
    page.fill(0);
    if undone {
        undo();
    }
    std::process::abort();
}
