//! The real guest on real KVM.

mod echo;
mod fixture;
mod golden;
mod mmio;
mod throttle;

use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_memory::{Bytes, GuestAddress};
use vmferry_kit::need_kvm;

use self::echo::Echo;
use self::fixture::{Guest, Memory, Output, differences, kinds, symbol, wait_until};
use super::*;
use crate::state::{StateError, StateReader, StateWriter};

const MEMORY_BYTES: usize = 64 << 20;
/// Ends a test that hangs. Everything here takes far less time.
const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn guest_boots_and_ticks_on_every_vcpu() {
    need_kvm();
    for vcpus in [1, 4, 8] {
        let mut guest = Guest::new(vcpus);
        guest.backend.start().unwrap();
        guest.await_ticks(&vec![20; usize::from(vcpus)]);
        assert!(
            guest.backend.serial_text().starts_with("vmferry guest"),
            "{}",
            guest.backend.serial_text()
        );
    }
}

#[test]
fn guest_reaches_memory_above_4_gib() {
    need_kvm();
    #[rustfmt::skip]
    const COUNT: &[u8] = &[
        0x48, 0xb8, 0xf8, 0xff, 0xff, 0x03, 0x01, 0, 0, 0, //    mov $0x103fffff8, %rax
        0x48, 0xff, 0x00,                                  // 1: incq (%rax)
        0xeb, 0xfb,                                        //    jmp 1b
    ];
    let ranges = [(GuestAddress(0), MEMORY_BYTES), (GuestAddress(HIGH_RAM), MEMORY_BYTES)];
    let mut guest = Guest::with_memory(1, &Output::default(), &ranges);
    guest.backend.start().unwrap();
    guest.await_more_ticks();
    guest.backend.pause().unwrap();
    guest.replace_timer(COUNT);
    guest.backend.resume().unwrap();
    let last = GuestAddress(HIGH_RAM + MEMORY_BYTES as u64 - 8);
    wait_until("the count", || guest.memory.read_obj::<u64>(last).unwrap() > 1000);
    assert_eq!(guest.backend.slots().len(), 2);
}

#[test]
fn pause_stops_the_guest_and_resume_continues_it() {
    need_kvm();
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
fn save_and_load_continue_the_guest_in_another_machine() {
    need_kvm();
    let (mut pause, mut save, mut load) = (Vec::new(), Vec::new(), Vec::new());
    let mut guest = Guest::new(4);
    guest.backend.start().unwrap();
    for _ in 0..10 {
        guest.await_more_ticks();
        let started = Instant::now();
        guest.backend.pause().unwrap();
        pause.push(started.elapsed());
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
        assert_eq!(
            differences(&state, &next.save()),
            Vec::<String>::new(),
            "what was loaded is not what was saved"
        );
        next.backend.resume().unwrap();
        next.await_ticks(&before.iter().map(|ticks| ticks + 20).collect::<Vec<_>>());
        guest = next;
    }
    for (what, times) in [("pause", &mut pause), ("save", &mut save), ("load", &mut load)] {
        times.sort();
        eprintln!("4 vCPUs: {what} takes {:?} (median)", times[times.len() / 2]);
    }
}

/// Moves a guest that echoes its serial input from machine to machine. Each input byte is echoed
/// once and in order. So no port access is lost or repeated (a read consumes a byte), and pending
/// input moves with the guest.
#[test]
fn port_access_is_complete_before_the_state_is_saved() {
    need_kvm();
    let output = Output::default();
    let mut guest = Guest::with_output(1, &output);
    let mut echo = Echo::start(&mut guest, &output);
    for _ in 0..30 {
        echo.feed(&guest, &output);
        guest.pause_in_device();
        let state = guest.save();
        let mut next = Guest::with_output(1, &output);
        next.copy_memory(&guest);
        next.load(&state).unwrap();
        next.backend.resume().unwrap();
        guest = next;
    }
    echo.check(&guest, &output);
}

#[test]
fn guest_panic_is_recorded() {
    need_kvm();
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
fn triple_fault_is_recorded_with_its_address() {
    need_kvm();
    let mut guest = Guest::new(1);
    guest.backend.start().unwrap();
    guest.await_more_ticks();
    guest.backend.pause().unwrap();
    // An empty IDT: the next interrupt is a triple fault.
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
fn load_refuses_a_foreign_or_truncated_state() {
    need_kvm();
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

    // Every section, shortened by a byte or left out.
    for victim in reader.sections() {
        for cut in [false, true] {
            let mut writer = StateWriter::new();
            for section in reader.sections() {
                let kind = *kinds().find(|kind| kind.name == section.name()).unwrap();
                let is_victim =
                    (section.name(), section.instance()) == (victim.name(), victim.instance());
                let length = section.payload().len() - usize::from(is_victim);
                if cut || !is_victim {
                    writer
                        .section(&kind, section.instance(), &section.payload()[..length])
                        .unwrap();
                }
            }
            let bytes = writer.finish();
            let mut next = Guest::new(2);
            let error = next.load(&bytes).unwrap_err();
            assert!(
                error.to_string().contains(victim.name().trim_end_matches('2')),
                "{}: {error}",
                victim.name()
            );
            // The machine was not changed, so it can still load the state.
            next.load(&state).unwrap();
        }
    }

    let mut corrupt = state.clone();
    corrupt[state.len() / 2] ^= 1;
    assert!(matches!(StateReader::parse(&corrupt), Err(StateError::Corrupt { .. })));
}

#[test]
fn requests_in_the_wrong_phase_are_refused() {
    need_kvm();
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
fn config_out_of_bounds_is_refused() {
    need_kvm();
    let memory = |bytes| Arc::new(Memory::from_ranges(&[(GuestAddress(0), bytes)]).unwrap());
    for vcpus in [0, 9] {
        let config = KvmConfig { vcpus, ..Default::default() };
        assert!(matches!(
            KvmBackend::new(config, memory(MEMORY_BYTES)),
            Err(KvmError::Config { .. })
        ));
    }
    let config = KvmConfig { vcpus: 1, ..Default::default() };
    let mut small = KvmBackend::new(config, memory(8 << 20)).unwrap();
    assert!(matches!(small.start(), Err(KvmError::Config { .. })));
    let half_a_display = [(GuestAddress(0), MEMORY_BYTES), (GuestAddress(DISPLAY), 32 << 10)];
    let mut half = Guest::with_memory(1, &Output::default(), &half_a_display);
    assert!(matches!(half.backend.start(), Err(KvmError::Config { .. })));
    let config = KvmConfig { vcpus: 1, command_line: "x".repeat(4096), ..Default::default() };
    let mut long = KvmBackend::new(config, memory(MEMORY_BYTES)).unwrap();
    assert!(matches!(long.start(), Err(KvmError::Config { .. })));
}
