//! `forerun chat`: lines in, answers out, with the conversation kept.

use super::{Printer, headline, note, say, summary};
use crate::cli::ChatArgs;
use crate::error::AppError;
use crate::model::{Model, model_path};
use crate::reader::Reader;
use crate::session::{Fixed, Look, Picture, Session, user_message};
use forerun_engine::NoObserver;
use serde_json::json;
use std::io::{BufRead, IsTerminal, Read, Write};
use std::path::PathBuf;

const HELP: &str = "\
/image PATH   show a picture with the next message
/clear        forget the conversation
/help         this
/quit         leave (also end of input)";

/// Longest line, bytes.
const LINE_BYTES_MAX: usize = 256 << 10;

/// Reads a line with its end into `line`, which stays empty at the end of the input. Of a line of over
/// [`LINE_BYTES_MAX`] bytes, skips the rest and returns false.
fn read_line(input: &mut impl BufRead, line: &mut Vec<u8>) -> std::io::Result<bool> {
    line.clear();
    input.by_ref().take(LINE_BYTES_MAX as u64).read_until(b'\n', line)?;
    let whole = line.len() < LINE_BYTES_MAX || line.ends_with(b"\n");
    if !whole {
        input.skip_until(b'\n')?;
    }
    Ok(whole)
}

/// Runs the command.
///
/// # Errors
/// If the model is not usable or storage fails. What is wrong with one message is said, and the conversation goes on.
pub fn run(args: &ChatArgs) -> Result<(), AppError> {
    let model = Model::open(&model_path(&args.model)?)?;
    let look = Look::up_to(&model, &args.vision, args.max_pixels);
    let vision = model.config.vision.is_some().then(|| model.vision_options(&look)).transpose()?;
    let mut setup = model.setup(&args.engine, vision);
    setup.options.prefix = true;
    let mut session = Session::new(&model, look, args.system.as_deref());
    session.fixed = Fixed::Messages;
    let first = session.messages.len();
    model.with_engine(
        &setup,
        |s| s,
        |engine, facts| {
            note(format_args!("{}\n{HELP}", headline(facts)));
            let mut reader = Reader::new(engine);
            let mut waiting: Vec<Picture> = Vec::new();
            let stdin = std::io::stdin();
            let prompt = stdin.is_terminal();
            let mut lines = stdin.lock();
            let mut line = Vec::new();
            loop {
                if prompt {
                    let _ = write!(std::io::stderr(), "> ");
                }
                let whole = read_line(&mut lines, &mut line);
                let whole = whole.map_err(|error| AppError::System { what: "standard input", error })?;
                if line.is_empty() {
                    if prompt {
                        note(format_args!(""));
                    }
                    break;
                }
                let line = match (whole, str::from_utf8(&line)) {
                    (true, Ok(line)) => line.trim(),
                    (true, Err(e)) => {
                        note(format_args!("this line is not UTF-8: {e}"));
                        continue;
                    }
                    (false, _) => {
                        note(format_args!("this line is longer than {LINE_BYTES_MAX} bytes: expected shorter ones"));
                        continue;
                    }
                };
                match line.split_once(' ').map_or((line, ""), |(c, rest)| (c, rest.trim())) {
                    ("", _) => {}
                    ("/quit" | "/exit" | "/bye", _) => break,
                    ("/help" | "/?", _) => note(format_args!("{HELP}")),
                    ("/clear", _) => {
                        session.messages.truncate(first);
                        session.pictures.clear();
                        waiting.clear();
                        note(format_args!("forgotten"));
                    }
                    ("/image", "") => note(format_args!("/image needs a path")),
                    ("/image", path) => {
                        // As a shell or a file manager may have quoted it.
                        let bare = ['"', '\''].iter().find_map(|&q| path.strip_prefix(q)?.strip_suffix(q));
                        let picture = Picture::File(PathBuf::from(bare.unwrap_or(path)));
                        match session.check_picture(&picture) {
                            Ok((width, height)) => {
                                let shown = picture.path().display();
                                note(format_args!("{shown}, {width} x {height} pixels, comes with the next message"));
                                waiting.push(picture);
                            }
                            Err(e) => note(format_args!("{e}")),
                        }
                    }
                    (c, _) if c.starts_with('/') => note(format_args!("{c} is not a command; /help lists them")),
                    _ => {
                        let (messages, pictures) = (session.messages.len(), session.pictures.len());
                        session.messages.push(user_message(waiting.len(), line));
                        session.pictures.append(&mut waiting);
                        let mut printer = Printer::new();
                        match session.answer(&mut reader, &args.sample, &mut NoObserver, &mut |p| printer.print(p)) {
                            Ok(answer) => {
                                say(format_args!("\n"))?;
                                note(format_args!("{}", summary(&answer, &reader.engine().counters())));
                                session.messages.push(json!({"role": "assistant", "content": answer.text}));
                            }
                            Err(e @ AppError::Output(_)) => return Err(e),
                            Err(e) => {
                                // The message that failed is taken back; what was said before stands.
                                note(format_args!("{e}"));
                                session.messages.truncate(messages);
                                let shown = session.pictures.split_off(pictures);
                                // The next try shows them again, unless they are what is wrong.
                                if !matches!(e, AppError::Picture { .. } | AppError::File { .. }) {
                                    waiting = shown;
                                }
                            }
                        }
                    }
                }
            }
            Ok(())
        },
    )
}
