//! Migration flags.

use std::fmt;

/// Flags of a migration: `virDomainMigrateFlags` in `include/libvirt/libvirt-domain.h`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MigrateFlags(pub u32);

macro_rules! flags {
    ($($(#[$doc:meta])* $name:ident = $bit:literal;)+) => {
        impl MigrateFlags {
            $($(#[$doc])* pub const $name: Self = Self(1 << $bit);)+

            const NAMES: &[(Self, &str)] = &[$((Self::$name, stringify!($name))),+];
        }
    };
}

flags! {
    /// The guest runs while its memory is sent.
    LIVE = 0;
    /// The source's libvirt connects to the destination's.
    PEER2PEER = 1;
    /// The guest's memory is sent through the RPC connection. libvirt's spelling.
    TUNNELLED = 2;
    /// The guest's definition is kept at the destination.
    PERSIST_DEST = 3;
    /// The guest's definition is removed at the source.
    UNDEFINE_SOURCE = 4;
    /// The guest stays paused at the destination.
    PAUSED = 5;
    /// Disks are copied whole.
    NON_SHARED_DISK = 6;
    /// Only the top images of disks are copied.
    NON_SHARED_INC = 7;
    /// The definition cannot be changed during the migration.
    CHANGE_PROTECTION = 8;
    /// The migration is made although libvirt considers it unsafe.
    UNSAFE = 9;
    /// Only the definition is sent.
    OFFLINE = 10;
    /// QEMU compresses memory.
    COMPRESSED = 11;
    /// An I/O error cancels the migration.
    ABORT_ON_ERROR = 12;
    /// QEMU throttles the guest.
    AUTO_CONVERGE = 13;
    /// RDMA pins all memory.
    RDMA_PIN_ALL = 14;
    /// QEMU may switch to post-copy.
    POSTCOPY = 15;
    /// QEMU encrypts the migration.
    TLS = 16;
    /// QEMU uses several connections.
    PARALLEL = 17;
    /// Writes wait for the copied disk.
    NON_SHARED_SYNCHRONOUS_WRITES = 18;
    /// Resumes a migration that failed in post-copy.
    POSTCOPY_RESUME = 19;
    /// QEMU sends memory without copying it.
    ZEROCOPY = 20;
}

impl MigrateFlags {
    /// Whether all flags of `flags` are set.
    #[must_use]
    pub fn contains(self, flags: Self) -> bool {
        self.0 & flags.0 == flags.0
    }
}

/// The names, for example `LIVE|PEER2PEER`. Unnamed bits are one number at the end.
impl fmt::Display for MigrateFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut left = self.0;
        let mut separator = "";
        for (flag, name) in Self::NAMES {
            if self.contains(*flag) {
                write!(f, "{separator}{name}")?;
                separator = "|";
                left &= !flag.0;
            }
        }
        match (left, separator) {
            (0, "") => f.write_str("none"),
            (0, _) => Ok(()),
            (left, separator) => write!(f, "{separator}{left:#x}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_have_libvirts_numbers() {
        assert_eq!(MigrateFlags::TUNNELLED.0, 4);
        assert_eq!(MigrateFlags::OFFLINE.0, 0x400);
        assert_eq!(MigrateFlags::TLS.0, 0x1_0000);
        assert_eq!(MigrateFlags::ZEROCOPY.0, 0x10_0000);
        for (bit, (flag, _)) in MigrateFlags::NAMES.iter().enumerate() {
            assert_eq!(flag.0, 1 << bit);
        }
    }

    #[test]
    fn flags_display_names_and_unnamed_bits() {
        assert_eq!(MigrateFlags(0).to_string(), "none");
        assert_eq!(MigrateFlags(3).to_string(), "LIVE|PEER2PEER");
        assert_eq!(MigrateFlags(0x8000_0001).to_string(), "LIVE|0x80000000");
        assert_eq!(MigrateFlags(1 << 31).to_string(), "0x80000000");
    }
}
