//! The options of `vmferry fleet`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

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
  vmferry fleet init
  vmferry fleet status
  vmferry fleet guests --json
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
    /// Make the fleet in etcd. A fleet that is there already stays as it is.
    Init {
        /// etcd was restored from a backup: give the fleet a new incarnation. Handovers that began
        /// before are decided by the hosts' journals alone.
        #[arg(long)]
        restored: bool,
    },
    /// Show the fleet in a few lines, with what is wrong in it.
    Status,
    /// Show the hosts.
    Hosts,
    /// Show the guests of all hosts.
    Guests,
}

/// `vmferry join-fleet`.
#[derive(Debug, Args)]
pub struct AgentOptions {
    /// The daemon's configuration.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
}
