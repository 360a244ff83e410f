//! Checks of the guest to move: its state, and whether it can be attached or must be carried.

use std::path::Path;

use bytesize::ByteSize;
use vmferry::chain;
use vmferry::vmm::streamed::StreamedVm;
use vmferry::{GuestDescription, SourceVm};
use vmferry_control::{Request, call};
use vmferry_memory::MemoryKind;
use vmferry_qemu::{Mode, Reached};
use vmferry_wire::GuestIdentity;

use super::{Findings, Level};
use crate::commands::socket;
use crate::exit::Failure;

/// The properties of a guest that its destination must match.
pub struct Guest {
    /// Its name and UUID.
    pub identity: GuestIdentity,
    /// Size of its memory.
    pub memory_bytes: u64,
    /// Kind of its memory here, if known. For a QEMU guest, the destination's QEMU decides.
    pub memory_kind: Option<MemoryKind>,
    /// Whether it runs on KVM here, if known.
    pub on_kvm: Option<bool>,
    /// Its CPU model, such as `qemu64`; `None` if it sees the host's.
    pub cpu_model: Option<String>,
    /// Whether it is a QEMU's that can't be attached, so that QEMU itself handles missing pages.
    pub is_carried: bool,
    /// What a migration would tell the other host's VMM about it, if this process can read it.
    pub machine: Option<GuestDescription>,
}

/// Checks a guest of the built-in VMM.
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
            format!("`vmferry status {name}` shows it, `vmferry cancel {name}` cancels it"),
        );
    } else if phase == "running" {
        let memory = ByteSize(memory_bytes);
        findings.ok("guest", object, format!("runs on {}, with {memory}", text("guest")));
    } else {
        findings.bad(
            "guest",
            Level::Error,
            object,
            format!("is {phase}, and only a running guest can be sent"),
            format!("`vmferry resume {name}`"),
        );
    }
    Ok(Some(Guest {
        identity,
        memory_bytes,
        memory_kind: text("memory_kind").parse().ok(),
        on_kvm: Some(text("guest") == "kvm"),
        cpu_model: None,
        is_carried: false,
        machine: None,
    }))
}

/// Checks a QEMU and its guest.
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
                "correct this first, no guest can be sent from this QEMU until then: the \
                 operations guide explains each message",
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
                    "QEMU {version} ({kind}) can't be attached, so its guest is carried, which \
                     costs more: {why}"
                ),
                "change its command line accordingly before its next start",
            );
            if source.must_stand_still() {
                findings.bad(
                    "qemu",
                    Level::Warning,
                    &object,
                    format!(
                        "QEMU {version} without KVM loses writes during its migration, so the \
                         guest is paused for all of it"
                    ),
                    "use KVM, make it attachable, or allow the pause with --when-stuck switch-over",
                );
            }
        }
    }
    let bitmaps = match &reached {
        Reached::Attached(source) => source.ending_bitmaps(),
        Reached::Carried { source, .. } => source.ending_bitmaps(),
    };
    if !bitmaps.is_empty() {
        findings.bad(
            "bitmaps",
            Level::Warning,
            &object,
            format!("dirty bitmaps that are not persistent are not moved: {}", bitmaps.join(", ")),
            "expect a full backup at the destination, or make them persistent in a qcow2 image",
        );
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
    let is_carried = matches!(reached, Reached::Carried { .. });
    let post_copy = match &mut reached {
        Reached::Attached(source) => source.may_use_post_copy().map_err(|error| chain(&error)),
        Reached::Carried { source, .. } => {
            let allowed = source.allow_post_copy().map_err(|error| chain(error.as_ref()));
            source.forbid_post_copy();
            allowed
        }
    };
    match post_copy {
        Ok(()) => findings.ok("post-copy", &object, "its guest can be sent with --post-copy"),
        Err(error) => {
            findings.note("post-copy", &object, format!("--post-copy does not work: {error}"));
        }
    }
    let (machine, memory_bytes, description) = match &reached {
        Reached::Attached(source) => {
            let bytes = source.ram().carried().map(|block| block.bytes).sum();
            (source.machine(), bytes, source.describe())
        }
        Reached::Carried { source, .. } => {
            (source.machine(), source.memory_bytes(), source.describe())
        }
    };
    let identity = description.identity.clone();
    if identity.uuid.is_nil() {
        findings.bad(
            "identity",
            Level::Warning,
            &object,
            "this QEMU has no UUID: only its name distinguishes it from other guests",
            "start it with `-uuid`",
        );
    }
    let cpu_model = machine.cpu.clone().filter(|model| model != "host" && model != "max");
    let machine = Some(description);
    Some(Guest {
        identity,
        memory_bytes,
        memory_kind: None,
        on_kvm: None,
        cpu_model,
        is_carried,
        machine,
    })
}
