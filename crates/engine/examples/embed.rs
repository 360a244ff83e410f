//! A minimal VMM that migrates its own guest over mutual TLS, from one thread to another in place
//! of two hosts. `cargo run -p vmferry --example embed`
//!
//! The guest is a vCPU whose only instruction is "step n: fill page p with n". Its register is n,
//! which determines the content of each page, so that the destination can check every byte.
//! docs/embedding.md explains the rest.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vmferry::destination::{Notice, Received, Stop, receive};
use vmferry::source::{Orders, Report, SourceOutcome, migrate};
use vmferry::{DestinationConfig, DestinationVm, GuestDescription, Landing, PrepareError};
use vmferry::{Resume, SourceConfig, SourceVm, VmError};
use vmferry_dirty::{DirtyLog, UffdLog};
use vmferry_memory::{GuestBytes, GuestMemory, MemoryKind, PAGE_SIZE, SlotId, SlotLayout};
use vmferry_transport::{Address, Dialer, IdentityFiles, Listener, TlsIdentity, pki};
use vmferry_wire::GuestIdentity;

/// 64 MiB, which the guest fills once; then it rewrites the first MiB forever.
const PAGES: u64 = 16 << 10;
const HOT_PAGES: u64 = 256;

/// The page that a step writes.
fn page_of(step: u64) -> u64 {
    if step < PAGES { step } else { step % HOT_PAGES }
}

/// The machine: memory, its dirty log, and a vCPU that is a thread.
struct Machine {
    memory: GuestMemory,
    log: Arc<UffdLog>,
    register: Arc<AtomicU64>,
    vcpu: Option<(Arc<AtomicBool>, JoinHandle<()>)>,
}

impl Machine {
    fn new(layout: &[SlotLayout]) -> Result<Self, VmError> {
        let memory = GuestMemory::allocate(layout, MemoryKind::Private)?;
        let log = Arc::new(UffdLog::new(&memory)?);
        Ok(Self { memory, log, register: Arc::default(), vcpu: None })
    }

    /// Checks that every page has the number of the last step that wrote it.
    fn check(&self) -> Result<(), VmError> {
        let last = self.register.load(Ordering::Acquire) - 1;
        let mut content = [0; PAGE_SIZE];
        for page in 0..PAGES {
            let cold = page >= HOT_PAGES;
            let expected = if cold { page } else { last - (last - page) % HOT_PAGES };
            self.memory.read_at(page * PAGE_SIZE as u64, &mut content)?;
            if content.chunks_exact(8).any(|word| word != expected.to_le_bytes()) {
                return Err(format!("page {page} is not as step {expected} has left it").into());
            }
        }
        Ok(())
    }
}

impl Resume for Machine {
    fn resume(&mut self) -> Result<(), VmError> {
        let (memory, register) = (self.memory.clone(), Arc::clone(&self.register));
        self.vcpu.get_or_insert_with(|| {
            let stop = Arc::new(AtomicBool::new(false));
            let stopped = Arc::clone(&stop);
            let vcpu = std::thread::spawn(move || {
                while !stopped.load(Ordering::Acquire) {
                    let step = register.load(Ordering::Relaxed);
                    let content = step.to_le_bytes().repeat(PAGE_SIZE / 8);
                    memory.write_at(page_of(step) * PAGE_SIZE as u64, &content).unwrap();
                    register.store(step + 1, Ordering::Release);
                }
            });
            (stop, vcpu)
        });
        Ok(())
    }
}

/// The source's side.
impl SourceVm for Machine {
    fn describe(&self) -> GuestDescription {
        GuestDescription {
            identity: GuestIdentity { uuid: uuid::Uuid::from_u128(1), name: "tiny".into() },
            vmm: "tiny/1".into(),
            config: HOT_PAGES.to_le_bytes().to_vec(),
            layout: self.memory.layout(),
        }
    }

    fn memory(&self) -> GuestMemory {
        self.memory.clone()
    }

    fn dirty_log(&self) -> Arc<dyn DirtyLog> {
        self.log.clone()
    }

    /// On return nothing writes the guest's memory any more. The migration relies on this.
    fn pause(&mut self) -> Result<Duration, VmError> {
        let begun = Instant::now();
        if let Some((stop, vcpu)) = self.vcpu.take() {
            stop.store(true, Ordering::Release);
            vcpu.join().map_err(|_| "the vCPU's thread has panicked")?;
        }
        Ok(begun.elapsed())
    }

    fn save(&mut self) -> Result<GuestBytes, VmError> {
        Ok(self.register.load(Ordering::Acquire).to_le_bytes().into())
    }
}

/// The destination's side: a machine, once a guest was announced.
#[derive(Default)]
struct Arriving(Option<Machine>);

impl DestinationVm for Arriving {
    fn prepare(&mut self, guest: &GuestDescription) -> Result<Landing, PrepareError> {
        if guest.vmm != "tiny/1" || guest.config != HOT_PAGES.to_le_bytes() {
            return Err(PrepareError::Incompatible(format!("this is tiny/1, not {}", guest.vmm)));
        }
        let machine = Machine::new(&guest.layout).map_err(PrepareError::Vm)?;
        Ok(Landing::Memory(self.0.insert(machine).memory.clone()))
    }

    fn load(&mut self, state: &[u8]) -> Result<(), VmError> {
        let machine = self.0.as_mut().ok_or("no guest was announced")?;
        machine.register.store(u64::from_le_bytes(state.try_into()?), Ordering::Release);
        Ok(())
    }

    fn discard(&mut self) {
        self.0 = None;
    }

    fn run(&mut self) -> Result<(), VmError> {
        self.0.as_mut().ok_or("no guest was announced")?.resume()
    }
}

/// A host's certificate, as `vmferry pki issue` creates it.
fn certificate(directory: &Path, host: &str) -> Result<Arc<TlsIdentity>, VmError> {
    let mut request = pki::IssueRequest::new(host, pki::Validity::days(1));
    request.addresses.push("127.0.0.1".into());
    let out = directory.join(host);
    pki::issue(&directory.join("ca"), &out, &request)?;
    Ok(Arc::new(TlsIdentity::new(IdentityFiles::in_directory(&out))?))
}

/// Migrates the guest between two hosts and checks it.
pub fn main() -> Result<(), VmError> {
    let directory = tempfile::tempdir()?;
    let at = |name: &str| directory.path().join(name);
    pki::init(&at("ca"), "tiny", pki::Validity::days(1))?;
    let address = Address::Tls { host: "127.0.0.1".into(), port: 0 };
    let listener = Listener::bind(&address, Some(certificate(directory.path(), "b")?))?;
    let identity = certificate(directory.path(), "a")?;
    let dialer = Dialer::new(listener.local_address().clone(), Some(identity));
    let config = DestinationConfig { once: true, ..DestinationConfig::new(at("journals-b")) };
    let destination = std::thread::spawn(move || {
        let watch = &mut |notice: &Notice| println!("B: {notice:?}");
        receive(listener, Arriving::default(), &config, &Stop::default(), watch)
    });

    let mut machine = Machine::new(&[SlotLayout { slot: SlotId(0), gpa: 0, pages: PAGES }])?;
    machine.resume()?;
    let mut config = SourceConfig::new(at("journals-a"));
    config.verify = true; // Hashes both memories: leave it out where downtime matters.
    let watch = &mut |report: &Report| println!("A: {report:?}");
    let (left, stats) = match migrate(machine, &dialer, config, &Orders::new(), watch) {
        SourceOutcome::Given { vm, stats } => (vm.register.load(Ordering::Acquire), stats),
        SourceOutcome::Kept { error, .. } | SourceOutcome::Lost { error, .. } => {
            return Err(error.into());
        }
    };

    let mut owned = match destination.join().map_err(|_| "the destination has panicked")? {
        Received::Owns(owned) => owned,
        Received::Nothing { error, .. } => return Err(error.into()),
    };
    let machine = owned.vm.0.as_mut().ok_or("there is no machine")?;
    while machine.register.load(Ordering::Acquire) < left.max(PAGES) + HOT_PAGES {
        std::thread::yield_now(); // The guest runs here, and rewrites its hot pages.
    }
    machine.pause()?;
    machine.check()?;
    let (rounds, downtime) = (stats.rounds.len(), stats.downtime_ms);
    println!("OK: {rounds} rounds, downtime {downtime:.1} ms, every page is as it must be");
    Ok(())
}
