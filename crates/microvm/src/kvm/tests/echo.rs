//! A guest that echoes its serial input.

use super::fixture::{Guest, Output, wait_until};

#[rustfmt::skip]
const ECHO: &[u8] = &[
    0x66, 0xba, 0xfd, 0x03,       // 1: mov $0x3fd, %dx
    0xec,                         //    in (%dx), %al
    0xa8, 0x01,                   //    test $1, %al
    0x74, 0xf7,                   //    jz 1b
    0x66, 0xba, 0xf8, 0x03,       //    mov $0x3f8, %dx
    0xb9, 0x08, 0x00, 0x00, 0x00, //    mov $8, %ecx
    0xec,                         // 2: in (%dx), %al
    0xee,                         //    out %al, (%dx)
    0xff, 0xc9,                   //    dec %ecx
    0x75, 0xfa,                   //    jnz 2b
    0xeb, 0xe6,                   //    jmp 1b
];

/// How much output the guest had written before, and how much output it must have written by now.
pub(super) struct Echo {
    boot_bytes: usize,
    sent: usize,
}

impl Echo {
    /// Starts a new guest and makes it echo.
    pub(super) fn start(guest: &mut Guest, output: &Output) -> Self {
        guest.backend.start().unwrap();
        guest.await_more_ticks();
        guest.backend.pause().unwrap();
        let boot_bytes = output.bytes().len();
        guest.replace_timer(ECHO);
        guest.backend.resume().unwrap();
        Self { boot_bytes, sent: boot_bytes }
    }

    /// Waits for the echo of all earlier input, and fills the port's buffer, whose size is a
    /// multiple of the eight bytes that the guest reads at a time. Returns after the first echo.
    pub(super) fn feed(&mut self, guest: &Guest, output: &Output) {
        wait_until("the whole echo", || output.bytes().len() == self.sent);
        let next = self.sent - self.boot_bytes;
        let bytes: Vec<u8> = (next..next + 64).map(|index| index as u8).collect();
        assert_eq!(guest.backend.devices.serial().enqueue_raw_bytes(&bytes).unwrap(), bytes.len());
        wait_until("the first of the echo", || output.bytes().len() > self.sent);
        self.sent += bytes.len();
    }

    /// Asserts that all input was echoed once and in order.
    pub(super) fn check(&self, guest: &Guest, output: &Output) {
        wait_until("the rest of the echo", || output.bytes().len() == self.sent);
        assert_eq!(guest.backend.stopped(), None);
        for (index, byte) in output.bytes()[self.boot_bytes..].iter().enumerate() {
            assert_eq!(*byte, index as u8, "byte {index} of the echo");
        }
    }
}
