//! Live migration of unmodified QEMU processes, from outside.
//!
//! Nothing of QEMU is patched and nothing is restarted. vmferry speaks QMP with it, maps the files that
//! the guest's memory is made of, and gets a userfaultfd of the QEMU process by letting one of its
//! threads make a single system call. The engine then moves memory as it does for any VMM; the
//! device state is a migration of QEMU's own that leaves shared memory out (`x-ignore-shared`),
//! through a socket pair that vmferry holds both ends of.
//!
//! A guest that can't be attached so is *carried*: QEMU runs its own migration into sockets of this host, and the
//! engine carries the bytes.
//!
//! * [`QemuSource`] is the engine's [`SourceVm`](vmferry::SourceVm) for a QEMU that runs,
//! * [`CarriedSource`] its [`StreamedVm`](vmferry::streamed::StreamedVm),
//! * [`Reached`] is one of the two, whichever is possible,
//! * [`QemuDestination`] its [`DestinationVm`](vmferry::DestinationVm) for one that was started with
//!   `-incoming defer -S`.

mod abandoned;
#[doc(hidden)]
pub mod answers;
mod arrived;
mod carried;
mod custody;
mod destination;
mod disks;
mod error;
mod guest;
mod inject;
mod lock;
mod machine;
mod memory_file;
mod mode;
mod parts;
mod process;
mod qmp;
mod ram;
mod settings;
mod source;
mod started;
mod starter;
mod state;
mod stream;
mod throttle;
mod vcpu;
mod writers;

pub use abandoned::AbandonedQemu;
pub use arrived::{Arrived, Finished};
pub use carried::CarriedSource;
pub use destination::{Expected, QemuDestination};
pub use error::QemuError;
pub use machine::{Habits, Machine};
pub use memory_file::{Examiner, KeptFile, Mapper, Release, Sharing};
pub use mode::{Mode, Reached};
pub use process::{Mapping, ProcessIdentity, process_name, wait_for_end, wait_until_gone};
pub use qmp::{Client, Qmp, QmpError, Version};
pub use ram::{Block, Carrier, Ram};
pub use settings::Settings;
pub use source::QemuSource;
pub use started::StartedQemu;
pub use starter::{
    Keep, LocalStarter, Looker, Starter, StarterProcess, View, serve as serve_starter,
};
pub use stream::{Blocks, MainStream, MultifdChannel};
