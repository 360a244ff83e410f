//! A domain that libvirt does not have, and a libvirtd that ends while it is asked about one.
//! `virsh` says `failed to get domain` about both.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use serde_json::Value;
use vmferry_handover::journal::{RecordFile, Side};
use vmferry_handover::{FinishEntry, FinishRecord, GuestIdentity, SessionId};
use vmferry_libvirt_lab::{LibvirtHost, LibvirtVersion};

/// The procedure by which `virsh` looks for a domain.
const LOOKUP_BY_UUID: u32 = 24;

/// Passes connections on to libvirtd. One that looks for a domain ends then, as if libvirtd had
/// been killed. Later ones are refused.
fn die_at_lookup(listener: &UnixListener, libvirtd: &Path) {
    for near in listener.incoming() {
        let (mut near, mut far) = (near.unwrap(), UnixStream::connect(libvirtd).unwrap());
        let (mut from, mut to) = (far.try_clone().unwrap(), near.try_clone().unwrap());
        std::thread::spawn(move || {
            let _ = io::copy(&mut from, &mut to);
        });
        let mut packet = vec![0; 64 << 10];
        loop {
            // virsh waits for each answer, so a packet comes alone.
            let bytes = near.read(&mut packet).unwrap();
            let procedure = packet[12..16].try_into().unwrap();
            let is_lookup = u32::from_be_bytes(procedure) == LOOKUP_BY_UUID;
            if bytes == 0 || is_lookup {
                let _ = (near.shutdown(Shutdown::Both), far.shutdown(Shutdown::Both));
                if is_lookup {
                    return;
                }
                break;
            }
            far.write_all(&packet[..bytes]).unwrap();
        }
    }
}

/// The journal of a destination whose libvirt was told to run a guest.
fn write_journal(journals: &Path) {
    let guest = GuestIdentity { uuid: uuid::Uuid::from_u128(5), name: "web".into() };
    let open = FinishRecord::Open { guest, peer: "192.0.2.1:1".into(), peer_names: Vec::new() };
    let session = SessionId([3; 16]);
    let mut journal = RecordFile::create(journals, session, Side::Destination).unwrap();
    for record in [open, FinishRecord::Passed] {
        journal.write(&FinishEntry::now(record)).unwrap();
    }
}

/// What libvirt says about the guest, by `vmferry status`.
fn said(host: &LibvirtHost) -> String {
    let mut status = host.command(env!("CARGO_BIN_EXE_vmferry"));
    let output = status.args(["--json", "status", "--sessions"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let shown: Value = serde_json::from_slice(&output.stdout).unwrap();
    shown["finishes"][0]["libvirt"].as_str().unwrap_or_else(|| panic!("{shown:#}")).to_owned()
}

fn is_told_from_a_dead_libvirtd(version: LibvirtVersion) {
    let host = LibvirtHost::start("host-b", version, None);
    write_journal(&host.path("/var/lib/vmferry/journal"));
    assert_eq!(said(&host), "no such domain");
    let (socket, moved): (PathBuf, _) = (host.socket(), host.path_in_run("libvirt/moved"));
    std::fs::rename(&socket, &moved).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let dies = std::thread::spawn(move || die_at_lookup(&listener, &moved));
    let without_answer = said(&host);
    assert!(without_answer.contains("failed to get domain"), "{without_answer}");
    assert!(without_answer.contains("failed to connect to the hypervisor"), "{without_answer}");
    dies.join().unwrap();
}

#[test]
fn absent_domain_is_told_from_a_dead_libvirtd_9() {
    is_told_from_a_dead_libvirtd(LibvirtVersion::V9_0);
}

#[test]
fn absent_domain_is_told_from_a_dead_libvirtd_11() {
    is_told_from_a_dead_libvirtd(LibvirtVersion::V11_3);
}
