//! Certificates for the runs: one that the hosts trust, and one that they do not.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use vmferry_transport::{TlsIdentity, pki};

use vmferry_net_lab::{DESTINATION_ADDRESS, SOURCE_ADDRESS};

/// Creates the certificates in this directory.
///
/// # Errors
/// The files cannot be written.
pub fn make(directory: &Path) -> anyhow::Result<()> {
    for (authority, host) in [("ca", "host"), ("other-ca", "stranger")] {
        pki::init(&directory.join(authority), authority, pki::Validity::days(1))?;
        let mut request = pki::IssueRequest::new(host, pki::Validity::days(1));
        for address in [Ipv4Addr::LOCALHOST, SOURCE_ADDRESS, DESTINATION_ADDRESS] {
            request.addresses.push(address.to_string());
        }
        pki::issue(&directory.join(authority), &directory.join(host), &request)?;
    }
    Ok(())
}

/// The directory of the hosts' certificate.
pub fn host(directory: &Path) -> PathBuf {
    directory.join("host")
}

/// Loads the identity that both hosts use.
///
/// # Errors
/// A file is missing or invalid.
pub fn identity(directory: &Path) -> anyhow::Result<TlsIdentity> {
    load(&host(directory), &host(directory))
}

/// Loads the attacker's identity. It trusts the hosts' authority, which is public, but its own
/// certificate is from another one.
///
/// # Errors
/// A file is missing or invalid.
pub fn stranger(directory: &Path) -> anyhow::Result<TlsIdentity> {
    load(&host(directory), &directory.join("stranger"))
}

fn load(trusted: &Path, own: &Path) -> anyhow::Result<TlsIdentity> {
    let load =
        TlsIdentity::load(&trusted.join("ca.pem"), &own.join("host.pem"), &own.join("host.key"));
    Ok(load?)
}
