//! What the headers of etcd's answers say: which data they come from.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};

use super::proto::ResponseHeader;
use super::{EtcdError, OtherData};

/// What a client knows from the headers of all its answers.
#[derive(Debug, Default)]
pub(super) struct Headers {
    /// Of the first answer.
    cluster: OnceLock<u64>,
    /// The highest revision that an answer had. A transaction's answer never has a lower one than
    /// an answer before the question.
    revision: AtomicI64,
    /// Once this was found nothing is believed any more: the revision grows past the known one.
    other_data: OnceLock<OtherData>,
}

impl Headers {
    /// The cluster's number; `None` before the first answer.
    pub(super) fn cluster(&self) -> Option<u64> {
        self.cluster.get().copied()
    }

    /// The highest revision so far. To be read before a question is asked.
    pub(super) fn revision(&self) -> i64 {
        self.revision.load(Ordering::Relaxed)
    }

    /// Checks that an answer comes from the same data as those before it. `known` is the highest
    /// revision before the question.
    pub(super) fn check(
        &self,
        header: Option<&ResponseHeader>,
        known: i64,
    ) -> Result<(), EtcdError> {
        let header = header.ok_or(EtcdError::BadAnswer { what: "header" })?;
        let of_cluster = |cluster: u64| format!("cluster {cluster:016x}");
        let of_revision = |revision: i64| format!("revision {revision}");
        let cluster = *self.cluster.get_or_init(|| header.cluster_id);
        let other = if header.cluster_id != cluster {
            Some((of_cluster(cluster), of_cluster(header.cluster_id)))
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
