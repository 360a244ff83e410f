//! A virtio-balloon device (VIRTIO 1.2, section 5.5) for any VMM on the rust-vmm crates.
//!
//! In go the queues that a driver has set up, by `virtio-queue`, and guest memory, by `vm-memory`; out come
//! calls of a [`BalloonHost`]: this range may be discarded, this range is free for now, these are the guest's
//! statistics. What is done about it is the embedder's: nothing here knows a hypervisor, a transport (MMIO or
//! PCI) or a migration, and nothing here waits.
//!
//! ```text
//!  transport: registers, kicks             embedder: memory, migration
//!      | negotiate, activate, process          | set_target, start_hints, stop_hints, finish_hints
//!      v                                       v
//!  +------------------------- Balloon -------------------------+
//!      | Interrupt: used_buffers, config_changed   | BalloonHost: discard, hint, statistics, warning
//!      v                                           v
//! ```
//!
//! The life of a device: [`Balloon::new`], [`Balloon::negotiate`] when the driver sets FEATURES_OK,
//! [`Balloon::activate`] when it sets DRIVER_OK, [`Balloon::process`] whenever it kicks a queue (and once for
//! each queue after `activate`: Linux kicks the statistics queue earlier), [`Balloon::reset`] when it resets.
//!
//! # The driver is not trusted
//! Whatever is in the rings, descriptors, buffers and registers: no call panics, none fails, each ends after
//! a bounded amount of work, and no range outside guest memory is ever reported. What a driver does wrong is
//! told once per kind ([`Warning`]). A wrong buffer is given back without effect. A ring that can't be followed
//! makes its queue *broken*: it is not looked at any more, and [`Balloon::needs_reset`] is true.
//!
//! # Free page hints
//! One round of hints is one command ID:
//!
//! ```text
//!          start_hints            buffer with the ID           buffer with STOP
//!   idle --------------> requested ----------------> started -------------------> ended
//!    ^                       |                          | hints are reported        |
//!    +-----------------------+--------------------------+---------------------------+
//!                 stop_hints (ID becomes STOP), finish_hints (ID becomes DONE)
//! ```
//!
//! Everywhere but in *started* a hint is stale and dropped. A hint says that the content of a range was of no
//! use when the ID was given out; if the guest has written to it since, it is no hint any more. So an embedder
//! clears dirty bits only of what was dirty before `start_hints`, and calls `stop_hints` before it collects
//! dirty bits again.
//!
//! # Numbers of queues
//! By section 5.5.2 the numbers are fixed: 0 inflateq, 1 deflateq, 2 statsq, 3 free_page_vq, 4 reporting_vq.
//! Linux numbers the queues that it has negotiated without gaps, and QEMU those that it offers
//! (`vm_find_vqs` and its likes skip queues without a name, but count on without them). Both are accepted: if
//! exactly the queues 0 to n-1 are ready, n being the number of those negotiated, they are those, in order. No
//! set of queues can be meant in both ways but the one in which both are the same.

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
//! // Here nobody is interrupted; a transport implements `Interrupt`.
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

/// Bytes of a page of the balloon, whatever pages the guest has (section 5.5.6).
pub const PAGE_BYTES: u64 = 4096;

/// The device's number (section 5).
pub const DEVICE_ID: u32 = 5;
