//! A conversation: messages and pictures in, words out.

use crate::cli::VisionArgs;
use crate::error::AppError;
use crate::model::{Model, text_bytes_max};
use crate::prompt::{Prompt, Visual, VisualGrid};
use crate::reader::{PictureId, Reader};
use crate::request::{Ending, Request, Watch};
use crate::speaker::{Next, Speaker};
use crate::template::Conversation;
use crate::tools::ToolCall;
use crate::words::{Said, Words};
use forerun_camera::picture::{Limits, PictureError, Rgb, dimensions};
use forerun_camera::resize::crops;
use forerun_engine::ports::Storage;
use forerun_engine::positions::TokenType;
use forerun_engine::slicing::{Detail, plan};
use forerun_engine::{EngineError, Observer};
use forerun_linux::sys;
use serde_json::{Value, json};
use std::borrow::Cow;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Largest picture file, whatever room there is.
pub const FILE_BYTES_MAX: u64 = 64 << 20;

/// Reads a whole picture file of at most `bytes_max` bytes.
///
/// # Errors
/// If it cannot be read or is larger.
pub fn read_picture(path: &Path, bytes_max: u64) -> Result<Vec<u8>, AppError> {
    let at = |error| AppError::File { path: path.into(), error };
    let wrong = |found: &str| {
        let path = path.display();
        AppError::Input(format!("{path}: found {found}, expected a picture file of at most {bytes_max} bytes"))
    };
    // Before the open, which would wait for ever on a FIFO.
    if !path.metadata().map_err(at)?.is_file() {
        return Err(wrong("something that is not a regular file"));
    }
    let file = std::fs::File::open(path).map_err(at)?;
    let len = file.metadata().map_err(at)?.len();
    if len > bytes_max {
        return Err(wrong(&format!("{len} bytes")));
    }
    let mut bytes = Vec::with_capacity(len as usize);
    // One byte more, to notice a file that grew.
    (&file).take(bytes_max + 1).read_to_end(&mut bytes).map_err(at)?;
    sys::drop_page_cache(&file);
    if bytes.len() as u64 > bytes_max { Err(wrong("more bytes than before")) } else { Ok(bytes) }
}

/// A picture file: on storage, or one that came another way.
#[derive(Debug, Clone)]
pub enum Picture {
    /// To be read when it is looked at.
    File(PathBuf),
    /// In memory.
    Memory {
        /// What errors call it, such as `picture 2`.
        name: String,
        /// The whole file.
        bytes: Arc<Vec<u8>>,
    },
}

impl From<PathBuf> for Picture {
    fn from(path: PathBuf) -> Self {
        Self::File(path)
    }
}

impl Picture {
    /// Its path, or the name in the place of one.
    pub fn path(&self) -> &Path {
        match self {
            Self::File(path) => path,
            Self::Memory { name, .. } => Path::new(name),
        }
    }

    /// The whole file, of at most `bytes_max` bytes.
    ///
    /// # Errors
    /// If it cannot be read or is larger.
    pub fn read(&self, bytes_max: u64) -> Result<Cow<'_, [u8]>, AppError> {
        match self {
            Self::File(path) => read_picture(path, bytes_max).map(Cow::Owned),
            Self::Memory { bytes, .. } if bytes.len() as u64 <= bytes_max => Ok(Cow::Borrowed(bytes)),
            Self::Memory { name, bytes } => {
                let found = bytes.len();
                Err(AppError::Input(format!(
                    "{name}: found {found} bytes, expected at most {bytes_max}: make it smaller"
                )))
            }
        }
    }
}

/// A message of a user: pictures, then text.
pub fn user_message(images: usize, text: &str) -> Value {
    if images == 0 {
        return json!({"role": "user", "content": text});
    }
    let mut parts: Vec<Value> = (0..images).map(|_| json!({"type": "image"})).collect();
    parts.push(json!({"type": "text", "text": text}));
    json!({"role": "user", "content": parts})
}

/// How pictures are seen.
#[derive(Debug, Clone, Copy)]
pub struct Look {
    /// Mode.
    pub detail: Detail,
    /// Most slices.
    pub max_slices: Option<u32>,
    /// Pixels of the largest picture.
    pub pixels_max: u64,
    /// Bytes of the largest picture file.
    pub file_bytes_max: u64,
}

impl Look {
    /// A look at pictures that are not known yet, of up to `pixels_max` pixels.
    pub fn up_to(model: &Model, args: &VisionArgs, pixels_max: u64) -> Self {
        // Cameras and screenshots stay below 4 bytes a pixel; small pictures may carry a colour profile.
        let file_bytes_max = pixels_max.saturating_mul(4).saturating_add(64 << 10).min(FILE_BYTES_MAX);
        Self { detail: model.detail(args), max_slices: args.max_slices, pixels_max, file_bytes_max }
    }
}

/// Milliseconds of each part of an answer.
#[derive(Debug, Clone, Copy, Default)]
pub struct Timings {
    /// Pictures: decoding, resizing, vision tower.
    pub vision_ms: f64,
    /// Prompt.
    pub prefill_ms: f64,
    /// Answer, after its first token.
    pub decode_ms: f64,
    /// From the start of the pictures to the first token.
    pub first_token_ms: f64,
}

/// What was said.
#[derive(Debug, Clone)]
pub struct Answer {
    /// The answer, without its thoughts.
    pub text: String,
    /// Thoughts, if asked for.
    pub thinking: Option<String>,
    /// Tokens generated, the one that ended the answer included.
    pub tokens: Vec<u32>,
    /// Tools that it calls, in order.
    pub calls: Vec<ToolCall>,
    /// `stop`, `tool_calls`, `length` (of tokens) or `deadline`.
    pub finish_reason: &'static str,
    /// Tokens of the prompt, visual ones included.
    pub prompt_tokens: usize,
    /// Of these, the ones whose state was there and was not computed again.
    pub cached_tokens: usize,
    /// Times.
    pub timings: Timings,
}

impl Answer {
    /// Tokens after the first, by second.
    pub fn tokens_per_second(&self) -> f64 {
        (self.tokens.len().saturating_sub(1)) as f64 * 1e3 / self.timings.decode_ms.max(1e-3)
    }
}

/// Part of an answer as it comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    /// A thought.
    Thought(&'a str),
    /// Words.
    Text(&'a str),
    /// A call of a tool, whole.
    Call(&'a ToolCall),
}

/// Takes the pieces of an answer as they come; an error ends the answer.
pub type Emit<'a> = dyn FnMut(Piece<'_>) -> Result<(), AppError> + 'a;

/// With what of this prompt the next one begins, too. The state after it is saved if the plan has room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fixed {
    /// With nothing that is known.
    Nothing,
    /// With all messages: an answer and another message follow.
    Messages,
    /// With what comes before this picture, counted from 0: another one takes its place.
    BeforePicture(usize),
}

/// A conversation so far.
pub struct Session<'m> {
    model: &'m Model,
    look: Look,
    /// Messages, oldest first.
    pub messages: Vec<Value>,
    /// Pictures of the messages, in their order.
    pub pictures: Vec<Picture>,
    /// What of it stays.
    pub fixed: Fixed,
}

impl<'m> Session<'m> {
    /// An empty conversation, or one that begins with `system`.
    pub fn new(model: &'m Model, look: Look, system: Option<&str>) -> Self {
        let messages = system.map(|s| json!({"role": "system", "content": s})).into_iter().collect();
        Self { model, look, messages, pictures: Vec::new(), fixed: Fixed::Nothing }
    }

    /// `(width, height)` of `picture`, if it is one that can be shown as far as its header tells.
    ///
    /// # Errors
    /// If it cannot be read, is no picture, too large or too narrow.
    pub fn check_picture(&self, picture: &Picture) -> Result<(u32, u32), AppError> {
        let params = self.model.slicing(&self.look)?;
        let path = picture.path();
        let bytes = picture.read(self.look.file_bytes_max)?;
        let wrong = |error| AppError::Picture { path: path.into(), error };
        let (width, height) = dimensions(&bytes).map_err(wrong)?;
        let pixels_max = self.look.pixels_max;
        if u64::from(width) * u64::from(height) > pixels_max {
            return Err(wrong(PictureError::Large { width, height, pixels_max }));
        }
        plan(width, height, &params, self.look.detail)
            .map_err(|error| AppError::Slicing { path: path.into(), error })?;
        Ok((width, height))
    }

    /// Shows picture `i` to the vision tower, unless it is the one that `reader` has there.
    fn see<S: Storage>(&self, reader: &mut Reader<'_, '_, S>, i: usize) -> Result<VisualGrid, AppError> {
        let path = self.pictures[i].path();
        let params = self.model.slicing(&self.look)?;
        let bytes = self.pictures[i].read(self.look.file_bytes_max)?;
        let id = PictureId::new(&bytes, self.look.detail, params.max_slices);
        if let Some(grid) = reader.knows(i, &id) {
            return Ok(grid.clone());
        }
        reader.keep_pictures(i);
        let wrong = |error| AppError::Picture { path: path.into(), error };
        let picture = Rgb::decode(&bytes, Limits { pixels_max: self.look.pixels_max }).map_err(wrong)?;
        let plan = plan(picture.width, picture.height, &params, self.look.detail)
            .map_err(|error| AppError::Slicing { path: path.into(), error })?;
        let pixels = crops(&picture, &plan).map_err(wrong)?;
        drop((bytes, picture));
        Ok(reader.see(id, &plan, &pixels)?)
    }

    /// The prompt, with or without the beginning of an answer.
    fn prompt(
        &self,
        visuals: &[Visual],
        request: &Request<'_>,
        answer: bool,
        context: usize,
    ) -> Result<Prompt, AppError> {
        let text = self.model.template.render(&Conversation {
            messages: &self.messages,
            tools: request.tools,
            enable_thinking: Some(request.think),
            add_generation_prompt: answer,
        })?;
        let (found, max) = (text.len(), text_bytes_max(context));
        if found > max {
            return Err(AppError::TextTooLong { found, max, context });
        }
        Ok(self.model.prompts.build(&self.model.tokenizer, &text, visuals, self.look.detail.merge())?)
    }

    /// Tokens at the beginning of `prompt` that stay; 0 if their state cannot be saved.
    fn fixed<S: Storage>(
        &self,
        reader: &Reader<'_, '_, S>,
        prompt: &Prompt,
        visuals: &[Visual],
        request: &Request<'_>,
    ) -> Result<usize, AppError> {
        if !reader.engine().can_save() {
            return Ok(0);
        }
        Ok(match self.fixed {
            Fixed::Nothing => 0,
            Fixed::Messages => prompt.common(&self.prompt(visuals, request, false, reader.engine().context())?),
            Fixed::BeforePicture(i) => {
                let placeholders = prompt.types.iter().enumerate().filter(|(_, t)| **t != TokenType::Text);
                placeholders.map(|(at, _)| at).nth(reader.features(i)).unwrap_or(0)
            }
        })
    }

    /// Answers the conversation as `request` asks, giving words to `emit` as they come and everything else to `observer`.
    /// What the state of `reader` holds of it is not computed again.
    ///
    /// # Errors
    /// If a picture or the prompt is not usable, it does not fit, or storage fails; if it is cancelled; and those of `emit`.
    pub fn answer<'r, S: Storage>(
        &'r self,
        reader: &mut Reader<'_, '_, S>,
        request: impl Into<Request<'r>>,
        observer: &mut dyn Observer,
        emit: &mut Emit<'_>,
    ) -> Result<Answer, AppError> {
        let start = Instant::now();
        let ms = |from: Instant| from.elapsed().as_secs_f64() * 1e3;
        let request: Request<'r> = request.into();
        self.model.prompts.check_text(&self.messages, request.tools)?;
        let context = reader.engine().context();
        // Before anything is computed, for it may say that the answer is too short.
        let words = Words::new(self.model, &request, text_bytes_max(context));
        let mut speaker = Speaker::new(self.model, &request, words)?;
        let mut visuals = Vec::new();
        for i in 0..self.pictures.len() {
            if request.is_cancelled() {
                return Err(AppError::Cancelled);
            }
            visuals.push(Visual::Image(self.see(reader, i)?));
        }
        reader.keep_pictures(visuals.len());
        let mut timings = Timings { vision_ms: ms(start), ..Timings::default() };

        let prompt = self.prompt(&visuals, &request, true, context)?;
        let fixed = self.fixed(reader, &prompt, &visuals, &request)?;
        let prefill = Instant::now();
        let cached_tokens =
            match reader.read(&prompt, fixed, &mut Watch { observer: &mut *observer, request: &request }) {
                Ok(tokens) => Some(tokens),
                Err(EngineError::Cancelled) => None,
                Err(e) => return Err(e.into()),
            };
        timings.prefill_ms = ms(prefill);
        speaker.reserve(context - reader.engine().len() + 1);

        let decode = Instant::now();
        let mut step = Duration::ZERO;
        let mut finish_reason = loop {
            match request.must_end(step) {
                Some(Ending::Deadline) => break "deadline",
                Some(Ending::Cancelled) => return Err(AppError::Cancelled),
                None if cached_tokens.is_none() => return Err(AppError::Cancelled),
                None => {}
            }
            let before = Instant::now();
            let said = speaker.next(reader.engine().logits(), emit)?;
            if timings.first_token_ms == 0.0 {
                timings.first_token_ms = ms(start);
            }
            let next = match said {
                Next::Token(next) => next,
                Next::End(why) => break why,
            };
            let len = reader.engine().len();
            if len == context {
                break "length";
            }
            // Positions of a prompt are at most its length, so the sum is a small non-negative number.
            reader.step(next, (len as i64 + prompt.positions.delta).max(0) as u32, observer)?;
            step = before.elapsed();
        };
        let (Said { text, thought, calls }, tokens) = speaker.finish(emit)?;
        timings.decode_ms = ms(decode);
        if !calls.is_empty() && finish_reason == "stop" {
            finish_reason = "tool_calls";
        }
        let cached_tokens = cached_tokens.unwrap_or(0);
        let (thinking, prompt_tokens) = (request.think.then_some(thought), prompt.ids.len());
        Ok(Answer { text, thinking, calls, tokens, finish_reason, prompt_tokens, cached_tokens, timings })
    }
}
