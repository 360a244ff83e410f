//! Creating a userfaultfd that reports the kernel's faults too.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;

use vmferry_memory::userfaultfd::{self, FaultOrigin};

use crate::{FaultError, Remedy, ioctl};

const DEVICE: &str = "/dev/userfaultfd";

/// Creates a userfaultfd of this process by the system call, or else by the device, whose mode
/// decides who may.
pub(crate) fn create() -> Result<OwnedFd, FaultError> {
    let system_call = match userfaultfd::create(FaultOrigin::UserAndKernel) {
        Ok(userfaultfd) => return Ok(userfaultfd),
        Err(error) => error,
    };
    File::open(DEVICE).and_then(ioctl::create).map_err(|device| {
        let remedy = remedy(&system_call);
        FaultError::Unavailable { system_call, device, remedy }
    })
}

fn remedy(system_call: &io::Error) -> Remedy {
    match system_call.raw_os_error() {
        Some(libc::EPERM) => Remedy::Permit,
        Some(libc::ENOSYS) => Remedy::Kernel,
        _ => Remedy::Resources,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedy_follows_the_error_of_the_system_call() {
        for (errno, expected) in [
            (libc::EPERM, Remedy::Permit),
            (libc::ENOSYS, Remedy::Kernel),
            (libc::EMFILE, Remedy::Resources),
        ] {
            assert_eq!(remedy(&io::Error::from_raw_os_error(errno)), expected);
        }
    }

    #[test]
    fn device_creates_a_userfaultfd_as_the_system_call_does() {
        let device = File::open(DEVICE).expect("this test needs to read /dev/userfaultfd");
        let userfaultfd = ioctl::create(device).unwrap();
        userfaultfd::set_up(&userfaultfd, 0).unwrap();
        let flags = rustix::fs::fcntl_getfl(&userfaultfd).unwrap();
        assert!(flags.contains(rustix::fs::OFlags::NONBLOCK));
        let flags = rustix::io::fcntl_getfd(&userfaultfd).unwrap();
        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC));
    }
}
