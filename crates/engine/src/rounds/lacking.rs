//! The messages that name the pages which a destination lacks at a switchover with post-copy.

use vmferry_memory::{PageBitmap, PageSet, SlotId};
use vmferry_wire::{ControlMessage, MAX_LACKING_BYTES};

/// Words of a bitmap in one message.
const MESSAGE_WORDS: usize = MAX_LACKING_BYTES / size_of::<u64>();

/// Messages that name these pages. Long stretches without any take no message.
pub fn lacking_messages(pages: &PageSet) -> impl Iterator<Item = ControlMessage> + '_ {
    pages.iter().flat_map(|(slot, bitmap)| messages_of(slot, bitmap))
}

fn messages_of(slot: SlotId, bitmap: &PageBitmap) -> impl Iterator<Item = ControlMessage> + '_ {
    let pages_of_words = |words: usize| words as u64 * u64::from(u64::BITS);
    (0..).zip(bitmap.words().chunks(MESSAGE_WORDS)).filter_map(move |(chunk, words)| {
        let from = words.iter().position(|word| *word != 0)?;
        let to = words.iter().rposition(|word| *word != 0)?;
        let first = pages_of_words(chunk * MESSAGE_WORDS + from);
        let bits = words[from..=to].iter().flat_map(|word| word.to_le_bytes()).collect();
        Some(ControlMessage::Lacking { slot, first, bits })
    })
}

#[cfg(test)]
mod tests {
    use vmferry_memory::SlotLayout;

    use super::*;

    /// The pages that messages name.
    fn named(messages: &[ControlMessage]) -> Vec<(u16, u64)> {
        let mut pages = Vec::new();
        for message in messages {
            let ControlMessage::Lacking { slot, first, bits } = message else { panic!() };
            for (byte, at) in bits.iter().zip((*first..).step_by(8)) {
                let set = (0..8).filter(|bit| byte >> bit & 1 == 1);
                pages.extend(set.map(|bit| (slot.0, at + bit)));
            }
        }
        pages
    }

    #[test]
    fn messages_name_exactly_the_lacking_pages() {
        let pages = 3 << 18;
        let layout = [0, 1].map(|slot| SlotLayout { slot: SlotId(slot), gpa: 0, pages });
        let mut lacking = PageSet::for_layout(&layout);
        let wanted =
            [(0, 0), (0, 63), (0, (1 << 18) - 1), (0, 1 << 18), (1, 777), (1, 3 * (1 << 18) - 1)];
        wanted.iter().for_each(|&(slot, page)| lacking.bitmap_mut(SlotId(slot)).set(page));
        let messages: Vec<_> = lacking_messages(&lacking).collect();
        assert_eq!(named(&messages), wanted);
        assert_eq!(messages.len(), 4, "the second chunk of slot 1 is empty");
        assert_eq!(lacking_messages(&PageSet::for_layout(&layout)).count(), 0);
    }
}
