//! The `vmferry` command: one file per subcommand in [`commands`].

#![forbid(unsafe_code)]

mod args;
mod commands;
mod exit;
mod output;
mod restrict;
mod signals;
mod tables;

use std::process::ExitCode;

use clap::Parser;

use args::{Arguments, Command};
use output::Output;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let output = Output::new(arguments.json);
    let result = match arguments.command {
        Command::Demo(options) => commands::demo::run(&options, &output),
        Command::Run(options) => commands::run::run(&options, &output),
        Command::Receive(options) => commands::receive::run(&options, &output),
        Command::Send(options) => commands::send::run(&options, &output),
        Command::Status(options) => commands::status::run(&options, &output),
        Command::Set(options) => commands::simple::set(&options, &output),
        Command::Cancel(options) => commands::simple::cancel(&options, &output),
        Command::Balloon(options) => commands::balloon::run(&options, &output),
        Command::Pause(options) => commands::simple::pause(&options, &output),
        Command::Resume(options) => commands::simple::resume(&options, &output),
        Command::Quit(options) => commands::simple::quit(&options, &output),
        Command::Resolve(options) => commands::resolve::run(&options, &output),
        Command::Guard => commands::qemu::guard::run(&output),
        Command::StartQemu(options) => commands::qemu::starter::run(&options),
        Command::Pki(options) => commands::pki::run(&options, &output),
        Command::Inspect(options) => commands::inspect::run(&options, &output),
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
