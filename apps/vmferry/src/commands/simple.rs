//! Commands that are one request: `set`, `switch-over`, `cancel`, `pause`, `resume`, `quit`.

use std::time::Duration;

use serde_json::Value;
use vmferry::config::PostCopy;
use vmferry_control::{ChangeRequest, Request, call};

use super::socket;
use crate::args::{Cap, GuestOption, SetOptions};
use crate::exit::Failure;
use crate::output::Output;

/// `vmferry cancel`.
pub fn cancel(options: &GuestOption, output: &Output) -> Result<(), Failure> {
    request(options, &Request::Cancel, output, "the migration is being cancelled")
}

/// `vmferry set`.
pub fn set(options: &SetOptions, output: &Output) -> Result<(), Failure> {
    let guest = GuestOption { guest: options.guest.clone() };
    let change = ChangeRequest {
        max_bandwidth: options.max_bandwidth.map(|Cap(cap)| cap),
        downtime_limit: options.downtime_limit.map(|limit| limit.max(Duration::from_micros(1))),
        max_rounds: options.max_rounds,
        throttle: options.throttle,
        post_copy: options.post_copy.map(Into::into),
    };
    let done = [
        change.max_bandwidth.map(|cap| {
            let capped = |cap| format!("at most {}/s", bytesize::ByteSize(cap));
            cap.map_or_else(|| "no bandwidth cap".to_owned(), capped)
        }),
        change.downtime_limit.map(|limit| format!("a downtime of up to {limit:?}")),
        change.max_rounds.map(|rounds| format!("up to {rounds} rounds")),
        change.throttle.map(|percent| format!("vCPUs throttled by up to {percent} %")),
        change.post_copy.map(|policy| match policy {
            PostCopy::Never => "no post-copy".to_owned(),
            PostCopy::Auto => "post-copy if the rounds do not converge".to_owned(),
            PostCopy::Now => "post-copy after the round in progress".to_owned(),
        }),
    ];
    let done: Vec<String> = done.into_iter().flatten().collect();
    request(&guest, &Request::Change(change), output, &format!("{} from now on", done.join(", ")))
}

/// `vmferry switch-over`.
pub fn switch_over(options: &GuestOption, output: &Output) -> Result<(), Failure> {
    request(
        options,
        &Request::SwitchOver,
        output,
        "switches over as soon as the rest fits the downtime limit",
    )
}

/// `vmferry pause`.
pub fn pause(options: &GuestOption, output: &Output) -> Result<(), Failure> {
    request(options, &Request::Pause, output, "paused")
}

/// `vmferry resume`.
pub fn resume(options: &GuestOption, output: &Output) -> Result<(), Failure> {
    request(options, &Request::Resume, output, "running")
}

/// `vmferry quit`.
pub fn quit(options: &GuestOption, output: &Output) -> Result<(), Failure> {
    request(options, &Request::Quit, output, "ended")
}

fn request(
    options: &GuestOption,
    request: &Request,
    output: &Output,
    done: &str,
) -> Result<(), Failure> {
    let value: Value = call(&socket(&options.guest)?, request, &mut |_| {})?;
    output.result(&value, || format!("{}: {done}", options.guest));
    Ok(())
}
