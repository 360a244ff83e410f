//! A migration as options describe it, and by the control socket of a guest's VMM.

use std::time::Duration;

use serde_json::Value;
use vmferry_control::{MigrateRequest, Request, TlsFiles, call};

use crate::args::{MigrationOptions, WhenStuck};
use crate::exit::Failure;
use crate::output::Output;
use crate::progress::Progress;
use crate::saved_run::SavedRun;

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

/// The engine's word for it.
pub fn when_stuck(option: WhenStuck) -> vmferry::config::WhenStuck {
    match option {
        WhenStuck::Refuse => vmferry::config::WhenStuck::Refuse,
        WhenStuck::SwitchOver => vmferry::config::WhenStuck::SwitchOver,
    }
}
