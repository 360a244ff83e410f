//! HTTP/1.1 as far as the control socket needs it: one request and one answer for each connection, bodies of a stated
//! length towards the server, and answers that end where the connection does.

use std::io::{self, Read};

/// Longest head of a request or an answer, in bytes.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// Longest body of a request, in bytes: a migration's options and paths take some hundred.
pub const MAX_BODY_BYTES: usize = 64 << 10;

/// Header lines of a request that are looked at; more are an error.
const MAX_HEADERS: usize = 64;

/// A request that can't be read.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    /// The connection failed, or was silent for too long.
    #[error("the request could not be read")]
    Io(#[from] io::Error),
    /// It ended before the request did.
    #[error("the connection ended within the request")]
    Ended,
    /// It is no HTTP.
    #[error("this is no HTTP/1.1 request")]
    NotHttp(#[from] httparse::Error),
    /// Its head is longer than anybody needs.
    #[error("the head of a request is at most {MAX_HEAD_BYTES} bytes")]
    LongHead,
    /// Its body is longer than any request of this API.
    #[error("the body of a request is at most {MAX_BODY_BYTES} bytes")]
    LongBody,
    /// Its body comes in chunks.
    #[error("a body needs its length in `Content-Length`")]
    NoLength,
    /// Its length is no number.
    #[error("`Content-Length: {0}` is no number")]
    BadLength(String),
}

impl HttpError {
    /// The status that says so.
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

/// A request as it came.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RawRequest {
    /// Such as `PUT`.
    pub method: String,
    /// Such as `/api/v1/migration`, without what stands behind a `?`.
    pub path: String,
    /// What it carries.
    pub body: Vec<u8>,
}

/// Reads a request. `go_on` is called when the client waits for leave to send its body.
///
/// # Errors
/// See [`HttpError`].
pub fn read_request(
    from: &mut impl Read,
    go_on: impl FnOnce() -> io::Result<()>,
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
                go_on()?;
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

/// Reads what is there, at least a byte and at most `most`.
fn read_some(from: &mut impl Read, into: &mut Vec<u8>, most: usize) -> Result<(), HttpError> {
    let before = into.len();
    into.resize(before + most.min(4096), 0);
    let read = loop {
        match from.read(&mut into[before..]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other,
        }
    };
    into.truncate(before + read.as_ref().copied().unwrap_or(0));
    if read? == 0 { Err(HttpError::Ended) } else { Ok(()) }
}

/// What a status means.
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

/// The head of an answer whose body ends with the connection, or has a stated length.
pub fn answer_head(status: u16, content_type: &str, length: Option<usize>) -> String {
    let length = length.map_or_else(String::new, |length| format!("Content-Length: {length}\r\n"));
    format!(
        "HTTP/1.1 {status} {}\r\nServer: vmferry/{}\r\nContent-Type: {content_type}\r\n{length}Connection: close\r\n\r\n",
        reason(status),
        env!("CARGO_PKG_VERSION")
    )
}

/// A request as it is sent.
pub fn request_text(method: &str, path: &str, body: &str) -> String {
    let mut text = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json, application/x-ndjson\r\n"
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

/// What of an answer's head counts to a client: its length in bytes and its status; `None` while there is more of it.
///
/// # Errors
/// What is no HTTP, or a head without end.
pub fn answer_status(bytes: &[u8]) -> Result<Option<(usize, u16)>, String> {
    let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
    let mut head = httparse::Response::new(&mut headers);
    match head.parse(bytes).map_err(|error| error.to_string())? {
        httparse::Status::Complete(length) => Ok(Some((length, head.code.unwrap_or_default()))),
        httparse::Status::Partial if bytes.len() >= MAX_HEAD_BYTES => {
            Err("a head without end".into())
        }
        httparse::Status::Partial => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Gives a piece at a time.
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
    fn requests_read_as_they_are_written() {
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
    fn a_client_that_waits_for_leave_gets_it() {
        let text = "PUT / HTTP/1.1\r\nexpect: 100-Continue\r\ncontent-length: 2\r\n\r\n{}";
        let mut asked = false;
        let request = read_request(&mut text.as_bytes(), || {
            asked = true;
            Ok(())
        });
        assert_eq!((request.unwrap().body, asked), (b"{}".to_vec(), true));
    }

    #[test]
    fn what_is_no_request_is_refused_by_what_is_wrong() {
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
    fn an_answer_reads_as_it_is_written() {
        let head = answer_head(409, "application/json", Some(2));
        assert_eq!(answer_status(head.as_bytes()), Ok(Some((head.len(), 409))));
        assert_eq!(answer_status(&head.as_bytes()[..20]), Ok(None));
        assert!(answer_status(b"{\"ok\":1}\n").is_err());
    }

    proptest! {
        #[test]
        fn nothing_that_is_read_panics(bytes in proptest::collection::vec(any::<u8>(), 0..2000)) {
            let _ = read(&bytes);
            let _ = answer_status(&bytes);
        }
    }
}
