//! `vmferry send`: moves a running guest.

use std::ops::RangeInclusive;
use std::time::Duration;

use serde_json::Value;
use vmferry::config::PROTOCOL_VERSIONS;
use vmferry_control::{MigrateRequest, RecordRequest, Request, TlsFiles, call};
use vmferry_transport::{Address, Dialer, IdentityFiles, Recorder, RecordingSide};

use super::socket;
use crate::args::{MigrationOptions, RecordOptions, SendOptions, TlsOptions, WhenStuck};
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::progress::Progress;
use crate::saved_run::SavedRun;
use crate::tables::outcome;

/// Asks the guest's VMM to migrate, shows how it goes, and what came of it. While this runs it
/// holds the migration's lease: ended before COMMIT, the guest stays.
pub fn run(options: &SendOptions, output: &Output) -> Result<(), Failure> {
    if let Some(qmp) = &options.qemu {
        return super::qemu::send::run(qmp, options, output);
    }
    super::qemu::hook::must_be_of_a_qemu(&options.hook)?;
    let tls = source_files(options)?;
    let to = address(&options.to, &options.tls)?;
    let mut request = migrate_request(to, tls, &options.migration, options.verify);
    let address: Address = request.to.parse().map_err(|error| Failure::of(Code::Usage, error))?;
    // The VMM writes the files, in a directory of its own.
    if let Some(directory) = &options.record.record {
        let directory = std::path::absolute(directory)?;
        request.record = Some(RecordRequest { directory, limit: options.record.record_limit });
    }
    let socket = socket(options.guest.as_deref().unwrap_or_default())?;
    // A VMM that may be restricted can't look a name up. One of the release before, which does not say what it is, can,
    // and knows no such member.
    if call(&socket, &Request::Status, &mut |_| {})?["release"].is_string() {
        request.addresses = address.look_up()?;
    }
    let saved = saved_run(&options.migration)?;
    let stats = migrate(&socket, request, output, true, saved)?;
    output.result(&stats, || outcome(&stats));
    Ok(())
}

/// The record that the options ask for, if they do.
pub fn saved_run(options: &MigrationOptions) -> Result<Option<SavedRun>, Failure> {
    options.save_run.as_deref().map(SavedRun::create).transpose()
}

/// Migrates by a guest's control socket and shows how it goes, to machines as `events` if they want them, and returns
/// the statistics.
pub fn migrate(
    socket: &std::path::Path,
    request: MigrateRequest,
    output: &Output,
    events: bool,
    saved: Option<SavedRun>,
) -> Result<Value, Failure> {
    let progress = Progress::new(output, events, saved);
    let result = call(socket, &Request::Migrate(Box::new(request)), &mut |event| {
        progress.event(&event);
    });
    let result = result.map_err(Failure::from);
    progress.finish(result.as_ref());
    result
}

/// The request for the options of a migration.
pub fn migrate_request(
    to: String,
    tls: Option<TlsFiles>,
    options: &MigrationOptions,
    verify: bool,
) -> MigrateRequest {
    MigrateRequest {
        to,
        tls,
        addresses: Vec::new(),
        channels: options.channels,
        downtime_limit: options.downtime_limit.max(Duration::from_micros(1)),
        downtime_abort: options.downtime_abort,
        max_bandwidth: options.max_bandwidth,
        max_rounds: options.max_rounds,
        reconnect_timeout: options.reconnect_timeout,
        timeout: options.timeout,
        when_stuck: when_stuck(options.when_stuck),
        pause_before_switchover: options.pause_before_switchover,
        throttle: options.throttle,
        compress: options.compress,
        when_busy: options.when_busy.into(),
        workers: options.workers,
        delta_memory: options.delta_memory,
        free_page_hints: !options.no_free_page_hints,
        verify,
        protocol: options.protocol,
        record: None,
    }
}

/// The versions of the protocol that an option leaves.
pub fn protocol(option: Option<u16>) -> RangeInclusive<u16> {
    option.map_or(PROTOCOL_VERSIONS, |version| version..=version)
}

/// The recorder that the options ask for, if they do.
pub fn recorder(
    options: &RecordOptions,
    side: RecordingSide,
    output: &Output,
) -> Result<Option<Recorder>, Failure> {
    let Some(directory) = &options.record else { return Ok(None) };
    let recorder = Recorder::new(directory, side, options.record_limit)?;
    let output = output.clone();
    recorder.tell(move |said| {
        let event = serde_json::json!({ "event": "recording", "message": said });
        output.event(&event, || said.to_owned());
    });
    Ok(Some(recorder))
}

/// The engine's word for it.
pub fn when_stuck(option: WhenStuck) -> vmferry::convergence::WhenStuck {
    match option {
        WhenStuck::Refuse => vmferry::convergence::WhenStuck::Refuse,
        WhenStuck::SwitchOver => vmferry::convergence::WhenStuck::SwitchOver,
    }
}

/// The way to the destination.
pub fn dialer(to: &str, tls: Option<&TlsFiles>) -> Result<Dialer, Failure> {
    let address: Address = to.parse().map_err(|error| Failure::of(Code::Usage, error))?;
    match tls {
        Some(files) => Ok(files.dialer(address)?),
        None => Ok(Dialer::new(address, None)),
    }
}

/// The files that the options of a source name, and whom it wants to reach.
pub fn source_files(options: &SendOptions) -> Result<Option<TlsFiles>, Failure> {
    let mut files = tls_files(&options.tls)?;
    if let Some(files) = &mut files {
        files.server_name.clone_from(&options.server_name);
        files.destination_id.clone_from(&options.destination_id);
    } else if options.destination_id.is_some() {
        let text = "--destination-id asks for a name in a certificate, and there are none without TLS: add \
                    --tls DIR";
        return Err(Failure::new(Code::Usage, text));
    }
    Ok(files)
}

/// The files that the options name; none if they name none.
pub fn tls_files(options: &TlsOptions) -> Result<Option<TlsFiles>, Failure> {
    // The VMM opens them, in a directory of its own.
    let absolute = |path: &std::path::Path| {
        std::path::absolute(path).map_err(|error| Failure::of(Code::Usage, error))
    };
    let mut files = match (&options.tls, &options.ca, &options.cert, &options.key) {
        (Some(directory), ..) => TlsFiles::in_directory(&absolute(directory)?),
        (None, Some(ca), Some(cert), Some(key)) => {
            IdentityFiles::new(&absolute(ca)?, &absolute(cert)?, &absolute(key)?).into()
        }
        _ if !options.crl.is_empty() => {
            let text = "--crl is about certificates, and there are none without TLS: add --tls DIR";
            return Err(Failure::new(Code::Usage, text));
        }
        _ => return Ok(None),
    };
    files.revocations = options.crl.iter().map(|path| absolute(path)).collect::<Result<_, _>>()?;
    files.clock_skew = Some(options.clock_skew);
    Ok(Some(files))
}

/// An address with its scheme: TLS is what TCP means unless `--plain` says otherwise.
pub fn address(text: &str, options: &TlsOptions) -> Result<String, Failure> {
    const SCHEMES: [&str; 6] = ["tls:", "grpc:", "grpc-ack:", "tcp:", "unix:", "fd:"];
    let scheme = SCHEMES.into_iter().find(|scheme| text.starts_with(scheme));
    let full = match scheme {
        None if options.plain => format!("tcp:{text}"),
        None => format!("tls:{text}"),
        Some(_) => text.to_owned(),
    };
    if full.starts_with("tcp:") && !options.plain {
        let text = "tcp: is neither encrypted nor authenticated: use tls:, or add --plain if \
                    nobody else is on that network";
        return Err(Failure::new(Code::Usage, text));
    }
    let named = options.tls.is_some() || options.ca.is_some();
    let secured =
        ["tls:", "grpc:", "grpc-ack:"].into_iter().find(|scheme| full.starts_with(scheme));
    if let Some(scheme) = secured.filter(|_| !named) {
        let text = format!(
            "{scheme} needs this host's certificate: add --tls DIR, made by `vmferry pki`, or \
             --plain for an unprotected link"
        );
        return Err(Failure::new(Code::Usage, text));
    }
    Ok(full)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(plain: bool, tls: bool) -> TlsOptions {
        TlsOptions {
            tls: tls.then(|| "t".into()),
            ca: None,
            cert: None,
            key: None,
            crl: Vec::new(),
            clock_skew: Duration::ZERO,
            plain,
        }
    }

    #[test]
    fn tcp_means_tls_unless_plain_is_said() {
        assert_eq!(address("b:1", &options(false, true)).unwrap(), "tls:b:1");
        assert_eq!(address("b:1", &options(true, false)).unwrap(), "tcp:b:1");
        assert_eq!(address("unix:/x", &options(false, false)).unwrap(), "unix:/x");
        assert_eq!(address("fd:3,4", &options(false, false)).unwrap(), "fd:3,4");
        assert_eq!(address("grpc-ack:b:1", &options(false, true)).unwrap(), "grpc-ack:b:1");
        assert!(address("grpc:b:1", &options(true, false)).is_err());
        assert!(address("tcp:b:1", &options(false, true)).is_err());
        let error = address("b:1", &options(false, false)).unwrap_err();
        assert_eq!(error.code, Code::Usage);
    }
}
