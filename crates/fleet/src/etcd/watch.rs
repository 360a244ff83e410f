//! Watches: a copy of a directory's keys that follows etcd's.
//!
//! The copy may be late, so no decision rests on it: a change that was computed from it is a
//! transaction that compares revisions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::Status;
use tonic::metadata::MetadataValue;
use tonic::transport::Channel;

use super::header::Headers;
use super::proto::event::EventType;
use super::proto::kv_client::KvClient;
use super::proto::watch_client::WatchClient;
use super::proto::watch_request::RequestUnion;
use super::proto::{Event, RangeRequest, WatchCreateRequest, WatchRequest};
use super::{ATTEMPT, Etcd, KeyRange, PAGE_KEYS, PAUSE, Value};

/// Pause between two members while all of them fail.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The keys of a directory, as they were seen last.
#[derive(Debug, Default)]
pub(crate) struct Watched(Mutex<Option<BTreeMap<String, Value>>>);

impl Watched {
    /// All of them, by their names; `None` until they were read once.
    pub(crate) fn all(&self) -> Option<BTreeMap<String, Value>> {
        self.0.lock().clone()
    }

    /// One of them.
    pub(crate) fn get(&self, key: &str) -> Option<Value> {
        self.0.lock().as_ref()?.get(key).cloned()
    }
}

/// A watch, which ends when this is dropped.
#[derive(Debug)]
pub struct Watch {
    task: AbortHandle,
    watched: Arc<Watched>,
}

impl Watch {
    pub(crate) fn watched(&self) -> &Arc<Watched> {
        &self.watched
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Etcd {
    /// Follows the keys that begin with `prefix`, which ends with `/`. Calls `changed` after each
    /// change of the copy, from a thread of this client, which must not be kept.
    pub(crate) fn watch(
        &self,
        prefix: String,
        changed: impl Fn() + Send + Sync + 'static,
    ) -> Watch {
        let watched: Arc<Watched> = Arc::default();
        let (members, headers) = (self.members.clone(), Arc::clone(&self.headers));
        let follower = Follower { prefix, headers, watched: Arc::clone(&watched), changed };
        let task = self.runtime.spawn(async move {
            let mut pause = PAUSE;
            // A member that has ended or is silent is replaced by the next one.
            for member in members.iter().cycle() {
                if let Ok(revision) = follower.read(member).await {
                    pause = PAUSE;
                    let _ = follower.follow(member, revision).await;
                }
                tokio::time::sleep(pause).await;
                pause = LONGEST_PAUSE.min(pause * 2);
            }
        });
        Watch { task: task.abort_handle(), watched }
    }
}

/// What a watch's task works with.
struct Follower<F> {
    prefix: String,
    headers: Arc<Headers>,
    watched: Arc<Watched>,
    changed: F,
}

impl<F: Fn()> Follower<F> {
    /// Follows one member from this revision on, until it fails.
    async fn follow(&self, member: &Channel, revision: i64) -> Result<(), Status> {
        let create = WatchCreateRequest {
            key: self.prefix.clone().into(),
            range_end: KeyRange::below(&self.prefix).end,
            start_revision: revision + 1,
        };
        let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        // etcd ends the watch when the requests end.
        let requests = tokio_stream::once(request).chain(tokio_stream::pending());
        let mut requests = tonic::Request::new(requests);
        // A member that is cut off from the others ends the watch instead of being silent.
        requests.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
        let mut client = WatchClient::new(member.clone());
        let mut answers = within(client.watch(requests)).await?.into_inner();
        while let Some(answer) = answers.message().await? {
            self.check(answer.header.as_ref())?;
            if answer.canceled {
                return Err(Status::unavailable(answer.cancel_reason));
            }
            if !answer.events.is_empty() {
                self.apply(answer.events);
                (self.changed)();
            }
        }
        Ok(())
    }

    /// Reads all keys, as of the revision that it returns.
    async fn read(&self, member: &Channel) -> Result<i64, Status> {
        let mut request = RangeRequest {
            key: self.prefix.clone().into(),
            range_end: KeyRange::below(&self.prefix).end,
            limit: PAGE_KEYS,
            ..RangeRequest::default()
        };
        let (mut found, mut client) = (BTreeMap::new(), KvClient::new(member.clone()));
        loop {
            let answer = within(client.range(request.clone())).await?.into_inner();
            self.check(answer.header.as_ref())?;
            if request.revision == 0 {
                request.revision = answer.header.map_or(0, |header| header.revision);
            }
            let last = answer.kvs.last().map(|kv| kv.key.clone());
            for kv in answer.kvs {
                found.insert(String::from_utf8_lossy(&kv.key).into_owned(), Value::from(kv));
            }
            let Some(mut last) = last.filter(|_| answer.more) else { break };
            last.push(0);
            request.key = last;
        }
        *self.watched.0.lock() = Some(found);
        (self.changed)();
        Ok(request.revision)
    }

    fn apply(&self, events: Vec<Event>) {
        let mut watched = self.watched.0.lock();
        let keys = watched.get_or_insert_default();
        for event in events {
            let is_deletion = event.r#type() == EventType::Delete;
            let Some(kv) = event.kv else { continue };
            let key = String::from_utf8_lossy(&kv.key).into_owned();
            match is_deletion {
                true => keys.remove(&key),
                false => keys.insert(key, Value::from(kv)),
            };
        }
    }

    /// A member that was behind is no sign of other data: only its cluster is checked.
    fn check(&self, header: Option<&super::proto::ResponseHeader>) -> Result<(), Status> {
        self.headers.check(header, 0).map_err(|error| Status::data_loss(error.to_string()))
    }
}

/// The answer, unless it takes too long.
async fn within<T>(answer: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let late = |_| Status::deadline_exceeded("it does not answer");
    timeout(ATTEMPT, answer).await.map_err(late)?
}
