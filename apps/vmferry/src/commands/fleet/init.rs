//! `vmferry fleet init`.

use std::sync::Arc;

use serde_json::{Value, json};
use vmferry_fleet::{
    Fleet, FleetError, FleetUser, GrantedRole, HostName, OperatorName, RoleChange,
};

use super::config::FleetTable;
use crate::args::InitOptions;
use crate::exit::{Code, Failure};
use crate::output::Output;

/// Makes the fleet, or gives it a new incarnation, and makes users and roles for it.
pub fn run(table: &FleetTable, options: &InitOptions, output: &Output) -> Result<(), Failure> {
    // A wrong name is found before anything is made.
    let hosts = options.hosts.iter().map(|name| HostName::new(name).map(FleetUser::Host));
    let operators =
        options.operators.iter().map(|name| OperatorName::new(name).map(FleetUser::Operator));
    let users = hosts.chain(operators).collect::<Result<Vec<_>, _>>()?;
    let done = Done::make(table, options.restored, &users).map_err(with_advice)?;
    output.result(&done.facts(), || done.in_words());
    Ok(())
}

/// The fleet and its users, and what was done about each.
struct Done {
    fleet: Fleet,
    made: bool,
    renewed: bool,
    grants: Vec<(FleetUser, GrantedRole)>,
    checks_roles: bool,
}

impl Done {
    fn make(table: &FleetTable, restored: bool, users: &[FleetUser]) -> Result<Self, Failure> {
        let prefix = table.prefix()?;
        let etcd = Arc::new(table.connect()?);
        let made = if restored {
            Fleet::renew(&etcd, &prefix)?;
            false
        } else {
            Fleet::make(&etcd, &prefix)?
        };
        let fleet = Fleet::join(etcd, prefix)?;
        let grants = users.iter().map(|user| Ok((user.clone(), fleet.grant(user)?)));
        let grants = grants.collect::<Result<_, FleetError>>()?;
        let checks_roles = fleet.checks_roles()?;
        Ok(Self { fleet, made, renewed: restored, grants, checks_roles })
    }

    fn facts(&self) -> Value {
        let users = self.grants.iter().map(|(user, grant)| {
            let kind = match user {
                FleetUser::Host(_) => "host",
                FleetUser::Operator(_) => "operator",
            };
            json!({
                "user": user.to_string(), "kind": kind, "user_made": grant.user_made,
                "role": grant.role, "role_made": grant.change == RoleChange::Made,
                "role_corrected": grant.change == RoleChange::Corrected,
                "granted": grant.granted, "other_roles": grant.other_roles,
            })
        });
        json!({
            "prefix": self.fleet.prefix().to_string(), "cluster": self.cluster(),
            "incarnation": self.fleet.incarnation(), "made": self.made, "renewed": self.renewed,
            "users": users.collect::<Vec<_>>(), "checks_roles": self.checks_roles,
        })
    }

    fn cluster(&self) -> String {
        format!("{:016x}", self.fleet.cluster())
    }

    fn in_words(&self) -> String {
        let fleet = format!("the fleet {} in etcd cluster {}", self.fleet.prefix(), self.cluster());
        let incarnation = self.fleet.incarnation();
        let mut lines = vec![match (self.made, self.renewed) {
            (true, _) => format!("made {fleet}, incarnation {incarnation}"),
            (false, true) => format!("gave {fleet} a new incarnation, {incarnation}"),
            (false, false) => format!("{fleet} is there already, incarnation {incarnation}"),
        }];
        for (user, grant) in &self.grants {
            let role = &grant.role;
            lines.push(match grant.change {
                RoleChange::Made => format!("made the role `{role}`"),
                RoleChange::Corrected => format!("corrected the permissions of the role `{role}`"),
                RoleChange::Unchanged => format!("the role `{role}` is there already"),
            });
            lines.push(match grant.user_made {
                true => format!("made the user `{user}`"),
                false => format!("the user `{user}` is there already"),
            });
            lines.push(match grant.granted {
                true => format!("gave the user `{user}` the role `{role}`"),
                false => format!("the user `{user}` has the role `{role}` already"),
            });
            if !grant.other_roles.is_empty() {
                let others = grant.other_roles.join("`, `");
                lines.push(format!("the user `{user}` keeps further roles: `{others}`"));
            }
        }
        lines.push(if self.checks_roles { CHECKED } else { UNCHECKED }.to_owned());
        lines.join("\n")
    }
}

const CHECKED: &str = "etcd checks roles: its authentication is enabled";

const UNCHECKED: &str = "\
etcd does not check roles: every client may read and write everything. When each host and operator
has a user (--host, --operator), enable authentication, as root from then on:
  etcdctl user add root --no-password
  etcdctl user grant-role root root
  etcdctl auth enable";

/// Says whose certificate it takes, if etcd has refused something.
fn with_advice(failure: Failure) -> Failure {
    if failure.code != Code::Authentication {
        return failure;
    }
    let text = "a fleet is made by a user of etcd with the role root: let `tls` name that user's \
                certificate, for example in a file with the table [fleet] alone, and pass the file \
                with --config";
    // In place of the advice that other commands give.
    let error = match failure.error.downcast::<FleetError>() {
        Ok(error) => anyhow::Error::new(error),
        Err(other) => other,
    };
    Failure::of(Code::Authentication, error.context(text))
}
