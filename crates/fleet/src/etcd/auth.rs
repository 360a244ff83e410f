//! Users and roles, and what it means if etcd refuses a request because of them.
//!
//! A client has no password and no token: members that run with `--client-cert-auth` take the
//! common name of its certificate as its user.

use tonic::{Code, Status};

use super::proto::auth_client::AuthClient;
use super::proto::permission::Type;
use super::proto::{
    self, AuthRoleAddRequest, AuthRoleGetRequest, AuthRoleGrantPermissionRequest,
    AuthRoleRevokePermissionRequest, AuthUserAddRequest, AuthUserGetRequest,
    AuthUserGrantRoleRequest, AuthenticateRequest, ResponseHeader, UserAddOptions,
};
use super::{Access, Etcd, EtcdError};

// What etcd says, in `rpctypes/error.go`: several of these have one code.
pub(super) const OLD_REVISION: &str = "etcdserver: revision of auth store is old";
const NOT_ENABLED: &str = "etcdserver: authentication is not enabled";
const NO_NAME: &str = "etcdserver: user name is empty";
const NO_USER: &str = "etcdserver: user name not found";
const USER_EXISTS: &str = "etcdserver: user name already exists";
const ROLE_EXISTS: &str = "etcdserver: role name already exists";
const NOT_PERMITTED: &str = "etcdserver: permission is not granted to the role";

/// A permission of a role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Permission {
    pub(crate) range: KeyRange,
    pub(crate) kind: PermissionKind,
}

/// What a permission permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PermissionKind {
    Read,
    Write,
    ReadWrite,
}

/// Keys from `start` to before `end`; the key `start` alone if `end` is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct KeyRange {
    pub(crate) start: Vec<u8>,
    pub(crate) end: Vec<u8>,
}

impl KeyRange {
    /// All keys that begin with `directory`, which ends with `/`.
    pub(crate) fn below(directory: &str) -> Self {
        let start = directory.as_bytes().to_vec();
        let mut end = start.clone();
        // The next key after all of them is one byte higher.
        if let Some(last) = end.last_mut() {
            *last += 1;
        }
        Self { start, end }
    }
}

impl Etcd {
    /// Whether authentication is enabled: otherwise every client may do everything. etcd answers
    /// this to everybody, and 3.4 has no request of its own for it.
    ///
    /// # Errors
    /// No member answers.
    pub fn checks_roles(&self) -> Result<bool, EtcdError> {
        let request = AuthenticateRequest { name: "vmferry".to_owned(), password: String::new() };
        match self.call(async |it| AuthClient::new(it).authenticate(request.clone()).await) {
            Ok(_) => Ok(true),
            Err(error) if has_said(&error, NOT_ENABLED) => Ok(false),
            // There is no such user, or it has another password, or none.
            Err(EtcdError::Refused(status)) if status.code() == Code::InvalidArgument => Ok(true),
            Err(error) => Err(error),
        }
    }

    /// Makes a role. Returns whether it was made; it may be there already.
    pub(crate) fn add_role(&self, role: &str) -> Result<bool, EtcdError> {
        let request = AuthRoleAddRequest { name: role.to_owned() };
        let known = self.headers.revision();
        let asked = self.call(async |it| AuthClient::new(it).role_add(request.clone()).await);
        self.changed(asked, ROLE_EXISTS, known, |answer| answer.header)
    }

    /// The permissions of a role.
    pub(crate) fn permissions(&self, role: &str) -> Result<Vec<Permission>, EtcdError> {
        let request = AuthRoleGetRequest { role: role.to_owned() };
        let known = self.headers.revision();
        let answer = self
            .call(async |it| AuthClient::new(it).role_get(request.clone()).await)
            .map_err(|error| self.explain(error, || Access::Roles))?;
        self.headers.check(answer.header.as_ref(), known)?;
        Ok(answer.perm.into_iter().map(Permission::from).collect())
    }

    /// Gives a role a permission, in place of the one that it may have on the same range.
    pub(crate) fn permit(&self, role: &str, permission: &Permission) -> Result<(), EtcdError> {
        let perm = Some(permission.clone().into());
        let request = AuthRoleGrantPermissionRequest { name: role.to_owned(), perm };
        let known = self.headers.revision();
        let answer = self
            .call(async |it| AuthClient::new(it).role_grant_permission(request.clone()).await)
            .map_err(|error| self.explain(error, || Access::Roles))?;
        self.headers.check(answer.header.as_ref(), known)
    }

    /// Takes the permissions on exactly this range from a role.
    pub(crate) fn forbid(&self, role: &str, range: &KeyRange) -> Result<(), EtcdError> {
        let KeyRange { start: key, end: range_end } = range.clone();
        let request = AuthRoleRevokePermissionRequest { role: role.to_owned(), key, range_end };
        let known = self.headers.revision();
        let asked =
            self.call(async |it| AuthClient::new(it).role_revoke_permission(request.clone()).await);
        self.changed(asked, NOT_PERMITTED, known, |answer| answer.header).map(drop)
    }

    /// Makes a user without a password. Returns whether it was made; it may be there already.
    pub(crate) fn add_user(&self, user: &str) -> Result<bool, EtcdError> {
        let options = Some(UserAddOptions { no_password: true });
        let (name, password) = (user.to_owned(), String::new());
        let request = AuthUserAddRequest { name, password, options };
        let known = self.headers.revision();
        let asked = self.call(async |it| AuthClient::new(it).user_add(request.clone()).await);
        self.changed(asked, USER_EXISTS, known, |answer| answer.header)
    }

    /// The roles of a user; `None` if there is no such user. A user may ask this about itself.
    pub(crate) fn roles_of(&self, user: &str) -> Result<Option<Vec<String>>, EtcdError> {
        match self.ask_roles_of(user) {
            Err(error) if has_said(&error, NO_USER) => Ok(None),
            asked => asked.map(Some).map_err(|error| self.explain(error, || Access::Roles)),
        }
    }

    fn ask_roles_of(&self, user: &str) -> Result<Vec<String>, EtcdError> {
        let request = AuthUserGetRequest { name: user.to_owned() };
        let known = self.headers.revision();
        let answer = self.call(async |it| AuthClient::new(it).user_get(request.clone()).await)?;
        self.headers.check(answer.header.as_ref(), known)?;
        Ok(answer.roles)
    }

    /// Gives a user a role, which it may have already.
    pub(crate) fn grant_role(&self, user: &str, role: &str) -> Result<(), EtcdError> {
        let request = AuthUserGrantRoleRequest { user: user.to_owned(), role: role.to_owned() };
        let known = self.headers.revision();
        let answer = self
            .call(async |it| AuthClient::new(it).user_grant_role(request.clone()).await)
            .map_err(|error| self.explain(error, || Access::Roles))?;
        self.headers.check(answer.header.as_ref(), known)
    }

    /// Whether a request has changed something: not if etcd says `already`.
    fn changed<T>(
        &self,
        asked: Result<T, EtcdError>,
        already: &str,
        known: i64,
        header: impl FnOnce(T) -> Option<ResponseHeader>,
    ) -> Result<bool, EtcdError> {
        match asked {
            Ok(answer) => self.headers.check(header(answer).as_ref(), known).map(|()| true),
            Err(error) if has_said(&error, already) => Ok(false),
            Err(error) => Err(self.explain(error, || Access::Roles)),
        }
    }

    /// Why etcd has refused a request that needs `access`. "Permission denied" says neither whose
    /// permission nor which one, and is also the answer to a user that etcd does not have.
    pub(super) fn explain(&self, error: EtcdError, access: impl FnOnce() -> Access) -> EtcdError {
        let EtcdError::Refused(status) = &error else { return error };
        let is_denied = status.code() == Code::PermissionDenied;
        let user = match &self.user {
            _ if status.message() == NO_NAME => None,
            _ if !is_denied && status.message() != NO_USER => return error,
            user => user.clone(),
        };
        let Some(user) = user else { return EtcdError::NoUser { access: access() } };
        match self.ask_roles_of(&user) {
            Ok(roles) if is_denied => EtcdError::Forbidden { user, access: access(), roles },
            Err(asked) if has_said(&asked, NO_USER) => {
                EtcdError::UnknownUser { user, access: access() }
            }
            _ => error,
        }
    }
}

fn has_said(error: &EtcdError, words: &str) -> bool {
    matches!(error, EtcdError::Refused(status) if Status::message(status) == words)
}

impl From<proto::Permission> for Permission {
    fn from(permission: proto::Permission) -> Self {
        let kind = match permission.perm_type() {
            Type::Read => PermissionKind::Read,
            Type::Write => PermissionKind::Write,
            Type::Readwrite => PermissionKind::ReadWrite,
        };
        let proto::Permission { key: start, range_end: end, .. } = permission;
        Self { range: KeyRange { start, end }, kind }
    }
}

impl From<Permission> for proto::Permission {
    fn from(Permission { range, kind }: Permission) -> Self {
        let kind = match kind {
            PermissionKind::Read => Type::Read,
            PermissionKind::Write => Type::Write,
            PermissionKind::ReadWrite => Type::Readwrite,
        };
        Self { perm_type: kind.into(), key: range.start, range_end: range.end }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::EtcdConfig;

    #[test]
    fn client_without_a_user_is_told_so() {
        let endpoints = vec!["http://127.0.0.1:1".to_owned()];
        let etcd = Etcd::connect(&EtcdConfig { endpoints, tls: None }).unwrap();
        let explained = |status: Status| {
            let refused = EtcdError::Refused(Box::new(status));
            etcd.explain(refused, || Access::Read("/f/fleet".to_owned())).to_string()
        };
        for status in [Status::invalid_argument(NO_NAME), Status::permission_denied("no")] {
            let text = explained(status);
            assert!(text.contains("does not know which user wants to read /f/fleet"), "{text}");
        }
        assert_eq!(explained(Status::invalid_argument("other")), "etcd refuses: other");
    }
}
