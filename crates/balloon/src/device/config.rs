//! The configuration space (section 5.5.4).

use vm_memory::{GuestAddressSpace, GuestMemoryBackend};

use super::Balloon;
use crate::{BalloonHost, Features, Interrupt};

/// Length of the configuration space: `num_pages`, `actual`, `free_page_hint_cmd_id`, `poison_val`.
pub const CONFIG_BYTES: usize = 16;

const ACTUAL: std::ops::Range<usize> = 4..8;
const POISON: std::ops::Range<usize> = 12..16;

impl<M, H, I> Balloon<M, H, I>
where
    M: GuestAddressSpace,
    M::M: GuestMemoryBackend + Sized,
    H: BalloonHost,
    I: Interrupt,
{
    /// Handles a driver's read of any bytes of the configuration space. Bytes beyond the end read
    /// as zeros, as do fields of features that the driver has not accepted.
    pub fn read_config(&self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        let Ok(offset) = usize::try_from(offset) else { return };
        let space = self.config_space();
        let there = space.get(offset..).unwrap_or_default();
        let length = there.len().min(data.len());
        data[..length].copy_from_slice(&there[..length]);
    }

    /// Handles a driver's write to the configuration space. Only `actual` is writable, and
    /// `poison_val` if it was negotiated and the device is not active yet (section 5.5.6.5.1).
    /// Other writes are ignored.
    pub fn write_config(&mut self, offset: u64, data: &[u8]) {
        let Ok(offset) = usize::try_from(offset) else { return };
        let poison = !self.active && self.negotiated().contains(Features::PAGE_POISON);
        let mut space = self.config_space();
        for (place, byte) in (offset..CONFIG_BYTES).zip(data) {
            if ACTUAL.contains(&place) || (POISON.contains(&place) && poison) {
                space[place] = *byte;
            }
        }
        let field = |at: usize| {
            u32::from_le_bytes([space[at], space[at + 1], space[at + 2], space[at + 3]])
        };
        self.actual_pages = field(ACTUAL.start);
        if poison {
            self.poison = field(POISON.start);
        }
    }

    fn config_space(&self) -> [u8; CONFIG_BYTES] {
        // Before FEATURES_OK the fields of offered features are readable (section 2.5.2).
        let features = self.negotiated.unwrap_or(self.offered());
        let if_there = |feature, value| if features.contains(feature) { value } else { 0 };
        let fields = [
            self.target_pages,
            self.actual_pages,
            if_there(Features::FREE_PAGE_HINT, self.hints.shown()),
            if_there(Features::PAGE_POISON, self.poison),
        ];
        let mut space = [0; CONFIG_BYTES];
        for (place, field) in space.chunks_exact_mut(4).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        space
    }
}
