//! The `vmferry` command: one file per subcommand in [`commands`].

#![forbid(unsafe_code)]

mod args;
mod commands;
mod exit;
mod output;
mod progress;
mod restrict;
mod saved_run;
mod signals;
mod tables;

use std::process::ExitCode;

use clap::Parser;

use args::{Arguments, Command};
use output::Output;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let output = Output::new(arguments.json, arguments.quiet);
    let result = match arguments.command {
        Command::Demo(options) => commands::demo::run(&options, &output),
        Command::Run(options) => commands::run::run(&options, &output),
        Command::Receive(options) => commands::receive::run(&options, &output),
        Command::Send(options) => commands::send::run(&options, &output),
        Command::Daemon(options) => commands::daemon::run(&options, &output),
        Command::Fleet(options) => commands::fleet::run(&options, &output),
        Command::Status(options) => commands::status::run(&options, &output),
        Command::Set(options) => commands::simple::set(&options, &output),
        Command::SwitchOver(options) => commands::simple::switch_over(&options, &output),
        Command::Cancel(options) => commands::simple::cancel(&options, &output),
        Command::Estimate(options) => commands::estimate::run(&options, &output),
        Command::Metrics(options) => commands::metrics::run(&options, &output),
        Command::Balloon(options) => commands::balloon::run(&options, &output),
        Command::Pause(options) => commands::simple::pause(&options, &output),
        Command::Resume(options) => commands::simple::resume(&options, &output),
        Command::Quit(options) => commands::simple::quit(&options, &output),
        Command::Doctor(options) => match commands::doctor::run(&options, &output) {
            // The findings were printed already.
            Ok(Some(code)) => return ExitCode::from(code.number()),
            found => found.map(drop),
        },
        Command::Resolve(options) => commands::resolve::run(&options, &output),
        Command::Guard => commands::qemu::guard::run(&output),
        Command::KeepConnections(options) => commands::daemon::keeper::serve(&options),
        Command::HelpDaemon(options) => commands::daemon::helper::process::serve(&options),
        Command::StartReceivers(options) => commands::daemon::receivers::process::serve(&options),
        Command::JoinFleet(options) => commands::daemon::agent::process::serve(&options, &output),
        Command::StartQemu(options) => commands::qemu::starter::run(&options),
        Command::RunHook(options) => commands::qemu::hook::serve(&options, &output),
        Command::Pki(options) => commands::pki::run(&options, &output),
        Command::Inspect(options) => commands::inspect::run(&options, &output),
        Command::Completions(options) => commands::completions::run(&options),
        Command::Man(options) => commands::man::run(&options, &output),
        Command::Report(options) => commands::report::run(&options, &output),
    };
    vmferry_transport::finish_recordings();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output.failure(&failure);
            ExitCode::from(failure.code.number())
        }
    }
}
