//! `vmferry metrics`: metrics of this host's guests and migrations in Prometheus's text format.

mod measures;

use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use hyper::body::Incoming;
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::encoding::{EncodeLabelSet, text::encode};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::json;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use vmferry_handover::journal::{self, Side, Verdict};

use self::measures::measures;
use super::directories;
use super::status::ask_all;
use crate::args::MetricsOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Connections that are open at a time. Others wait in the kernel's queue. At 16 KiB each they take
/// 2 MiB, and stay below the usual limit of 1024 descriptors.
const MAX_CONNECTIONS: usize = 128;

/// Maximum length of a request's head, in bytes.
const MAX_HEAD_BYTES: usize = 16 << 10;

/// Scrapes that ask the guests at a time. Each needs a thread per guest.
const MAX_SCRAPES: usize = 4;

/// How long a client may take to send its request.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a connection may last. A VMM that is stopped delays a scrape by 10 s.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(20);

/// Prometheus's text format. It treats the additional lines of OpenMetrics as comments.
const TEXT_FORMAT: HeaderValue =
    HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");

/// Prints the metrics, or serves them until the process ends.
pub fn run(options: &MetricsOptions, output: &Output) -> Result<(), Failure> {
    let Some(address) = &options.listen else {
        let text = text()?;
        output.result(&json!({ "metrics": text }), || text.clone());
        return Ok(());
    };
    let failed = |error: std::io::Error| {
        if error.kind() == std::io::ErrorKind::InvalidInput {
            let text =
                format!("`{address}` is not an address: use HOST:PORT, such as 127.0.0.1:9188");
            return Failure::new(Code::Usage, text);
        }
        Failure::of(
            Code::Busy,
            anyhow::Error::new(error).context(format!("can't listen on {address}")),
        )
    };
    let listener = TcpListener::bind(address).map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    output.event(&json!({ "event": "listening", "address": bound.to_string() }), || {
        format!("metrics at http://{bound}/metrics")
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(MAX_SCRAPES)
        .build()
        .map_err(failed)?;
    runtime.block_on(serve(listener)).map_err(failed)
}

/// Answers clients until the process ends.
async fn serve(listener: TcpListener) -> std::io::Result<()> {
    listener.set_nonblocking(true)?;
    let listener = tokio::net::TcpListener::from_std(listener)?;
    let free = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let permit = Arc::clone(&free).acquire_owned().await.map_err(std::io::Error::other)?;
        let Ok((stream, _)) = listener.accept().await else {
            // The system lacks descriptors or memory, and would report that again at once.
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let permit = Arc::new(permit);
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST_TIMEOUT)
            .max_buf_size(MAX_HEAD_BYTES)
            .keep_alive(false)
            .serve_connection(
                TokioIo::new(stream),
                service_fn(move |request| answer(request, Arc::clone(&permit))),
            );
        // Clients that fail are not reported, so that they cannot fill a log.
        tokio::spawn(tokio::time::timeout(CONNECTION_TIMEOUT, connection));
    }
}

/// Answers a request. A scrape keeps its connection's permit until it has ended, even if the
/// connection ends first.
async fn answer(
    request: Request<Incoming>,
    permit: Arc<OwnedSemaphorePermit>,
) -> Result<Response<String>, Infallible> {
    let (status, body) = if request.uri().path() == "/metrics" {
        let scrape = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            text()
        });
        match scrape.await {
            Ok(Ok(text)) => (StatusCode::OK, text),
            Ok(Err(failure)) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{failure}\n")),
            Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")),
        }
    } else {
        (StatusCode::NOT_FOUND, "metrics are at /metrics\n".to_owned())
    };
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, TEXT_FORMAT);
    Ok(response)
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Guest {
    guest: String,
    uuid: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Sessions {
    side: &'static str,
    verdict: &'static str,
}

/// The journal's verdict on a session, as a label.
fn verdict_name(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Here => "here",
        Verdict::There => "there",
        Verdict::InDoubt => "in-doubt",
    }
}

/// The metrics in Prometheus's text format.
fn text() -> Result<String, Failure> {
    let directory = directories()?;
    let sessions = journal::sessions(&directory.journals())
        .map_err(|error| Failure::of(Code::Internal, error))?;
    let guests = ask_all(&directory, &sessions)?;
    let mut registry = Registry::with_prefix("vmferry");
    for measure in measures() {
        let family = Family::<Guest, Gauge<f64, std::sync::atomic::AtomicU64>>::default();
        for guest in &guests {
            if let Some(number) = (measure.read)(guest) {
                let text = |name: &str| guest[name].as_str().unwrap_or_default().to_owned();
                family
                    .get_or_create(&Guest { guest: text("name"), uuid: text("uuid") })
                    .set(number);
            }
        }
        match measure.unit {
            Some(unit) => registry.register_with_unit(measure.name, measure.help, unit, family),
            None => registry.register(measure.name, measure.help, family),
        }
    }
    let family = Family::<Sessions, Gauge>::default();
    for session in &sessions {
        let side = if session.side == Side::Source { "source" } else { "destination" };
        family.get_or_create(&Sessions { side, verdict: verdict_name(session.verdict) }).inc();
    }
    registry.register(
        "sessions",
        "Migrations in this host's journals, by the host that has the guest",
        family,
    );
    let mut text = String::new();
    encode(&mut text, &registry).map_err(|error| Failure::of(Code::Internal, error))?;
    Ok(text)
}
