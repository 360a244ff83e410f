//! Commands that are one request: `cancel`, `pause`, `resume`, `quit`.

use serde_json::Value;
use vmferry_microvm::control::{Request, call};

use super::socket;
use crate::args::GuestOption;
use crate::exit::Failure;
use crate::output::Output;

/// `vmferry cancel`.
pub fn cancel(options: &GuestOption, output: &Output) -> Result<(), Failure> {
    request(options, &Request::Cancel {}, output, "the migration is being cancelled")
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
