//! The configuration of a KVM machine.

use std::io::Write;

use super::mmio::MmioWiring;

/// The configuration of a KVM machine.
#[derive(Default)]
pub struct KvmConfig {
    /// Number of vCPUs: 1 to 8.
    pub vcpus: u8,
    /// The guest's workload, at most 4,095 bytes.
    pub command_line: String,
    /// Where serial output is copied to, besides the 64 KiB that are always kept.
    pub serial: Option<Box<dyn Write + Send>>,
    /// Whether the machine has KVM's dirty rings.
    pub dirty_ring: DirtyRing,
    /// A balloon.
    pub balloon: Option<MmioWiring>,
}

/// Whether a machine has dirty rings. The number is the entries for each vCPU, a power of two from
/// 1,024 on. KVM may allow only fewer. A machine with dirty rings has no dirty bitmaps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DirtyRing {
    /// The machine has dirty bitmaps.
    #[default]
    Off,
    /// The machine has dirty rings if KVM supports them.
    Preferred(u32),
    /// The machine has dirty rings. It is not created if KVM does not support them.
    Required(u32),
}
