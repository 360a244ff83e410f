//! A client of etcd with deadlines. It asks one member after another, so that a dead one costs
//! little.

mod auth;
mod config;
mod error;
mod header;
mod lease;
mod transaction;
mod watch;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Status};

pub(crate) use self::auth::{KeyRange, Permission, PermissionKind};
pub use self::config::{EtcdConfig, EtcdTls};
pub use self::error::{Access, EtcdError, OtherData};
use self::header::Headers;
pub(crate) use self::lease::LeaseId;
use self::proto::RangeRequest;
use self::proto::kv_client::KvClient;
pub(crate) use self::transaction::{Outcome, Transaction, Value};
pub use self::watch::Watch;
pub(crate) use self::watch::Watched;

/// etcd's messages.
#[allow(missing_docs, clippy::all, clippy::pedantic, reason = "generated")]
mod proto {
    tonic::include_proto!("etcdserverpb");
}

/// How long one member is waited for. etcd answers within milliseconds, or is in an election,
/// which takes about a second.
const ATTEMPT: Duration = Duration::from_millis(700);

/// How long all members together are waited for.
const DEADLINE: Duration = Duration::from_secs(2);

/// Keys that one answer has at most: an answer has at most 4 MiB, and an object a few kilobytes.
const PAGE_KEYS: i64 = 200;

/// How often a member is asked whether it lives while a watch waits for it. etcd ends connections
/// that ask more often than each 5 s (`--grpc-keepalive-min-time`).
const PING_PERIOD: Duration = Duration::from_secs(6);

/// How long it may take to answer that.
const PING_TIMEOUT: Duration = Duration::from_secs(2);

/// Pause between two members, if the first one has failed at once.
const PAUSE: Duration = Duration::from_millis(20);

/// A client. Its calls block the calling thread, for two seconds at most.
#[derive(Debug)]
pub struct Etcd {
    runtime: Runtime,
    members: Vec<Channel>,
    /// The member that has answered last.
    preferred: AtomicUsize,
    /// The common name of the client's certificate, which is its user's name if etcd checks roles.
    user: Option<String>,
    headers: Arc<Headers>,
}

impl Etcd {
    /// A client that connects with its first request, and learns from the answer which cluster it
    /// is. Which requests need no permission differs between releases of etcd, so it makes none.
    ///
    /// # Errors
    /// The configuration is wrong.
    pub fn connect(config: &EtcdConfig) -> Result<Self, EtcdError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("etcd")
            .enable_all()
            .build()
            .map_err(EtcdError::Local)?;
        let members = {
            let _context = runtime.enter();
            config
                .endpoints
                .iter()
                .map(|endpoint| member(endpoint, config.tls.as_ref()))
                .collect::<Result<Vec<_>, _>>()?
        };
        if members.is_empty() {
            return Err(EtcdError::NoEndpoint);
        }
        Ok(Self {
            runtime,
            members,
            preferred: AtomicUsize::new(0),
            user: config.tls.as_ref().and_then(|tls| tls.user.clone()),
            headers: Arc::default(),
        })
    }

    /// The cluster's number; `None` before the first answer. It depends on the members' addresses
    /// and on etcd's `--initial-cluster-token`.
    #[must_use]
    pub fn cluster(&self) -> Option<u64> {
        self.headers.cluster()
    }

    /// Does one transaction, also if an attempt of it may have taken effect already: it must be
    /// right to repeat it.
    ///
    /// # Errors
    /// [`EtcdError::NoAnswer`]: it may or may not have been done.
    pub(crate) fn transact(&self, transaction: Transaction) -> Result<Outcome, EtcdError> {
        let known = self.headers.revision();
        let request = transaction.into_request();
        let answer = self
            .call(async |member| KvClient::new(member).txn(request.clone()).await)
            .map_err(|error| self.explain(error, || Access::of(&request)))?;
        self.headers.check(answer.header.as_ref(), known)?;
        Outcome::of(answer)
    }

    /// All keys that begin with `prefix`, which ends with `/`, with their values, as of one
    /// revision.
    ///
    /// # Errors
    /// No member answers.
    pub(crate) fn list(&self, prefix: &str) -> Result<Vec<(String, Value)>, EtcdError> {
        let KeyRange { start: key, end: range_end } = KeyRange::below(prefix);
        let mut request =
            RangeRequest { key, range_end, limit: PAGE_KEYS, ..RangeRequest::default() };
        let mut found = Vec::new();
        loop {
            let known = self.headers.revision();
            let answer = self
                .call(async |member| KvClient::new(member).range(request.clone()).await)
                .map_err(|error| self.explain(error, || Access::Read(prefix.to_owned())))?;
            self.headers.check(answer.header.as_ref(), known)?;
            let revision = answer.header.map_or(0, |header| header.revision);
            if request.revision == 0 {
                request.revision = revision;
            }
            let last = answer.kvs.last().map(|kv| kv.key.clone());
            for kv in answer.kvs {
                let name = String::from_utf8_lossy(&kv.key).into_owned();
                found.push((name, Value::from(kv)));
            }
            match last.filter(|_| answer.more) {
                Some(mut last) => {
                    last.push(0);
                    request.key = last;
                }
                None => return Ok(found),
            }
        }
    }

    /// Asks the members in turn until one answers. The request must be one that may be repeated.
    fn call<T, F>(&self, ask: impl Fn(Channel) -> F) -> Result<T, EtcdError>
    where
        F: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let begun = Instant::now();
        let mut at = self.preferred.load(Ordering::Relaxed);
        let mut last = None;
        while let Some(left) = DEADLINE.checked_sub(begun.elapsed()) {
            let number = at % self.members.len();
            let asked = ask(self.members[number].clone());
            let answer = self
                .runtime
                .block_on(async { tokio::time::timeout(left.min(ATTEMPT), asked).await });
            match answer {
                Ok(Ok(answer)) => {
                    self.preferred.store(number, Ordering::Relaxed);
                    return Ok(answer.into_inner());
                }
                Ok(Err(status)) if is_final(&status) => {
                    return Err(EtcdError::Refused(Box::new(status)));
                }
                Ok(Err(status)) => {
                    last = Some(status);
                    // A refused connection costs nothing: do not ask in a tight loop.
                    std::thread::sleep(PAUSE.min(left));
                }
                Err(_) => {}
            }
            at += 1;
        }
        let last = last.map_or_else(|| "all are silent".to_owned(), |status| chain(&status));
        Err(EtcdError::NoAnswer { after: begun.elapsed(), last })
    }
}

/// What a member's status says, with its causes: "transport error" alone helps nobody.
fn chain(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// Whether another member, or another attempt, would get the same answer.
fn is_final(status: &Status) -> bool {
    // Users or roles were changed while the request was on its way.
    let is_outdated = status.message() == auth::OLD_REVISION;
    let code = matches!(
        status.code(),
        Code::InvalidArgument
            | Code::PermissionDenied
            | Code::Unauthenticated
            | Code::NotFound
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unimplemented
    );
    code && !is_outdated
}

fn member(endpoint: &str, tls: Option<&EtcdTls>) -> Result<Channel, EtcdError> {
    let bad = |source| EtcdError::BadEndpoint { endpoint: endpoint.to_owned(), source };
    let mut to = Endpoint::from_shared(endpoint.to_owned())
        .map_err(bad)?
        .connect_timeout(ATTEMPT)
        .http2_keep_alive_interval(PING_PERIOD)
        .keep_alive_timeout(PING_TIMEOUT);
    if let Some(EtcdTls { authority, certificate, key, .. }) = tls {
        let config = ClientTlsConfig::new()
            .ca_certificate(Certificate::from_pem(authority))
            .identity(Identity::from_pem(certificate, key));
        to = to.tls_config(config).map_err(bad)?;
    }
    Ok(to.connect_lazy())
}
