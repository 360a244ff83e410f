//! The table `[fleet]` of a daemon's configuration.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize;
use vmferry_fleet::{Etcd, EtcdConfig, EtcdError, EtcdTls, Fleet, FleetError, FleetPrefix};

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

    /// Checks what can be checked without etcd.
    pub fn check(&self) -> Result<(), Failure> {
        self.prefix()?;
        self.etcd_config().map(drop)
    }

    /// Where the fleet's keys are.
    pub fn prefix(&self) -> Result<FleetPrefix, Failure> {
        Ok(FleetPrefix::new(&self.prefix)?)
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
            FleetError::Prefix { .. } => Code::Usage,
            FleetError::Missing { .. }
            | FleetError::OtherIncarnation { .. }
            | FleetError::Object(_)
            | FleetError::Etcd(EtcdError::OtherData(_)) => Code::WrongState,
            FleetError::Etcd(error) => match error {
                EtcdError::NoEndpoint | EtcdError::BadEndpoint { .. } | EtcdError::File { .. } => {
                    Code::Usage
                }
                EtcdError::NoAnswer { .. } | EtcdError::BadAnswer { .. } => Code::Connect,
                EtcdError::Refused(_) => Code::Authentication,
                EtcdError::Local(_) | EtcdError::OtherData(_) => Code::Internal,
            },
        };
        Self::of(code, error)
    }
}
