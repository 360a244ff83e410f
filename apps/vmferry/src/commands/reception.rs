//! Listening for guests as the options describe it, and the events of a reception.

use std::path::PathBuf;
use std::sync::Arc;

use serde_json::json;
use vmferry::DestinationConfig;
use vmferry::config::policy::{Admission, Policy};
use vmferry::config::{ProtocolVersions, WorkerCount};
use vmferry::destination::{FetchProgress, Notice, Report};
use vmferry_sandbox::Restrictions;
use vmferry_transport::{Address, Listener, PeerIdentity, RecordingSide};
use vmferry_wire::GuestIdentity;

use super::link::{address, recorder, tls_files};
use crate::args::ReceiveOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::progress::fetch;

/// Reports the listening address and the restrictions in force.
pub fn announce(listener: &Listener, restrictions: &Restrictions, output: &Output) {
    let at = listener.local_address().to_string();
    let event = json!({
        "event": "listening", "address": at, "pid": std::process::id(), "sandbox": restrictions,
    });
    output.event(&event, || format!("waiting for a guest on {at} ({})", restrictions.summary()));
}

/// The engine's configuration for the options.
pub fn config(
    options: &ReceiveOptions,
    journals: PathBuf,
    output: &Output,
) -> Result<DestinationConfig, Failure> {
    let mut config = DestinationConfig::new(journals);
    config.once = options.once;
    let wrong = |error| Failure::of(Code::Usage, error);
    config.workers = options.workers.map(WorkerCount::new).transpose().map_err(wrong)?;
    if let Some(version) = options.protocol {
        config.protocol = ProtocolVersions::new(version..=version).map_err(wrong)?;
    }
    config.host = super::doctor::this_host();
    if let Some(path) = &options.policy {
        let policy = Policy::load(path).map_err(|error| Failure::of(Code::Usage, error))?;
        let output = output.clone();
        policy.tell(move |said| remark("policy", said, &output));
        config.policy = Some(Arc::new(policy));
    }
    if let Some(name) = options.expect_source.clone() {
        config.policy = Some(Arc::new(OneSource { name, inner: config.policy.take() }));
    }
    Ok(config)
}

/// Admits one source, as far as another policy does.
#[derive(Debug)]
struct OneSource {
    /// The first name in its certificate.
    name: String,
    inner: Option<Arc<dyn Admission>>,
}

impl Admission for OneSource {
    fn check_source(&self, source: &PeerIdentity) -> Result<(), String> {
        if source.names.first() != Some(&self.name) {
            return Err(format!("{source} may not send guests here: {} is expected", self.name));
        }
        self.inner.as_ref().map_or(Ok(()), |inner| inner.check_source(source))
    }

    fn check_guest(&self, source: &PeerIdentity, guest: &GuestIdentity) -> Result<(), String> {
        self.inner.as_ref().map_or(Ok(()), |inner| inner.check_guest(source, guest))
    }
}

/// Reports that changed files were reloaded, or why not.
fn remark(about: &str, said: &str, output: &Output) {
    output.event(&json!({ "event": about, "message": said }), || said.to_owned());
}

/// Listens at the address of `--listen`.
pub fn listen(options: &ReceiveOptions, output: &Output) -> Result<Listener, Failure> {
    // A daemon passes sockets, which have TLS if there are certificates.
    let text = match options.listen.starts_with("passed:") {
        true => options.listen.clone(),
        false => address(&options.listen, &options.tls)?,
    };
    let address: Address = text.parse().map_err(|error| Failure::of(Code::Usage, error))?;
    let tls = match tls_files(&options.tls)? {
        Some(files) => {
            let identity = files.identity()?;
            let output = output.clone();
            identity.on_change(move |said| remark("certificates", said, &output));
            Some(Arc::new(identity))
        }
        None => None,
    };
    let recorder = recorder(&options.record, RecordingSide::Destination, output)?;
    let mut listener = Listener::bind(&address, tls)?;
    if let Some(recorder) = recorder {
        listener.record(recorder);
    }
    Ok(listener)
}

/// For this long every progress of a fetch is a line for people, and then one in ten.
const EVERY_SECOND_MS: f64 = 10e3;

/// Reports an event of the reception.
pub fn tell(notice: &Notice, output: &Output) {
    if let Notice::Session(Report::FetchProgress(progress)) = notice {
        let ms = progress.stats.fetch_ms;
        if output.is_json() || ms < EVERY_SECOND_MS || ms % EVERY_SECOND_MS < 1e3 {
            output.event(notice, || fetch_line(progress));
        }
        return;
    }
    output.event(notice, || match notice {
        Notice::Session(Report::Accepted {
            name, memory_bytes, lanes, protocol, source, ..
        }) => {
            let mib = memory_bytes >> 20;
            let of = source.as_ref().map_or_else(String::new, |source| format!(", from {source}"));
            format!("receiving {name}: {mib} MiB over {lanes} channels, protocol {protocol}{of}")
        }
        Notice::Session(Report::UnknownFields { message, fields }) => {
            format!("the source is newer: ignored unknown fields of its {message}: {fields:?}")
        }
        Notice::Session(Report::LinkLost { channel, reason }) => {
            format!("{channel}: {reason}; waiting for the source to reconnect")
        }
        Notice::Session(Report::LinkRestored { channel, after_ms }) => {
            format!("{channel} is restored after {:.1} s", after_ms / 1e3)
        }
        Notice::Session(Report::Ready) => "ready, waiting for COMMIT".to_owned(),
        Notice::Session(Report::WaitingForWord) => {
            "the link is lost; waiting for the source's decision".to_owned()
        }
        Notice::Session(Report::Running) => "the guest runs here".to_owned(),
        Notice::Session(Report::Fetching { pages }) => format!(
            "{pages} of its pages are still at the source, and are fetched while it runs: keep \
             both hosts running"
        ),
        Notice::Session(Report::FetchProgress(progress)) => fetch_line(progress),
        Notice::Session(Report::Fetched) => {
            "every page has arrived: the source is not needed any more".to_owned()
        }
        Notice::Session(Report::GuestEnded { in_order: true }) => {
            "the guest was ended while it lacked pages: the source is not needed any more"
                .to_owned()
        }
        Notice::Session(Report::GuestEnded { in_order: false }) => {
            "the guest has crashed while it lacked pages, and is lost: its source keeps them until \
             its operator gives the guest up"
                .to_owned()
        }
        Notice::Session(Report::FetchingFailed { reason }) => {
            format!("fetching pages: {reason}")
        }
        Notice::Session(Report::Paused) => {
            "the guest is here, paused as it was at the source".to_owned()
        }
        Notice::Authenticated { peer, names, key_exchange } => {
            let name = names.first().map_or("a certificate without a name", String::as_str);
            let keys = key_exchange.as_deref().unwrap_or("unknown");
            format!("{peer} is {name} (TLS 1.3, key exchange {keys})")
        }
        Notice::TurnedAway { peer, reason } => format!("turned {peer} away: {reason}"),
        Notice::AttemptFailed { reason } => format!("still waiting: {reason}"),
    });
    if matches!(notice, Notice::AttemptFailed { .. }) {
        output.end_of_run();
    }
}

/// The progress of a fetch in one line.
fn fetch_line(progress: &FetchProgress) -> String {
    let progress = json!(progress);
    let link = fetch::link(&progress).map_or_else(String::new, |link| format!("; {link}"));
    format!("the guest {}; {}{link}", fetch::needs(&progress), fetch::waits(&progress))
}
