//! `vmferry send --libvirt`: libvirt moves the guest itself, over the sockets of `vmferry daemon`.
//!
//! `virsh migrate --p2p` runs as a child, and libvirt is asked for statistics meanwhile
//! (docs/decisions/0078).

mod carried;
mod conduct;
mod domain;
mod failure;
mod job;
pub mod managed;
mod options;
mod outcome;
mod peer;
mod releases;
mod service;
mod virsh;
mod watch;

pub use self::domain::Domain;
pub use self::job::JobStats;
pub use self::releases::{Releases, Version};
pub use self::virsh::Virsh;

use std::sync::Arc;
use std::sync::mpsc::channel;

use clap::CommandFactory;
use parking_lot::Mutex;
use serde_json::{Value, json};
use vmferry::config::Limits;
use vmferry_control::{Server, ServerError, Started};

use self::carried::DaemonStreams;
use self::conduct::Conductor;
use self::domain::Whereabouts;
use self::failure::Ended;
use self::options::{Given, migrate_arguments};
use self::peer::PeerDirectory;
use self::service::{Input, LibvirtService};
use self::watch::{PostCopy, Throttling, Watch};
use super::migration::{migrate_request, saved_run, when_stuck};
use super::prepared_directories;
use crate::args::{Arguments, SendOptions};
use crate::exit::{Code, Failure};
use crate::output::Output;
use crate::progress::{JsonEvents, Progress};

/// Moves a guest that libvirt manages.
pub fn run(guest: &str, options: &SendOptions, output: &Output) -> Result<(), Failure> {
    // The parsed options don't say which of them were given.
    let matches = Arguments::command().get_matches();
    let mut chosen_limit = None;
    if let Some(matches) = matches.subcommand_matches("send") {
        let given = Given(matches);
        given.must_mean_something()?;
        chosen_limit = given.has("downtime_limit").then_some(options.migration.downtime_limit);
    }
    must_be_of_this_host(&options.domain.connect)?;
    let virsh = Virsh::new(&options.domain.connect);
    let domain = Domain::find(&virsh, guest)?;
    domain.must_run()?;
    let (guest, uuid) = (&domain.identity, domain.identity.uuid.to_string());
    must_have_no_job(&virsh, &domain, &uuid)?;
    let peer = PeerDirectory::find(&options.domain.daemon_config, &options.to)?;
    let uris = peer.uris(guest.uuid)?;
    let arguments = migrate_arguments(&uuid, &uris, options)?;
    let saved = saved_run(&options.migration)?;
    let directory = prepared_directories()?;
    let request = migrate_request(String::new(), None, &options.migration, false);
    let config = request.source_config(directory.journals());
    let config = config.map_err(|error| Failure::of(Code::Usage, error))?;

    let has_postcopy = options.domain.postcopy;
    let watch = watch_of(options);
    let streams = DaemonStreams::new(peer.base(), &options.to, &uris);
    let (inputs, received) = channel();
    let name = super::qemu::socket_name(guest, None);
    let service = Arc::new(LibvirtService {
        about: domain.about(&name),
        progress: Mutex::new(watch.progress(&JobStats::default(), 0.0)),
        virsh: virsh.clone(),
        uuid: uuid.clone(),
        has_postcopy,
        inputs: inputs.clone(),
    });
    let server = Server::bind(&directory.socket(&name), service.clone());
    let server = server.map_err(|error| match error {
        ServerError::InUse { .. } => Failure::of(Code::Busy, error),
        error => Failure::of(Code::Internal, error),
    })?;
    let on_signal = inputs.clone();
    crate::signals::on_end(move || {
        let _ = on_signal.send(Input::Cancel);
    })?;

    let progress = Progress::new(output, JsonEvents::All, saved);
    let mut started = json!(Started::new(&guest.name, domain.memory_bytes, &options.to, &config));
    describe_streams_and_limits(&mut started, options, &peer);
    progress.event(&started);
    // The completed job of a transient guest is reported by this event only. Without it the
    // statistics are those of the last question.
    let completed = ["event", "--domain", &uuid, "--event", "job-completed"];
    let completed = virsh.start(&completed).ok();
    let mut conductor =
        Conductor::new(&service, &progress, output, &options.migration, watch, &streams);
    conductor.set_downtime_limit(chosen_limit);
    let moved = virsh.start(&arguments).and_then(|migration| {
        let on_end = inputs.clone();
        migration.on_end(move |result| {
            let _ = on_end.send(Input::Ended(result.map(drop)));
        })?;
        conductor.run(&received)
    });
    drop(server);
    match moved {
        Ok(()) => {
            let (watch, origin, total_ms) = conductor.finish(completed);
            let about = json!({
                "guest": guest.name, "uuid": guest.uuid, "peer": options.to,
                "connection": options.domain.connect, "memory_uri": uris.memory,
            });
            let mut stats = outcome::statistics(&watch, origin, total_ms, about);
            stats["compression"] = started["compression"].clone();
            stats["transport"] = json!(peer.transport());
            progress.finish(Ok(&stats));
            output.result(&stats, || outcome::text(&stats));
            Ok(())
        }
        Err(error) => {
            if let Some(mut completed) = completed {
                completed.kill();
            }
            let was_paused = domain.state == "paused";
            let whereabouts = Whereabouts::ask(&virsh, guest.uuid, was_paused);
            let ended = Ended { error, aborted: conductor.abort_reason(), whereabouts };
            let failure = ended.failure(&guest.name, &peer.named(), || streams.failure());
            progress.finish(Err(&failure));
            Err(failure)
        }
    }
}

/// libvirt connects to the sockets of the daemon on its own host.
fn must_be_of_this_host(uri: &str) -> Result<(), Failure> {
    let is_local = match uri.split_once("://") {
        Some((scheme, rest)) => {
            let transport = scheme.split_once('+').map_or("unix", |(_, transport)| transport);
            transport == "unix" && rest.starts_with('/')
        }
        None => false,
    };
    if is_local {
        return Ok(());
    }
    let text = format!(
        "--connect {uri} is not this host's libvirt: give one such as qemu:///system, and run \
         `vmferry send --libvirt` on the guest's host"
    );
    Err(Failure::new(Code::Usage, text))
}

/// An abort would end any other job, so there may be none.
fn must_have_no_job(virsh: &Virsh, domain: &Domain, uuid: &str) -> Result<(), Failure> {
    let text = virsh.run(&["domjobinfo", "--domain", uuid, "--rawstats"])?;
    if !JobStats::parse(&text).is_active {
        return Ok(());
    }
    let name = &domain.identity.name;
    let text = format!(
        "libvirt has another job for the guest {name}, such as a migration, a backup or a save: \
         wait for its end (`virsh domjobinfo {name}`), or abort it with `virsh domjobabort {name}`"
    );
    Err(Failure::new(Code::Busy, text))
}

/// What the options say about the rounds. libvirt does not limit their number.
fn watch_of(options: &SendOptions) -> Watch {
    let domain = &options.domain;
    let postcopy = if domain.postcopy { PostCopy::AfterFirstRound } else { PostCopy::Off };
    let may_throttle = domain.auto_converge || options.migration.throttle > 0;
    let throttling = if may_throttle { Throttling::Allowed } else { Throttling::Off };
    let limits = Limits {
        downtime: options.migration.downtime_limit,
        rounds: u32::MAX,
        time: options.migration.timeout,
        when_stuck: when_stuck(options.migration.when_stuck),
    };
    Watch::new(limits, options.migration.max_bandwidth, postcopy, throttling)
}

/// The daemon decides how streams are packed, and libvirt how many there are. libvirt has no limits
/// for rounds and for a pause that has begun.
fn describe_streams_and_limits(started: &mut Value, options: &SendOptions, peer: &PeerDirectory) {
    let streams = match (options.multifd, options.domain.parallel) {
        (Some(streams), _) => streams,
        // libvirt's default.
        (None, true) => 2,
        (None, false) => 1,
    };
    started["channels"] = json!(streams);
    started["compression"] = json!(peer.compression());
    started["limits"]["downtime_abort_ms"] = Value::Null;
    started["limits"]["max_rounds"] = Value::Null;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_must_be_to_this_host() {
        for uri in ["qemu:///system", "qemu:///session", "qemu+unix:///system?socket=/run/x"] {
            must_be_of_this_host(uri).unwrap();
        }
        for uri in ["qemu+ssh://b/system", "qemu://b/system", "qemu+tls:///system", "system"] {
            let failure = must_be_of_this_host(uri).unwrap_err();
            assert_eq!(failure.code, Code::Usage);
        }
    }
}
