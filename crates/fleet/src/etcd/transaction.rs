//! Transactions: comparisons, and what is done if all of them hold or if one does not.

use super::proto::compare::{CompareResult, CompareTarget, TargetUnion};
use super::proto::request_op::Request;
use super::proto::response_op::Response;
use super::proto::{
    Compare, DeleteRangeRequest, KeyValue, PutRequest, RangeRequest, RequestOp, TxnRequest,
    TxnResponse,
};
use super::{Access, EtcdError, LeaseId};

/// A transaction. Its comparisons are of revisions: a key that has changed since it was read has
/// another one.
#[derive(Clone, Debug, Default)]
pub(crate) struct Transaction {
    request: TxnRequest,
}

/// A key's value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Value {
    pub(crate) bytes: Vec<u8>,
    /// The revision of its last change.
    pub(crate) revision: i64,
}

impl From<KeyValue> for Value {
    fn from(kv: KeyValue) -> Self {
        Self { bytes: kv.value, revision: kv.mod_revision }
    }
}

/// What a transaction has done.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Its comparisons held, and it was done at this revision.
    Done(i64),
    /// One did not. The values are those of [`Transaction::or_read`], in the order of the calls.
    Otherwise(Vec<Option<Value>>),
}

impl Transaction {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Only if the key's last change was at `revision`; `None` if the key must not exist.
    pub(crate) fn only_if(mut self, key: &str, revision: Option<i64>) -> Self {
        self.request.compare.push(Compare {
            result: CompareResult::Equal.into(),
            target: CompareTarget::Mod.into(),
            key: key.into(),
            // etcd compares a missing key as one with revision 0.
            target_union: Some(TargetUnion::ModRevision(revision.unwrap_or(0))),
        });
        self
    }

    /// Sets the key.
    pub(crate) fn put(self, key: &str, bytes: Vec<u8>) -> Self {
        self.put_leased(key, bytes, None)
    }

    /// Sets the key, until the lease ends.
    pub(crate) fn put_leased(mut self, key: &str, bytes: Vec<u8>, lease: Option<LeaseId>) -> Self {
        let lease = lease.map_or(0, |lease| lease.0);
        let put = PutRequest { key: key.into(), value: bytes, lease };
        self.request.success.push(RequestOp { request: Some(Request::RequestPut(put)) });
        self
    }

    /// Removes the key.
    pub(crate) fn delete(mut self, key: &str) -> Self {
        let range = DeleteRangeRequest { key: key.into(), ..DeleteRangeRequest::default() };
        self.request.success.push(RequestOp { request: Some(Request::RequestDeleteRange(range)) });
        self
    }

    /// Reads the key if a comparison does not hold.
    pub(crate) fn or_read(mut self, key: &str) -> Self {
        let range = RangeRequest { key: key.into(), ..RangeRequest::default() };
        self.request.failure.push(RequestOp { request: Some(Request::RequestRange(range)) });
        self
    }

    pub(super) fn into_request(self) -> TxnRequest {
        self.request
    }
}

impl Access {
    /// What a transaction needs. Those that change a key are made by clients that could read it.
    pub(super) fn of(request: &TxnRequest) -> Self {
        let text = |key: &[u8]| String::from_utf8_lossy(key).into_owned();
        let written = request.success.iter().find_map(|change| match &change.request {
            Some(Request::RequestPut(put)) => Some(&put.key),
            Some(Request::RequestDeleteRange(range)) => Some(&range.key),
            _ => None,
        });
        match written {
            Some(key) => Self::Write(text(key)),
            None => Self::Read(request.compare.last().map_or_else(String::new, |it| text(&it.key))),
        }
    }
}

impl Outcome {
    pub(super) fn of(answer: TxnResponse) -> Result<Self, EtcdError> {
        if answer.succeeded {
            return Ok(Self::Done(answer.header.map_or(0, |header| header.revision)));
        }
        let values = answer.responses.into_iter().map(|response| match response.response {
            Some(Response::ResponseRange(range)) => {
                Ok(range.kvs.into_iter().next().map(Value::from))
            }
            _ => Err(EtcdError::BadAnswer { what: "value" }),
        });
        Ok(Self::Otherwise(values.collect::<Result<_, _>>()?))
    }
}
