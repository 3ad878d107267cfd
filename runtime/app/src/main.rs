//! The `forerun` binary: command line in, exit code out. Everything else is in the library beside it.
#![forbid(unsafe_code)]

use clap::Parser;
use forerun::cli::{Cli, Command};
use forerun::commands;
use forerun::error::AppError;
use std::io::ErrorKind;
use std::process::ExitCode;

fn main() -> ExitCode {
    env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("warn")).init();
    let cli = Cli::parse();
    let result = match &cli.command {
        Command::Run(a) => commands::run::run(a),
        Command::Chat(a) => commands::chat::run(a),
        Command::Plan(a) => commands::plan::run(a),
        Command::Verify(a) => commands::verify::run(a),
        Command::Demo(a) => commands::demo::run(a),
        Command::Route(a) => commands::route::run(a),
        Command::Bench(a) => commands::bench::run(a),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            // A reader that went away, as in `forerun run … | head -1`, needs no message.
            if !matches!(&e, AppError::Output(e) if e.kind() == ErrorKind::BrokenPipe) {
                commands::note(format_args!("forerun: {e}"));
            }
            ExitCode::from(e.exit_code())
        }
    }
}
