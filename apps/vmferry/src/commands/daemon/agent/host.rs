//! What this host says of itself in its fleet.

use std::io::{ErrorKind, Write};
use std::path::Path;

use uuid::Uuid;
use vmferry::probe::HostFacts;
use vmferry_fleet::Host;
use vmferry_transport::{certificates_of, names_of};

use crate::commands::daemon::config::Configuration;
use crate::commands::doctor::this_host;
use crate::commands::fleet::config::HostTable;
use crate::exit::{Code, Failure};

/// This host, with the parts of it that its operator has configured.
pub fn describe(config: &Configuration, table: &HostTable, state: &Path) -> Result<Host, Failure> {
    Ok(Host {
        identity: identity(config)?,
        templates: config.template_names(),
        instance: instance(state)?,
        address: table.address.clone(),
        cpus: std::thread::available_parallelism()?.get(),
        memory_bytes: memory_bytes(),
        labels: table.labels.clone(),
        networks: table.networks.clone(),
        // Amounts that change all the time are a part of its presence.
        facts: HostFacts { memory_available: None, huge_pages: Vec::new(), ..this_host() },
    })
}

/// The first name in this host's certificate.
fn identity(config: &Configuration) -> Result<Option<String>, Failure> {
    let Some(files) = config.tls() else { return Ok(None) };
    let path = files.certificate;
    let wrong = |error: String| {
        Failure::new(Code::Authentication, format!("{} can't be used: {error}", path.display()))
    };
    let pem = std::fs::read(&path).map_err(|error| wrong(error.to_string()))?;
    let certificates = certificates_of(&pem).map_err(wrong)?;
    let own = certificates.first().ok_or_else(|| wrong("it has no certificate".into()))?;
    Ok(names_of(own).into_iter().next())
}

/// The number of this host, which its state directory keeps: journals in another directory are
/// those of another host.
fn instance(state: &Path) -> Result<Uuid, Failure> {
    let path = state.join("fleet-instance");
    let failed = |error: std::io::Error| {
        let text = format!("this host's number in its fleet, {}, can't be kept", path.display());
        Failure::of(Code::Internal, anyhow::Error::new(error).context(text))
    };
    if !path.exists() {
        // Complete before it has its name: an agent may be killed in between.
        let mut fresh = tempfile::NamedTempFile::new_in(state).map_err(failed)?;
        fresh.write_all(Uuid::new_v4().to_string().as_bytes()).map_err(failed)?;
        fresh.as_file().sync_all().map_err(failed)?;
        match fresh.persist_noclobber(&path) {
            Err(error) if error.error.kind() != ErrorKind::AlreadyExists => {
                return Err(failed(error.error));
            }
            _ => {}
        }
    }
    let text = std::fs::read_to_string(&path).map_err(failed)?;
    text.trim().parse().map_err(|error| failed(std::io::Error::other(error)))
}

fn memory_bytes() -> u64 {
    let system = rustix::system::sysinfo();
    u64::from(system.mem_unit) * system.totalram
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_keeps_its_number() {
        let directory = tempfile::tempdir().unwrap();
        let first = instance(directory.path()).unwrap();
        assert_eq!(instance(directory.path()).unwrap(), first);
        std::fs::write(directory.path().join("fleet-instance"), "").unwrap();
        let error = instance(directory.path()).unwrap_err().to_string();
        assert!(error.contains("can't be kept"), "{error}");
    }

    #[test]
    fn memory_of_this_host_is_known() {
        assert!(memory_bytes() > 1 << 28);
    }
}
