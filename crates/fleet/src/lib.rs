//! Fleets: what several hosts agree on in etcd.
//!
//! So far this is the [witness](EtcdWitness) of handovers. etcd does what needs agreement: it
//! orders changes, and each change is one transaction that compares what it found.

#![forbid(unsafe_code)]

mod etcd;
mod fleet;
mod object;
mod witness;

pub use etcd::{Etcd, EtcdConfig, EtcdError, EtcdTls, OtherData};
pub use fleet::{Fleet, FleetError, FleetPrefix};
pub use object::BadObject;
pub use witness::EtcdWitness;
