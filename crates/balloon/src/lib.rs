//! A virtio-balloon device (VIRTIO 1.2, section 5.5) for any VMM on the rust-vmm crates.
//!
//! The inputs are the queues that a driver has set up, from `virtio-queue`, and guest memory, from
//! `vm-memory`. The outputs are calls of a [`BalloonHost`]: this range may be discarded, this range
//! is free at present, these are the guest's statistics. The embedder decides what to do. This
//! crate does not depend on a hypervisor, a transport (MMIO or PCI) or a migration, and it never
//! blocks.
//!
//! ```text
//!  transport: registers, kicks             embedder: memory, migration
//!      | negotiate, activate, process          | set_target, start_hints, stop_hints, finish_hints
//!      v                                       v
//!  +------------------------- Balloon -------------------------+
//!      | Interrupt: used_buffers, ...               | BalloonHost: discard, hint, warning, ...
//!      v                                           v
//! ```
//!
//! Lifecycle of a device: [`Balloon::new`], [`Balloon::negotiate`] when the driver sets
//! FEATURES_OK, [`Balloon::activate`] when it sets DRIVER_OK, [`Balloon::process`] whenever it
//! kicks a queue (and once for each queue after `activate`, because Linux kicks the statistics
//! queue earlier), [`Balloon::reset`] when it resets the device.
//!
//! # The driver is not trusted
//! For any content of the rings, descriptors, buffers and registers, no call panics or fails, each
//! call ends after a bounded amount of work, and no range outside guest memory is reported. A
//! driver's mistakes are reported once per kind ([`Warning`]). An invalid buffer is returned
//! without effect. An invalid ring makes its queue *broken*: the device stops using it, and
//! [`Balloon::needs_reset`] is true.
//!
//! # Free page hints
//! One round of hints has one command ID:
//!
//! ```text
//!          start_hints            buffer with the ID           buffer with STOP
//!   idle --------------> requested ----------------> started -------------------> ended
//!    ^                       |                          | hints are reported        |
//!    +-----------------------+--------------------------+---------------------------+
//!                 stop_hints (ID becomes STOP), finish_hints (ID becomes DONE)
//! ```
//!
//! In every state except *started* a hint is stale and is dropped. A hint means that the content of
//! a range was not needed when the ID was issued. If the guest has written to the range since, the
//! hint is no longer valid. Therefore an embedder clears only dirty bits that were set before
//! `start_hints`, and calls `stop_hints` before it collects dirty bits again.
//!
//! # Queue numbers
//! Section 5.5.2 fixes the numbers: 0 inflateq, 1 deflateq, 2 statsq, 3 free_page_vq, 4
//! reporting_vq. Linux numbers the negotiated queues without gaps, and QEMU the offered ones
//! (`vm_find_vqs` and similar functions skip queues without a name and do not count them). Both
//! numberings are accepted: if exactly the queues 0 to n-1 are ready, where n is the number of
//! negotiated queues, they are the negotiated queues in order. The only set of queues that is valid
//! in both numberings is the one for which both are the same.
//!
//! # Example
//! ```
//! use std::sync::Arc;
//!
//! use virtio_queue::{Queue, QueueT};
//! use vm_memory::{GuestAddress, GuestMemoryMmap};
//! use vmferry_balloon::{
//!     Balloon, BalloonConfig, BalloonHost, CommandId, Features, GuestRange, Progress,
//! };
//!
//! struct Host;
//!
//! impl BalloonHost for Host {
//!     fn discard(&mut self, range: GuestRange) -> std::io::Result<()> {
//!         println!("{range:?} may be given back to the system");
//!         Ok(())
//!     }
//!
//!     fn hint(&mut self, range: GuestRange, id: CommandId, _poison: Option<u32>) {
//!         println!("{range:?} need not be sent, if it was not written since {id} was given out");
//!     }
//! }
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let memory = Arc::new(GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)])?);
//! // No interrupts here. A transport implements `Interrupt`.
//! let mut balloon = Balloon::new(BalloonConfig::default(), memory, Host, ())?;
//!
//! // The transport, when the driver sets FEATURES_OK, DRIVER_OK, and kicks.
//! balloon.negotiate(Features::VERSION_1.with(Features::FREE_PAGE_HINT))?;
//! let mut hints = Queue::new(balloon.max_queue_size(3))?;
//! # hints.try_set_avail_ring_address(GuestAddress(0x1000))?;
//! # hints.try_set_used_ring_address(GuestAddress(0x2000))?;
//! hints.set_ready(true);
//! balloon.activate(vec![(3, hints)])?;
//! while balloon.process(3) == Progress::More {}
//!
//! // The embedder, when a migration begins.
//! assert_eq!(balloon.start_hints().unwrap().number(), 2);
//! balloon.stop_hints();
//! balloon.finish_hints();
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod buffers;
mod device;
mod error;
mod features;
mod hints;
mod host;
mod queues;
mod ranges;
mod state;
mod statistics;
mod warning;

pub use device::{Balloon, BalloonConfig, CONFIG_BYTES, Progress};
pub use error::BalloonError;
pub use features::Features;
pub use hints::CommandId;
pub use host::{BalloonHost, GuestRange, Interrupt};
pub use queues::{MAX_QUEUES, QueueKind};
pub use state::{BalloonState, SavedHints, SavedPhase, SavedQueue};
pub use statistics::{STATISTICS, Statistics};
pub use warning::Warning;

/// Page size of the balloon in bytes, regardless of the guest's page size (section 5.5.6).
pub const PAGE_BYTES: u64 = 4096;

/// The virtio device ID (section 5).
pub const DEVICE_ID: u32 = 5;
