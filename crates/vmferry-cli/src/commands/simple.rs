//! Commands that are one request: `set`, `cancel`, `pause`, `resume`, `quit`.

use serde_json::Value;
use vmferry_microvm::control::{Request, call};

use super::socket;
use crate::args::{Cap, GuestOption, SetOptions};
use crate::exit::Failure;
use crate::output::Output;

/// `vmferry cancel`.
pub fn cancel(options: &GuestOption, output: &Output) -> Result<(), Failure> {
    request(options, &Request::Cancel {}, output, "the migration is being cancelled")
}

/// `vmferry set`.
pub fn set(options: &SetOptions, output: &Output) -> Result<(), Failure> {
    let Cap(max_bandwidth) = options.max_bandwidth;
    let guest = GuestOption { guest: options.guest.clone() };
    let done = max_bandwidth.map_or_else(
        || "no bandwidth cap any more".to_owned(),
        |cap| format!("at most {}/s from now on", bytesize::ByteSize(cap)),
    );
    request(&guest, &Request::Set { max_bandwidth }, output, &done)
}

/// `vmferry pause`.
pub fn pause(options: &GuestOption, output: &Output) -> Result<(), Failure> {
    request(options, &Request::Pause {}, output, "paused")
}

/// `vmferry resume`.
pub fn resume(options: &GuestOption, output: &Output) -> Result<(), Failure> {
    request(options, &Request::Resume {}, output, "running")
}

/// `vmferry quit`.
pub fn quit(options: &GuestOption, output: &Output) -> Result<(), Failure> {
    request(options, &Request::Quit {}, output, "ended")
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
