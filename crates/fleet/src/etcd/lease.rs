//! Leases: keys that etcd removes when their owner is not heard of any more.

use std::time::Duration;

use tonic::{Response, Status};

use super::proto::lease_client::LeaseClient;
use super::proto::{LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest};
use super::{Access, Etcd, EtcdError};

/// A lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeaseId(pub(super) i64);

impl LeaseId {
    /// No lease, in etcd's messages too.
    pub(crate) const NONE: Self = Self(0);
}

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
        let answer = self
            .call(async |member| LeaseClient::new(member).lease_grant(request).await)
            .map_err(|error| self.explain(error, || Access::Lease))?;
        self.headers.check(answer.header.as_ref(), known)?;
        Ok(LeaseId(answer.id))
    }

    /// Keeps a lease alive. Returns whether it still was.
    ///
    /// # Errors
    /// No member answers.
    pub(crate) fn keep_alive(&self, lease: LeaseId) -> Result<bool, EtcdError> {
        let request = LeaseKeepAliveRequest { id: lease.0 };
        let answer = self.call(async |member| {
            let one = tokio_stream::once(request);
            let mut answers = LeaseClient::new(member).lease_keep_alive(one).await?.into_inner();
            let answer = answers.message().await?;
            answer.map(Response::new).ok_or_else(|| Status::unavailable("it ended the stream"))
        });
        let answer = answer.map_err(|error| self.explain(error, || Access::Lease))?;
        // The member that answers passes it on to the leader and says its own revision, which may
        // be lower than another member's.
        self.headers.check(answer.header.as_ref(), 0)?;
        Ok(answer.ttl > 0)
    }

    /// Ends a lease, with its keys.
    ///
    /// # Errors
    /// No member answers, or the lease has ended already.
    pub(crate) fn revoke(&self, lease: LeaseId) -> Result<(), EtcdError> {
        let known = self.headers.revision();
        let request = LeaseRevokeRequest { id: lease.0 };
        let answer = self
            .call(async |member| LeaseClient::new(member).lease_revoke(request).await)
            .map_err(|error| self.explain(error, || Access::Lease))?;
        self.headers.check(answer.header.as_ref(), known)
    }
}
