//! The user that libvirt runs QEMU as.

use vmferry_proxy::Owner;

use super::wrong;
use crate::exit::Failure;

/// Names that distributions give to this user.
const QEMU_USERS: [&str; 2] = ["libvirt-qemu", "qemu"];

/// The user that QEMU runs as: of this name, or of the first usual name that exists, or else root.
pub fn qemu_user(name: Option<&str>) -> Result<Owner, Failure> {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let find = |name: &str| {
        users.lines().find_map(|line| {
            let mut fields = line.split(':');
            let is_it = fields.next() == Some(name);
            let mut number = || fields.nth(1).and_then(|field| field.parse().ok());
            let uid = number().filter(|_| is_it)?;
            let gid = fields.next()?.parse().ok()?;
            Some(Owner { uid, gid })
        })
    };
    match name {
        Some(name) => find(name)
            .ok_or_else(|| wrong(format!("the user {name} of `qemu_user` is not in /etc/passwd"))),
        None => Ok(QEMU_USERS.into_iter().find_map(find).unwrap_or(Owner { uid: 0, gid: 0 })),
    }
}
