//! Checks of the other host, through its receiver, and of the link to it.

use std::time::Duration;

use bytesize::ByteSize;
use serde_json::{Value, json};
use vmferry::chain;
use vmferry::probe::{About, HostFacts, LOAD_TIME, LinkFigures, ProbeError, Probed, probe};
use vmferry_memory::MemoryKind;
use vmferry_transport::Dialer;
use vmferry_wire::{Compared, GuestIdentity};

use super::guest::Guest;
use super::host::{look_for_any_room, look_for_room};
use super::{Findings, Level};
use crate::args::DoctorOptions;
use crate::commands::link::{address, dialer, tls_files};
use crate::exit::Failure;
use crate::output::Output;

/// Clocks that differ by less count as equal, in milliseconds. Only dates depend on the clocks.
const SAME_CLOCK_MS: f64 = 1000.0;

/// How many missing CPU features are listed by name.
const NAMED_FLAGS: usize = 12;

/// Probes the host at `to` through its receiver. Returns its facts and the measurements of the
/// link.
pub fn look(
    to: &str,
    options: &DoctorOptions,
    host: &HostFacts,
    guest: Option<&Guest>,
    output: &Output,
    findings: &mut Findings,
) -> Result<Value, Failure> {
    let mut tls = tls_files(&options.tls)?;
    if let Some(files) = &mut tls {
        files.server_name.clone_from(&options.server_name);
        files.destination_id.clone_from(&options.destination_id);
    }
    let to = address(to, &options.tls)?;
    let dialer = match dialer(&to, tls.as_ref()) {
        Ok(dialer) => dialer,
        Err(failure) => {
            let remedy = "correct it, then run this again";
            findings.bad("other-host", Level::Error, &to, failure, remedy);
            return Ok(Value::Null);
        }
    };
    let asking = Asking { to: &to, dialer: &dialer, program: Program::Receiver, options };
    let probed = asking.ask(host, guest, output, findings);
    Ok(probed.map_or(Value::Null, |probed| facts(&probed, asking.name(&probed), options)))
}

/// What answers at the other host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Program {
    /// `vmferry receive`.
    Receiver,
    /// `vmferry daemon`.
    Daemon,
}

impl Program {
    fn command(self) -> &'static str {
        match self {
            Self::Receiver => "`vmferry receive`",
            Self::Daemon => "`vmferry daemon`",
        }
    }

    fn policy(self) -> &'static str {
        match self {
            Self::Receiver => "`receive --policy`",
            Self::Daemon => "`policy` of its daemon's configuration",
        }
    }
}

/// A host to probe.
pub struct Asking<'a> {
    /// Its address, for people.
    pub to: &'a str,
    /// How to reach it.
    pub dialer: &'a Dialer,
    /// What answers there.
    pub program: Program,
    /// The options of the command.
    pub options: &'a DoctorOptions,
}

impl Asking<'_> {
    /// Probes the host and checks what it says. `None` if it can't be asked.
    pub fn ask(
        &self,
        host: &HostFacts,
        guest: Option<&Guest>,
        output: &Output,
        findings: &mut Findings,
    ) -> Option<Probed> {
        let Self { to, dialer, program, options } = *self;
        let load = if options.no_load { Duration::ZERO } else { LOAD_TIME };
        let about = guest.map_or(About::Host, |guest| match &guest.machine {
            Some(machine) => About::Machine(machine),
            None => About::Guest(&guest.identity),
        });
        let mut watch = |time: Duration, bytes: u64| {
            if output.is_terminal() {
                let rate = ByteSize((bytes as f64 / time.as_secs_f64().max(1e-3)) as u64);
                eprint!("\rmeasuring the link to {to}: {:.1} s, {rate}/s   ", time.as_secs_f64());
            }
        };
        let asked = probe(dialer, about, load, &mut watch);
        if output.is_terminal() && load > Duration::ZERO {
            eprintln!();
        }
        let probed = match asked {
            Ok(probed) => probed,
            Err(error) => {
                could_not_ask(to, program, &error, findings);
                return None;
            }
        };
        let name = self.name(&probed);
        look_at_admission(name, program, &probed, guest, findings);
        if let Some(guest) = guest.filter(|guest| guest.machine.is_some()) {
            look_at_machine(name, &guest.identity, &probed, findings);
        }
        look_at_host(name, &probed.host, host, guest, findings);
        if program == Program::Receiver {
            look_at_post_copy(name, &probed.host, guest, findings);
        }
        if let Some(link) = &probed.link {
            look_at_clock(name, link, options.tls.clock_skew, findings);
            look_at_link(to, link, !options.no_load, guest, findings);
        }
        Some(probed)
    }

    /// The name in its certificate, or else its address.
    pub fn name<'b>(&'b self, probed: &'b Probed) -> &'b str {
        probed.peer.names.first().map_or(self.to, String::as_str)
    }
}

/// What a host said, and the measurements.
pub fn facts(probed: &Probed, name: &str, options: &DoctorOptions) -> Value {
    let rate = probed.link.filter(|_| !options.no_load).map(|link| link.bytes_per_s());
    json!({
        "name": name, "refusal": probed.refusal, "host": probed.host, "link": probed.link,
        "bytes_per_s": rate,
    })
}

fn could_not_ask(to: &str, program: Program, error: &ProbeError, findings: &mut Findings) {
    match error {
        ProbeError::Older => findings.bad(
            "other-host",
            Level::Warning,
            to,
            "its vmferry is an older release that answers no probes: it is reachable and trusted, \
             nothing more is known",
            "upgrade vmferry there, or run `vmferry doctor` there",
        ),
        ProbeError::Busy => {
            findings.bad("other-host", Level::Warning, to, error, "try again in some seconds")
        }
        ProbeError::Failed(cause) => findings.bad(
            "other-host",
            Level::Error,
            to,
            chain(cause),
            format!(
                "start {} there, and check names, certificates and firewalls: the operations guide \
                 explains each message",
                program.command()
            ),
        ),
    }
}

fn look_at_admission(
    name: &str,
    program: Program,
    probed: &Probed,
    guest: Option<&Guest>,
    findings: &mut Findings,
) {
    let what = guest
        .map_or_else(|| "this host".into(), |guest| format!("{} from this host", guest.identity));
    match &probed.refusal {
        None => findings.ok("admission", name, format!("its policy admits {what}")),
        Some(refusal) => findings.bad(
            "admission",
            Level::Error,
            name,
            format!("its policy does not admit {what}: {refusal}"),
            format!(
                "add a rule to the policy there ({}), which takes effect at once",
                program.policy()
            ),
        ),
    }
}

/// Whether the VMM that waits there could take the guest: the comparison with which a migration
/// begins.
fn look_at_machine(name: &str, guest: &GuestIdentity, probed: &Probed, findings: &mut Findings) {
    let not_compared = "nothing is known about the machine of the QEMU that waits there";
    match &probed.compared {
        Some(Compared::Fits) => {
            findings.ok("machine", name, format!("the QEMU that waits there can take {guest}"));
        }
        Some(Compared::Differs(why)) => findings.bad(
            "machine",
            Level::Error,
            name,
            format!("the QEMU that waits there can't take {guest}: {why}"),
            "start the QEMU there with the same machine: docs/qemu.md has the table of what is \
             compared",
        ),
        Some(Compared::Unknown(why)) => {
            findings.note("machine", name, format!("{not_compared}: {why}"));
        }
        // It was reported already that the guest is not admitted there.
        None if probed.refusal.is_some() => {}
        None => {
            findings.note("machine", name, format!("{not_compared}: its vmferry is too old"));
        }
    }
}

fn look_at_host(
    name: &str,
    theirs: &HostFacts,
    ours: &HostFacts,
    guest: Option<&Guest>,
    findings: &mut Findings,
) {
    if *theirs == HostFacts::default() {
        findings.note("other-host", name, "reports nothing about itself to this host");
        return;
    }
    if let Some(release) = &theirs.release {
        let kernel = theirs.kernel.as_deref().unwrap_or("unknown");
        findings.ok("other-host", name, format!("runs vmferry {release} on Linux {kernel}"));
    }
    if theirs.kvm == Some(false) {
        let needed = guest.and_then(|guest| guest.on_kvm) == Some(true);
        findings.bad(
            "kvm",
            if needed { Level::Error } else { Level::Warning },
            name,
            "can't run guests on KVM",
            "load kvm_intel or kvm_amd there, and let the receiver's user open /dev/kvm",
        );
    }
    if theirs.journals_on_disk == Some(false) {
        findings.bad(
            "journals",
            Level::Warning,
            name,
            "keeps its journals in memory (tmpfs): after a reboot it would not know which host has \
             a guest",
            "set its receiver's VMFERRY_STATE_DIR to a directory on a disk",
        );
    }
    look_at_processors(name, theirs, ours, guest, findings);
    if let Some(guest) = guest {
        // A guest on huge pages here is expected to use huge pages there, although it need not.
        match guest.memory_kind {
            Some(MemoryKind::Hugetlb) => {
                look_for_room(theirs, name, guest.memory_bytes, MemoryKind::Hugetlb, findings);
            }
            Some(_) => {
                look_for_room(theirs, name, guest.memory_bytes, MemoryKind::Private, findings);
            }
            None => look_for_any_room(theirs, name, guest.memory_bytes, findings),
        }
    }
    if let (Some(ours), Some(theirs)) = (&ours.congestion_control, &theirs.congestion_control)
        && ours != theirs
    {
        findings.note(
            "congestion-control",
            name,
            format!(
                "uses {theirs} for TCP, and this host {ours}: throughput may differ between the \
                 two directions"
            ),
        );
    }
}

/// Whether a guest may run there before all its pages have arrived. The daemon's rights say nothing
/// about it: libvirt starts the QEMU.
fn look_at_post_copy(
    name: &str,
    theirs: &HostFacts,
    guest: Option<&Guest>,
    findings: &mut Findings,
) {
    // QEMU handles the missing pages of a carried guest itself.
    let needed = match guest {
        Some(guest) if guest.is_carried => "; the user of the QEMU there needs the same right",
        _ => "",
    };
    match (theirs.post_copy, &theirs.no_post_copy) {
        (Some(true), _) => findings.ok(
            "post-copy",
            name,
            format!("its receiver may use userfaultfd for the kernel's faults{needed}"),
        ),
        (Some(false), why) => findings.bad(
            "post-copy",
            Level::Note,
            name,
            why.as_deref().unwrap_or("its receiver may not use userfaultfd"),
            format!("without it guests arrive there with pre-copy only{needed}"),
        ),
        (None, _) => {}
    }
}

fn look_at_processors(
    name: &str,
    theirs: &HostFacts,
    ours: &HostFacts,
    guest: Option<&Guest>,
    findings: &mut Findings,
) {
    let missing = ours.cpu_flags_missing_at(theirs);
    let model = |host: &HostFacts| host.cpu_model.clone().unwrap_or_else(|| "unknown".into());
    let same_vendor = ours.cpu_vendor == theirs.cpu_vendor;
    if missing.is_empty() && same_vendor {
        findings.ok(
            "processor",
            name,
            format!("has all features of this host's processor ({})", model(theirs)),
        );
        return;
    }
    let named: Vec<&str> = missing.iter().take(NAMED_FLAGS).map(String::as_str).collect();
    let more = missing.len().saturating_sub(NAMED_FLAGS);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    let lacks = if missing.is_empty() {
        String::new()
    } else {
        format!(", and lacks {}{more}", named.join(" "))
    };
    let why = format!("has {}, this host {}{lacks}", model(theirs), model(ours));
    match guest.and_then(|guest| guest.cpu_model.as_ref()) {
        Some(model) => findings.note(
            "processor",
            name,
            format!("{why}; the guest sees the CPU model {model}, which both must support"),
        ),
        None => findings.bad(
            "processor",
            Level::Warning,
            name,
            format!("{why}: a guest that uses a missing feature crashes there"),
            "move between equal processors, or give a QEMU guest a CPU model that both have \
             (`-cpu`)",
        ),
    }
}

fn look_at_clock(name: &str, link: &LinkFigures, skew: Duration, findings: &mut Findings) {
    let ms = link.clock_ahead_ms;
    let direction = if ms < 0.0 { "behind" } else { "ahead" };
    let why = if ms.abs() < 10.0 {
        "its clock agrees with this host's within 10 ms".to_owned()
    } else {
        format!("its clock is {:.2} s {direction}", ms.abs() / 1e3)
    };
    let remedy = "synchronize both clocks (NTP)";
    if ms.abs() > skew.as_secs_f64() * 1e3 {
        let why = format!("{why}, more than --clock-skew allows for certificates");
        findings.bad("clock", Level::Error, name, why, remedy);
    } else if ms.abs() > SAME_CLOCK_MS + link.round_trip_ms {
        let why =
            format!("{why}: the times in the hosts' logs differ, and a guest's clock may jump");
        findings.bad("clock", Level::Warning, name, why, remedy);
    } else {
        findings.ok("clock", name, why);
    }
}

fn look_at_link(
    to: &str,
    link: &LinkFigures,
    loaded: bool,
    guest: Option<&Guest>,
    findings: &mut Findings,
) {
    findings.ok("round-trip", to, format!("{:.2} ms", link.round_trip_ms));
    if !loaded {
        return;
    }
    let rate = link.bytes_per_s();
    let mut why = format!("one channel carries {:.1} MB/s", rate / 1e6);
    if let Some(guest) = guest {
        let seconds = guest.memory_bytes as f64 / rate.max(1.0);
        why.push_str(&format!(
            ": the guest's {} take up to {seconds:.0} s uncompressed; `vmferry estimate` measures \
             what it writes",
            ByteSize(guest.memory_bytes)
        ));
    }
    findings.ok("throughput", to, why);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(clock_ahead_ms: f64) -> LinkFigures {
        LinkFigures { round_trip_ms: 1.0, clock_ahead_ms, bytes: 1_000_000, load_ms: 101.0 }
    }

    #[test]
    fn clock_difference_is_a_warning_and_beyond_the_skew_an_error() {
        let level = |ms| {
            let mut findings = Findings::default();
            look_at_clock("b", &link(ms), Duration::from_secs(300), &mut findings);
            (findings.worst(), findings.0[0].why.clone())
        };
        assert_eq!(level(-3.0).0, Level::Ok);
        assert_eq!(level(900.0).0, Level::Ok);
        let (warned, why) = level(-5000.0);
        assert!(warned == Level::Warning && why.contains("5.00 s behind"), "{why}");
        assert_eq!(level(400_000.0).0, Level::Error);
    }

    #[test]
    fn processors_names_missing_features() {
        let host = |flags: &[&str]| HostFacts {
            cpu_vendor: Some("x".into()),
            cpu_flags: flags.iter().map(|flag| (*flag).to_owned()).collect(),
            ..HostFacts::default()
        };
        let mut findings = Findings::default();
        look_at_processors("b", &host(&["avx"]), &host(&["avx", "avx512f"]), None, &mut findings);
        assert!(findings.0[0].why.contains("lacks avx512f"), "{findings:?}");
        assert_eq!(findings.worst(), Level::Warning);
        let mut findings = Findings::default();
        look_at_processors("b", &host(&["avx", "sse"]), &host(&["avx"]), None, &mut findings);
        assert_eq!(findings.worst(), Level::Ok);
    }

    #[test]
    fn post_copy_is_a_note_with_the_reason_if_the_receiver_may_not() {
        let look = |post_copy, no_post_copy: Option<&str>| {
            let mut findings = Findings::default();
            let no_post_copy = no_post_copy.map(str::to_owned);
            let host = HostFacts { post_copy, no_post_copy, ..HostFacts::default() };
            look_at_post_copy("b", &host, None, &mut findings);
            findings.0.pop().map(|found| (found.level, found.why))
        };
        assert_eq!(look(None, None), None);
        assert_eq!(look(Some(true), None).unwrap().0, Level::Ok);
        assert_eq!(look(Some(false), Some("no")), Some((Level::Note, "no".into())));
    }

    #[test]
    fn throughput_excludes_the_round_trip() {
        // 1 MB in 100 ms, and then 1 ms for the answer.
        assert!((link(0.0).bytes_per_s() - 10e6).abs() < 1.0);
    }
}
