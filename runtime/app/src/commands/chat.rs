//! `forerun chat`: lines in, answers out, with the conversation kept.

use super::{Printer, headline, summary};
use crate::cli::ChatArgs;
use crate::error::AppError;
use crate::model::{Model, model_path};
use crate::session::{Look, Session, user_message};
use forerun_engine::NoObserver;
use serde_json::json;
use std::io::{BufRead, IsTerminal, Write};
use std::path::PathBuf;

const HELP: &str = "\
/image PATH   show a picture with the next message
/clear        forget the conversation
/help         this
/quit         leave (also end of input)";

/// Runs the command.
///
/// # Errors
/// If the model is not usable or storage fails. What is wrong with one message is said, and the conversation goes on.
pub fn run(args: &ChatArgs) -> Result<(), AppError> {
    let model = Model::open(&model_path(&args.model)?)?;
    let detail = model.detail(&args.vision);
    let setup = model.setup(&args.engine, model.config.vision.is_some().then_some(detail), args.max_pixels);
    let look = Look { detail, max_slices: args.vision.max_slices, pixels_max: args.max_pixels };
    let mut session = Session::new(&model, look, args.system.as_deref());
    let first = session.messages.len();
    model.with_engine(
        &setup,
        |s| s,
        |engine, facts| {
            eprintln!("{}", headline(facts));
            eprintln!("{HELP}");
            let mut waiting: Vec<PathBuf> = Vec::new();
            let stdin = std::io::stdin();
            let prompt = stdin.is_terminal();
            let mut lines = stdin.lock().lines();
            loop {
                if prompt {
                    eprint!("> ");
                    let _ = std::io::stderr().flush();
                }
                let Some(line) = lines.next() else { break };
                let line = line.map_err(|error| AppError::System { what: "standard input", error })?;
                let line = line.trim();
                match line.split_once(' ').map_or((line, ""), |(c, rest)| (c, rest.trim())) {
                    ("", _) => {}
                    ("/quit" | "/exit" | "/bye", _) => break,
                    ("/help" | "/?", _) => eprintln!("{HELP}"),
                    ("/clear", _) => {
                        session.messages.truncate(first);
                        session.pictures.clear();
                        waiting.clear();
                    }
                    ("/image", "") => eprintln!("/image needs a path"),
                    ("/image", path) => waiting.push(path.into()),
                    (c, _) if c.starts_with('/') => eprintln!("{c} is not a command; /help lists them"),
                    _ => {
                        let (messages, pictures) = (session.messages.len(), session.pictures.len());
                        session.messages.push(user_message(waiting.len(), line));
                        session.pictures.append(&mut waiting);
                        let mut printer = Printer::new();
                        match session.answer(engine, &args.sample, &mut NoObserver, &mut |p| printer.print(p)) {
                            Ok(answer) => {
                                println!();
                                eprintln!("{}", summary(&answer, &engine.counters()));
                                session.messages.push(json!({"role": "assistant", "content": answer.text}));
                            }
                            Err(e) => {
                                // The message that failed is taken back; what was said before stands.
                                eprintln!("{e}");
                                session.messages.truncate(messages);
                                session.pictures.truncate(pictures);
                            }
                        }
                    }
                }
            }
            Ok(())
        },
    )
}
