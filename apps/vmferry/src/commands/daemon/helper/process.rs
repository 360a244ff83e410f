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
use crate::args::HelperOptions;
use crate::commands::daemon::lines;
use crate::exit::{Code, Failure};

/// The most requests at a time. Each has a thread, and `virsh` may take 40 s.
const MAX_REQUESTS: usize = 256;

/// How long the daemon may take to write a request or to read its answer.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Serves the daemon at the other end of standard input.
pub fn serve(options: &HelperOptions) -> Result<(), Failure> {
    // It ends when the daemon does.
    crate::signals::ignore()?;
    let daemon = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let host = Arc::new(Host::new(options.config.clone())?);
    serve_all(&daemon, &host).map_err(|error| Failure::of(Code::Internal, error))
}

/// Serves requests until the daemon has gone.
///
/// # Errors
/// The daemon has sent anything other than connections, or the system's error.
fn serve_all(daemon: &UnixStream, host: &Arc<Host>) -> io::Result<()> {
    let count = Arc::new(());
    while let Some(connection) = next(daemon)? {
        let is_full = Arc::strong_count(&count) > MAX_REQUESTS;
        let (host, place) = (Arc::clone(host), Arc::clone(&count));
        let connection = Arc::new(connection);
        let of_thread = Arc::clone(&connection);
        let spawned = match is_full {
            true => Err(io::Error::other(format!("{MAX_REQUESTS} requests are being served"))),
            false => std::thread::Builder::new().name("request".into()).spawn(move || {
                serve_one(&of_thread, &host);
                drop(place);
            }),
        };
        if let Err(error) = spawned {
            // The daemon may have closed it.
            let _ = answer(&connection, &Said::Failed(error.to_string()), None);
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

fn serve_one(connection: &UnixStream, host: &Host) {
    let (said, descriptor) = match read(connection) {
        Ok(ask) => host.carry_out(&ask).unwrap_or_else(|problem| (Said::Failed(problem), None)),
        Err(error) => (Said::Failed(format!("the helper can't read the request: {error}")), None),
    };
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
