//! `vmferry doctor`: checks for what prevents or slows a migration, with remedies.

mod certificates;
mod guest;
mod host;
mod libvirt;
mod peer;

use std::fmt;

use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use serde_json::{Value, json};
use vmferry::chain;
use vmferry::probe::HostFacts;

use crate::args::DoctorOptions;
use crate::exit::{Code, Failure};
use crate::output::{Output, columns};

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Level {
    /// Nothing is wrong.
    Ok,
    /// For information only.
    Note,
    /// Guests can move, but something will be slow or may fail later.
    Warning,
    /// A guest can't be moved.
    Error,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Warning => "WARNING",
            Self::Error => "ERROR",
        })
    }
}

/// The result of one check.
#[derive(Debug, Serialize)]
struct Finding {
    /// The name of the check.
    check: &'static str,
    level: Level,
    /// The host, file or setting.
    object: String,
    /// What was found, and why it matters.
    why: String,
    /// What to do about it, if anything.
    remedy: Option<String>,
}

/// All findings, in the order of the checks.
#[derive(Debug, Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn ok(&mut self, check: &'static str, object: impl fmt::Display, why: impl fmt::Display) {
        self.add(check, Level::Ok, object, why, None);
    }

    fn note(&mut self, check: &'static str, object: impl fmt::Display, why: impl fmt::Display) {
        self.add(check, Level::Note, object, why, None);
    }

    /// A problem, with its remedy.
    fn bad(
        &mut self,
        check: &'static str,
        level: Level,
        object: impl fmt::Display,
        why: impl fmt::Display,
        remedy: impl fmt::Display,
    ) {
        self.add(check, level, object, why, Some(remedy.to_string()));
    }

    fn add(
        &mut self,
        check: &'static str,
        level: Level,
        object: impl fmt::Display,
        why: impl fmt::Display,
        remedy: Option<String>,
    ) {
        let (object, why) = (object.to_string(), why.to_string());
        self.0.push(Finding { check, level, object, why, remedy });
    }

    fn worst(&self) -> Level {
        self.0.iter().map(|finding| finding.level).max().unwrap_or(Level::Ok)
    }
}

/// Runs all checks that the options ask for and prints the findings. Returns the exit status, or
/// `None` for 0.
pub fn run(options: &DoctorOptions, output: &Output) -> Result<Option<Code>, Failure> {
    let mut findings = Findings::default();
    let host = this_host();
    let other = match &options.libvirt {
        Some(guest) => libvirt::look(guest, options, &host, output, &mut findings)?,
        None => look(options, &host, output, &mut findings)?,
    };
    let worst = findings.worst();
    let result = json!({
        "ok": worst < Level::Warning, "worst": worst, "findings": findings.0, "host": host,
        "other": other,
    });
    output.result(&result, || table(&findings));
    Ok(match worst {
        Level::Ok | Level::Note => None,
        Level::Warning => Some(Code::Warnings),
        Level::Error => Some(Code::Errors),
    })
}

/// Checks for a guest of the built-in VMM or of a QEMU, or for none.
fn look(
    options: &DoctorOptions,
    host: &HostFacts,
    output: &Output,
    findings: &mut Findings,
) -> Result<Value, Failure> {
    host::look(host, findings);
    if let Some(memory) = options.memory {
        host::look_for_room(host, "this host", memory, options.memory_kind, findings);
    }
    certificates::look(&options.tls, findings)?;
    if let Some(policy) = &options.policy {
        host::look_at_policy(policy, findings);
    }
    let guest = match (&options.guest, &options.qemu) {
        (Some(guest), _) => guest::own(guest, findings)?,
        (None, Some(qmp)) => guest::of_qemu(qmp, findings),
        (None, None) => None,
    };
    match &options.to {
        Some(to) => peer::look(to, options, host, guest.as_ref(), output, findings),
        None => Ok(Value::Null),
    }
}

/// The facts about this host that it reports to peers.
pub fn this_host() -> HostFacts {
    let mut host = HostFacts::of_this_host();
    host.kvm = Some(vmferry_microvm::kvm::KvmBackend::available().is_ok());
    host.no_post_copy = host::post_copy().err().map(|error| chain(&error));
    host.post_copy = Some(host.no_post_copy.is_none());
    host.journals_on_disk = host::journals_on_disk();
    host
}

fn table(findings: &Findings) -> String {
    let mut table = Table::new();
    table.load_style(presets::ASCII_BORDERS_ONLY_CONDENSED);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_width(
        columns().map_or(120, |columns| u16::try_from(columns.max(60)).unwrap_or(u16::MAX)),
    );
    table.set_header(["", "what", "where", "found"]);
    for finding in &findings.0 {
        let what = finding.check.replace('-', " ");
        let why = match &finding.remedy {
            Some(remedy) => format!("{}\n-> {remedy}", finding.why),
            None => finding.why.clone(),
        };
        table.add_row([finding.level.to_string(), what, finding.object.clone(), why]);
    }
    let count = |level| findings.0.iter().filter(|finding| finding.level == level).count();
    let counted = |level, what: &str| match count(level) {
        1 => format!("1 {what}"),
        count => format!("{count} {what}s"),
    };
    format!(
        "{table}\n{}, {}, {}, {} ok",
        counted(Level::Error, "error"),
        counted(Level::Warning, "warning"),
        counted(Level::Note, "note"),
        count(Level::Ok)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worst_is_the_highest_level() {
        let mut findings = Findings::default();
        assert_eq!(findings.worst(), Level::Ok);
        findings.note("clock", "host b", "2 ms ahead");
        assert_eq!(findings.worst(), Level::Note);
        findings.bad("kvm", Level::Error, "/dev/kvm", "is missing", "load kvm_intel or kvm_amd");
        findings.bad("policy", Level::Warning, "p", "x", "y");
        assert_eq!(findings.worst(), Level::Error);
        let shown = table(&findings);
        for words in ["ERROR", "load kvm_intel", "1 error, 1 warning, 1 note, 0 ok"] {
            assert!(shown.contains(words), "{shown}");
        }
        findings.bad("clock", Level::Error, "host b", "2 h ahead", "set it");
        let shown = table(&findings);
        assert!(shown.contains("2 errors, 1 warning, 1 note, 0 ok"), "{shown}");
    }
}
