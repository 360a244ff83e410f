//! Orderly termination of a long-running command on SIGINT, SIGTERM or SIGHUP.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

/// Calls `ended` on the first of these signals, from a separate thread.
///
/// # Errors
/// If the handlers can't be installed.
pub fn on_end(ended: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        if signals.forever().next().is_some() {
            ended();
        }
    })?;
    Ok(())
}

/// Calls `signaled` on each of these signals, from a separate thread.
///
/// # Errors
/// If the handlers can't be installed.
pub fn on_each(mut signaled: impl FnMut() + Send + 'static) -> std::io::Result<()> {
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP])?;
    std::thread::Builder::new().name("signals".into()).spawn(move || {
        for _ in signals.forever() {
            signaled();
        }
    })?;
    Ok(())
}

/// Ignores these signals from now on.
///
/// # Errors
/// If the handlers can't be installed.
pub fn ignore() -> std::io::Result<()> {
    for signal in [SIGINT, SIGTERM, SIGHUP] {
        // The handler only sets this flag, which is never read.
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    Ok(())
}
