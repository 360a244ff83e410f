//! Gives up a guest that runs here and lacks pages of a host that is lost.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bytesize::ByteSize;
use serde_json::{Value, json};
use vmferry::destination::record_fetched;
use vmferry_control::{Directories, Request, call};
use vmferry_handover::journal::{self, JournalError, SessionSummary, Side};
use vmferry_qemu::Arrived;

use super::memory::{self, Directory, LIST, Saved};
use super::process::Process;
use super::{confirm, in_use, internal};
use crate::args::ResolveOptions;
use crate::commands::status::{began, guest_name, peer};
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::progress::fetch;

/// How long the receiver may take to note that its guest has ended.
const NOTED: Duration = Duration::from_secs(10);

/// Pause between looks at the journal.
const LOOK_PERIOD: Duration = Duration::from_millis(50);

/// The VMM of a guest that lacks pages.
pub enum Vmm {
    /// A QEMU, which may have outlived its receiver.
    Qemu(Box<Arrived>),
    /// The VMM of `vmferry run`, by its process.
    Microvm(u32),
}

impl Vmm {
    /// Finds the VMM of a session's guest. `None` if it has ended.
    pub fn of(directory: &Directories, session: &SessionSummary) -> Option<Self> {
        if let Ok(Some(arrived)) = Arrived::of(&directory.journals(), session.session) {
            return Some(Self::Qemu(Box::new(arrived)));
        }
        let status = status(directory, session)?;
        if status["guest"] == "qemu" {
            return None;
        }
        Some(Self::Microvm(u32::try_from(status["pid"].as_u64()?).ok()?))
    }

    fn pid(&self) -> u32 {
        match self {
            Self::Qemu(arrived) => arrived.pid(),
            Self::Microvm(pid) => *pid,
        }
    }

    fn words(&self) -> String {
        match self {
            Self::Qemu(_) => format!("in QEMU process {}", self.pid()),
            Self::Microvm(pid) => format!("in process {pid}"),
        }
    }
}

/// What the guest's control socket says while the guest fetches.
fn status(directory: &Directories, session: &SessionSummary) -> Option<Value> {
    let status = call(&directory.socket(guest_name(session)?), &Request::Status, &mut |_| {});
    let status = status.ok()?;
    let is_its =
        status["uuid"].as_str() == session.guest().map(|it| it.uuid.to_string()).as_deref();
    (is_its && !status["fetch"].is_null()).then_some(status)
}

/// Ends the guest, after its memory was saved if that is wanted. Asks for confirmation first.
pub fn give_up(
    directory: &Directories,
    session: &SessionSummary,
    options: &ResolveOptions,
    output: &Output,
) -> Result<(), Failure> {
    let name = guest_name(session).unwrap_or(&options.guest).to_owned();
    let vmm = Vmm::of(directory, session);
    if vmm.is_none() && options.dump.is_some() {
        let text = format!("the VMM of {name} has ended, so there is no memory to save");
        return Err(Failure::new(Code::WrongState, text));
    }
    let create = |path: &PathBuf| Directory::create(path).map_err(|error| usage(&error));
    let dump = options.dump.as_ref().map(create).transpose()?;
    let status = status(directory, session);
    let reminder = remind(&name, session, vmm.as_ref(), status.as_ref(), options.dump.as_deref());
    confirm(&name, &reminder, options.yes, output)?;
    let mut saved = None;
    if let Some(vmm) = &vmm {
        let failed = |error: anyhow::Error| {
            let text = format!("{name} was not ended: {error:#}");
            Failure::new(Code::Internal, text)
        };
        let process = Process::find(vmm.pid()).map_err(failed)?;
        // The PID may have passed to another process before the descriptor was there.
        let is_its = Vmm::of(directory, session).is_some_and(|again| again.pid() == vmm.pid());
        if is_its {
            if let Some(dump) = dump {
                let stopped = process.stop().map_err(failed)?;
                saved = Some(save(dump, vmm, session, output).map_err(failed)?);
                drop(stopped);
            }
            process.end(matches!(vmm, Vmm::Qemu(_))).map_err(failed)?;
        }
    }
    note(directory, session)?;
    let result = json!({
        "ok": true, "given_up": true, "session": session.session,
        "dump": options.dump.as_ref().filter(|_| saved.is_some()),
        "dumped_bytes": saved.as_ref().map(|saved| saved.bytes),
        "absent_pages": saved.as_ref().map(|saved| saved.absent_pages),
    });
    output.result(&result, || {
        let mut text = format!("{name}: ended and given up, as you decided");
        if let (Some(saved), Some(path)) = (&saved, &options.dump) {
            text.push_str(&format!(
                ". {} of its memory are in {}; {} pages were not here ({LIST} lists them)",
                ByteSize(saved.bytes),
                path.display(),
                saved.absent_pages
            ));
        }
        text
    });
    Ok(())
}

fn usage(error: &anyhow::Error) -> Failure {
    Failure::new(Code::Usage, format!("{error:#}"))
}

fn save(
    directory: Directory,
    vmm: &Vmm,
    session: &SessionSummary,
    output: &Output,
) -> anyhow::Result<Saved> {
    let about = json!({
        "guest": session.guest(), "session": session.session, "source": peer(session),
    });
    let saved = memory::save(vmm.pid(), &directory, &about, &mut |bytes, of| {
        let event = json!({ "event": "dump-progress", "bytes": bytes, "of_bytes": of });
        output.event(&event, || format!("saved {} of {}", ByteSize(bytes), ByteSize(of)));
    })?;
    directory.keep();
    Ok(saved)
}

/// What the operator must do first, and what is lost.
fn remind(
    name: &str,
    session: &SessionSummary,
    vmm: Option<&Vmm>,
    status: Option<&Value>,
    dump: Option<&Path>,
) -> String {
    let of = peer(session).unwrap_or("another host");
    let mut text = format!("session {} of {name}, begun {}: ", session.session, began(session));
    let Some(vmm) = vmm else {
        text.push_str(&format!(
            "{name} has run here while it lacked pages of {of}, and its VMM has ended, so {name} \
             is lost. Giving up notes here that it needs no pages any more, so that {of} frees \
             them when it asks. It can only be started again from its disks."
        ));
        return text;
    };
    let fetching = status.map(|status| &status["fetch"]);
    text.push_str(&match fetching {
        Some(fetching) => format!("{name} runs here {}, {}", vmm.words(), fetch::needs(fetching)),
        None => format!(
            "{name} runs here {}, and may lack pages of {of}; no vmferry fetches them now",
            vmm.words()
        ),
    });
    match fetching.map(|fetching| (fetch::link(fetching), &fetching["link_lost_ms"])) {
        Some((Some(link), lost)) if !lost.is_null() => text.push_str(&format!("; {link}")),
        Some(_) => text.push_str(". NOTE that the other host answers: wait instead of giving up"),
        None => text.push_str(
            ": the same `vmferry receive` as before goes on, and the guest with it, if the other \
             host lives",
        ),
    }
    let saved = match dump {
        Some(path) => format!(
            "what is here of its memory is saved in {}, and nothing can run from that",
            path.display()
        ),
        None => "everything in its memory is gone".into(),
    };
    text.push_str(&format!(
        ". FIRST make sure that the memory of the other host is lost for good: it was rebooted or \
         powered off, or the VMM of {name} there has ended. Giving up ends {name} here: what it \
         had written to its disks stays, {saved}, and it can only be started again from its disks."
    ));
    text
}

/// Waits until the receiver has noted that nothing of the source is needed, or notes it if that has
/// died.
fn note(directory: &Directories, session: &SessionSummary) -> Result<(), Failure> {
    let (journals, until) = (directory.journals(), Instant::now() + NOTED);
    loop {
        match record_fetched(&journals, session.session) {
            Err(JournalError::InUse { .. }) => {
                let records = journal::read(&journals, session.session, Side::Destination);
                let records = records.map_err(internal)?;
                let now = SessionSummary::new(session.session, Side::Destination, records, true);
                if !now.lacks_pages() {
                    return Ok(());
                }
                if Instant::now() >= until {
                    return Err(in_use(session));
                }
                // Nothing tells when another process has written its journal.
                std::thread::sleep(LOOK_PERIOD);
            }
            recorded => return recorded.map_err(internal),
        }
    }
}
