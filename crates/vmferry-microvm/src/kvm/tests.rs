//! The real guest on real KVM. Skipped, by name, where there is no `/dev/kvm`; where there is one, a
//! KVM that does not serve is a failure.

use std::io::Write;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::*;
use crate::state::{StateError, StateReader, StateWriter};

const MEMORY_BYTES: usize = 64 << 20;
/// Far more than anything here takes: a limit for what hangs, not a measure.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether to run `test`.
fn has_kvm(test: &str) -> bool {
    let exists = Path::new("/dev/kvm").exists();
    if !exists {
        eprintln!("SKIPPED {test}: this host has no /dev/kvm");
    }
    exists
}

#[test]
fn the_guest_boots_and_ticks_on_every_vcpu() {
    if !has_kvm("the_guest_boots_and_ticks_on_every_vcpu") {
        return;
    }
    for vcpus in [1, 4, 8] {
        let mut guest = Guest::new(vcpus);
        guest.backend.start().unwrap();
        guest.await_ticks(&vec![20; usize::from(vcpus)]);
        assert!(guest.backend.serial_text().starts_with("vmferry guest"), "{}", guest.backend.serial_text());
    }
}

#[test]
fn a_paused_guest_stands_still_and_a_resumed_one_goes_on() {
    if !has_kvm("a_paused_guest_stands_still_and_a_resumed_one_goes_on") {
        return;
    }
    let mut guest = Guest::new(4);
    guest.backend.start().unwrap();
    for _ in 0..50 {
        guest.backend.pause().unwrap();
        let before = guest.image();
        std::thread::yield_now();
        assert!(before == guest.image(), "a paused guest wrote to its memory");
        guest.backend.pause().unwrap();
        guest.backend.resume().unwrap();
        guest.backend.resume().unwrap();
        guest.await_more_ticks();
    }
}

#[test]
fn a_saved_guest_goes_on_in_another_machine() {
    if !has_kvm("a_saved_guest_goes_on_in_another_machine") {
        return;
    }
    let (mut save, mut load) = (Vec::new(), Vec::new());
    let mut guest = Guest::new(4);
    guest.backend.start().unwrap();
    for _ in 0..10 {
        guest.await_more_ticks();
        guest.backend.pause().unwrap();
        let before = guest.ticks();
        let started = Instant::now();
        let state = guest.save();
        save.push(started.elapsed());

        let mut next = Guest::new(4);
        next.copy_memory(&guest);
        let image = next.image();
        let started = Instant::now();
        next.load(&state).unwrap();
        load.push(started.elapsed());
        assert!(image == next.image(), "loading wrote to guest memory");
        assert_eq!(differences(&state, &next.save()), Vec::<String>::new(), "what was loaded is not what was saved");
        next.backend.resume().unwrap();
        next.await_ticks(&before.iter().map(|ticks| ticks + 20).collect::<Vec<_>>());
        guest = next;
    }
    save.sort();
    load.sort();
    eprintln!("4 vCPUs: save {:?} (median), load {:?}", save[save.len() / 2], load[load.len() / 2]);
}

/// A guest that reads and writes ports all the time, moved from machine to machine: each byte comes
/// out once, in order, so no access is lost, repeated, or answered with something else.
#[test]
fn an_access_to_a_port_is_complete_before_the_state_is_saved() {
    if !has_kvm("an_access_to_a_port_is_complete_before_the_state_is_saved") {
        return;
    }
    #[rustfmt::skip]
    const PROGRAM: &[u8] = &[
        0x48, 0x31, 0xc9,             //    xor %rcx, %rcx
        0x66, 0xba, 0xfd, 0x03,       // 1: mov $0x3fd, %dx
        0xec,                         //    in (%dx), %al
        0x3c, 0x60,                   //    cmp $0x60, %al
        0x75, 0x0c,                   //    jne 2f
        0x66, 0xba, 0xf8, 0x03,       //    mov $0x3f8, %dx
        0x88, 0xc8,                   //    mov %cl, %al
        0xee,                         //    out %al, (%dx)
        0x48, 0xff, 0xc1,             //    inc %rcx
        0xeb, 0xeb,                   //    jmp 1b
        0x0f, 0x0b,                   // 2: ud2
    ];
    let output = Output::default();
    let mut guest = Guest::with_output(1, &output);
    guest.backend.start().unwrap();
    guest.await_more_ticks();
    guest.backend.pause().unwrap();
    let boot_bytes = output.bytes().len();
    guest.replace_timer(PROGRAM);
    guest.backend.resume().unwrap();
    for _ in 0..30 {
        let seen = output.bytes().len();
        wait_until("bytes at the serial port", || output.bytes().len() > seen + 20);
        guest.pause_in_device();
        let state = guest.save();
        let mut next = Guest::with_output(1, &output);
        next.copy_memory(&guest);
        next.load(&state).unwrap();
        next.backend.resume().unwrap();
        guest = next;
    }
    guest.backend.pause().unwrap();
    assert_eq!(guest.backend.stopped(), None);
    for (index, byte) in output.bytes()[boot_bytes..].iter().enumerate() {
        assert_eq!(*byte, index as u8, "byte {index} of the output");
    }
}

#[test]
fn a_guest_panic_is_recorded() {
    if !has_kvm("a_guest_panic_is_recorded") {
        return;
    }
    let mut guest = Guest::new(2);
    guest.backend.start().unwrap();
    guest.await_more_ticks();
    guest.backend.pause().unwrap();
    // ud2 at the next tick.
    guest.replace_timer(&[0x0f, 0x0b]);
    guest.backend.resume().unwrap();
    let stop = guest.backend.wait_stopped(PATIENCE).expect("no panic was recorded");
    assert_eq!(stop.cause, StopCause::Panicked, "{stop}");
    let text = guest.backend.serial_text();
    assert!(text.contains("exception 0000000000000006"), "{text}");
}

#[test]
fn a_triple_fault_is_recorded_with_its_address() {
    if !has_kvm("a_triple_fault_is_recorded_with_its_address") {
        return;
    }
    let mut guest = Guest::new(1);
    guest.backend.start().unwrap();
    guest.await_more_ticks();
    guest.backend.pause().unwrap();
    // Nothing is left that could take an interrupt or an exception.
    guest.memory.write_slice(&[0; 64 * 16], GuestAddress(symbol("idts"))).unwrap();
    guest.backend.resume().unwrap();
    let stop = guest.backend.wait_stopped(PATIENCE).expect("no stop was recorded");
    assert_eq!((stop.cause.clone(), stop.vcpu), (StopCause::Shutdown, 0), "{stop}");
    assert!(stop.rip.is_some());
    guest.backend.pause().unwrap();
    let error = guest.backend.save(&mut StateWriter::new()).unwrap_err();
    assert!(error.to_string().contains("triple fault"), "{error}");
}

#[test]
fn a_state_that_does_not_fit_is_refused() {
    if !has_kvm("a_state_that_does_not_fit_is_refused") {
        return;
    }
    let mut guest = Guest::new(2);
    guest.backend.start().unwrap();
    guest.await_more_ticks();
    guest.backend.pause().unwrap();
    let state = guest.save();
    let reader = StateReader::parse(&state).unwrap();
    reader.refuse_unknown(KvmBackend::sections()).unwrap();

    let error = Guest::new(4).load(&state).unwrap_err();
    assert!(matches!(error, KvmError::State(StateError::Missing { instance: 2, .. })), "{error}");
    let error = Guest::new(1).load(&state).unwrap_err();
    assert!(error.to_string().contains("this machine has 1 vCPUs"), "{error}");

    // Every section, cut by a byte, and left out.
    for victim in reader.sections() {
        for cut in [false, true] {
            let mut writer = StateWriter::new();
            for section in reader.sections() {
                let kind = *kinds().find(|kind| kind.name == section.name()).unwrap();
                let is_victim = (section.name(), section.instance()) == (victim.name(), victim.instance());
                let length = section.payload().len() - usize::from(is_victim);
                if cut || !is_victim {
                    writer.section(&kind, section.instance(), &section.payload()[..length]).unwrap();
                }
            }
            let bytes = writer.finish();
            let mut next = Guest::new(2);
            let error = next.load(&bytes).unwrap_err();
            assert!(error.to_string().contains(victim.name().trim_end_matches('2')), "{}: {error}", victim.name());
            // It was refused before anything was changed.
            next.load(&state).unwrap();
        }
    }

    let mut corrupt = state.clone();
    corrupt[state.len() / 2] ^= 1;
    assert!(matches!(StateReader::parse(&corrupt), Err(StateError::Corrupt { .. })));
}

#[test]
fn requests_in_the_wrong_phase_are_refused() {
    if !has_kvm("requests_in_the_wrong_phase_are_refused") {
        return;
    }
    let mut guest = Guest::new(1);
    let is_phase = |result: Result<(), KvmError>| matches!(result, Err(KvmError::Phase { .. }));
    assert!(is_phase(guest.backend.pause()));
    assert!(is_phase(guest.backend.resume()));
    assert!(is_phase(guest.backend.save(&mut StateWriter::new())));
    guest.backend.start().unwrap();
    assert!(is_phase(guest.backend.start()));
    assert!(is_phase(guest.backend.save(&mut StateWriter::new())));
}

#[test]
fn a_configuration_out_of_bounds_is_refused() {
    if !has_kvm("a_configuration_out_of_bounds_is_refused") {
        return;
    }
    let memory = |bytes| Arc::new(Memory::from_ranges(&[(GuestAddress(0), bytes)]).unwrap());
    for vcpus in [0, 9] {
        let config = KvmConfig { vcpus, ..Default::default() };
        assert!(matches!(KvmBackend::new(config, memory(MEMORY_BYTES)), Err(KvmError::Config { .. })));
    }
    let config = KvmConfig { vcpus: 1, ..Default::default() };
    let mut small = KvmBackend::new(config, memory(8 << 20)).unwrap();
    assert!(matches!(small.start(), Err(KvmError::Config { .. })));
    let config = KvmConfig { vcpus: 1, command_line: "x".repeat(4096), ..Default::default() };
    let mut long = KvmBackend::new(config, memory(MEMORY_BYTES)).unwrap();
    assert!(matches!(long.start(), Err(KvmError::Config { .. })));
}

/// A machine and its memory.
struct Guest {
    backend: KvmBackend,
    memory: Arc<Memory>,
    vcpus: u8,
}

impl Guest {
    fn new(vcpus: u8) -> Self {
        Self::with_output(vcpus, &Output::default())
    }

    fn with_output(vcpus: u8, output: &Output) -> Self {
        let memory = Arc::new(Memory::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap());
        let serial: Option<Box<dyn Write + Send>> = Some(Box::new(output.clone()));
        let config = KvmConfig { vcpus, command_line: "ticks".into(), serial };
        let backend = KvmBackend::new(config, Arc::clone(&memory)).unwrap();
        Self { backend, memory, vcpus }
    }

    /// Each vCPU's page in the guest kernel begins with its count of ticks.
    fn ticks(&self) -> Vec<u64> {
        let pages = symbol("cpu_pages");
        let tick = |vcpu| self.memory.read_obj(GuestAddress(pages + vcpu * 4096)).unwrap();
        (0..u64::from(self.vcpus)).map(tick).collect()
    }

    fn await_ticks(&self, at_least: &[u64]) {
        wait_until("ticks", || {
            if let Some(stop) = self.backend.stopped() {
                panic!("{stop}; serial: {}", self.backend.serial_text());
            }
            self.ticks().iter().zip(at_least).all(|(ticks, least)| ticks >= least)
        });
    }

    fn await_more_ticks(&self) {
        self.await_ticks(&self.ticks().iter().map(|ticks| ticks + 2).collect::<Vec<_>>());
    }

    /// Pauses a guest that uses its serial port all the time while it waits for that port's lock.
    fn pause_in_device(&mut self) {
        let devices = Arc::clone(&self.backend.devices);
        let lock = devices.serial();
        std::thread::scope(|scope| {
            let pause = scope.spawn(|| self.backend.pause());
            // Not for correctness: time for the vCPU to arrive at the lock, and for the kick to find it there.
            std::thread::sleep(Duration::from_millis(2));
            drop(lock);
            pause.join().unwrap().unwrap();
        });
    }

    /// Lets the next tick of a paused guest run `code` instead. It goes where the start-up code was; the
    /// tick's own code becomes a slide to it, so that a vCPU that is half-way through gets there, too.
    fn replace_timer(&self, code: &[u8]) {
        let (start, timer) = (symbol("start64"), symbol("timer_entry"));
        let mut slide = vec![0x90; (symbol("spurious_entry") - timer) as usize + 1];
        let distance = i8::try_from(start as i64 - (timer as i64 + slide.len() as i64)).unwrap();
        let jump = slide.len() - 2;
        slide[jump..].copy_from_slice(&[0xeb, distance as u8]);
        assert!(timer + slide.len() as u64 <= symbol("protection_entry") && code.len() as u64 <= timer - start);
        self.memory.write_slice(code, GuestAddress(start)).unwrap();
        self.memory.write_slice(&slide, GuestAddress(timer)).unwrap();
    }

    fn image(&self) -> Vec<u8> {
        let mut bytes = vec![0; MEMORY_BYTES];
        self.memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes
    }

    fn copy_memory(&self, from: &Guest) {
        assert_eq!(self.memory.num_regions(), 1);
        assert_eq!(from.memory.iter().next().unwrap().len(), MEMORY_BYTES as u64);
        self.memory.write_slice(&from.image(), GuestAddress(0)).unwrap();
    }

    fn save(&mut self) -> Vec<u8> {
        let mut writer = StateWriter::new();
        self.backend.save(&mut writer).unwrap();
        writer.finish()
    }

    fn load(&mut self, state: &[u8]) -> Result<(), KvmError> {
        let reader = StateReader::parse(state)?;
        reader.refuse_unknown(KvmBackend::sections())?;
        self.backend.load(&reader)
    }
}

/// A sink that several machines write to.
#[derive(Clone, Default)]
struct Output(Arc<Mutex<Vec<u8>>>);

impl Output {
    fn bytes(&self) -> Vec<u8> {
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

fn kinds() -> impl Iterator<Item = &'static crate::state::SectionKind> {
    KvmBackend::sections().iter().copied().flatten()
}

/// The sections in which two states differ, apart from what time alone changes.
fn differences(one: &[u8], other: &[u8]) -> Vec<String> {
    let (one, other) = (StateReader::parse(one).unwrap(), StateReader::parse(other).unwrap());
    assert_eq!(one.sections().len(), other.sections().len());
    let pairs = one.sections().iter().zip(other.sections());
    let different = pairs.filter(|(one, other)| timeless(one) != timeless(other));
    different.map(|(section, _)| format!("{}[{}]", section.name(), section.instance())).collect()
}

fn timeless(section: &crate::state::Section<'_>) -> Vec<u8> {
    let mut bytes = section.payload().to_vec();
    match section.name() {
        // The timer's current count.
        "vcpu.lapic" => bytes[0x390..0x394].fill(0),
        // MSR 0x10 is the TSC; an entry is {index u32, reserved u32, data u64}.
        "vcpu.msrs" => {
            let tsc = bytes.chunks_exact_mut(16).find(|entry| entry[..4] == 0x10u32.to_le_bytes()).unwrap();
            tsc[8..].fill(0);
        }
        // When each channel's count was loaded, in the host's time; kvm_pit_channel_state ends with it.
        "pit" => (0..3).for_each(|channel| bytes[channel * 24 + 16..(channel + 1) * 24].fill(0)),
        "clock" => bytes.clear(),
        _ => {}
    }
    bytes
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} for {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The address of a symbol of the guest, from its ELF file's symbol table.
fn symbol(wanted: &str) -> u64 {
    let elf = boot::GUEST_ELF;
    let number = |at: usize, bytes: usize| {
        elf[at..at + bytes].iter().rev().fold(0u64, |value, &byte| value << 8 | u64::from(byte)) as usize
    };
    let section = |index: usize| number(0x28, 8) + index * number(0x3a, 2);
    let symbols = (0..number(0x3c, 2)).map(section).find(|&header| number(header + 4, 4) == 2).unwrap();
    let names = number(section(number(symbols + 0x28, 4)) + 0x18, 8);
    let (start, bytes) = (number(symbols + 0x18, 8), number(symbols + 0x20, 8));
    let is_wanted = |&at: &usize| {
        let name = &elf[names + number(at, 4)..];
        name.starts_with(wanted.as_bytes()) && name[wanted.len()] == 0
    };
    number((start..start + bytes).step_by(24).find(is_wanted).unwrap() + 8, 8) as u64
}
