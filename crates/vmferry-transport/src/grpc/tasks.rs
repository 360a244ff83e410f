//! The tasks of a call: one body is sent, the other one received.

use std::future::poll_fn;
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue};
use hyper::body::{Body, Frame, Incoming};
use tonic::{Code, Status};

use super::failure::Failure;
use super::flow::{Flow, Outgoing};
use super::message::{Decoder, Part};
use crate::stream::Stream;

/// For how long a connection that this side has done with waits for the peer's end: what is on
/// its way to the peer would be lost if the socket was closed with something unread.
const LINGER: Duration = Duration::from_secs(10);

/// The body of a request or a response: what this side sends. None is an empty body.
#[derive(Debug, Default)]
pub struct Sending {
    flow: Option<Arc<Flow>>,
    /// A response ends with a status, a request just ends.
    is_response: bool,
}

impl Sending {
    /// What the client sends.
    pub fn request(flow: Arc<Flow>) -> Self {
        Self { flow: Some(flow), is_response: false }
    }

    /// What the server sends.
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
        // Its text is no header; its code always is.
        let code = HeaderValue::from(status.code() as i32);
        headers.insert(HeaderName::from_static("grpc-status"), code);
    }
    headers
}

/// Takes what the peer sends, until it ends.
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

/// The call is over. A good end was announced by a message before.
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
                    return Err(refused("an acknowledgement of what was not sent".into()));
                }
            }
            Part::End => flow.note_end(),
        }
    }
    Ok(())
}

/// Waits until nobody holds the channel any more, lets go of the connection, so that it closes
/// when the call is over, and closes it if the call does not end.
pub async fn dismiss<C>(connection: C, flow: Arc<Flow>, stream: Arc<Stream>) {
    poll_fn(|context| flow.poll_over(context)).await;
    drop(connection);
    tokio::time::sleep(LINGER).await;
    // A socket that is closed already needs nothing.
    let _ = stream.shutdown(Shutdown::Both);
}
