//! A throttle takes vCPUs out of the guest wherever they are, so nothing may be half done then.

use super::*;
use crate::pace::Pace;

/// The guest is interrupted a hundred times a second while it reads and writes its serial port, by the
/// throttle and by pauses that find it waiting there: each byte comes out once and in order.
#[test]
fn an_access_to_a_port_is_complete_when_a_rest_begins() {
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
fn a_guest_that_has_stopped_is_throttled_in_vain() {
    need_kvm();
    let mut guest = Guest::new(2);
    guest.backend.start().unwrap();
    guest.await_more_ticks();
    guest.backend.throttle(Pace::losing(60).unwrap()).unwrap();
    guest.backend.pause().unwrap();
    // Nothing is left that could take an interrupt or an exception.
    guest.memory.write_slice(&[0; 64 * 16], GuestAddress(symbol("idts"))).unwrap();
    guest.backend.resume().unwrap();
    let stop = guest.backend.wait_stopped(PATIENCE).expect("no stop was recorded");
    assert_eq!(stop.cause, StopCause::Shutdown, "{stop}");
    guest.backend.throttle(Pace::losing(99).unwrap()).unwrap();
    guest.backend.pause().unwrap();
    guest.backend.throttle(None).unwrap();
}
