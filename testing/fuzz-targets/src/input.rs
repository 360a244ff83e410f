//! A fuzzer's bytes as choices. The input never ends: after its bytes come zeros.

/// The remaining bytes.
#[derive(Clone, Copy)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    pub fn word(&mut self) -> u16 {
        u16::from_le_bytes([self.byte(), self.byte()])
    }

    /// A number below `end`, which must not be 0.
    pub fn below(&mut self, end: u64) -> u64 {
        let number = if end > 256 { u64::from(self.word()) } else { u64::from(self.byte()) };
        number % end
    }

    /// Any number, mostly one near a power of two, where limits are.
    pub fn number(&mut self) -> u64 {
        let power = u32::from(self.byte() % 65);
        let near = 1_u64.checked_shl(power).unwrap_or(0);
        near.wrapping_add(u64::from(self.byte())).wrapping_sub(128)
    }

    /// Up to `most` bytes, fewer at the end.
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (bytes, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        bytes
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
