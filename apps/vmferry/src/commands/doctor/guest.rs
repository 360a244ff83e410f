//! The guest to move: its state, and whether it can be attached or is carried.

use std::path::Path;

use bytesize::ByteSize;
use vmferry::chain;
use vmferry::vmm::streamed::StreamedVm;
use vmferry_control::{Request, call};
use vmferry_memory::MemoryKind;
use vmferry_qemu::{Mode, Reached};
use vmferry_wire::GuestIdentity;

use super::{Findings, Level};
use crate::commands::socket;
use crate::exit::Failure;

/// A guest, as far as it matters to the host that it goes to.
pub struct Guest {
    /// Who it is.
    pub identity: GuestIdentity,
    /// Its memory.
    pub memory_bytes: u64,
    /// What its memory is made of here, if that is known: a QEMU's destination decides for itself.
    pub memory_kind: Option<MemoryKind>,
    /// Whether it runs on KVM here, if that is known.
    pub on_kvm: Option<bool>,
    /// Its CPU model, such as `qemu64`; none for one that sees the host's.
    pub cpu_model: Option<String>,
}

/// A guest of vmferry's own VMM.
pub fn own(name: &str, findings: &mut Findings) -> Result<Option<Guest>, Failure> {
    let status = call(&socket(name)?, &Request::Status, &mut |_| {})?;
    let text = |member: &str| status[member].as_str().unwrap_or_default().to_owned();
    let identity =
        GuestIdentity { uuid: text("uuid").parse().unwrap_or_default(), name: text("name") };
    let memory_bytes = status["memory_bytes"].as_u64().unwrap_or(0);
    let (object, phase) = (format!("guest {name}"), text("phase"));
    if !status["migration"].is_null() {
        findings.bad(
            "guest",
            Level::Error,
            object,
            "is being migrated",
            format!("`vmferry status {name}` shows it, `vmferry cancel {name}` ends it"),
        );
    } else if phase == "running" {
        let memory = ByteSize(memory_bytes);
        findings.ok("guest", object, format!("runs on {}, with {memory}", text("guest")));
    } else {
        findings.bad(
            "guest",
            Level::Error,
            object,
            format!("is {phase}, and only one that runs is sent"),
            format!("`vmferry resume {name}`"),
        );
    }
    Ok(Some(Guest {
        identity,
        memory_bytes,
        memory_kind: text("memory_kind").parse().ok(),
        on_kvm: Some(text("guest") == "kvm"),
        cpu_model: None,
    }))
}

/// The guest of a QEMU.
pub fn of_qemu(qmp: &Path, findings: &mut Findings) -> Option<Guest> {
    let object = qmp.display().to_string();
    let mut reached = match Reached::by(qmp, Mode::Auto, 0) {
        Ok(reached) => reached,
        Err(error) => {
            findings.bad(
                "qemu",
                Level::Error,
                object,
                chain(&error),
                "no guest can be sent from this QEMU before that is mended: the operations guide \
                 has each message",
            );
            return None;
        }
    };
    match &reached {
        Reached::Attached(source) => findings.ok(
            "qemu",
            &object,
            format!("QEMU {} ({}) can be attached", source.version(), source.machine().kind),
        ),
        Reached::Carried { source, why } => {
            let (version, kind) = (source.version(), &source.machine().kind);
            let why = why.as_ref().map_or_else(String::new, |why| chain(why));
            findings.bad(
                "qemu",
                Level::Warning,
                &object,
                format!(
                    "QEMU {version} ({kind}) can't be attached, and is carried, which costs more: \
                     {why}"
                ),
                "change its command line as it says, at its next start",
            );
            if source.must_stand_still() {
                findings.bad(
                    "qemu",
                    Level::Warning,
                    &object,
                    format!(
                        "QEMU {version} without KVM would lose writes: the guest is paused \
                         meanwhile"
                    ),
                    "use KVM, let it be attached, or allow it with --when-stuck switch-over",
                );
            }
        }
    }
    let throttling = match &mut reached {
        Reached::Attached(source) => source.allow_throttling().map_err(|error| chain(&error)),
        Reached::Carried { source, .. } => {
            source.allow_throttling(1).map_err(|error| chain(error.as_ref()))
        }
    };
    match throttling {
        Ok(()) => findings.ok("throttle", &object, "its vCPUs can be throttled"),
        Err(error) => {
            findings.note("throttle", &object, format!("--throttle does not work: {error}"))
        }
    }
    let (identity, memory_bytes, machine) = match &reached {
        Reached::Attached(source) => {
            let bytes = source.ram().carried().map(|block| block.bytes).sum();
            (source.identity().clone(), bytes, source.machine())
        }
        Reached::Carried { source, .. } => {
            (source.identity().clone(), source.memory_bytes(), source.machine())
        }
    };
    if identity.uuid.is_nil() {
        findings.bad(
            "identity",
            Level::Warning,
            &object,
            "this QEMU has no UUID: it is told from others by its name alone",
            "start it with `-uuid`",
        );
    }
    let cpu_model = machine.cpu.clone().filter(|model| model != "host" && model != "max");
    Some(Guest { identity, memory_bytes, memory_kind: None, on_kvm: None, cpu_model })
}
