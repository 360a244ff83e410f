//! `vmferry completions`: shell completions for the command line.

use std::io::{self, Write};

use crate::args::{CompletionsOptions, public_command};
use crate::exit::Failure;

/// Prints the completions of one shell.
pub fn run(options: &CompletionsOptions) -> Result<(), Failure> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut public_command(), "vmferry", &mut script);
    io::stdout().write_all(&script)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;
    use clap_complete::Shell;

    use crate::args::public_command;

    #[test]
    fn completions_have_the_public_commands_only() {
        for shell in Shell::value_variants() {
            let mut script = Vec::new();
            clap_complete::generate(*shell, &mut public_command(), "vmferry", &mut script);
            let script = String::from_utf8(script).unwrap();
            for command in public_command().get_subcommands() {
                assert!(script.contains(command.get_name()), "{shell}: {}", command.get_name());
            }
            for hidden in ["guard", "start-qemu", "run-hook"] {
                assert!(!script.contains(hidden), "{shell}: {hidden}");
            }
        }
    }
}
