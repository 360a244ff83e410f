//! Messages of a userfaultfd, `struct uffd_msg` of Linux `include/uapi/linux/userfaultfd.h`.

use crate::FaultError;

/// Size of `struct uffd_msg`.
pub(crate) const MESSAGE_BYTES: usize = 32;

const UFFD_EVENT_PAGEFAULT: u8 = 0x12;
/// The other events, none of which this crate enables.
const EVENTS: [(u8, &str); 4] = [
    (0x13, "UFFD_EVENT_FORK"),
    (0x14, "UFFD_EVENT_REMAP"),
    (0x15, "UFFD_EVENT_REMOVE"),
    (0x16, "UFFD_EVENT_UNMAP"),
];

const UFFD_PAGEFAULT_FLAG_WRITE: u64 = 1 << 0;
const UFFD_PAGEFAULT_FLAG_WP: u64 = 1 << 1;

/// What a thread that faults is about to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To read the page.
    Read,
    /// To write it, or to have the kernel pin it for writing. KVM may report reads so.
    Write,
}

/// A thread waits at a missing page, or at a huge page that is not mapped before it is complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Host-virtual address of the page's first byte, in the process that owns the memory. On
    /// hugetlbfs it is that of the huge page.
    pub address: u64,
    /// What the thread is about to do.
    pub access: Access,
}

impl Fault {
    /// Decodes a message.
    pub(crate) fn decode(message: &[u8; MESSAGE_BYTES]) -> Result<Self, FaultError> {
        let event = message[0];
        if event != UFFD_EVENT_PAGEFAULT {
            let name = EVENTS.iter().find(|(number, _)| *number == event);
            let name = name.map_or("an unknown event", |(_, name)| name);
            return Err(FaultError::Event { event, name });
        }
        let (flags, address) = (word(message, 8), word(message, 16));
        if flags & UFFD_PAGEFAULT_FLAG_WP != 0 {
            return Err(FaultError::OtherMode { address, flags });
        }
        let writes = flags & UFFD_PAGEFAULT_FLAG_WRITE != 0;
        Ok(Self { address, access: if writes { Access::Write } else { Access::Read } })
    }
}

fn word(message: &[u8; MESSAGE_BYTES], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&message[at..at + 8]);
    u64::from_ne_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(event: u8, flags: u64, address: u64) -> [u8; MESSAGE_BYTES] {
        let mut message = [0; MESSAGE_BYTES];
        message[0] = event;
        message[8..16].copy_from_slice(&flags.to_ne_bytes());
        message[16..24].copy_from_slice(&address.to_ne_bytes());
        message
    }

    #[test]
    fn fault_of_either_access_is_decoded() {
        // With bit 2 the file has the page, and the page table has not.
        let flags = [(0, Access::Read), (1, Access::Write), (4, Access::Read), (5, Access::Write)];
        for (flags, access) in flags {
            let fault = Fault::decode(&message(0x12, flags, 0x7f00_0000_3000)).unwrap();
            assert_eq!(fault, Fault { address: 0x7f00_0000_3000, access });
        }
    }

    #[test]
    fn event_that_was_not_requested_is_an_error_with_its_name() {
        for (event, name) in EVENTS.into_iter().chain([(0x77, "an unknown event (0x77)")]) {
            let error = Fault::decode(&message(event, 0, 0)).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn fault_of_another_mode_is_an_error_with_its_address() {
        for flags in [2, 3] {
            let error = Fault::decode(&message(0x12, flags, 0x5000)).unwrap_err().to_string();
            assert!(error.contains("0x5000"), "{error}");
        }
    }
}
