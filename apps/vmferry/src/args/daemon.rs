//! The options of `vmferry daemon`.

use std::path::PathBuf;

use clap::Args;

use super::SandboxOption;

/// `vmferry daemon`.
#[derive(Debug, Args)]
#[command(after_help = "\
The file names the address to listen on, this host's certificates, the policy, and the other hosts:

  listen = \"0.0.0.0:7002\"
  tls = \"/etc/vmferry/tls\"
  policy = \"/etc/vmferry/policy.toml\"

  [[peer]]
  name = \"host-b\"
  address = \"host-b.example:7002\"

docs/libvirt.md describes all of it. The daemon reads the file again when it changes.

Examples:
  vmferry daemon
  vmferry daemon --check                          # read the file, and say what is wrong with it
  vmferry daemon --config ./daemon.toml --json
  vmferry send --libvirt web --to host-b          # in another terminal")]
pub struct DaemonOptions {
    /// The configuration.
    #[arg(long, value_name = "FILE", default_value = "/etc/vmferry/daemon.toml")]
    pub config: PathBuf,
    /// Check the configuration, and start nothing.
    #[arg(long)]
    pub check: bool,
    /// Before accepting connections, drop the privileges that the daemon does not need:
    /// capabilities, files, system calls and core dumps. auto: all that this kernel can restrict;
    /// require: all of them, or don't start; off: none.
    #[arg(long, value_enum, default_value_t = SandboxOption::Auto, value_name = "HOW")]
    pub sandbox: SandboxOption,
}

/// `vmferry help-daemon`.
#[derive(Debug, Args)]
pub struct HelperOptions {
    /// The daemon's configuration.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
}

/// `vmferry start-receivers`.
#[derive(Debug, Args)]
pub struct ReceiverStarterOptions {
    /// The daemon's configuration, with the templates.
    #[arg(long, value_name = "FILE")]
    pub config: PathBuf,
}

/// `vmferry keep-connections`.
#[derive(Debug, Args)]
pub struct KeeperOptions {
    /// The socket that daemons connect to.
    #[arg(long, value_name = "PATH")]
    pub socket: PathBuf,
}
