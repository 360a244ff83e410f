//! `vmferry pki`: certificates for mutual TLS.

use serde_json::json;
use vmferry_transport::pki;

use crate::args::{PkiCommand, PkiOptions};
use crate::exit::Failure;
use crate::output::Output;

/// Creates an authority, a host's certificate or a revocation list.
pub fn run(options: &PkiOptions, output: &Output) -> Result<(), Failure> {
    match &options.command {
        PkiCommand::Init { dir, days } => {
            pki::init(dir, "vmferry", pki::Validity::days(*days))?;
            output.result(&json!({ "ok": true, "directory": dir }), || {
                format!(
                    "made {}/ca.pem and ca.key. Keep ca.key only where certificates are issued.\n\
                     Next: vmferry pki issue HOST --dir {} --out DIRECTORY",
                    dir.display(),
                    dir.display()
                )
            });
        }
        PkiCommand::Issue { name, dir, out, addresses, days } => {
            let mut request = pki::IssueRequest::new(name, pki::Validity::days(*days));
            request.addresses.extend(addresses.iter().cloned());
            pki::issue(dir, out, &request)?;
            output.result(&json!({ "ok": true, "directory": out, "name": name }), || {
                format!(
                    "made {0}/ca.pem, host.pem and host.key. Copy the directory to {name}, and use \
                     it there with --tls {0}",
                    out.display()
                )
            });
        }
        PkiCommand::Revoke { hosts, dir, days } => {
            let list = pki::revoke(dir, hosts, pki::Validity::days(*days))?;
            let result = json!({
                "ok": true, "file": list.path, "number": list.number, "added": list.added,
                "revoked": list.revoked, "days": days,
            });
            output.result(&result, || {
                format!(
                    "made {}: list {}, {} revoked certificates, {} of them new. Copy it to each \
                     host's directory, where it takes effect at once, and renew it within {days} \
                     days",
                    list.path.display(),
                    list.number,
                    list.revoked,
                    list.added
                )
            });
        }
    }
    Ok(())
}
