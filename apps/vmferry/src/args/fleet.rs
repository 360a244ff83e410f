//! The options of `vmferry fleet`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::{parse_duration, parse_rate};

/// `vmferry fleet`.
#[derive(Debug, Args)]
#[command(after_help = "\
The table [fleet] of the configuration says where etcd is:

  [fleet]
  etcd = [\"https://etcd-1.example:2379\", \"https://etcd-2.example:2379\"]
  tls = \"/etc/vmferry/etcd\"    # ca.pem, host.pem and host.key for etcd
  prefix = \"/vmferry\"
  host = \"host-a\"

docs/fleet.md describes all of it.

Examples:
  vmferry fleet init --host host-a --host host-b --operator alice
  vmferry fleet status
  vmferry fleet guests --json
  vmferry fleet watch
  vmferry fleet init --config ./daemon.toml --json
  vmferry fleet init --restored    # after etcd was restored from a backup")]
pub struct FleetOptions {
    /// What to do.
    #[command(subcommand)]
    pub command: FleetCommand,
    /// The configuration of this host's `vmferry daemon`, or a file with its table [fleet] alone.
    #[arg(long, global = true, value_name = "FILE", default_value = "/etc/vmferry/daemon.toml")]
    pub config: PathBuf,
}

/// Subcommands of `vmferry fleet`.
#[derive(Debug, Subcommand)]
pub enum FleetCommand {
    /// Make the fleet in etcd, and users and roles for it. What is there stays as it is.
    Init(InitOptions),
    /// Show the fleet in a few lines, with what is wrong in it.
    Status,
    /// Show the hosts.
    Hosts,
    /// Show the guests of all hosts.
    Guests,
    /// Show hosts, guests and moves as they change, until interrupted.
    Watch,
    /// Move a guest to another host, and show the progress.
    Move(MoveOptions),
    /// Cancel the migration of a guest; the guest stays on its host.
    Cancel {
        /// Name or UUID of the guest.
        guest: String,
    },
    /// Move no guest to a host any more, unless --to names the host.
    Cordon {
        /// The host.
        host: String,
    },
    /// Undo `cordon`.
    Uncordon {
        /// The host.
        host: String,
    },
    /// Fence a host that is not heard any more, and free its guests.
    DeclareLost(LossOptions),
    /// Let a host that was declared lost join again.
    Readmit {
        /// The host.
        host: String,
    },
}

/// `vmferry fleet init`.
#[derive(Debug, Args)]
#[command(after_help = "\
With --host and --operator, etcd gets users, who are named by the common names of their
certificates, and roles with exactly the permissions that docs/fleet.md lists. etcd checks them once
its authentication is enabled, which this command does not do; from then on it needs the certificate
of a user of etcd with the role root.

Examples:
  vmferry fleet init
  vmferry fleet init --host host-a --host host-b --operator alice
  vmferry fleet init --restored    # after etcd was restored from a backup")]
pub struct InitOptions {
    /// Make the user and the role of this host; may be given several times.
    #[arg(long = "host", value_name = "NAME")]
    pub hosts: Vec<String>,
    /// Make this user, who may move guests and cordon hosts; may be given several times.
    #[arg(long = "operator", value_name = "NAME")]
    pub operators: Vec<String>,
    /// etcd was restored from a backup: give the fleet a new incarnation. Handovers that began
    /// before are decided by the hosts' journals alone.
    #[arg(long)]
    pub restored: bool,
}

/// `vmferry fleet move`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without --to, the fleet chooses: of the hosts that are heard, are not cordoned, and have the labels,
the template, all features of the source's processors and enough memory, the one with the largest
part of its memory available afterwards.

Examples:
  vmferry fleet move web
  vmferry fleet move web --to host-b
  vmferry fleet move web --label rack=r2 --json")]
pub struct MoveOptions {
    /// Name or UUID of the guest.
    pub guest: String,
    /// The host that it moves to.
    #[arg(long, value_name = "HOST")]
    pub to: Option<String>,
    /// A label that the host must have; may be given several times.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = parse_label)]
    pub labels: Vec<(String, String)>,
    /// The `[[receive]]` template of the destination's daemon that receives it.
    #[arg(long, value_name = "NAME", default_value = "default")]
    pub template: String,
    /// Bandwidth cap in bytes per second, such as 100M or 350MiB/s, or in bits, such as 1Gbit/s.
    #[arg(long, value_parser = parse_rate, value_name = "RATE")]
    pub max_bandwidth: Option<u64>,
    /// Order it, and don't wait for its end.
    #[arg(long)]
    pub no_wait: bool,
}

/// `vmferry fleet declare-lost`.
#[derive(Debug, Args)]
#[command(after_help = "\
The host is fenced by the command `fence` of the table [fleet]. {host} is replaced by its name, and
{label:KEY} by one of its labels:

  fence = [\"/usr/sbin/fence_ipmilan\", \"--action=off\", \"--ip={label:bmc}\"]

Only when that command has succeeded are the host's guests free. If it fails or takes too long,
nothing is changed.

Examples:
  vmferry fleet declare-lost host-b
  vmferry fleet declare-lost host-b --fence-timeout 5min --json")]
pub struct LossOptions {
    /// The host.
    pub host: String,
    /// How long the fencing command may take, such as 90s or 5min.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = parse_duration)]
    pub fence_timeout: Duration,
    /// Fence the host although its agent is heard.
    #[arg(long)]
    pub although_heard: bool,
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) => Ok((key.to_owned(), value.to_owned())),
        None => Err("use KEY=VALUE".to_owned()),
    }
}

/// `vmferry join-fleet`.
#[derive(Debug, Args)]
pub struct AgentOptions {
    /// The daemon's configuration.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
}
