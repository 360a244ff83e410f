//! Taking over a guest that lacks pages, from a receiver that has died.
//!
//! QEMU may be waiting for a missing page in its main loop, so nothing here needs its monitor
//! before the pages arrive. The note says where the guest's memory is. A QEMU that fetches by
//! itself, because its guest was carried, is told to connect again: out of band, on the connection
//! that it has kept.

use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use vmferry::destination::FetchHandle;
use vmferry::vmm::left::{LeftGuest, LeftMemory, LeftVm};
use vmferry::vmm::streamed::{LateEnd, LateStreams};
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, VmError};
use vmferry_faults::{FaultDescriptor, FaultRanges};
use vmferry_memory::{GuestMemory, PAGE_SIZE, SlotId, SlotLayout};
use vmferry_wire::GuestIdentity;

use super::{Arrived, Finished};
use crate::carried::{Arrival, Place, connect_destination, end_all, ends_of};
use crate::error::QemuError;
use crate::inject;
use crate::lock::Lock;
use crate::process::{self, Mapping};
use crate::ram::Ranges;

/// How long the kernel may take to release the lock of a process that has just died.
const DEATH_TIMEOUT: Duration = Duration::from_secs(5);

/// The pause between attempts to continue a guest.
const RETRY_PERIOD: Duration = Duration::from_millis(100);

/// The guest and its state after the arrival was completed.
type Completed = Result<(GuestIdentity, Finished), QemuError>;

/// Told when the guest is known to run and to lack pages.
pub type FetchWatcher = Box<dyn FnMut(FetchHandle) + Send>;

/// A QEMU whose guest lacks pages. Drop it after all of them have arrived.
pub struct LeftQemu {
    arrived: Arc<Mutex<Arrived>>,
    journals: PathBuf,
    guest: Option<LeftGuest>,
    /// For the streams of a QEMU that fetches by itself.
    place: Option<Place>,
    /// Those streams, as far as they are connected.
    streams: Vec<UnixStream>,
    /// Completes the arrival.
    completing: Option<JoinHandle<Completed>>,
    on_fetch: Option<FetchWatcher>,
    /// No other vmferry may use this QEMU.
    _lock: Lock,
}

impl Arrived {
    /// Takes over the guest's memory, to fetch its missing pages, or the streams of a QEMU that
    /// fetches them itself. Needs the same rights as attaching to a QEMU, so a process that
    /// restricts itself calls this first.
    ///
    /// # Errors
    /// QEMU's userfaultfd was closed, or its process or memory is out of reach.
    pub fn take_over(self, journals: &Path) -> Result<LeftQemu, QemuError> {
        let pid = self.pid();
        let lock = Lock::take_within(pid, DEATH_TIMEOUT)?;
        let (ranges, stays_paused) = (&self.memory, self.stays_paused);
        if self.fetches_by_itself() {
            let place = Some(Place::of_process(pid)?);
            return Ok(LeftQemu {
                guest: Some(LeftGuest::Streams { stays_paused }),
                place,
                ..LeftQemu::of(self, journals, lock)
            });
        }
        if !process::reports_missing_pages(pid, ranges)? {
            return Err(QemuError::NotReported { pid });
        }
        let memory =
            LeftMemory { memory: map(pid, ranges)?, ranges: adopt(pid, ranges)?, stays_paused };
        let guest = Some(LeftGuest::Memory(memory));
        Ok(LeftQemu { guest, ..LeftQemu::of(self, journals, lock) })
    }

    /// Ends the registration of a guest that has every page by its journal: its receiver has died
    /// before it could do that. Threads that wait for a page which was never populated go on. Needs
    /// the rights of [`take_over`](Self::take_over). Does nothing if nothing was left.
    ///
    /// # Errors
    /// QEMU's userfaultfd is out of reach, and the threads wait on.
    pub fn end_registration(&self) -> Result<(), QemuError> {
        let pid = self.pid();
        if self.memory.is_empty() || !process::lacks_pages(pid)? {
            return Ok(());
        }
        let _lock = Lock::take_within(pid, DEATH_TIMEOUT)?;
        let ended = adopt(pid, &self.memory)?.unregister();
        ended.map_err(|error| QemuError::Inject { pid, why: vmferry::chain(&error) })?;
        inject::close_leftovers(pid)
    }
}

/// Maps the blocks at these addresses of a QEMU.
fn map(pid: u32, ranges: &Ranges) -> Result<GuestMemory, QemuError> {
    let mappings = process::mappings(pid)?;
    let mut files = Vec::new();
    let mut gpa = 0;
    for (slot, Range { start, end }) in ranges {
        let has = |mapping: &&Mapping| mapping.range.start <= *start && *end <= mapping.range.end;
        let mapping = mappings.iter().find(has).ok_or(QemuError::NotReported { pid })?;
        let file = process::open_file(pid, mapping)?;
        let pages = (end - start) / PAGE_SIZE as u64;
        let offset = mapping.offset + (start - mapping.range.start);
        files.push((SlotLayout { slot: *slot, gpa, pages }, file, offset));
        gpa += end - start;
    }
    GuestMemory::map_files(files).map_err(|error| QemuError::Local {
        action: "map the guest's memory",
        source: std::io::Error::other(error),
    })
}

/// Takes a duplicate of the userfaultfd with which these addresses are registered. Registering them
/// again changes nothing, and fails with any other userfaultfd.
fn adopt(pid: u32, ranges: &[(SlotId, Range<u64>)]) -> Result<FaultRanges, QemuError> {
    let mut why = "it has none".to_owned();
    for descriptor in inject::userfaultfds(pid)? {
        let adopted = FaultDescriptor::adopt(descriptor, PAGE_SIZE as u64).and_then(|descriptor| {
            // SAFETY: the addresses are those of the guest's memory, whose missing pages only this
            // process places from now on: it has QEMU locked.
            unsafe { FaultRanges::register_blocks(ranges, &descriptor) }
        });
        match adopted {
            Ok(ranges) => return Ok(ranges),
            Err(error) => why = vmferry::chain(&error),
        }
    }
    Err(QemuError::Inject { pid, why })
}

impl LeftQemu {
    fn of(arrived: Arrived, journals: &Path, lock: Lock) -> Self {
        Self {
            arrived: Arc::new(Mutex::new(arrived)),
            journals: journals.to_owned(),
            guest: None,
            place: None,
            streams: Vec::new(),
            completing: None,
            on_fetch: None,
            _lock: lock,
        }
    }

    /// Has `watcher` told of the missing pages.
    #[must_use]
    pub fn watched_by(self, watcher: FetchWatcher) -> Self {
        Self { on_fetch: Some(watcher), ..self }
    }

    /// The directory of the sockets between vmferry and a QEMU that fetches by itself.
    #[must_use]
    pub fn place(&self) -> Option<&Path> {
        self.place.as_ref().map(Place::path)
    }

    /// The guest and its state, once the session has ended.
    ///
    /// # Errors
    /// As [`Arrived::finish`].
    pub fn finish(&mut self) -> Result<(GuestIdentity, Finished), QemuError> {
        let completed = match self.completing.take().map(JoinHandle::join) {
            Some(Ok(completed)) => completed,
            // A panic there has already been reported.
            Some(Err(_)) | None => self.arrived.lock().finish(&self.journals),
        };
        self.arrived.lock().free_monitor();
        completed
    }
}

impl DestinationVm for LeftQemu {
    fn prepare(&mut self, _: &GuestDescription) -> Result<Landing, PrepareError> {
        Err(PrepareError::Vm("this QEMU has a guest already".into()))
    }

    fn load(&mut self, _: &[u8]) -> Result<(), VmError> {
        Err("this QEMU has a guest already".into())
    }

    fn discard(&mut self) {}

    /// Continues the guest if it has never run here, in another thread: QEMU may be waiting for
    /// pages, which the caller has to fetch.
    fn run(&mut self) -> Result<(), VmError> {
        if self.place.is_some() && self.arrived.lock().was_run {
            return Ok(());
        }
        let (arrived, journals) = (Arc::clone(&self.arrived), self.journals.clone());
        let complete = move || loop {
            match arrived.lock().finish(&journals) {
                // The lock is free for a moment, for the thread that brings the pages.
                Err(error) if error.is_timeout() => std::thread::sleep(RETRY_PERIOD),
                completed => return completed,
            }
        };
        self.completing =
            Some(std::thread::Builder::new().name("continue".into()).spawn(complete)?);
        Ok(())
    }

    fn reconnect(&mut self) -> Result<LateStreams, VmError> {
        let place = self.place.as_ref().ok_or("this QEMU takes no streams")?;
        end_all(&self.streams);
        let late = connect_destination(&mut self.arrived.lock().connect()?, place)?;
        self.streams = ends_of(&late)?;
        Ok(late)
    }

    fn late_end(&mut self) -> Result<LateEnd, VmError> {
        match self.arrived.lock().connect() {
            Ok(mut qmp) => Ok(Arrival::late_end(&mut qmp)?),
            // It waits for pages.
            Err(error) if error.is_timeout() => Ok(LateEnd::Awaited),
            Err(error) => Err(error.into()),
        }
    }

    fn fetch_begins(&mut self, fetch: FetchHandle) {
        if let Some(watcher) = &mut self.on_fetch {
            watcher(fetch);
        }
    }
}

impl LeftVm for LeftQemu {
    fn adopt(&mut self) -> Result<LeftGuest, VmError> {
        self.guest.take().ok_or_else(|| "it was taken over already".into())
    }
}
