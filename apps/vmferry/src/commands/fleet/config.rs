//! The table `[fleet]` of a daemon's configuration.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use vmferry_fleet::{
    Etcd, EtcdConfig, EtcdError, EtcdTls, Fleet, FleetError, FleetPrefix, HostName, HostNetwork,
};
use vmferry_proxy::is_plain_name;

use crate::args::parse_rate;
use crate::commands::daemon::config::read_toml;
use crate::exit::{Code, Failure};

/// The table.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FleetTable {
    etcd: Vec<String>,
    #[serde(default = "default_prefix")]
    prefix: String,
    tls: Option<PathBuf>,
    #[serde(default)]
    plain: bool,
    host: Option<String>,
    address: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    qemu: Vec<PathBuf>,
    #[serde(default, rename = "network")]
    networks: Vec<NetworkTable>,
    #[serde(default)]
    fence: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct NetworkTable {
    name: String,
    address: String,
    bandwidth: Option<String>,
}

/// What the table says of this host.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTable {
    /// Its name.
    pub name: HostName,
    /// Where other hosts reach its daemon.
    pub address: String,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// Directories with QMP sockets of QEMUs.
    pub qemu: Vec<PathBuf>,
    /// The networks that guests are sent over.
    pub networks: Vec<HostNetwork>,
}

fn default_prefix() -> String {
    "/vmferry".to_owned()
}

impl FleetTable {
    /// Reads the table from a file that may have others.
    pub fn read(path: &Path) -> Result<Self, Failure> {
        #[derive(Deserialize)]
        struct File {
            fleet: Option<FleetTable>,
        }
        read_toml::<File>(path)?.fleet.ok_or_else(|| {
            let name = path.display();
            let text = format!(
                "the configuration {name} has no table [fleet]: add one with `etcd = \
                 [\"https://HOST:2379\"]` and `tls = \"DIR\"`"
            );
            Failure::new(Code::Usage, text)
        })
    }

    /// Checks what a daemon that listens at `listen` needs, without etcd.
    pub fn check(&self, listen: &str) -> Result<(), Failure> {
        self.prefix()?;
        self.host(listen)?;
        self.etcd_config().map(drop)
    }

    /// Where the fleet's keys are.
    pub fn prefix(&self) -> Result<FleetPrefix, Failure> {
        Ok(FleetPrefix::new(&self.prefix)?)
    }

    /// The command that fences a host, with its arguments; empty if there is none.
    pub fn fence(&self) -> &[String] {
        &self.fence
    }

    /// Connects to etcd.
    pub fn connect(&self) -> Result<Etcd, Failure> {
        Ok(Etcd::connect(&self.etcd_config()?).map_err(FleetError::from)?)
    }

    /// Joins the fleet.
    pub fn join(&self) -> Result<Fleet, Failure> {
        let prefix = self.prefix()?;
        Ok(Fleet::join(Arc::new(self.connect()?), prefix)?)
    }

    /// What it says of this host, whose daemon listens at `listen`.
    pub fn host(&self, listen: &str) -> Result<HostTable, Failure> {
        let wrong = |text: String| Failure::new(Code::Usage, text);
        let name = self.host.as_deref().ok_or_else(|| {
            wrong("the table [fleet] does not say which host this is: add `host = \"NAME\"`".into())
        })?;
        let name = HostName::new(name)?;
        let port = listen.rsplit_once(':').map(|(_, port)| port).filter(|port| *port != "0");
        let address = match (&self.address, port) {
            (Some(address), _) => address.clone(),
            (None, Some(port)) => format!("{name}:{port}"),
            (None, None) => {
                return Err(wrong(
                    "the table [fleet] does not say where other hosts reach this one: add \
                     `address = \"HOST:PORT\"`"
                        .into(),
                ));
            }
        };
        let labels = self.labels.iter().flat_map(|(key, value)| [key, value]);
        if let Some(label) = labels.into_iter().find(|text| !is_plain_name(text)) {
            return Err(wrong(format!(
                "{label:?} can't be a label of a host: keys and values have up to 64 letters, \
                 digits, `-`, `_` and `.`"
            )));
        }
        let networks = self.networks.iter().map(|table| {
            let NetworkTable { name, address, bandwidth } = table.clone();
            let bytes_per_s =
                bandwidth.as_deref().map(parse_rate).transpose().map_err(|error| {
                    wrong(format!("`bandwidth` of network {name} is wrong: {error}"))
                })?;
            Ok(HostNetwork { name, address, bytes_per_s })
        });
        let networks = networks.collect::<Result<_, Failure>>()?;
        let (labels, qemu) = (self.labels.clone(), self.qemu.clone());
        if let Some(path) = qemu.iter().find(|path| !path.is_absolute()) {
            let text = format!(
                "`qemu` of the table [fleet] has {}, which is not an absolute path",
                path.display()
            );
            return Err(wrong(text));
        }
        Ok(HostTable { name, address, labels, qemu, networks })
    }

    fn etcd_config(&self) -> Result<EtcdConfig, Failure> {
        let wrong = |text: &str| Err(Failure::new(Code::Usage, text));
        let tls = match &self.tls {
            Some(directory) => Some(EtcdTls::read(directory).map_err(FleetError::from)?),
            None if self.plain => None,
            None => {
                return wrong(
                    "the table [fleet] names no certificates: add `tls = \"DIR\"` with ca.pem, \
                     host.pem and host.key for etcd, or `plain = true` if only hosts of the fleet \
                     can reach etcd",
                );
            }
        };
        let scheme = if tls.is_some() { "https://" } else { "http://" };
        if self.etcd.iter().any(|address| !address.starts_with(scheme)) {
            let text =
                format!("each address in `etcd` of the table [fleet] must begin with {scheme}");
            return wrong(&text);
        }
        Ok(EtcdConfig { endpoints: self.etcd.clone(), tls })
    }
}

impl From<FleetError> for Failure {
    fn from(error: FleetError) -> Self {
        let code = match &error {
            FleetError::Prefix { .. }
            | FleetError::HostName { .. }
            | FleetError::OperatorName { .. } => Code::Usage,
            FleetError::NameTaken { .. } | FleetError::MigrationUnderWay { .. } => Code::Busy,
            FleetError::UnknownHost { .. } => Code::Usage,
            FleetError::DeclaredLost { .. }
            | FleetError::Missing { .. }
            | FleetError::OtherIncarnation { .. }
            | FleetError::Object(_)
            | FleetError::Etcd(EtcdError::OtherData(_)) => Code::WrongState,
            FleetError::Etcd(error) => match error {
                EtcdError::NoEndpoint | EtcdError::BadEndpoint { .. } | EtcdError::File { .. } => {
                    Code::Usage
                }
                EtcdError::NoAnswer { .. } | EtcdError::BadAnswer { .. } => Code::Connect,
                EtcdError::Forbidden { .. }
                | EtcdError::UnknownUser { .. }
                | EtcdError::NoUser { .. }
                | EtcdError::Refused(_) => Code::Authentication,
                EtcdError::Local(_) | EtcdError::OtherData(_) => Code::Internal,
            },
        };
        let advice = match &error {
            FleetError::Missing { .. } => "there is no fleet yet: run `vmferry fleet init` once",
            FleetError::Etcd(
                EtcdError::Forbidden { .. }
                | EtcdError::UnknownUser { .. }
                | EtcdError::NoUser { .. },
            ) => {
                "see `tls`, `host` and `prefix` of the table [fleet], or run `vmferry fleet init \
                 --host NAME` (--operator NAME)"
            }
            _ => return Self::of(code, error),
        };
        Self::of(code, anyhow::Error::new(error).context(advice))
    }
}
