//! The helper's process, `vmferry help-daemon`. It is not restricted and reads only from its
//! daemon. It ends with it.

use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use vmferry_control::descriptors::{self, Receiver};

use super::host::Host;
use super::messages::{Ask, Said};
use super::places::{Kind, Place, Places};
use crate::args::HelperOptions;
use crate::commands::daemon::lines;
use crate::exit::{Code, Failure};

/// How long the daemon may take to write a request or to read its answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Serves the daemon at the other end of standard input.
pub fn serve(options: &HelperOptions) -> Result<(), Failure> {
    // It ends when the daemon does.
    crate::signals::ignore()?;
    let daemon = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let host = Arc::new(Host::new(options.config.clone())?);
    serve_all(&daemon, &host, &Arc::default()).map_err(|error| Failure::of(Code::Internal, error))
}

/// Serves requests until the daemon has gone.
///
/// # Errors
/// The daemon has sent anything other than connections, or the system's error.
fn serve_all(daemon: &UnixStream, host: &Arc<Host>, places: &Arc<Places>) -> io::Result<()> {
    while let Some(connection) = next(daemon)? {
        let connection = Arc::new(connection);
        let spawned = places.enter(Kind::Unread).and_then(|place| {
            let (host, places) = (Arc::clone(host), Arc::clone(places));
            let of_thread = Arc::clone(&connection);
            let thread = std::thread::Builder::new().name("request".into());
            let spawned = thread.spawn(move || serve_one(&of_thread, &host, &places, place));
            spawned.map(drop).map_err(|error| error.to_string())
        });
        if let Err(problem) = spawned {
            // The daemon may have closed it.
            let _ = answer(&connection, &Said::Failed(problem), None);
        }
    }
    Ok(())
}

/// The connection of the next request; `None` at the end.
fn next(daemon: &UnixStream) -> io::Result<Option<UnixStream>> {
    let mut receiver = Receiver::new(daemon);
    let mut byte = [0];
    loop {
        match receiver.read(&mut byte) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) => return Ok(None),
            read => {
                read?;
                let connection = receiver.descriptors.pop().map(UnixStream::from);
                let no_connection =
                    || io::Error::other("the daemon has sent a request without a connection");
                return connection.ok_or_else(no_connection).map(Some);
            }
        }
    }
}

fn serve_one(connection: &UnixStream, host: &Host, places: &Arc<Places>, unread: Place) {
    let read = read(connection);
    drop(unread);
    // It is kept until the answer is written.
    let entered = read
        .map_err(|error| format!("the helper can't read the request: {error}"))
        .and_then(|ask| Ok((places.enter(Kind::of(&ask))?, ask)));
    let carried_out = entered.as_ref().map_err(String::clone);
    let carried_out = carried_out.and_then(|(_, ask)| host.carry_out(ask));
    let (said, descriptor) = carried_out.unwrap_or_else(|problem| (Said::Failed(problem), None));
    if answer(connection, &said, descriptor).is_err()
        && let Said::Done { file: Some(file) } = said
    {
        // The daemon has gone, and nobody else removes it.
        host.remove(file);
    }
}

fn read(connection: &UnixStream) -> io::Result<Ask> {
    connection.set_read_timeout(Some(TIMEOUT))?;
    lines::read(&mut BufReader::new(connection))?.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn answer(connection: &UnixStream, said: &Said, descriptor: Option<OwnedFd>) -> io::Result<()> {
    connection.set_write_timeout(Some(TIMEOUT))?;
    let descriptors: Vec<_> = descriptor.into_iter().collect();
    descriptors::send(connection, &lines::line(said)?, &descriptors)
}

#[cfg(test)]
mod tests;
