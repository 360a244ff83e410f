//! The subset of HTTP/1.1 that the control socket needs: one request and one answer per connection,
//! request bodies with `Content-Length`, and answers that end with the connection.

use std::io::{self, Read};

/// Maximum length of the head of a request or an answer, in bytes.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// Maximum length of a request's body, in bytes. The options and paths of a migration take some
/// hundred.
pub const MAX_BODY_BYTES: usize = 64 << 10;

/// Maximum number of header lines in a request or an answer.
const MAX_HEADERS: usize = 64;

/// A request that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The connection failed, or was silent for too long.
    #[error("the request could not be read")]
    Io(#[from] io::Error),
    /// The connection ended before the request did.
    #[error("the connection ended within the request")]
    Ended,
    /// The request is not HTTP.
    #[error("this is not an HTTP/1.1 request")]
    NotHttp(#[from] httparse::Error),
    /// The head is longer than `MAX_HEAD_BYTES`.
    #[error("the head of a request is at most {MAX_HEAD_BYTES} bytes")]
    LongHead,
    /// The body is longer than [`MAX_BODY_BYTES`].
    #[error("the body of a request is at most {MAX_BODY_BYTES} bytes")]
    LongBody,
    /// The body is sent in chunks.
    #[error("a body needs its length in `Content-Length`")]
    NoLength,
    /// The `Content-Length` is not a number.
    #[error("`Content-Length: {0}` is not a number")]
    BadLength(String),
}

impl HttpError {
    /// The HTTP status for this error.
    pub fn status(&self) -> u16 {
        match self {
            Self::Io(_) => 408,
            Self::Ended | Self::NotHttp(_) | Self::BadLength(_) => 400,
            Self::LongHead => 431,
            Self::LongBody => 413,
            Self::NoLength => 411,
        }
    }
}

/// A request before it is interpreted.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RawRequest {
    /// The method, such as `PUT`.
    pub method: String,
    /// The path, such as `/api/v1/migration`, without the query.
    pub path: String,
    /// The body.
    pub body: Vec<u8>,
}

/// Reads a request. Calls `send_continue` when the client waits for `100 Continue` before it sends
/// the body.
///
/// # Errors
/// See [`HttpError`].
pub fn read_request(
    from: &mut impl Read,
    send_continue: impl FnOnce() -> io::Result<()>,
) -> Result<RawRequest, HttpError> {
    let mut bytes = Vec::new();
    loop {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut head = httparse::Request::new(&mut headers);
        if let httparse::Status::Complete(length) = head.parse(&bytes)? {
            let header = |name: &str| {
                let found =
                    head.headers.iter().find(|header| header.name.eq_ignore_ascii_case(name));
                found.map(|header| String::from_utf8_lossy(header.value).trim().to_owned())
            };
            if header("transfer-encoding").is_some() {
                return Err(HttpError::NoLength);
            }
            let body_bytes = match header("content-length") {
                None => 0,
                Some(text) => text.parse::<usize>().map_err(|_| HttpError::BadLength(text))?,
            };
            if body_bytes > MAX_BODY_BYTES {
                return Err(HttpError::LongBody);
            }
            let path = head.path.unwrap_or_default();
            let mut request = RawRequest {
                method: head.method.unwrap_or_default().to_owned(),
                path: path.split_once('?').map_or(path, |(path, _)| path).to_owned(),
                body: Vec::new(),
            };
            if header("expect")
                .is_some_and(|expected| expected.eq_ignore_ascii_case("100-continue"))
            {
                send_continue()?;
            }
            request.body = bytes.split_off(length);
            request.body.truncate(body_bytes);
            while request.body.len() < body_bytes {
                let missing = body_bytes - request.body.len();
                read_some(from, &mut request.body, missing)?;
            }
            return Ok(request);
        }
        if bytes.len() >= MAX_HEAD_BYTES {
            return Err(HttpError::LongHead);
        }
        let room = MAX_HEAD_BYTES - bytes.len();
        read_some(from, &mut bytes, room)?;
    }
}

/// Reads available bytes: at least one and at most `max`.
fn read_some(from: &mut impl Read, into: &mut Vec<u8>, max: usize) -> Result<(), HttpError> {
    let before = into.len();
    into.resize(before + max.min(4096), 0);
    let read = loop {
        match from.read(&mut into[before..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other,
        }
    };
    into.truncate(before + read.as_ref().copied().unwrap_or(0));
    if read? == 0 { Err(HttpError::Ended) } else { Ok(()) }
}

/// The reason phrase of a status.
fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        411 => "Length Required",
        413 => "Content Too Large",
        431 => "Request Header Fields Too Large",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        _ => "Internal Server Error",
    }
}

/// The head of an answer. Without `length`, the body ends with the connection.
pub fn answer_head(status: u16, content_type: &str, length: Option<usize>) -> String {
    let length = length.map_or_else(String::new, |length| format!("Content-Length: {length}\r\n"));
    format!(
        "HTTP/1.1 {status} {}\r\nServer: vmferry/{}\r\nContent-Type: {content_type}\r\n\
         {length}Connection: close\r\n\r\n",
        reason(status),
        env!("CARGO_PKG_VERSION")
    )
}

/// The text of a request.
pub fn request_text(method: &str, path: &str, body: &str) -> String {
    let mut text = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\n\
         Accept: application/json, application/x-ndjson\r\n"
    );
    if !body.is_empty() {
        text.push_str(&format!(
            "Content-Type: application/json\r\nContent-Length: {}\r\n",
            body.len()
        ));
    }
    text.push_str("\r\n");
    text.push_str(body);
    text
}

/// Parses the head of an answer. Returns its length in bytes and its status, or `None` if the head
/// is incomplete.
///
/// # Errors
/// Bytes that are not HTTP, or a head that is too long.
pub fn answer_status(bytes: &[u8]) -> Result<Option<(usize, u16)>, String> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Response::new(&mut headers);
    match head.parse(bytes).map_err(|error| error.to_string())? {
        httparse::Status::Complete(length) => Ok(Some((length, head.code.unwrap_or_default()))),
        httparse::Status::Partial if bytes.len() >= MAX_HEAD_BYTES => {
            Err("the head is too long".into())
        }
        httparse::Status::Partial => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A reader that returns one piece per call.
    struct Pieces<'a>(Vec<&'a [u8]>);

    impl Read for Pieces<'_> {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let Some(piece) = self.0.first_mut() else { return Ok(0) };
            let taken = piece.len().min(into.len());
            into[..taken].copy_from_slice(&piece[..taken]);
            *piece = &piece[taken..];
            if piece.is_empty() {
                self.0.remove(0);
            }
            Ok(taken)
        }
    }

    fn read(bytes: &[u8]) -> Result<RawRequest, HttpError> {
        read_request(&mut &bytes[..], || Ok(()))
    }

    #[test]
    fn request_round_trips() {
        let text = request_text("PATCH", "/api/v1/migration?verbose", "{\"throttle\":3}");
        for cut in 1..text.len() {
            let (head, tail) = text.as_bytes().split_at(cut);
            let mut pieces = Pieces(vec![head, tail, b"more"]);
            let request = read_request(&mut pieces, || Ok(())).unwrap();
            assert_eq!(
                (request.method.as_str(), request.path.as_str()),
                ("PATCH", "/api/v1/migration")
            );
            assert_eq!(request.body, b"{\"throttle\":3}", "cut at {cut}");
        }
        assert!(read(request_text("GET", "/x", "").as_bytes()).unwrap().body.is_empty());
    }

    #[test]
    fn expect_continue_is_answered() {
        let text = "PUT / HTTP/1.1\r\nexpect: 100-Continue\r\ncontent-length: 2\r\n\r\n{}";
        let mut asked = false;
        let request = read_request(&mut text.as_bytes(), || {
            asked = true;
            Ok(())
        });
        assert_eq!((request.unwrap().body, asked), (b"{}".to_vec(), true));
    }

    #[test]
    fn read_request_refuses_invalid_requests_with_a_status() {
        let long = format!("GET /{} HTTP/1.1\r\n", "x".repeat(MAX_HEAD_BYTES));
        for (text, status) in [
            ("{\"request\":\"status\"}\n", 400),
            ("GET / HTTP/1.1\r\n", 400),
            ("PUT / HTTP/1.1\r\nContent-Length: 3\r\n\r\n{}", 400),
            ("PUT / HTTP/1.1\r\nContent-Length: many\r\n\r\n{}", 400),
            ("PUT / HTTP/1.1\r\nContent-Length: 65537\r\n\r\n{}", 413),
            ("PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}", 411),
            (long.as_str(), 431),
        ] {
            let error = read(text.as_bytes()).unwrap_err();
            assert_eq!(error.status(), status, "{error}");
        }
    }

    #[test]
    fn answer_head_round_trips() {
        let head = answer_head(409, "application/json", Some(2));
        assert_eq!(answer_status(head.as_bytes()), Ok(Some((head.len(), 409))));
        assert_eq!(answer_status(&head.as_bytes()[..20]), Ok(None));
        assert!(answer_status(b"{\"ok\":1}\n").is_err());
    }

    proptest! {
        #[test]
        fn parsers_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let _ = read(&bytes);
            let _ = answer_status(&bytes);
        }
    }
}
