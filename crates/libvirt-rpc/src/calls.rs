//! The two calls of interest, Prepare and Finish.

use crate::cookie;
use crate::error::RpcError;
use crate::flags::MigrateFlags;
use crate::guest::{Guest, check_name};
use crate::params::{MAX_STRING_BYTES, Params};
use crate::socket_uri::SocketUri;
use crate::xdr::Reader;
use crate::xml;

/// A call of interest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// A guest is about to arrive.
    Prepare(Box<PrepareCall>),
    /// A guest has arrived, or has not.
    Finish(FinishCall),
}

impl Call {
    /// The call's serial number, which its reply repeats.
    #[must_use]
    pub fn serial(&self) -> u32 {
        match self {
            Self::Prepare(call) => call.serial,
            Self::Finish(call) => call.serial,
        }
    }

    /// The guest that the call is about.
    #[must_use]
    pub fn guest(&self) -> &Guest {
        match self {
            Self::Prepare(call) => &call.guest,
            Self::Finish(call) => &call.guest,
        }
    }
}

/// A call that starts a guest's QEMU at the destination, where it waits for the migration:
/// `remote_domain_migrate_prepare3_params_args` in `src/remote/remote_protocol.x`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrepareCall {
    /// The call's serial number.
    pub serial: u32,
    /// The guest's UUID of the definition, and its name at the destination: `new_name` if there is
    /// one, otherwise the definition's (`qemuMigrationAnyPrepareDef` in
    /// `src/qemu/qemu_migration.c`). A migration hook of the destination's own may change the
    /// definition, but not these.
    pub guest: Guest,
    /// The name in the definition, which is the guest's name at the source.
    pub source_name: String,
    /// `destination_name`, if the guest is renamed.
    pub new_name: Option<String>,
    /// Where QEMU sends memory: `migrate_uri`. Without it, the destination's libvirt selects a TCP
    /// port.
    pub migrate_uri: Option<String>,
    /// Where QEMU copies disks to: `disks_uri`. Without it, a TCP port.
    pub disks_uri: Option<String>,
    /// The TCP port for disks: `disks_port`.
    pub disks_port: Option<i32>,
    /// Where the destination's QEMU listens: `listen_address`.
    pub listen_address: Option<String>,
    /// Where the clients of the guest's graphics are sent: `graphics_uri`.
    pub graphics_uri: Option<String>,
    /// The name that the destination's certificate must have: `tls.destination`.
    pub tls_destination: Option<String>,
    /// The disks that are copied, or none if the flags decide: `migrate_disks`.
    pub disks: Vec<String>,
    /// The flags.
    pub flags: MigrateFlags,
    /// The guest's definition: `destination_xml`. At most 4 MiB.
    pub xml: String,
    /// The cookie, without the NUL at its end. At most 4 MiB.
    pub cookie: Option<String>,
}

impl PrepareCall {
    /// Reads the arguments of a Prepare.
    ///
    /// # Errors
    /// What is wrong with them: XDR, parameters, the definition, names, or the cookie.
    pub(crate) fn read(serial: u32, payload: &[u8]) -> Result<Self, RpcError> {
        let mut reader = Reader::new(payload);
        let params = Params::read(&mut reader)?;
        let cookie = reader.opaque(MAX_STRING_BYTES, "the cookie")?;
        let flags = MigrateFlags(reader.u32("the flags")?);
        reader.end()?;
        if flags.contains(MigrateFlags::TUNNELLED) {
            return Err(RpcError::Tunnelled);
        }
        let document = "domain definition";
        let missing = RpcError::MissingParameter { name: "destination_xml" };
        let definition = params.destination_xml.ok_or(missing)?;
        let parsed = xml::parse(definition, "domain", document)?;
        let identity = xml::identity(parsed.root_element(), document)?;
        let cookie = cookie::check(cookie, &identity.name, identity.uuid)?;
        if let Some(name) = params.destination_name {
            check_name(name)?;
        }
        let owned = |text: Option<&str>| text.map(str::to_owned);
        let name = params.destination_name.unwrap_or(&identity.name).to_owned();
        Ok(Self {
            serial,
            guest: Guest { name, uuid: identity.uuid },
            new_name: owned(params.destination_name),
            source_name: identity.name,
            migrate_uri: owned(params.migrate_uri),
            disks_uri: owned(params.disks_uri),
            disks_port: params.disks_port,
            listen_address: owned(params.listen_address),
            graphics_uri: owned(params.graphics_uri),
            tls_destination: owned(params.tls_destination),
            disks: params.migrate_disks.into_iter().map(str::to_owned).collect(),
            flags,
            xml: definition.to_owned(),
            cookie: owned(cookie),
        })
    }

    /// The socket that `migrate_uri` names.
    ///
    /// # Errors
    /// [`RpcError::MissingParameter`], [`RpcError::NotASocket`].
    pub fn migrate_socket(&self) -> Result<SocketUri, RpcError> {
        let missing = RpcError::MissingParameter { name: "migrate_uri" };
        SocketUri::parse(self.migrate_uri.as_ref().ok_or(missing)?)
    }

    /// The socket that `disks_uri` names, if there is one.
    ///
    /// # Errors
    /// [`RpcError::NotASocket`].
    pub fn disks_socket(&self) -> Result<Option<SocketUri>, RpcError> {
        self.disks_uri.as_deref().map(SocketUri::parse).transpose()
    }
}

/// A call that runs a guest at the destination after its Prepare, or removes it after a failure:
/// `remote_domain_migrate_finish3_params_args` in `src/remote/remote_protocol.x`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishCall {
    /// The call's serial number.
    pub serial: u32,
    /// The guest of its Prepare, which libvirt finds by the name.
    pub guest: Guest,
    /// Whether the migration has failed at the source, so that the guest must not run.
    pub cancelled: bool,
    /// The flags.
    pub flags: MigrateFlags,
}

/// A guest whose Prepare has passed.
#[derive(Clone, Debug)]
pub(crate) struct Prepared {
    guest: Guest,
    source_name: String,
}

impl From<&PrepareCall> for Prepared {
    fn from(call: &PrepareCall) -> Self {
        Self { guest: call.guest.clone(), source_name: call.source_name.clone() }
    }
}

/// The guests that are prepared on one connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct PreparedGuests(Vec<Prepared>);

impl PreparedGuests {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Adds the guest of a Prepare, instead of an earlier one of the same name.
    pub(crate) fn add(&mut self, call: &PrepareCall) {
        self.0.retain(|prepared| prepared.guest.name != call.guest.name);
        self.0.push(call.into());
    }

    /// Reads the arguments of a Finish and removes its guest, because a guest is finished once.
    /// Returns the cookie's text, too.
    ///
    /// `qemuDomainMigrateFinish3Params` in `src/qemu/qemu_driver.c` uses of the parameters only
    /// `destination_name`, which the source's libvirt always adds.
    ///
    /// # Errors
    /// What is wrong with them: XDR, parameters, or the cookie. [`RpcError::NotPrepared`].
    pub(crate) fn finish<'a>(
        &mut self,
        serial: u32,
        payload: &'a [u8],
    ) -> Result<(FinishCall, Option<&'a str>), RpcError> {
        let mut reader = Reader::new(payload);
        let params = Params::read(&mut reader)?;
        let cookie = reader.opaque(MAX_STRING_BYTES, "the cookie")?;
        let flags = MigrateFlags(reader.u32("the flags")?);
        let cancelled = reader.i32("whether it is canceled")? != 0;
        reader.end()?;
        if flags.contains(MigrateFlags::TUNNELLED) {
            return Err(RpcError::Tunnelled);
        }
        let missing = RpcError::MissingParameter { name: "destination_name" };
        let name = params.destination_name.ok_or(missing)?;
        check_name(name)?;
        let Some(at) = self.0.iter().position(|prepared| prepared.guest.name == name) else {
            return Err(RpcError::NotPrepared { name: name.to_owned() });
        };
        let prepared = &self.0[at];
        let cookie = cookie::check(cookie, &prepared.source_name, prepared.guest.uuid)?;
        let guest = self.0.swap_remove(at).guest;
        Ok((FinishCall { serial, guest, cancelled, flags }, cookie))
    }
}

#[cfg(test)]
mod tests;
