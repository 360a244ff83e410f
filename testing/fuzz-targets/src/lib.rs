//! The bodies of the fuzz targets. Each takes any bytes and panics if the code under test
//! misbehaves. `testing/fuzz` runs them in a fuzzer; the tests of this crate run the seeds.

pub mod balloon;
pub mod certificate;
pub mod control;
pub mod conversation;
pub mod definition;
pub mod delta;
pub mod frame;
pub mod frame_sealed;
pub mod input;
pub mod inspect;
pub mod journal;
pub mod libvirt_rpc;
pub mod piece;
pub mod policy;
pub mod qemu_stream;
pub mod qmp;
pub mod round_trip;
pub mod state;
pub mod world;

/// A target's body.
pub type Target = fn(&[u8]);
