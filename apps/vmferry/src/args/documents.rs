//! The options of `vmferry completions` and `vmferry man`, and the command line that they describe.

use std::path::PathBuf;

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::Arguments;

/// `vmferry completions`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmferry completions bash >/usr/share/bash-completion/completions/vmferry
  vmferry completions zsh >/usr/share/zsh/vendor-completions/_vmferry
  vmferry completions fish >~/.config/fish/completions/vmferry.fish")]
pub struct CompletionsOptions {
    /// The shell.
    pub shell: Shell,
}

/// `vmferry man`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  vmferry man | man -l -
  vmferry man --dir /usr/local/share/man/man1")]
pub struct ManOptions {
    /// Write vmferry.1 and a page for each command into this directory, which is created if needed.
    /// By default vmferry.1 goes to standard output.
    #[arg(long, value_name = "DIR")]
    pub dir: Option<PathBuf>,
}

/// The command line without the subcommands that vmferry runs internally.
///
/// clap's generators only leave hidden commands out of lists, so they are removed here.
pub fn public_command() -> clap::Command {
    let whole = Arguments::command();
    let commands = whole.get_subcommands().filter(|command| !command.is_hide_set()).cloned();
    let after_help = whole.get_after_help().cloned().unwrap_or_default();
    clap::Command::new("vmferry")
        .version(env!("CARGO_PKG_VERSION"))
        .propagate_version(true)
        .about(whole.get_about().cloned().unwrap_or_default())
        .after_help(after_help)
        .subcommand_required(true)
        .args(whole.get_arguments().cloned())
        .subcommands(commands)
}
