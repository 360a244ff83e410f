//! Live migration of unmodified QEMU processes, from outside.
//!
//! QEMU is neither patched nor restarted. vmferry speaks QMP with it, maps the files that back the
//! guest's memory, and gets a userfaultfd of the QEMU process by making one of its threads execute
//! a single system call. The engine then moves memory as it does for any VMM. The device state
//! comes from QEMU's own migration, which leaves shared memory out (`x-ignore-shared`) and runs
//! through a socket pair of which vmferry holds both ends.
//!
//! A guest that can't be attached in this way is *carried*: QEMU runs its own migration into
//! sockets of this host, and the engine carries the bytes.
//!
//! * [`QemuSource`] is the engine's [`SourceVm`](vmferry::SourceVm) for a running QEMU.
//! * [`CarriedSource`] is its [`StreamedVm`](vmferry::vmm::streamed::StreamedVm).
//! * [`Reached`] is one of the two, whichever is possible.
//! * [`QemuDestination`] is its [`DestinationVm`](vmferry::DestinationVm) for a QEMU that was
//!   started with `-incoming defer -S`.

mod abandoned;
mod additions;
#[doc(hidden)]
pub mod answers;
mod arrived;
mod carried;
mod custody;
mod destination;
mod direct_view;
mod disks;
mod error;
mod fault_access;
mod glance;
mod guest;
mod identity;
mod inject;
mod inventory;
mod life;
mod located;
mod lock;
mod machine;
mod memory_file;
mod mode;
mod proc_stat;
mod process;
mod qmp;
mod ram;
mod sample;
mod settings;
mod source;
mod started;
mod starter;
mod state;
mod stream;
mod throttle;
mod vcpu;
mod view;
mod writers;

pub use abandoned::AbandonedQemu;
pub use arrived::{Arrived, Finished, LeftQemu};
pub use carried::CarriedSource;
pub use destination::{Expected, QemuDestination};
pub use error::QemuError;
pub use fault_access::FaultAccess;
pub use glance::Glance;
pub use identity::{ProcessIdentity, process_name};
pub use inventory::{Allowed, Disk, Inventory, Medium, OpenImage, ROWS, Row, Rule, Storage};
pub use machine::{Habits, Machine};
pub use memory_file::{Examiner, KeptFile, Mapper, Release, Sharing};
pub use mode::{Mode, Reached};
pub use process::{
    Mapping, has_ended_within, open_file, pagemap, pidfd, reported_mappings, wait_for_end,
    wait_until_gone,
};
pub use qmp::{Client, Qmp, QmpError, Version};
pub use ram::{Block, Carrier, Ram};
pub use sample::{Block as ImageBlock, BlockReader, ImageBlocks};
pub use settings::Settings;
pub use source::QemuSource;
pub use started::StartedQemu;
pub use starter::{Keep, LocalStarter, Starter, StarterProcess, serve as serve_starter};
pub use stream::{AnyStream, Blocks, MainStream, MultifdChannel};
pub use view::{Looker, View};
