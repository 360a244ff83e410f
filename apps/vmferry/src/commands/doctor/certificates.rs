//! Checks of this host's certificates and revocation lists: readable, named, and within their
//! dates.

use std::path::Path;
use std::time::{Duration, SystemTime};

use vmferry::chain;
use vmferry_control::TlsFiles;
use vmferry_transport::{
    certificates_of, names_of, next_update_of, revocation_lists_of, validity_of,
};

use super::{Findings, Level};
use crate::args::TlsOptions;
use crate::commands::link::tls_files;
use crate::exit::Failure;

/// A certificate that expires within this time should be renewed.
const SOON: Duration = Duration::from_secs(30 * 24 * 3600);

/// A revocation list that expires within this time should be renewed. Lists are valid for a shorter
/// time than certificates.
const SOON_FOR_LISTS: Duration = Duration::from_secs(7 * 24 * 3600);

/// Checks the files that the options name, if any.
pub fn look(options: &TlsOptions, findings: &mut Findings) -> Result<(), Failure> {
    if let Some(tls) = tls_files(options)? {
        look_at(&tls, options.clock_skew, findings);
    }
    Ok(())
}

/// Checks these files. `skew` is the tolerated difference between clocks.
pub fn look_at(tls: &TlsFiles, skew: Duration, findings: &mut Findings) {
    if let Err(error) = tls.identity() {
        findings.bad(
            "certificates",
            Level::Error,
            tls.certificate.display(),
            chain(&error),
            "make them with `vmferry pki`, or correct the named file",
        );
        return;
    }
    for (what, path) in [("certificate", &tls.certificate), ("authority", &tls.ca)] {
        let read = std::fs::read(path).map_err(|error| error.to_string());
        let found = read.and_then(|pem| certificates_of(&pem)).unwrap_or_default();
        for certificate in found {
            let names = names_of(&certificate);
            if what == "certificate" && names.is_empty() {
                findings.bad(
                    "certificates",
                    Level::Warning,
                    path.display(),
                    "has no name (URI, DNS name or address) that a policy or a peer could expect",
                    "issue it with `vmferry pki issue NAME --address ADDRESS`",
                );
            }
            let Some((from, until)) = validity_of(&certificate) else { continue };
            look_at_dates(what, &path.display().to_string(), &names, (from, until), findings);
        }
    }
    let lists = tls.revocations.iter().chain(&tls.revocations_if_present);
    for path in lists.filter(|path| path.exists()) {
        look_at_revocations(path, skew, findings);
    }
}

/// Checks the dates of the revocation lists in a file, which is known to be readable.
fn look_at_revocations(path: &Path, skew: Duration, findings: &mut Findings) {
    let read = std::fs::read(path).map_err(|error| error.to_string());
    let lists = read.and_then(|pem| revocation_lists_of(&pem)).unwrap_or_default();
    let (now, object) = (SystemTime::now(), path.display());
    for until in lists.iter().filter_map(|(_, list)| next_update_of(list)) {
        let date = humantime::format_rfc3339_seconds(until);
        let remedy = "make a new one with `vmferry pki revoke` in the authority's directory, and \
                      copy it to each host";
        let mut bad = |level, why: String| {
            findings.bad("revocations", level, &object, why, remedy);
        };
        if until + skew < now {
            let why = format!(
                "the revocation list expired at {date}: no peer of its authority is accepted"
            );
            bad(Level::Error, why);
        } else if until < now + SOON_FOR_LISTS {
            let why = format!(
                "the revocation list expires at {date}; then no peer of its authority is accepted"
            );
            bad(Level::Warning, why);
        } else {
            findings.ok("revocations", &object, format!("revocation list, valid until {date}"));
        }
    }
}

fn look_at_dates(
    what: &str,
    object: &str,
    names: &[String],
    (from, until): (SystemTime, SystemTime),
    findings: &mut Findings,
) {
    let now = SystemTime::now();
    let date = |at| humantime::format_rfc3339_seconds(at).to_string();
    let remedy = "issue a new one with `vmferry pki issue`, and check this host's clock";
    let bad = |findings: &mut Findings, level, why: String| {
        findings.bad("certificates", level, object, why, remedy);
    };
    if until <= now {
        bad(findings, Level::Error, format!("the {what} has expired: {}", date(until)));
    } else if from > now {
        bad(findings, Level::Error, format!("the {what} is not valid before {}", date(from)));
    } else if until < now + SOON {
        bad(findings, Level::Warning, format!("the {what} expires soon: {}", date(until)));
    } else {
        let names =
            if names.is_empty() { String::new() } else { format!(" of {}", names.join(", ")) };
        findings.ok("certificates", object, format!("{what}{names}, valid until {}", date(until)));
    }
}
