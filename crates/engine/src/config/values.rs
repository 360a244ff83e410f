//! Settings that can be out of range. Each is checked when its value is made, so a configuration
//! cannot have a wrong one.

use std::ops::RangeInclusive;

use vmferry_wire::{PROTOCOL_VERSION_MAX, PROTOCOL_VERSION_MIN};

use super::compression::MOST_WORKERS;

/// A setting that is out of its range or does not apply.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The number of data channels is out of range.
    #[error("{0} channels: choose 1 to 16")]
    Channels(u8),
    /// The bandwidth cap is too low for any migration to finish.
    #[error("a bandwidth cap of {0} bytes/s is below 64 KiB/s")]
    Bandwidth(u64),
    /// The throttle would stop the vCPUs completely.
    #[error("a throttle of {0} %: choose 0 to 99")]
    Throttle(u8),
    /// The number of worker threads is out of range.
    #[error("{0} workers: choose 1 to {MOST_WORKERS}")]
    Workers(u8),
    /// The number of rounds is zero.
    #[error("at least one round is needed")]
    Rounds,
    /// `pause_before_switchover` is set for a carried guest, whose VMM decides itself when to stop
    /// it.
    #[error(
        "a guest that its VMM streams can't be held short of the switchover, as the VMM decides \
         when to stop it: do not ask for that, or attach to it"
    )]
    NothingToHold,
    /// The range contains protocol versions that this release does not speak.
    #[error(
        "protocol versions {oldest} to {newest}: this release speaks {PROTOCOL_VERSION_MIN} to \
         {PROTOCOL_VERSION_MAX}"
    )]
    Protocol {
        /// The oldest version requested.
        oldest: u16,
        /// The newest version requested.
        newest: u16,
    },
    /// `verify` is set for a carried guest, whose VMM does not expose its memory.
    #[error(
        "the memory of a guest that its VMM streams can't be hashed, so there is nothing to \
         verify: do not ask for that; every byte of the streams is compared in any case"
    )]
    NothingToVerify,
}

/// Defines numbers that are in a range: the type, the range, and the error of a value outside.
macro_rules! checked {
    ($($(#[$doc:meta])* $name:ident($number:ty): $range:expr, $error:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name(pub(super) $number);

        impl $name {
            /// Checks the range.
            ///
            /// # Errors
            /// The value is out of its range.
            pub fn new(value: $number) -> Result<Self, ConfigError> {
                if $range.contains(&value) { Ok(Self(value)) } else { Err($error(value)) }
            }

            /// The value.
            #[must_use]
            pub const fn get(self) -> $number {
                self.0
            }
        }
    )*};
}

checked! {
    /// A number of data channels, 1 to 16.
    ChannelCount(u8): (1..=16), ConfigError::Channels;
    /// A cap in bytes per second, at least 64 KiB/s.
    BandwidthCap(u64): (64 << 10..), ConfigError::Bandwidth;
    /// The highest percentage of their CPU time that the vCPUs may lose, 0 to 99.
    ThrottleLimit(u8): (..=99), ConfigError::Throttle;
    /// A number of worker threads, 1 to [`MOST_WORKERS`].
    WorkerCount(u8): (1..=MOST_WORKERS), ConfigError::Workers;
    /// The most rounds with the guest running, at least 1.
    RoundLimit(u32): (1..), |_| ConfigError::Rounds;
}

/// All protocol versions that this release speaks.
pub const PROTOCOL_VERSIONS: RangeInclusive<u16> = PROTOCOL_VERSION_MIN..=PROTOCOL_VERSION_MAX;

/// A range of [`PROTOCOL_VERSIONS`] that is not empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProtocolVersions(pub(super) RangeInclusive<u16>);

impl ProtocolVersions {
    /// Checks the range.
    ///
    /// # Errors
    /// It is empty, or has a version that this release does not speak.
    pub fn new(versions: RangeInclusive<u16>) -> Result<Self, ConfigError> {
        let (oldest, newest) = (*versions.start(), *versions.end());
        let known = |version| PROTOCOL_VERSIONS.contains(&version);
        if oldest <= newest && known(oldest) && known(newest) {
            Ok(Self(versions))
        } else {
            Err(ConfigError::Protocol { oldest, newest })
        }
    }

    /// The range.
    #[must_use]
    pub const fn range(&self) -> &RangeInclusive<u16> {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_out_of_range_are_refused() {
        let refusals = [
            (ChannelCount::new(0).err(), "0 channels: choose 1 to 16"),
            (ChannelCount::new(17).err(), "17 channels: choose 1 to 16"),
            (BandwidthCap::new(65_535).err(), "a bandwidth cap of 65535 bytes/s is below 64 KiB/s"),
            (ThrottleLimit::new(100).err(), "a throttle of 100 %: choose 0 to 99"),
            (WorkerCount::new(0).err(), "0 workers: choose 1 to 64"),
            (WorkerCount::new(65).err(), "65 workers: choose 1 to 64"),
            (RoundLimit::new(0).err(), "at least one round is needed"),
        ];
        for (error, says) in refusals {
            assert_eq!(error.unwrap().to_string(), says);
        }
    }

    #[test]
    fn values_at_the_ends_of_their_ranges_are_allowed() {
        assert!([1, 16].map(ChannelCount::new).iter().all(Result::is_ok));
        assert!([64 << 10, u64::MAX].map(BandwidthCap::new).iter().all(Result::is_ok));
        assert!([0, 99].map(ThrottleLimit::new).iter().all(Result::is_ok));
        assert!([1, 64].map(WorkerCount::new).iter().all(Result::is_ok));
        assert!([1, u32::MAX].map(RoundLimit::new).iter().all(Result::is_ok));
    }

    #[test]
    fn protocol_versions_are_those_of_this_release() {
        let newest = *PROTOCOL_VERSIONS.end();
        for (oldest, newest) in [(0, 1), (1, newest + 1), (newest + 1, newest + 1), (2, 1)] {
            let refused = ProtocolVersions::new(RangeInclusive::new(oldest, newest));
            assert_eq!(refused, Err(ConfigError::Protocol { oldest, newest }));
        }
        assert_eq!(ProtocolVersions::new(1..=newest).unwrap().range(), &(1..=newest));
    }
}
