//! Errors of etcd's client.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use tonic::Status;

/// An error of etcd's client.
#[derive(Debug, thiserror::Error)]
pub enum EtcdError {
    /// No member is configured.
    #[error("no address of etcd is configured")]
    NoEndpoint,
    /// An address is wrong, or its certificates are.
    #[error("etcd can't be reached at `{endpoint}`")]
    BadEndpoint {
        /// The address.
        endpoint: String,
        /// Why.
        #[source]
        source: tonic::transport::Error,
    },
    /// A file of the client's certificate can't be read.
    #[error("{path} can't be read", path = path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// This host lacks threads.
    #[error("a thread for etcd could not be started")]
    Local(#[source] std::io::Error),
    /// No member has answered in time. A change may or may not have been made.
    #[error("no member of etcd answered within {:.1} s: {last}", after.as_secs_f64())]
    NoAnswer {
        /// How long they were waited for.
        after: Duration,
        /// What the last member that answered at all has said.
        last: String,
    },
    /// The client's user may not do that.
    #[error(
        "etcd's roles do not let user `{user}` {access}; its roles: {}. Check the certificate, the \
         host's name and the prefix, or give the user its role",
        listed(roles)
    )]
    Forbidden {
        /// The user, who is named by the client's certificate.
        user: String,
        /// What was to be done.
        access: Access,
        /// The roles that it has.
        roles: Vec<String>,
    },
    /// etcd does not have the client's user.
    #[error(
        "etcd has no user `{user}`, which is the common name of this certificate, so it does not \
         let it {access}: use the certificate of one of its users, or make the user"
    )]
    UnknownUser {
        /// The user.
        user: String,
        /// What was to be done.
        access: Access,
    },
    /// etcd does not know the client's user.
    #[error(
        "etcd checks roles and does not know which user wants to {access}: use a certificate with \
         a common name, and start etcd's members with --client-cert-auth"
    )]
    NoUser {
        /// What was to be done.
        access: Access,
    },
    /// etcd has refused the request.
    #[error("etcd refuses: {}", .0.message())]
    Refused(#[source] Box<Status>),
    /// The answer comes from another cluster, or from older data, than an earlier one.
    #[error(transparent)]
    OtherData(#[from] OtherData),
    /// The answer lacks something.
    #[error("etcd's answer has no {what}")]
    BadAnswer {
        /// What is missing.
        what: &'static str,
    },
}

/// etcd's data is not what it was.
#[derive(Clone, Debug, thiserror::Error)]
#[error(
    "etcd's data was replaced or restored from a backup: {found} now, {known} before. Nothing in \
     it decides about guests that were moving"
)]
pub struct OtherData {
    pub(super) known: String,
    pub(super) found: String,
}

/// What a request needs a permission for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// To read a key, or all keys that begin with it if it ends with `/`.
    Read(String),
    /// To set or remove a key.
    Write(String),
    /// To grant, keep alive or revoke a lease.
    Lease,
    /// To read and change users and roles.
    Roles,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read(key) => write!(f, "read {key}"),
            Self::Write(key) => write!(f, "write {key}"),
            Self::Lease => f.write_str("use leases"),
            Self::Roles => f.write_str("manage users and roles"),
        }
    }
}

fn listed(roles: &[String]) -> String {
    match roles {
        [] => "none".to_owned(),
        roles => roles.iter().map(|role| format!("`{role}`")).collect::<Vec<_>>().join(", "),
    }
}
