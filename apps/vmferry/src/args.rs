//! The command line.

mod daemon;
mod doctor;
mod documents;
mod fleet;
mod hook;
mod inspect;
mod migration;
mod migrations;
mod receive;
mod record;
mod report;
mod send;
mod units;
mod witness;

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use vmferry_dirty::{LogChoice, SoftwareWay};
use vmferry_memory::MemoryKind;

pub use daemon::{DaemonOptions, HelperOptions, KeeperOptions, ReceiverStarterOptions};
pub use doctor::DoctorOptions;
pub use documents::{CompletionsOptions, ManOptions, public_command};
pub use fleet::{AgentOptions, FleetCommand, FleetOptions, InitOptions, LossOptions, MoveOptions};
pub use hook::{HookOptions, HookRunnerOptions};
pub use inspect::InspectOptions;
pub use migration::{MigrationOptions, WhenStuck};
pub use migrations::{EstimateOptions, MetricsOptions, SetOptions};
pub use receive::{ReceiveOptions, SandboxOption, StarterOptions};
pub use record::RecordOptions;
pub use report::ReportOptions;
pub use send::SendOptions;
pub use units::{Cap, parse_duration, parse_rate};
pub use witness::WitnessOptions;

use units::parse_bytes;

/// Live migration for KVM virtual machines.
#[derive(Debug, Parser)]
#[command(name = "vmferry", version, max_term_width = 100, propagate_version = true)]
#[command(after_help = format!(
    "{}\n\nTry `vmferry demo` first: it migrates a guest between two processes on this machine.",
    crate::exit::help()
))]
pub struct Arguments {
    /// Print JSON: one object, or one object per line for long-running commands.
    #[arg(long, global = true)]
    pub json: bool,
    /// Print results and failures only.
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Migrate a guest between two processes on this machine and show what happened.
    Demo(DemoOptions),
    /// Run a guest until it ends, is quit, or moves to another host.
    Run(RunOptions),
    /// Wait for a guest from another host and run it.
    Receive(ReceiveOptions),
    /// Move a running guest to a waiting host.
    Send(Box<SendOptions>),
    /// Show the guests of this host, one guest, or migrations that are in doubt.
    Status(StatusOptions),
    /// Carry the migrations of this host's libvirt to other hosts, and theirs to this one.
    Daemon(DaemonOptions),
    /// Make the fleet of this host in etcd, show its hosts, and move its guests.
    Fleet(FleetOptions),
    /// Change the limits of a running migration.
    Set(SetOptions),
    /// Release a migration that --pause-before-switchover holds.
    SwitchOver(GuestOption),
    /// Cancel the migration of a guest; the guest stays on this host.
    Cancel(GuestOption),
    /// Watch a running guest and estimate what a migration would cost, without migrating it.
    Estimate(EstimateOptions),
    /// Print or serve metrics of this host's guests and migrations for Prometheus.
    Metrics(MetricsOptions),
    /// Show a guest's balloon and memory statistics, or set the size of the balloon.
    Balloon(BalloonOptions),
    /// Pause a guest.
    Pause(GuestOption),
    /// Resume a paused guest.
    Resume(GuestOption),
    /// End a guest and its VMM.
    Quit(GuestOption),
    /// Check hosts and a guest for what prevents a migration, and say what to do.
    Doctor(DoctorOptions),
    /// Decide, as the operator, which host has a guest whose handover is in doubt.
    Resolve(ResolveOptions),
    /// Issue and revoke the certificates of mutual TLS.
    Pki(PkiOptions),
    /// Decode a recorded channel, a journal or a saved state, and show where it is damaged.
    Inspect(InspectOptions),
    /// Print the completions for a shell.
    Completions(CompletionsOptions),
    /// Print the manual page, or write one for each command.
    Man(ManOptions),
    /// Make an HTML page with plots of one migration, of two side by side, or of benchmarks.
    Report(ReportOptions),
    /// Guard the guest of a `send --qemu` and take over if that process dies. Reads its order from
    /// standard input.
    #[command(hide = true)]
    Guard,
    /// Hold connections of libvirt for a `daemon` that dies.
    #[command(hide = true)]
    KeepConnections(KeeperOptions),
    /// Do on this host what a restricted `daemon` can't do itself. Reads its requests from standard
    /// input.
    #[command(hide = true)]
    HelpDaemon(HelperOptions),
    /// Start receivers for a `daemon`, which sends requests through standard input.
    #[command(hide = true)]
    StartReceivers(ReceiverStarterOptions),
    /// Represent this host in its fleet for a `daemon`.
    #[command(hide = true)]
    JoinFleet(AgentOptions),
    /// Start the QEMU of a `receive --exec`, which sends requests through standard input.
    #[command(hide = true)]
    StartQemu(StarterOptions),
    /// Run the hook of a `send` or `receive`, which sends requests through standard input.
    #[command(hide = true)]
    RunHook(HookRunnerOptions),
}

/// One guest of this host.
#[derive(Debug, Args)]
pub struct GuestOption {
    /// Name of the guest, or path of its control socket.
    pub guest: String,
}

/// A guest to create.
#[derive(Clone, Debug, Args)]
pub struct MachineOptions {
    /// kvm, process (threads that write memory, for hosts without /dev/kvm), or auto.
    #[arg(long, default_value = "auto", value_name = "KIND")]
    pub guest: vmferry_microvm::GuestKind,
    /// Guest memory, such as 256M or 8G.
    #[arg(long, default_value = "256M", value_parser = parse_bytes, value_name = "BYTES")]
    pub memory: u64,
    /// Kind of guest memory: private, memfd, thp, or hugetlb (reserved huge pages).
    #[arg(long, default_value = "private", value_name = "KIND")]
    pub memory_kind: MemoryKind,
    /// Number of vCPUs, 1 to 8.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=8))]
    pub vcpus: u8,
    /// The dirty log: auto, bitmap, clear (bitmap with manual clear), ring (KVM's dirty
    /// ring), or uffd.
    #[arg(long, default_value = "auto", value_name = "LOG")]
    pub dirty_log: LogChoice,
    /// How the dirty log of device writes is read: switch, or for comparison get.opt or get.org.
    #[arg(long, default_value = "switch", value_name = "WAY")]
    pub device_log: SoftwareWay,
    /// Give the guest a balloon (virtio-balloon on virtio-mmio). Requires a guest on KVM.
    #[arg(long)]
    pub balloon: bool,
}

/// `vmferry run`.
#[derive(Debug, Args)]
#[command(after_help = "\
Workloads, separated by spaces: idle | fill=MIB,incompressible|text|zero |
read=MIB | hot=MIB[,rate=PAGES_PER_S][,random|sequential] | display | ticks |
freed=MIB | churn=MIB[,rate=PAGES_PER_S] | poison | pressure | reporting | rewrite

Examples:
  vmferry run web --memory 1G --vcpus 2 --workload \"fill=256,text hot=64,random\"
  vmferry run web --guest process --workload hot=16,rate=20000
  vmferry run kiosk --workload \"display read=64\"
  vmferry run builder --memory 4G --vcpus 2 --balloon --workload \"freed=3000 churn=500 poison\"")]
pub struct RunOptions {
    /// Name of the guest.
    pub name: String,
    /// The guest.
    #[command(flatten)]
    pub machine: MachineOptions,
    /// The guest's workloads.
    #[arg(long, default_value = "idle", value_name = "WORDS")]
    pub workload: String,
    /// The guest's UUID; random by default.
    #[arg(long)]
    pub uuid: Option<uuid::Uuid>,
}

/// Files for `tls:` and `grpc:` addresses.
#[derive(Clone, Debug, Args)]
pub struct TlsOptions {
    /// Directory with ca.pem, host.pem and host.key, as made by `vmferry pki`.
    #[arg(long, value_name = "DIR", env = "VMFERRY_TLS",
          conflicts_with_all = ["ca", "cert", "key"])]
    pub tls: Option<PathBuf>,
    /// Certificates of the trusted authorities (PEM).
    #[arg(long, value_name = "FILE", requires_all = ["cert", "key"])]
    pub ca: Option<PathBuf>,
    /// This host's certificate (PEM).
    #[arg(long, value_name = "FILE", requires = "ca")]
    pub cert: Option<PathBuf>,
    /// This host's private key (PEM, mode 0600).
    #[arg(long, value_name = "FILE", requires = "ca")]
    pub key: Option<PathBuf>,
    /// Revocation list of an authority (PEM); may be given several times. With --tls, DIR/crl.pem
    /// is used as well if it exists.
    #[arg(long, value_name = "FILE")]
    pub crl: Vec<PathBuf>,
    /// How long a certificate or revocation list is accepted outside its dates, to allow for
    /// differing clocks.
    #[arg(long, default_value = "5m", value_parser = parse_duration, value_name = "TIME")]
    pub clock_skew: Duration,
    /// Allow tcp:, which anyone on the network path can read and change.
    #[arg(long)]
    pub plain: bool,
}

/// `vmferry balloon`.
#[derive(Debug, Args)]
#[command(after_help = "\
The guest's driver gives up as much memory as it can; `actual` is what it has given up.

Examples:
  vmferry run web --memory 1G --balloon
  vmferry balloon web                 # statistics, as the guest's driver reports them
  vmferry balloon web 256M            # take 256 MiB from the guest
  vmferry balloon web 0               # give all of it back
  vmferry balloon web --json")]
pub struct BalloonOptions {
    /// Name of the guest, or path of its control socket.
    pub guest: String,
    /// Memory to take from the guest, such as 256M; 0 gives all of it back.
    #[arg(value_parser = parse_bytes, value_name = "SIZE")]
    pub size: Option<u64>,
}

/// `vmferry status`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmferry status
  vmferry status web
  vmferry status --sessions    # on the other host, before `vmferry resolve`")]
pub struct StatusOptions {
    /// Name of a guest, or path of its control socket; by default all guests.
    pub guest: Option<String>,
    /// Show every migration in this host's journals, and what this host promised in it.
    #[arg(long, conflicts_with = "guest")]
    pub sessions: bool,
}

/// `vmferry resolve`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("word").required(true))]
#[command(after_help = "\
Look at the other host first. If the source resumes while the destination runs the guest, two hosts
run it and its data is lost. The command shows what the journal says and asks before it decides
anything. Without a terminal, --yes confirms that the other host was looked at or fenced.

A guest that libvirt moves can be decided on both hosts, with and without a running daemon: the word
is written to the journal, and then libvirt of this host resumes or removes the guest.

Examples:
  vmferry resolve web --destination-owns
  vmferry resolve web --source-resumes
  vmferry resolve web --give-up    # a host is lost before the guest had all pages (post-copy)
  vmferry resolve web --give-up --dump web-memory    # at the destination: keep what is there
  vmferry resolve web --source-resumes --yes --json    # after a script has fenced the other host")]
pub struct ResolveOptions {
    /// Name of the guest, path of its control socket, or number of the session.
    pub guest: String,
    /// The destination has the guest, or had it: the source gives it up.
    #[arg(long, group = "word")]
    pub destination_owns: bool,
    /// The guest never ran at the destination and never will: the source resumes it.
    #[arg(long, group = "word")]
    pub source_resumes: bool,
    /// A host is lost for good before the guest had all its pages (post-copy). At the source, the
    /// memory that is still here is released; at the destination, the guest is ended.
    #[arg(long, group = "word")]
    pub give_up: bool,
    /// Before the guest is ended, save the memory that is here into this new directory, for
    /// inspection.
    #[arg(long, value_name = "DIR", requires = "give_up")]
    pub dump: Option<PathBuf>,
    /// Don't ask: the other host was looked at, or is fenced.
    #[arg(long, short)]
    pub yes: bool,
}

/// `vmferry pki`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmferry pki init --dir pki
  vmferry pki issue host-a --dir pki --out tls-a --address host-a.example --address 192.0.2.1
  vmferry pki revoke host-a --dir pki    # then copy pki/crl.pem to each host's directory")]
pub struct PkiOptions {
    /// What to do.
    #[command(subcommand)]
    pub command: PkiCommand,
}

/// Subcommands of `vmferry pki`.
#[derive(Debug, Subcommand)]
pub enum PkiCommand {
    /// Make a certificate authority.
    Init {
        /// Directory for ca.pem and ca.key.
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
        /// Validity in days.
        #[arg(long, default_value_t = 3650)]
        days: u32,
    },
    /// Issue a host's certificate.
    Issue {
        /// Name of the host.
        name: String,
        /// The authority's directory.
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
        /// Directory for ca.pem, host.pem and host.key.
        #[arg(long, value_name = "DIR")]
        out: PathBuf,
        /// DNS names and IP addresses of the host; by default its name.
        #[arg(long = "address", value_name = "NAME_OR_IP")]
        addresses: Vec<String>,
        /// Validity in days.
        #[arg(long, default_value_t = 365)]
        days: u32,
    },
    /// Revoke certificates: make or renew the authority's revocation list.
    Revoke {
        /// Hosts whose certificates are all revoked, or files with one certificate each; without
        /// any, the list is only renewed.
        hosts: Vec<String>,
        /// The authority's directory; the list is crl.pem in it.
        #[arg(long, value_name = "DIR")]
        dir: PathBuf,
        /// Days until the list must be renewed. A host with an expired list accepts no peer.
        #[arg(long, default_value_t = 30)]
        days: u32,
    },
}

/// How the demo's two processes are connected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// Mutual TLS 1.3 over TCP, with temporary certificates.
    Tls,
    /// Plain TCP.
    Tcp,
    /// A Unix socket.
    Unix,
}

/// `vmferry demo`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmferry demo
  vmferry demo --memory 1G --vcpus 4 --hot 128M --channels 4
  vmferry demo --guest process --transport unix --json
  vmferry demo --workload display
  vmferry demo --workload \"fill=128,text\" --max-bandwidth 20M --compress zstd:3
  vmferry demo --max-bandwidth 20M --downtime-limit 20ms    # does not converge, and says why")]
pub struct DemoOptions {
    /// The guest.
    #[command(flatten)]
    pub machine: MachineOptions,
    /// The guest's workloads; by default it fills a quarter of its memory and rewrites --hot.
    #[arg(long, value_name = "WORDS")]
    pub workload: Option<String>,
    /// Memory that the guest rewrites continuously.
    #[arg(long, default_value = "32M", value_parser = parse_bytes, value_name = "BYTES",
          conflicts_with = "workload")]
    pub hot: u64,
    /// How the two processes are connected.
    #[arg(long, value_enum, default_value_t = Transport::Tls)]
    pub transport: Transport,
    /// Limits and settings.
    #[command(flatten)]
    pub migration: MigrationOptions,
    /// Don't hash and compare all guest memory.
    #[arg(long)]
    pub no_verify: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_is_consistent() {
        Arguments::command().debug_assert();
    }
}
