//! What the tests of fleets have in common.

#![allow(dead_code, reason = "each test uses a part of it")]

use std::collections::BTreeMap;
use std::sync::Arc;

use uuid::Uuid;
use vmferry::probe::HostFacts;
use vmferry_etcd_lab::EtcdCluster;
use vmferry_fleet::{
    Etcd, EtcdConfig, EtcdTls, Fleet, FleetPrefix, Guest, GuestPhase, GuestVmm, Host, HostName,
    Migration, MigrationPhase,
};
use vmferry_handover::GuestIdentity;

pub fn name(name: &str) -> HostName {
    HostName::new(name).unwrap()
}

pub fn prefix() -> FleetPrefix {
    FleetPrefix::new("/f").unwrap()
}

/// A client with the certificate of this user.
pub fn connect(etcd: &EtcdCluster, user: &str) -> Arc<Etcd> {
    let tls = Some(EtcdTls::read(&etcd.client(user)).unwrap());
    Arc::new(Etcd::connect(&EtcdConfig { endpoints: etcd.endpoints(), tls }).unwrap())
}

/// The fleet `/f`, made if it is not there.
pub fn fleet(etcd: &EtcdCluster) -> Fleet {
    let client = connect(etcd, "root");
    Fleet::make(&client, &prefix()).unwrap();
    Fleet::join(client, prefix()).unwrap()
}

pub fn host(instance: u8) -> Host {
    Host {
        instance: Uuid::from_bytes([instance; 16]),
        address: "host.example:7002".to_owned(),
        identity: None,
        cpus: 2,
        memory_bytes: 1 << 30,
        labels: BTreeMap::from([("rack".to_owned(), "r1".to_owned())]),
        networks: Vec::new(),
        templates: Vec::new(),
        facts: HostFacts { cpu_flags: vec!["avx2".to_owned()], ..HostFacts::default() },
    }
}

pub fn guest(number: u8, phase: GuestPhase) -> Guest {
    Guest {
        uuid: Uuid::from_bytes([number; 16]),
        name: format!("guest-{number}"),
        vmm: GuestVmm::Qemu,
        phase,
        memory_bytes: Some(1 << 28),
        vcpus: Some(1),
        socket: None,
    }
}

pub fn identity(number: u8) -> GuestIdentity {
    let Guest { uuid, name, .. } = guest(number, GuestPhase::Running);
    GuestIdentity { uuid, name }
}

/// The order with this number to move the guest `guest` from one host to another.
pub fn order(number: u8, guest: u8, source: &str, destination: &str) -> Migration {
    Migration {
        id: Uuid::from_bytes([number; 16]),
        guest: identity(guest),
        source: name(source),
        destination: name(destination),
        why: String::new(),
        template: "default".into(),
        memory_bytes: 1,
        max_bandwidth: None,
        ordered_at: 0,
        cancel: false,
        phase: MigrationPhase::Ordered,
    }
}
