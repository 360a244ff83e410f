//! Fleets: what several hosts agree on in etcd.
//!
//! Each host's agent [publishes](Membership) the host and its guests, a [`Migration`] says how far
//! a move by order has come, and the [witness](EtcdWitness) decides handovers in doubt. etcd does
//! what needs agreement: it orders changes, and each change is one transaction that compares what
//! it found.

#![forbid(unsafe_code)]

mod etcd;
mod fleet;
mod guest;
mod host;
mod loss;
mod membership;
mod migration;
mod object;
pub mod placement;
mod store;
mod witness;

pub use etcd::{Etcd, EtcdConfig, EtcdError, EtcdTls, OtherData, Watch};
pub use fleet::{Fleet, FleetError, FleetPrefix};
pub use guest::{Guest, GuestPhase, GuestVmm};
pub use host::{Host, HostName, HostNetwork, HostOrders, HostView, Presence};
pub use loss::{Fate, Loss, LostGuest};
pub use membership::Membership;
pub use migration::{Migration, MigrationPhase, MigrationProgress, MigrationView};
pub use object::BadObject;
pub use witness::EtcdWitness;
