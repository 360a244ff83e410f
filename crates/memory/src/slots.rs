//! The memory slots of a guest, mapped in this process.

use std::any::Any;
use std::fmt;
use std::fs::File;
use std::sync::Arc;

use vm_memory::bitmap::Bitmap;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::error::MemoryError;
use crate::layout;
use crate::units::{Gpa, PAGE_SIZE, PageRun, SlotId, SlotLayout};

/// What backs a slot's pages. It decides how populated pages are found.
#[derive(Clone, Debug)]
pub enum Backing {
    /// Anonymous private memory. Only this process's page table knows which pages are populated.
    Private,
    /// A shared mapping of a file (a memfd, or a file on a tmpfs).
    File {
        /// The file.
        file: Arc<File>,
        /// Offset of the slot's first byte within the file, in bytes.
        offset: u64,
    },
}

/// One memory slot.
#[derive(Clone, Debug)]
pub struct Slot {
    layout: SlotLayout,
    host: usize,
    backing: Backing,
}

impl Slot {
    /// A slot that is mapped at host-virtual address `host`.
    ///
    /// # Safety
    /// `layout.pages` pages from `host` on must be mapped readable and writable, and stay so for
    /// as long as the slot or any [`GuestMemory`] with it is used. Nothing in Rust may hold a
    /// reference to that memory: the guest writes it at any time.
    #[must_use]
    pub unsafe fn new(layout: SlotLayout, host: *mut u8, backing: Backing) -> Self {
        Self { layout, host: host as usize, backing }
    }

    /// The slot's number.
    #[must_use]
    pub fn id(&self) -> SlotId {
        self.layout.slot
    }

    /// Guest-physical address of the first byte.
    #[must_use]
    pub fn gpa(&self) -> Gpa {
        Gpa(self.layout.gpa)
    }

    /// Length in pages.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.layout.pages
    }

    /// Length in bytes.
    #[must_use]
    pub fn len_bytes(&self) -> usize {
        self.layout.pages as usize * PAGE_SIZE
    }

    /// Host-virtual address of the first byte.
    #[must_use]
    pub fn host_address(&self) -> *mut u8 {
        self.host as *mut u8
    }

    /// What backs the pages.
    #[must_use]
    pub fn backing(&self) -> &Backing {
        &self.backing
    }

    /// Where the slot lies in the guest.
    #[must_use]
    pub fn layout(&self) -> SlotLayout {
        self.layout
    }
}

/// All memory slots of a guest. Cheap to clone; the mappings are kept until the last clone is
/// dropped.
///
/// ```
/// use vmferry_memory::{GuestMemory, MemoryKind, SlotId, SlotLayout};
///
/// // 4 MiB at 0, and 4 MiB at 4 GiB.
/// let layout = [
///     SlotLayout { slot: SlotId(0), gpa: 0, pages: 1024 },
///     SlotLayout { slot: SlotId(1), gpa: 4 << 30, pages: 1024 },
/// ];
/// let memory = GuestMemory::allocate(&layout, MemoryKind::Private)?;
/// memory.write_at((4 << 30) + 0x2000, b"firebird")?;
///
/// // What was never touched takes no memory, and is not sent.
/// let populated = memory.populated()?;
/// assert!(populated.bitmap(SlotId(0)).is_empty());
/// assert!(populated.bitmap(SlotId(1)).is_set(2));
/// # Ok::<(), vmferry_memory::MemoryError>(())
/// ```
#[derive(Clone)]
pub struct GuestMemory {
    inner: Arc<Inner>,
}

struct Inner {
    slots: Vec<Slot>,
    /// Owns the mappings; dropped last.
    _keep_alive: Box<dyn Any + Send + Sync>,
}

impl GuestMemory {
    /// Uses the memory of a rust-vmm VMM. Slots are numbered by ascending guest-physical address.
    /// The `Arc` is kept, so the mappings outlive every use.
    ///
    /// # Errors
    /// A region that is not a whole number of pages, or a private mapping of a file (neither the
    /// file nor the page table alone knows its populated pages).
    pub fn from_vm_memory<B>(memory: &Arc<GuestMemoryMmap<B>>) -> Result<Self, MemoryError>
    where
        B: Bitmap + Send + Sync + 'static,
    {
        let mut slots = Vec::new();
        for (index, region) in memory.iter().enumerate() {
            let layout = SlotLayout {
                slot: SlotId(index as u16),
                gpa: region.start_addr().raw_value(),
                pages: region.len() / PAGE_SIZE as u64,
            };
            if region.len() % PAGE_SIZE as u64 != 0 {
                return Err(MemoryError::Layout(format!(
                    "{} has {} bytes, which is not a whole number of pages",
                    layout.slot,
                    region.len()
                )));
            }
            let shared = region.flags() & libc::MAP_SHARED != 0;
            let backing = match region.file_offset() {
                None => Backing::Private,
                Some(at) if shared => {
                    Backing::File { file: Arc::clone(at.arc()), offset: at.start() }
                }
                Some(_) => {
                    return Err(MemoryError::Layout(format!(
                        "{} is a private mapping of a file: map it shared",
                        layout.slot
                    )));
                }
            };
            // SAFETY: the region maps its length readable and writable, and `_keep_alive` keeps the
            // region for as long as the slot is used. vm-memory creates no references to it.
            slots.push(unsafe { Slot::new(layout, region.as_ptr(), backing) });
        }
        Self::checked(slots, Box::new(Arc::clone(memory)))
    }

    /// Uses slots whose mappings are owned elsewhere. `keep_alive` is dropped with the last clone.
    ///
    /// # Errors
    /// Slots whose numbers are not 0, 1, 2 …, or that overlap in guest-physical space.
    pub fn from_slots(
        slots: Vec<Slot>,
        keep_alive: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, MemoryError> {
        Self::checked(slots, keep_alive)
    }

    fn checked(
        slots: Vec<Slot>,
        keep_alive: Box<dyn Any + Send + Sync>,
    ) -> Result<Self, MemoryError> {
        let layout: Vec<SlotLayout> = slots.iter().map(Slot::layout).collect();
        layout::check(&layout)?;
        Ok(Self { inner: Arc::new(Inner { slots, _keep_alive: keep_alive }) })
    }

    /// The slots, in the order of their numbers.
    #[must_use]
    pub fn slots(&self) -> &[Slot] {
        &self.inner.slots
    }

    /// One slot.
    ///
    /// # Errors
    /// [`MemoryError::NoSuchSlot`].
    pub fn slot(&self, id: SlotId) -> Result<&Slot, MemoryError> {
        let slots = self.slots();
        slots.get(usize::from(id.0)).ok_or(MemoryError::NoSuchSlot { slot: id, slots: slots.len() })
    }

    /// Where all slots lie in the guest.
    #[must_use]
    pub fn layout(&self) -> Vec<SlotLayout> {
        self.slots().iter().map(Slot::layout).collect()
    }

    /// Pages of all slots, populated or not.
    #[must_use]
    pub fn total_pages(&self) -> u64 {
        self.slots().iter().map(Slot::pages).sum()
    }

    /// Checks that a run lies within its slot, and returns the slot.
    ///
    /// # Errors
    /// [`MemoryError::NoSuchSlot`] or [`MemoryError::OutOfSlot`]; no arithmetic here overflows.
    pub fn check_run(&self, run: PageRun) -> Result<&Slot, MemoryError> {
        let slot = self.slot(run.slot)?;
        match run.first.checked_add(run.pages) {
            Some(end) if end <= slot.pages() => Ok(slot),
            _ => Err(MemoryError::OutOfSlot { run, pages: slot.pages() }),
        }
    }
}

impl fmt::Debug for GuestMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuestMemory").field("slots", &self.slots()).finish()
    }
}
