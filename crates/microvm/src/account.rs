//! Reads the guest's free pages from the state of its allocator in guest memory (`guest/heap.h`).
//!
//! The guest may have written anything there: an inconsistent state is an error.

use vmferry_memory::{GuestMemory, MemoryError, PAGE_SIZE, PageSet, SlotId};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

const HEAP_ADDRESS: u64 = 0x40_0000;
const HEAP_MAGIC: u64 = u64::from_le_bytes(*b"VMFERRYH");
const HEAP_VERSION: u32 = 1;
const BLOCKS_ADDRESS: u64 = 0x48_0000;
const BITMAPS_ADDRESS: u64 = 0x80_0000;
/// Size of a block in bytes.
pub const BLOCK_BYTES: u64 = 4 << 20;
const BLOCK_PAGES: u64 = BLOCK_BYTES / PAGE_SIZE as u64;
const MAX_BLOCKS: u32 = 65_536;
const BITMAP_BYTES: usize = BLOCK_PAGES as usize / 8;

/// The first part of `struct heap_header`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct RawHeader {
    magic: u64,
    version: u32,
    block_bytes: u32,
    blocks: u32,
    low_blocks: u32,
    low_first: u64,
    high_first: u64,
    blocks_address: u64,
    bitmaps_address: u64,
    poison: u32,
    untouched: u32,
    lock: u32,
    wanted: u32,
    taken_early: u64,
}
const _: () = assert!(size_of::<RawHeader>() == 80);

/// `struct heap_block`.
#[repr(C)]
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout)]
struct RawBlock {
    state: u8,
    list: u8,
    used: u8,
    reserved: u8,
    touched: u16,
    run_limit: u16,
    next: u32,
    previous: u32,
}
const _: () = assert!(size_of::<RawBlock>() == 16);

/// Why the allocator's state cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum AccountError {
    /// The memory does not have these addresses.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A field of the heap's header is not valid.
    #[error("the guest's heap has {field} {found:#x}, which is not valid")]
    Header {
        /// The field.
        field: &'static str,
        /// Its value.
        found: u64,
    },
    /// A block is outside guest memory.
    #[error("block {block} of the guest's heap, at {gpa:#x}, is outside guest memory")]
    Outside {
        /// Number of the block.
        block: u32,
        /// Its guest-physical address.
        gpa: u64,
    },
    /// A block is in an unknown state.
    #[error("block {block} of the guest's heap is in the unknown state {state}")]
    State {
        /// Number of the block.
        block: u32,
        /// Its state.
        state: u8,
    },
}

/// The pages that are free in the guest's allocator.
///
/// It is exact if the guest is paused. The parts of a running guest's account are read at
/// different times.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FreeAccount {
    /// The pages that nothing in the guest uses: free ones, hinted ones, and those in the balloon.
    pub pages: PageSet,
    /// The free pages that have been written since the guest last gave them to the host.
    pub used: PageSet,
    /// Number of blocks, of 4 MiB each.
    pub blocks: u32,
    /// Blocks allocated whole.
    pub whole: u32,
    /// Blocks that are split into pages.
    pub split: u32,
    /// Blocks that the balloon driver has hinted and still holds.
    pub hinted: u32,
    /// Blocks in the balloon.
    pub inflated: u32,
    /// Hinted blocks that were used again before the host returned them, since the guest started.
    pub taken_early: u64,
}

impl FreeAccount {
    /// Reads the account. `None` if the guest has not started, or is another guest program.
    ///
    /// # Errors
    /// [`AccountError`] with the first inconsistency.
    pub fn read(memory: &GuestMemory) -> Result<Option<Self>, AccountError> {
        let mut bytes = [0; size_of::<RawHeader>()];
        memory.read_at(HEAP_ADDRESS, &mut bytes)?;
        let header: RawHeader = zerocopy::transmute!(bytes);
        if header.magic != HEAP_MAGIC || header.version != HEAP_VERSION {
            return Ok(None);
        }
        check_header(&header)?;
        let mut account = Self {
            pages: PageSet::for_memory(memory),
            used: PageSet::for_memory(memory),
            blocks: header.blocks,
            whole: 0,
            split: 0,
            hinted: 0,
            inflated: 0,
            taken_early: header.taken_early,
        };
        // At most 1 MiB.
        let mut bytes = vec![0; header.blocks as usize * size_of::<RawBlock>()];
        memory.read_at(BLOCKS_ADDRESS, &mut bytes)?;
        let (entries, _) = bytes.as_chunks::<{ size_of::<RawBlock>() }>();
        for (block, bytes) in (0..).zip(entries) {
            account.add(memory, &header, block, zerocopy::transmute!(*bytes))?;
        }
        Ok(Some(account))
    }

    fn add(
        &mut self,
        memory: &GuestMemory,
        header: &RawHeader,
        block: u32,
        entry: RawBlock,
    ) -> Result<(), AccountError> {
        let (slot, first) = place(memory, header, block)?;
        let mut free = |first: u64, pages: u64| {
            self.pages.bitmap_mut(slot).set_run(first, pages);
            if entry.used != 0 {
                self.used.bitmap_mut(slot).set_run(first, pages);
            }
        };
        match entry.state {
            0 | 3 | 4 | 5 => free(first, BLOCK_PAGES),
            1 => self.whole += 1,
            2 => {
                let mut bitmap = [0; BITMAP_BYTES];
                memory.read_at(
                    BITMAPS_ADDRESS + u64::from(block) * BITMAP_BYTES as u64,
                    &mut bitmap,
                )?;
                for page in 0..BLOCK_PAGES {
                    if bitmap[page as usize / 8] >> (page % 8) & 1 == 0 {
                        free(first + page, 1);
                    }
                }
                self.split += 1;
            }
            state => return Err(AccountError::State { block, state }),
        }
        match entry.state {
            3 => self.hinted += 1,
            4 => self.inflated += 1,
            _ => {}
        }
        Ok(())
    }
}

fn check_header(header: &RawHeader) -> Result<(), AccountError> {
    let checks = [
        ("blocks of", header.block_bytes.into(), u64::from(header.block_bytes) == BLOCK_BYTES),
        ("a number of blocks of", header.blocks.into(), header.blocks <= MAX_BLOCKS),
        ("a number of low blocks of", header.low_blocks.into(), header.low_blocks <= header.blocks),
        ("its blocks at", header.blocks_address, header.blocks_address == BLOCKS_ADDRESS),
        ("its bitmaps at", header.bitmaps_address, header.bitmaps_address == BITMAPS_ADDRESS),
        ("its low part at", header.low_first, header.low_first.is_multiple_of(BLOCK_BYTES)),
        ("its high part at", header.high_first, header.high_first.is_multiple_of(BLOCK_BYTES)),
    ];
    match checks.into_iter().find(|(_, _, right)| !right) {
        Some((field, found, _)) => Err(AccountError::Header { field, found }),
        None => Ok(()),
    }
}

/// The slot that a block is in, and the block's first page there.
fn place(
    memory: &GuestMemory,
    header: &RawHeader,
    block: u32,
) -> Result<(SlotId, u64), AccountError> {
    let (first, index) = match block.checked_sub(header.low_blocks) {
        None => (header.low_first, block),
        Some(index) => (header.high_first, index),
    };
    let gpa = first.saturating_add(u64::from(index) * BLOCK_BYTES);
    for slot in memory.layout() {
        let page = gpa.checked_sub(slot.gpa).map(|offset| offset / PAGE_SIZE as u64);
        if let Some(page) = page.filter(|page| page.saturating_add(BLOCK_PAGES) <= slot.pages) {
            return Ok((slot.slot, page));
        }
    }
    Err(AccountError::Outside { block, gpa })
}
