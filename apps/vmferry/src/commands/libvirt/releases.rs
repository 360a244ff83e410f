//! The releases of libvirt and QEMU.

use super::virsh::{Virsh, VirshError, field};

/// The releases that libvirt reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Releases {
    /// Of libvirt's daemon.
    pub libvirt: Option<String>,
    /// Of the QEMU that it uses by default.
    pub qemu: Option<String>,
}

/// A release such as `11.3.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(u32, u32, u32);

impl Version {
    /// The release with these numbers.
    pub const fn new(major: u32, minor: u32, micro: u32) -> Self {
        Self(major, minor, micro)
    }

    /// Reads it. Missing parts are 0.
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.trim().split('.').map(|part| part.parse().ok());
        let first = parts.next()??;
        let mut next = || parts.next().flatten().unwrap_or(0);
        Some(Self(first, next(), next()))
    }
}

impl Releases {
    /// Asks libvirt.
    pub fn ask(virsh: &Virsh) -> Result<Self, VirshError> {
        Ok(Self::parse(&virsh.run(&["version", "--daemon"])?))
    }

    /// Reads what `virsh version --daemon` prints.
    fn parse(text: &str) -> Self {
        let qemu = field(text, "Running hypervisor").and_then(|it| it.strip_prefix("QEMU "));
        let libvirt = field(text, "Running against daemon");
        Self { libvirt: libvirt.map(str::to_owned), qemu: qemu.map(str::to_owned) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read_from_virsh() {
        let printed = "\
Compiled against library: libvirt 11.3.0
Using library: libvirt 11.3.0
Using API: QEMU 11.3.0
Running hypervisor: QEMU 10.0.2
Running against daemon: 11.3.0
";
        let releases = Releases::parse(printed);
        assert_eq!(releases.libvirt.as_deref(), Some("11.3.0"));
        assert_eq!(releases.qemu.as_deref(), Some("10.0.2"));
        assert_eq!(Releases::parse(""), Releases::default());
    }

    #[test]
    fn versions_are_compared_by_their_numbers() {
        let version = |text| Version::parse(text).unwrap();
        assert!(version("9.0.0") < version("11.3.0") && version("10.0") < version("10.0.2"));
        assert_eq!(Version::parse("unknown"), None);
    }
}
