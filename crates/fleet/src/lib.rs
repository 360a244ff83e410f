//! Fleets: what several hosts agree on in etcd.
//!
//! Each host's agent [publishes](Membership) the host and its guests, a [`Migration`] says how far
//! a move by order has come, and the [witness](EtcdWitness) decides handovers in doubt. etcd does
//! what needs agreement: it orders changes, and each change is one transaction that compares what
//! it found. Its [roles](FleetUser) say which keys a host or an operator may write.

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
mod roles;
mod store;
mod witness;

pub use etcd::{Access, Etcd, EtcdConfig, EtcdError, EtcdTls, OtherData, Watch};
pub use fleet::{Fleet, FleetError, FleetPrefix};
pub use guest::{Guest, GuestPhase, GuestVmm};
pub use host::{Host, HostName, HostNetwork, HostOrders, HostView, Presence};
pub use loss::{Fate, Loss, LostGuest};
pub use membership::Membership;
pub use migration::{Migration, MigrationPhase, MigrationProgress, MigrationView};
pub use object::BadObject;
pub use roles::{FleetUser, GrantedRole, OperatorName, RoleChange};
pub use witness::EtcdWitness;
