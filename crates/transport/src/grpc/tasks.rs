//! The tasks of a call: one sends a body, the other receives one.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use hyper::body::{Body, Frame, Incoming};
use parking_lot::Mutex;
use tokio::task::JoinHandle;
use tonic::{Code, Status};

use super::failure::Failure;
use super::flow::{Flow, Outgoing};
use super::message::{Decoder, Part};
use super::{runtime, to_tokio};
use crate::stream::Stream;

/// How long a connection that this side no longer needs may wait for the end of its call, and then
/// for the peer to close the connection.
const LINGER: Duration = Duration::from_secs(10);

/// Maximum number of connections of this process that linger. With a well-behaved peer, a
/// connection lingers for a round trip, so this covers the ends of several migrations at once.
const MAX_LINGERING: usize = 64;

static LINGERING: Lingering = Lingering::new(MAX_LINGERING);

/// The lingering connections, oldest first. If there are too many, the oldest is closed: its peer
/// has had the max time to close it.
struct Lingering {
    max: usize,
    streams: Mutex<VecDeque<Arc<Stream>>>,
}

impl Lingering {
    const fn new(max: usize) -> Self {
        Self { max, streams: Mutex::new(VecDeque::new()) }
    }

    fn enter(&self, stream: &Arc<Stream>) {
        let mut streams = self.streams.lock();
        streams.push_back(Arc::clone(stream));
        if streams.len() > self.max
            && let Some(oldest) = streams.pop_front()
        {
            close(&oldest);
        }
    }

    fn leave(&self, stream: &Arc<Stream>) {
        self.streams.lock().retain(|other| !Arc::ptr_eq(other, stream));
    }
}

/// Discards data from the peer until it closes the connection. Closing a socket with unread data
/// would also discard data that this side has sent and the peer has not received.
async fn await_end(stream: &Stream) {
    let socket = runtime().and_then(|runtime| to_tokio(runtime, stream));
    let Ok(socket) = socket else { return };
    let mut discarded = [0; 4096];
    while socket.readable().await.is_ok() {
        match socket.try_read(&mut discarded) {
            Ok(0) => return,
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return,
            Ok(_) | Err(_) => {}
        }
    }
}

fn close(stream: &Stream) {
    // An error means that the socket is already closed.
    let _ = stream.shutdown(Shutdown::Both);
}

/// The body of a request or a response that this side sends. Without a flow, the body is empty.
#[derive(Debug, Default)]
pub struct Sending {
    flow: Option<Arc<Flow>>,
    /// A response ends with a status; a request has none.
    is_response: bool,
}

impl Sending {
    /// The client's body.
    pub fn request(flow: Arc<Flow>) -> Self {
        Self { flow: Some(flow), is_response: false }
    }

    /// The server's body.
    pub fn response(flow: Arc<Flow>) -> Self {
        Self { flow: Some(flow), is_response: true }
    }
}

impl Body for Sending {
    type Data = Bytes;
    type Error = Failure;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Failure>>> {
        let Some(flow) = &self.flow else { return Poll::Ready(None) };
        let last = match ready!(flow.poll_next(context)) {
            Outgoing::Message(message) => return Poll::Ready(Some(Ok(Frame::data(message)))),
            Outgoing::End(status) | Outgoing::Refused(status) if self.is_response => {
                Some(Ok(Frame::trailers(trailers(&status))))
            }
            Outgoing::End(_) => None,
            // An error resets the call.
            Outgoing::Refused(status) => Some(Err(Failure::Status(status))),
            Outgoing::Cut(failure) => Some(Err(failure)),
        };
        self.flow = None;
        Poll::Ready(last)
    }

    fn is_end_stream(&self) -> bool {
        self.flow.is_none()
    }
}

fn trailers(status: &Status) -> HeaderMap {
    let mut headers = HeaderMap::new();
    if status.add_header(&mut headers).is_err() {
        // The status text is not a valid header value. Its code always is.
        let code = HeaderValue::from(status.code() as i32);
        headers.insert(HeaderName::from_static("grpc-status"), code);
    }
    headers
}

/// Receives the peer's body until it ends.
pub async fn pump(mut body: Incoming, flow: Arc<Flow>) {
    let mut decoder = Decoder::default();
    loop {
        let frame = poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        match frame.map(|frame| frame.map(Frame::into_data)) {
            Some(Ok(Ok(data))) => {
                if let Err(status) = take(&mut decoder, data, &flow).await {
                    flow.refuse(status);
                    return;
                }
            }
            Some(Ok(Err(other))) => {
                if let Ok(trailers) = other.into_trailers() {
                    let status = Status::from_header_map(&trailers);
                    return end(&flow, status.unwrap_or_else(|| Status::unknown("no status")));
                }
            }
            Some(Err(error)) => {
                if !flow.has_peer_ended() {
                    flow.fail_call(Failure::of_call(&error));
                }
                return;
            }
            None => return end(&flow, Status::ok("")),
        }
    }
}

/// Handles the end of the call. A regular end was announced by a message before.
fn end(flow: &Flow, status: Status) {
    if status.code() != Code::Ok {
        flow.fail(Failure::Status(status));
    } else if !flow.has_peer_ended() {
        flow.fail(Failure::Cut("it ended before the end was announced".into()));
    }
}

async fn take(decoder: &mut Decoder, mut data: Bytes, flow: &Flow) -> Result<(), Status> {
    let refused = |error: String| Status::invalid_argument(error);
    while let Some(part) = decoder.next(&mut data).map_err(|error| refused(error.to_string()))? {
        match part {
            Part::Data(mut piece) => {
                poll_fn(|context| flow.poll_put(context, &mut piece)).await;
            }
            Part::Taken(bytes) => {
                if !flow.note_taken(bytes) {
                    return Err(refused("an acknowledgement of data that was not sent".into()));
                }
            }
            Part::End => flow.note_end(),
        }
    }
    Ok(())
}

/// Waits until both halves of the channel are dropped, and then drops `calls`, so that the
/// connection ends with its call. Closes the connection if it has not ended after [`LINGER`].
///
/// `connection` is the task that drives the connection.
pub async fn close_when_unused<C>(
    calls: C,
    connection: JoinHandle<()>,
    flow: Arc<Flow>,
    stream: Arc<Stream>,
) {
    poll_fn(|context| flow.poll_over(context)).await;
    drop(calls);
    LINGERING.enter(&stream);
    let ended = async {
        // Its error, if any, was reported to the flow.
        let _ = connection.await;
        await_end(&stream).await;
    };
    // A call that has not ended by then is cut.
    let _ = tokio::time::timeout(LINGER, ended).await;
    LINGERING.leave(&stream);
    close(&stream);
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn is_open(peer: &mut UnixStream) -> bool {
        peer.set_nonblocking(true).unwrap();
        peer.read(&mut [0]).is_err()
    }

    #[test]
    fn lingering_closes_the_oldest_connection_when_there_are_too_many() {
        let lingering = Lingering::new(2);
        let pair = || {
            let (near, far) = UnixStream::pair().unwrap();
            (Arc::new(Stream::Unix(near)), far)
        };
        let (mut first, mut second, mut third) = (pair(), pair(), pair());
        lingering.enter(&first.0);
        lingering.enter(&second.0);
        assert!(is_open(&mut first.1) && is_open(&mut second.1));
        lingering.enter(&third.0);
        assert!(!is_open(&mut first.1), "the oldest is closed");
        lingering.leave(&third.0);
        let mut fourth = pair();
        lingering.enter(&fourth.0);
        let open = [&mut second, &mut third, &mut fourth].map(|pair| is_open(&mut pair.1));
        assert_eq!(open, [true; 3], "a connection that has left makes room");
    }
}
