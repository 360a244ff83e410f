//! `vmferry fleet`: what several hosts agree on in etcd.

pub mod config;
mod init;
mod show;
pub mod witness;

use crate::args::{FleetCommand, FleetOptions};
use crate::exit::Failure;
use crate::output::Output;
use config::FleetTable;

/// Carries out a command.
pub fn run(options: &FleetOptions, output: &Output) -> Result<(), Failure> {
    let table = FleetTable::read(&options.config)?;
    match options.command {
        FleetCommand::Init { restored } => init::run(&table, restored, output),
        FleetCommand::Status => show::status(&table.join()?, output),
        FleetCommand::Hosts => show::hosts(&table.join()?, output),
        FleetCommand::Guests => show::guests(&table.join()?, output),
    }
}
