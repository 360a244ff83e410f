//! A machine for tests, with its memory, its output, and access to the guest's symbols.

use std::io::Write;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::super::*;
use super::{MEMORY_BYTES, PATIENCE};
use crate::state::{StateReader, StateWriter};

pub(super) type Memory = vm_memory::GuestMemoryMmap<()>;

/// A machine and its memory.
pub(super) struct Guest {
    pub(super) backend: KvmBackend,
    pub(super) memory: Arc<Memory>,
    vcpus: u8,
}

impl Guest {
    pub(super) fn new(vcpus: u8) -> Self {
        Self::with_output(vcpus, &Output::default())
    }

    pub(super) fn with_output(vcpus: u8, output: &Output) -> Self {
        Self::with_memory(vcpus, output, &[(GuestAddress(0), MEMORY_BYTES)])
    }

    pub(super) fn with_memory(
        vcpus: u8,
        output: &Output,
        ranges: &[(GuestAddress, usize)],
    ) -> Self {
        let serial: Option<Box<dyn Write + Send>> = Some(Box::new(output.clone()));
        let config =
            KvmConfig { vcpus, command_line: "ticks".into(), serial, ..Default::default() };
        Self::with_config(config, ranges)
    }

    pub(super) fn with_config(config: KvmConfig, ranges: &[(GuestAddress, usize)]) -> Self {
        let memory = Arc::new(Memory::from_ranges(ranges).unwrap());
        let vcpus = config.vcpus;
        let backend = KvmBackend::new(config, Arc::clone(&memory)).unwrap();
        Self { backend, memory, vcpus }
    }

    /// The tick counts of the vCPUs. Each vCPU's page in the guest kernel begins with its count.
    pub(super) fn ticks(&self) -> Vec<u64> {
        let pages = symbol("cpu_pages");
        let tick = |vcpu| self.memory.read_obj(GuestAddress(pages + vcpu * 4096)).unwrap();
        (0..u64::from(self.vcpus)).map(tick).collect()
    }

    pub(super) fn await_ticks(&self, at_least: &[u64]) {
        wait_until("ticks", || {
            if let Some(stop) = self.backend.stopped() {
                panic!("{stop}; serial: {}", self.backend.serial_text());
            }
            self.ticks().iter().zip(at_least).all(|(ticks, least)| ticks >= least)
        });
    }

    pub(super) fn await_more_ticks(&self) {
        self.await_ticks(&self.ticks().iter().map(|ticks| ticks + 2).collect::<Vec<_>>());
    }

    /// Pauses a guest that always uses its serial port, while it waits for the port's lock.
    pub(super) fn pause_in_device(&mut self) {
        let devices = Arc::clone(&self.backend.devices);
        let lock = devices.serial();
        std::thread::scope(|scope| {
            let pause = scope.spawn(|| self.backend.pause());
            // Not needed for correctness: time for the vCPU to wait for the lock, and for the kick
            // to arrive meanwhile.
            std::thread::sleep(Duration::from_millis(2));
            drop(lock);
            pause.join().unwrap().unwrap();
        });
    }

    /// Replaces the tick handler of a paused guest by `code`. The code overwrites the start-up
    /// code. The handler itself becomes a slide of NOPs with a jump to it, so that a vCPU in the
    /// middle of the handler gets there, too.
    pub(super) fn replace_timer(&self, code: &[u8]) {
        let (start, timer) = (symbol("start64"), symbol("timer_entry"));
        let mut slide = vec![0x90; (symbol("spurious_entry") - timer) as usize + 1];
        let distance = i8::try_from(start as i64 - (timer as i64 + slide.len() as i64)).unwrap();
        let jump = slide.len() - 2;
        slide[jump..].copy_from_slice(&[0xeb, distance as u8]);
        assert!(
            timer + slide.len() as u64 <= symbol("protection_entry")
                && code.len() as u64 <= timer - start
        );
        self.memory.write_slice(code, GuestAddress(start)).unwrap();
        self.memory.write_slice(&slide, GuestAddress(timer)).unwrap();
    }

    pub(super) fn image(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY_BYTES];
        self.memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes
    }

    pub(super) fn copy_memory(&self, from: &Guest) {
        assert_eq!(self.memory.num_regions(), 1);
        assert_eq!(from.memory.iter().next().unwrap().len(), MEMORY_BYTES as u64);
        self.memory.write_slice(&from.image(), GuestAddress(0)).unwrap();
    }

    pub(super) fn save(&mut self) -> Vec<u8> {
        let mut writer = StateWriter::new();
        self.backend.save(&mut writer).unwrap();
        writer.finish().to_vec()
    }

    pub(super) fn load(&mut self, state: &[u8]) -> Result<(), KvmError> {
        let reader = StateReader::parse(state)?;
        reader.refuse_unknown(KvmBackend::sections())?;
        self.backend.load(&reader)
    }
}

/// A sink that several machines write to.
#[derive(Clone, Default)]
pub(super) struct Output(Arc<Mutex<Vec<u8>>>);

impl Output {
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub(super) fn kinds() -> impl Iterator<Item = &'static crate::state::SectionKind> {
    KvmBackend::sections().iter().copied().flatten()
}

/// The sections in which two states differ, and the differing bytes. Ignores fields that change
/// with time or that KVM computes itself.
pub(super) fn differences(one: &[u8], other: &[u8]) -> Vec<String> {
    let (one, other) = (StateReader::parse(one).unwrap(), StateReader::parse(other).unwrap());
    assert_eq!(one.sections().len(), other.sections().len());
    let mut differences = Vec::new();
    for (section, other) in one.sections().iter().zip(other.sections()) {
        let (one, other) = (comparable(section), comparable(other));
        let bytes = one.iter().zip(&other).enumerate().filter(|(_, (one, other))| one != other);
        let mut named: Vec<_> =
            bytes.map(|(at, (one, other))| format!("{at:#x}: {one:#x} is {other:#x}")).collect();
        if one.len() != other.len() {
            named.push(format!("{} bytes are {}", one.len(), other.len()));
        }
        if !named.is_empty() {
            let (name, instance) = (section.name(), section.instance());
            differences.push(format!("{name}[{instance}] {}", named.join(", ")));
        }
    }
    differences
}

fn comparable(section: &crate::state::Section<'_>) -> Vec<u8> {
    let mut bytes = section.payload().to_vec();
    match section.name() {
        // The timer's current count, and the processor priority. KVM computes the priority from TPR
        // and ISR when it needs it. After KVM_SET_LAPIC it is 0 until then, even with an interrupt
        // in service (kvm_apic_set_state in arch/x86/kvm/lapic.c).
        "vcpu.lapic" => [0x390, 0xa0].into_iter().for_each(|at| bytes[at..at + 4].fill(0)),
        // MSR 0x10 is the TSC; an entry is {index u32, reserved u32, data u64}.
        "vcpu.msrs" => {
            let tsc = bytes
                .chunks_exact_mut(16)
                .find(|entry| entry[..4] == 0x10u32.to_le_bytes())
                .unwrap();
            tsc[8..].fill(0);
        }
        // The host time at which each channel's count was loaded, the last field of
        // kvm_pit_channel_state.
        "pit" => (0..3).for_each(|channel| bytes[channel * 24 + 16..(channel + 1) * 24].fill(0)),
        "clock" => bytes.clear(),
        _ => {}
    }
    bytes
}

pub(super) fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The address of a symbol of the guest, from its ELF file's symbol table.
pub(super) fn symbol(wanted: &str) -> u64 {
    let elf = boot::GUEST_ELF;
    let number = |at: usize, bytes: usize| {
        elf[at..at + bytes].iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte))
            as usize
    };
    let section = |index: usize| number(0x28, 8) + index * number(0x3a, 2);
    let symbols =
        (0..number(0x3c, 2)).map(section).find(|&header| number(header + 4, 4) == 2).unwrap();
    let names = number(section(number(symbols + 0x28, 4)) + 0x18, 8);
    let (start, bytes) = (number(symbols + 0x18, 8), number(symbols + 0x20, 8));
    let is_wanted = |&at: &usize| {
        let name = &elf[names + number(at, 4)..];
        name.starts_with(wanted.as_bytes()) && name[wanted.len()] == 0
    };
    number((start..start + bytes).step_by(24).find(is_wanted).unwrap() + 8, 8) as u64
}
