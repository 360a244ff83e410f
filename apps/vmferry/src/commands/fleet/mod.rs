//! `vmferry fleet`: what several hosts agree on in etcd.

pub mod config;
mod fence;
mod init;
mod loss;
mod moving;
mod show;
mod watch;
pub mod witness;

use crate::args::{FleetCommand, FleetOptions};
use crate::exit::Failure;
use crate::output::Output;
use config::FleetTable;

/// Carries out a command.
pub fn run(options: &FleetOptions, output: &Output) -> Result<(), Failure> {
    let table = FleetTable::read(&options.config)?;
    match options.command {
        FleetCommand::Move(ref options) => moving::order(&table.join()?, options, output),
        FleetCommand::Cancel { ref guest } => moving::cancel(&table.join()?, guest, output),
        FleetCommand::Cordon { ref host } => moving::cordon(&table.join()?, host, true, output),
        FleetCommand::Uncordon { ref host } => moving::cordon(&table.join()?, host, false, output),
        FleetCommand::DeclareLost(ref options) => {
            loss::declare(&table.join()?, &table, options, output)
        }
        FleetCommand::Readmit { ref host } => loss::readmit(&table.join()?, host, output),
        FleetCommand::Init(ref options) => init::run(&table, options, output),
        FleetCommand::Status => show::status(&table.join()?, output),
        FleetCommand::Hosts => show::hosts(&table.join()?, output),
        FleetCommand::Guests => show::guests(&table.join()?, output),
        FleetCommand::Watch => watch::run(&table.join()?, output),
    }
}
