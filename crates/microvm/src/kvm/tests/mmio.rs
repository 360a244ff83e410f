//! A device outside memory, which the guest reads, writes and kicks.

use std::sync::Mutex;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::*;

const ADDRESS: u64 = 0xfe00_0000;

#[derive(Default)]
struct Recorder(Mutex<Vec<(u64, Vec<u8>)>>);

impl MmioDevice for Recorder {
    fn read(&self, offset: u64, data: &mut [u8]) {
        data.fill(0x40 + offset as u8);
    }

    fn write(&self, offset: u64, data: &[u8]) {
        self.0.lock().unwrap().push((offset, data.to_vec()));
    }
}

#[test]
fn guest_reaches_a_device_outside_memory() {
    need_kvm();
    #[rustfmt::skip]
    const CODE: &[u8] = &[
        0xba, 0x00, 0x00, 0x00, 0xfe,             //    mov $0xfe000000, %edx
        0x8b, 0x42, 0x04,                         //    mov 4(%rdx), %eax
        0x89, 0x04, 0x25, 0xf8, 0xff, 0xff, 0x03, //    mov %eax, 0x3fffff8
        0xc7, 0x42, 0x50, 1, 0, 0, 0,             //    movl $1, 0x50(%rdx)
        0xc7, 0x42, 0x50, 9, 0, 0, 0,             //    movl $9, 0x50(%rdx)
        0xc6, 0x42, 0x70, 7,                      //    movb $7, 0x70(%rdx)
        0xeb, 0xfe,                               // 1: jmp 1b
    ];
    let event = || EventFd::new(EFD_NONBLOCK).unwrap();
    let (device, kicks) = (Arc::new(Recorder::default()), [event(), event()]);
    let wiring = MmioWiring {
        address: ADDRESS,
        bytes: 4096,
        device: Arc::clone(&device) as Arc<dyn MmioDevice>,
        interrupt: Arc::new(InterruptPin::new(16)),
        kick_offset: 0x50,
        kicks: kicks.iter().map(|kick| kick.try_clone().unwrap()).collect(),
    };
    let config = KvmConfig {
        vcpus: 1,
        command_line: "ticks".into(),
        balloon: Some(wiring),
        ..Default::default()
    };
    let mut guest = Guest::with_config(config, &[(GuestAddress(0), MEMORY_BYTES)]);
    guest.backend.start().unwrap();
    guest.await_more_ticks();
    guest.backend.pause().unwrap();
    guest.replace_timer(CODE);
    guest.backend.resume().unwrap();
    wait_until("the last write", || device.0.lock().unwrap().len() == 2);
    // A write of another number than that of a kick reaches the device.
    let written = [(0x50, vec![9, 0, 0, 0]), (0x70, vec![7])];
    assert_eq!(*device.0.lock().unwrap(), written);
    let read: u32 = guest.memory.read_obj(GuestAddress(MEMORY_BYTES as u64 - 8)).unwrap();
    assert_eq!(read, 0x4444_4444);
    assert!(kicks[0].read().is_err(), "this queue was not kicked");
    assert_eq!(kicks[1].read().unwrap(), 1);
}
