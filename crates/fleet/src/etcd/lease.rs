//! Leases: keys that etcd removes when their owner is not heard of any more.

use std::time::Duration;

use tonic::{Response, Status};

use super::proto::lease_client::LeaseClient;
use super::proto::{LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest};
use super::{Etcd, EtcdError};

/// A lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeaseId(pub(super) i64);

impl Etcd {
    /// A new lease, which ends this time after it was kept alive last. A second attempt leaves one
    /// that ends by itself.
    ///
    /// # Errors
    /// No member answers.
    pub(crate) fn grant(&self, lasts: Duration) -> Result<LeaseId, EtcdError> {
        let known = self.headers.revision();
        let seconds = i64::try_from(lasts.as_secs()).unwrap_or(i64::MAX).max(1);
        let request = LeaseGrantRequest { ttl: seconds, id: 0 };
        let answer =
            self.call(async |member| LeaseClient::new(member).lease_grant(request).await)?;
        self.headers.check(answer.header.as_ref(), known)?;
        Ok(LeaseId(answer.id))
    }

    /// Keeps a lease alive. Returns whether it still was.
    ///
    /// # Errors
    /// No member answers.
    pub(crate) fn keep_alive(&self, lease: LeaseId) -> Result<bool, EtcdError> {
        let known = self.headers.revision();
        let request = LeaseKeepAliveRequest { id: lease.0 };
        let answer = self.call(async |member| {
            let one = tokio_stream::once(request);
            let mut answers = LeaseClient::new(member).lease_keep_alive(one).await?.into_inner();
            let answer = answers.message().await?;
            answer.map(Response::new).ok_or_else(|| Status::unavailable("it ended the stream"))
        })?;
        self.headers.check(answer.header.as_ref(), known)?;
        Ok(answer.ttl > 0)
    }

    /// Ends a lease, with its keys.
    ///
    /// # Errors
    /// No member answers, or the lease has ended already.
    pub(crate) fn revoke(&self, lease: LeaseId) -> Result<(), EtcdError> {
        let known = self.headers.revision();
        let request = LeaseRevokeRequest { id: lease.0 };
        let answer =
            self.call(async |member| LeaseClient::new(member).lease_revoke(request).await)?;
        self.headers.check(answer.header.as_ref(), known)
    }
}
