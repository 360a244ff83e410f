//! The VMM of the simulated guest, at the source and at the destination.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::MutexGuard;
use vmferry::vmm::free_pages::FreePages;
use vmferry::{DestinationVm, GuestDescription, Landing, PrepareError, Resume, SourceVm, VmError};
use vmferry_codec::{CompressError, Compressors};
use vmferry_dirty::DirtyLog;
use vmferry_memory::{GuestBytes, GuestMemory, MemoryKind};

use super::{FREE, Guest, OPTION_ROM, State, gpa_of, identity, layout};
use crate::plan::VmCall;

/// The VMM, as seen by one process of its host.
pub struct Vm {
    pub(super) guest: Guest,
    pub(super) process: u64,
}

impl Vm {
    /// The guest's state, unless the process is dead.
    fn state(&self) -> Result<MutexGuard<'_, State>, VmError> {
        let state = self.guest.lock();
        if state.process == self.process { Ok(state) } else { Err("the process is dead".into()) }
    }

    /// The guest.
    pub fn guest(&self) -> &Guest {
        &self.guest
    }

    /// The compressors of the VMM's host.
    pub fn compressors(&self) -> Compressors {
        let guest = self.guest.clone();
        Compressors::new(move |method| {
            guest.lock().fails(VmCall::Compress).map_err(|error| CompressError::Unavailable {
                method,
                reason: error.to_string(),
            })?;
            Compressors::default().make(method)
        })
    }
}

impl Resume for Vm {
    fn resume(&mut self) -> Result<(), VmError> {
        let mut state = self.state()?;
        state.fails(VmCall::Resume)?;
        if !state.running {
            state.set_running(true);
        }
        Ok(())
    }
}

impl SourceVm for Vm {
    fn describe(&self) -> GuestDescription {
        GuestDescription {
            identity: identity(),
            vmm: "simulated".into(),
            config: Vec::new(),
            layout: layout(),
        }
    }

    fn memory(&self) -> GuestMemory {
        self.guest.lock().memory.clone().expect("the source's guest has memory")
    }

    fn dirty_log(&self) -> Arc<dyn DirtyLog> {
        self.guest.lock().log.clone()
    }

    fn pause(&mut self) -> Result<Duration, VmError> {
        let mut state = self.state()?;
        state.fails(VmCall::Pause)?;
        state.set_running(false);
        Ok(Duration::from_micros(300))
    }

    fn save(&mut self) -> Result<GuestBytes, VmError> {
        let mut state = self.state()?;
        state.fails(VmCall::Save)?;
        let mut bytes = GuestBytes::from(state.next_version.to_le_bytes());
        bytes.extend_from_slice(&state.ledger.lock().stretch.to_le_bytes());
        let written = state.written.iter().map(|(page, version)| (*page, *version));
        for ((slot, page), version) in written.chain(state.balloon.pages().map(|page| (page, FREE)))
        {
            for word in [u64::from(slot), page, version] {
                bytes.extend_from_slice(&word.to_le_bytes());
            }
        }
        Ok(bytes)
    }

    fn free_pages(&self) -> Vec<Arc<dyn FreePages>> {
        if self.guest.lock().hints { vec![Arc::new(self.guest.clone())] } else { Vec::new() }
    }
}

impl DestinationVm for Vm {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        let mut state = self.state().map_err(PrepareError::Vm)?;
        state.fails(VmCall::Prepare).map_err(PrepareError::Vm)?;
        let memory = GuestMemory::allocate(&guest.layout, MemoryKind::Private)
            .map_err(|error| PrepareError::Vm(error.into()))?;
        state.memory = Some(memory.clone());
        Ok(Landing::Memory(memory))
    }

    fn load(&mut self, bytes: &[u8]) -> Result<(), VmError> {
        let mut state = self.state()?;
        state.fails(VmCall::Load)?;
        let words: Vec<u64> = bytes
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().unwrap_or_default()))
            .collect();
        let [next_version, stretch, rest @ ..] = &words[..] else { return Err("no state".into()) };
        (state.next_version, state.stretch) = (*next_version, *stretch);
        state.waits = true;
        let pages = rest.chunks_exact(3).map(|page| ((page[0] as u16, page[1]), page[2]));
        let (free, written): (Vec<_>, Vec<_>) = pages.partition(|(_, version)| *version == FREE);
        state.written = written.into_iter().collect();
        free.into_iter().for_each(|(page, _)| state.balloon.frees(page));
        if state.load_writes
            && let Some(memory) = &state.memory
        {
            // A real VMM waits for a page that is missing. The guest never writes this one.
            if state.missing.has(OPTION_ROM) {
                return Err("the option ROM is missing".into());
            }
            memory.write_at(gpa_of(OPTION_ROM), &[0x5a; 2])?;
        }
        Ok(())
    }

    fn discard(&mut self) {
        if let Ok(mut state) = self.state() {
            state.vanish();
        }
    }

    fn run(&mut self) -> Result<(), VmError> {
        let mut state = self.state()?;
        // From this call on the guest belongs to this host, and a failure is a crash of the guest.
        state.ledger.lock().runs_there(state.stretch);
        state.waits = false;
        state.fails(VmCall::Run)?;
        state.set_running(true);
        if let Err(text) = state.check() {
            let text = format!("the memory that arrived differs: {text}");
            state.ledger.lock().violations.push(text);
        }
        Ok(())
    }
}
