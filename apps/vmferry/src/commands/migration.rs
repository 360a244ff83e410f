//! A migration as the options describe it, run through the control socket of a guest's VMM.

use std::time::Duration;

use serde_json::Value;
use vmferry_control::{MigrateRequest, Request, TlsFiles, call};

use crate::args::{MigrationOptions, WhenStuck};
use crate::exit::Failure;
use crate::output::Output;
use crate::progress::{JsonEvents, Progress};
use crate::saved_run::SavedRun;

/// The record for `--save-run`, if it is given.
pub fn saved_run(options: &MigrationOptions) -> Result<Option<SavedRun>, Failure> {
    options.save_run.as_deref().map(SavedRun::create).transpose()
}

/// Migrates through a guest's control socket, shows the progress, and returns the statistics.
pub fn migrate(
    socket: &std::path::Path,
    request: MigrateRequest,
    output: &Output,
    json_events: JsonEvents,
    saved: Option<SavedRun>,
) -> Result<Value, Failure> {
    let progress = Progress::new(output, json_events, saved);
    let result = call(socket, &Request::Migrate(Box::new(request)), &mut |event| {
        progress.event(&event);
    });
    let result = result.map_err(Failure::from);
    progress.finish(result.as_ref());
    result
}

/// The request that the options of a migration describe.
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
        post_copy: options.post_copy.into(),
        pause_before_switchover: options.pause_before_switchover,
        throttle: options.throttle,
        compress: options.compress,
        when_busy: options.when_busy.into(),
        workers: options.workers,
        delta_memory: options.delta_memory,
        free_page_hints: !options.no_free_page_hints,
        verify,
        protocol: options.protocol,
        witness: None,
        record: None,
    }
}

/// The engine's value for the option.
pub fn when_stuck(option: WhenStuck) -> vmferry::config::WhenStuck {
    match option {
        WhenStuck::Refuse => vmferry::config::WhenStuck::Refuse,
        WhenStuck::SwitchOver => vmferry::config::WhenStuck::SwitchOver,
        WhenStuck::PostCopy => vmferry::config::WhenStuck::PostCopy,
    }
}
