//! Certificates for the runs: the hosts', and one that they do not trust.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use vmferry_transport::{TlsIdentity, pki};

use vmferry_net_lab::{DESTINATION_ADDRESS, SOURCE_ADDRESS};

/// Makes them in this directory.
///
/// # Errors
/// No room.
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

/// Where the hosts' are.
pub fn host(directory: &Path) -> PathBuf {
    directory.join("host")
}

/// Both hosts'.
///
/// # Errors
/// Files that are not there.
pub fn identity(directory: &Path) -> anyhow::Result<TlsIdentity> {
    load(&host(directory), &host(directory))
}

/// Of somebody who knows the hosts' authority, which is no secret, but has the certificate of another.
///
/// # Errors
/// Files that are not there.
pub fn stranger(directory: &Path) -> anyhow::Result<TlsIdentity> {
    load(&host(directory), &directory.join("stranger"))
}

fn load(trusted: &Path, own: &Path) -> anyhow::Result<TlsIdentity> {
    let load =
        TlsIdentity::load(&trusted.join("ca.pem"), &own.join("host.pem"), &own.join("host.key"));
    Ok(load?)
}
