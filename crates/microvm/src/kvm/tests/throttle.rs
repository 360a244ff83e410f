//! A throttle interrupts vCPUs at any point, so port accesses must be complete when they rest.

use super::*;
use crate::pace::Pace;

/// The throttle and pauses interrupt the guest a hundred times a second while it reads and writes
/// its serial port. Each input byte is echoed once and in order.
#[test]
fn port_access_is_complete_when_a_rest_begins() {
    need_kvm();
    let output = Output::default();
    let mut guest = Guest::with_output(1, &output);
    let mut echo = Echo::start(&mut guest, &output);
    for turn in 0..30 {
        guest.backend.throttle(Pace::losing([50, 90, 99][turn % 3]).unwrap()).unwrap();
        echo.feed(&guest, &output);
        if turn % 2 == 0 {
            guest.pause_in_device();
            guest.backend.resume().unwrap();
        }
    }
    echo.check(&guest, &output);
}

#[test]
fn throttle_of_a_stopped_guest_does_nothing() {
    need_kvm();
    let mut guest = Guest::new(2);
    guest.backend.start().unwrap();
    guest.await_more_ticks();
    guest.backend.throttle(Pace::losing(60).unwrap()).unwrap();
    guest.backend.pause().unwrap();
    // An empty IDT: the next interrupt is a triple fault.
    guest.memory.write_slice(&[0; 64 * 16], GuestAddress(symbol("idts"))).unwrap();
    guest.backend.resume().unwrap();
    let stop = guest.backend.wait_stopped(PATIENCE).expect("no stop was recorded");
    assert_eq!(stop.cause, StopCause::Shutdown, "{stop}");
    guest.backend.throttle(Pace::losing(99).unwrap()).unwrap();
    guest.backend.pause().unwrap();
    guest.backend.throttle(None).unwrap();
}
