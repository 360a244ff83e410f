//! Users and roles of etcd for a fleet: which keys each host, and each operator, may write.
//!
//! | role | reads | writes, which includes removing |
//! | --- | --- | --- |
//! | `PREFIX host NAME` | all below `PREFIX/` | `hosts/NAME/`, `migrations/`, `sessions/` there |
//! | `PREFIX operator` | all below `PREFIX/` | `orders/`, `migrations/`, `sessions/` there |
//!
//! Prefixes and names of hosts have no spaces, so no two roles have one name.

use std::fmt;

use crate::etcd::{Etcd, KeyRange, Permission, PermissionKind};
use crate::fleet::{Fleet, FleetError, FleetPrefix};
use crate::host::{HostName, is_name};

/// The name of an operator: the common name of their certificate for etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OperatorName(String);

impl OperatorName {
    /// Checks a name.
    ///
    /// # Errors
    /// [`FleetError::OperatorName`].
    pub fn new(name: &str) -> Result<Self, FleetError> {
        match is_name(name) {
            true => Ok(Self(name.to_owned())),
            false => Err(FleetError::OperatorName { name: name.to_owned() }),
        }
    }
}

impl fmt::Display for OperatorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A user of etcd who belongs to a fleet. etcd takes the common name of a client's certificate as
/// the user's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FleetUser {
    /// A host's agent. The user has the host's name.
    Host(HostName),
    /// An administrator who moves guests.
    Operator(OperatorName),
}

impl FleetUser {
    /// The name of the user's role in the fleet at `prefix`.
    fn role(&self, prefix: &FleetPrefix) -> String {
        match self {
            Self::Host(name) => format!("{prefix} host {name}"),
            Self::Operator(_) => format!("{prefix} operator"),
        }
    }

    /// What that role permits.
    fn permissions(&self, prefix: &FleetPrefix) -> Vec<Permission> {
        let written = match self {
            Self::Host(name) => vec![name.key(""), "migrations/".into(), "sessions/".into()],
            // Declaring a host lost frees sessions.
            Self::Operator(_) => vec!["orders/".into(), "migrations/".into(), "sessions/".into()],
        };
        let below = |directory: &str, kind| {
            let range = KeyRange::below(&prefix.key(directory));
            Permission { range, kind }
        };
        let written = written.iter().map(|directory| below(directory, PermissionKind::Write));
        std::iter::once(below("", PermissionKind::Read)).chain(written).collect()
    }
}

impl fmt::Display for FleetUser {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(name) => name.fmt(f),
            Self::Operator(name) => name.fmt(f),
        }
    }
}

/// What [`Fleet::grant`] has done about a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoleChange {
    /// It was not there.
    Made,
    /// It was there with other permissions.
    Corrected,
    /// It was there with these permissions.
    Unchanged,
}

/// A user's role in a fleet, and what [`Fleet::grant`] has done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantedRole {
    /// The role's name in etcd.
    pub role: String,
    /// What was done about the role.
    pub change: RoleChange,
    /// Whether the user was made.
    pub user_made: bool,
    /// Whether the user was given the role, which it did not have.
    pub granted: bool,
    /// Further roles of the user, such as those of other fleets. With the role `root` etcd permits
    /// everything.
    pub other_roles: Vec<String>,
}

impl Fleet {
    /// Makes a user, and the role with exactly the permissions that the user needs in this fleet.
    /// What is there already is left, except other permissions of the role. A user that is there
    /// keeps its password and its further roles.
    ///
    /// # Errors
    /// This client's user lacks the role `root`, or etcd does not answer. Some of it may be done
    /// then, and another call does the rest.
    pub fn grant(&self, user: &FleetUser) -> Result<GrantedRole, FleetError> {
        let (etcd, role, name) = (self.etcd(), user.role(self.prefix()), user.to_string());
        let made = etcd.add_role(&role)?;
        let corrected = correct(etcd, &role, &user.permissions(self.prefix()))?;
        let user_made = etcd.add_user(&name)?;
        let mut other_roles = etcd.roles_of(&name)?.unwrap_or_default();
        let granted = !other_roles.contains(&role);
        if granted {
            etcd.grant_role(&name, &role)?;
        }
        other_roles.retain(|other| *other != role);
        let change = match (made, corrected) {
            (true, _) => RoleChange::Made,
            (false, true) => RoleChange::Corrected,
            (false, false) => RoleChange::Unchanged,
        };
        Ok(GrantedRole { role, change, user_made, granted, other_roles })
    }

    /// Whether etcd checks roles at all: not before its authentication is enabled.
    ///
    /// # Errors
    /// etcd does not answer.
    pub fn checks_roles(&self) -> Result<bool, FleetError> {
        Ok(self.etcd().checks_roles()?)
    }
}

/// Gives a role exactly these permissions. Returns whether it had others.
fn correct(etcd: &Etcd, role: &str, wanted: &[Permission]) -> Result<bool, FleetError> {
    let (excess, missing) = differences(&etcd.permissions(role)?, wanted);
    for range in &excess {
        etcd.forbid(role, range)?;
    }
    for permission in &missing {
        etcd.permit(role, permission)?;
    }
    Ok(!excess.is_empty() || !missing.is_empty())
}

/// The ranges to be taken from a role, and then the permissions to be given to it. A range with the
/// wrong permission is not taken away first, so that its user can go on meanwhile.
fn differences(found: &[Permission], wanted: &[Permission]) -> (Vec<KeyRange>, Vec<Permission>) {
    let of = |all: &[Permission], range: &KeyRange| {
        all.iter().filter(|permission| permission.range == *range).count()
    };
    // etcd can have a range twice, and then it would correct only one of the two.
    let is_excess = |range: &KeyRange| of(wanted, range) == 0 || of(found, range) > 1;
    let mut excess: Vec<KeyRange> = Vec::new();
    for Permission { range, .. } in found {
        if is_excess(range) && !excess.contains(range) {
            excess.push(range.clone());
        }
    }
    let is_missing =
        |wanted: &&Permission| !found.contains(wanted) || excess.contains(&wanted.range);
    let missing = wanted.iter().filter(is_missing).cloned().collect();
    (excess, missing)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn permission(directory: &str, kind: PermissionKind) -> Permission {
        Permission { range: KeyRange::below(directory), kind }
    }

    #[test]
    fn host_writes_its_own_keys_only() {
        let prefix = FleetPrefix::new("/f").unwrap();
        let host = FleetUser::Host(HostName::new("host-a").unwrap());
        assert_eq!(host.role(&prefix), "/f host host-a");
        let written: Vec<Permission> = host
            .permissions(&prefix)
            .into_iter()
            .filter(|permission| permission.kind != PermissionKind::Read)
            .collect();
        let may_write = |key: &str| {
            let key = key.as_bytes();
            written.iter().any(|it| *it.range.start <= *key && *key < *it.range.end)
        };
        for key in ["/f/hosts/host-a/self", "/f/hosts/host-a/guests/x", "/f/sessions/1"] {
            assert!(may_write(key), "{key}");
        }
        for key in ["/f/hosts/host-a", "/f/hosts/host-a0/self", "/f/hosts/host-a-1/self"] {
            assert!(!may_write(key), "{key}");
        }
        for key in ["/f/fleet", "/f/orders/host-a", "/f2/sessions/1", "/f/hosts/host-b/self"] {
            assert!(!may_write(key), "{key}");
        }
    }

    #[test]
    fn only_differences_are_changed() {
        use PermissionKind::{Read, ReadWrite, Write};
        let wanted = [permission("/f/", Read), permission("/f/a/", Write)];
        assert_eq!(differences(&wanted, &wanted), (vec![], vec![]));
        assert_eq!(differences(&[], &wanted), (vec![], wanted.to_vec()));
        let found = [permission("/", ReadWrite), permission("/f/", ReadWrite), wanted[1].clone()];
        let expected = (vec![KeyRange::below("/")], vec![wanted[0].clone()]);
        assert_eq!(differences(&found, &wanted), expected);
        let twice = [wanted[0].clone(), permission("/f/", ReadWrite), wanted[1].clone()];
        let expected = (vec![KeyRange::below("/f/")], vec![wanted[0].clone()]);
        assert_eq!(differences(&twice, &wanted), expected);
    }

    #[test]
    fn operator_names_are_checked() {
        assert_eq!(OperatorName::new("alice").unwrap().to_string(), "alice");
        let error = OperatorName::new("alice smith").unwrap_err().to_string();
        assert!(error.contains("can't be the name of an operator"), "{error}");
    }
}
