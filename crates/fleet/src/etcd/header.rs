//! What the headers of etcd's answers say: which data they come from.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};

use super::EtcdError;
use super::proto::ResponseHeader;

/// etcd's data is not what it was.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "etcd's data was replaced or restored from a backup: {found} now, {known} before. Nothing in \
     it decides about guests that were moving"
)]
pub struct OtherData {
    known: String,
    found: String,
}

/// What a client knows from the headers of all its answers.
#[derive(Debug, Default)]
pub(super) struct Headers {
    cluster: u64,
    /// The highest revision that an answer had. A transaction's answer never has a lower one than
    /// an answer before the question.
    revision: AtomicI64,
    /// Once this was found nothing is believed any more: the revision grows past the known one.
    other_data: OnceLock<OtherData>,
}

impl Headers {
    /// Those of a client whose first answer has this header.
    pub(super) fn of(header: Option<&ResponseHeader>) -> Result<Self, EtcdError> {
        let header = header.ok_or(EtcdError::BadAnswer { what: "header" })?;
        let (cluster, revision) = (header.cluster_id, header.revision.into());
        Ok(Self { cluster, revision, other_data: OnceLock::new() })
    }

    pub(super) fn cluster(&self) -> u64 {
        self.cluster
    }

    /// The highest revision so far. To be read before a question is asked.
    pub(super) fn revision(&self) -> i64 {
        self.revision.load(Ordering::Relaxed)
    }

    /// Checks the header of an answer. `known` is the revision before the question.
    pub(super) fn check(
        &self,
        header: Option<&ResponseHeader>,
        known: i64,
    ) -> Result<(), EtcdError> {
        let header = header.ok_or(EtcdError::BadAnswer { what: "header" })?;
        let of_cluster = |cluster: u64| format!("cluster {cluster:016x}");
        let of_revision = |revision: i64| format!("revision {revision}");
        let other = if header.cluster_id != self.cluster {
            Some((of_cluster(self.cluster), of_cluster(header.cluster_id)))
        } else {
            let is_older = header.revision < known;
            is_older.then(|| (of_revision(known), of_revision(header.revision)))
        };
        if let Some((known, found)) = other {
            let _ = self.other_data.set(OtherData { known, found });
        }
        if let Some(other) = self.other_data.get() {
            return Err(other.clone().into());
        }
        self.revision.fetch_max(header.revision, Ordering::Relaxed);
        Ok(())
    }
}
