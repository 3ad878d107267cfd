//! From the text of a prompt and the crops of its pictures to model input: token ids, types, crop grids, positions.
//!
//! Relies on the tokenizer and on the engine's positions. Never repairs a prompt whose placeholders and pictures do not
//! fit each other: it says so.
//!
//! **Text from strangers.** The reference renders a conversation to one string and tokenizes that, so `<|im_start|>`
//! in a user's text begins a new turn. Ids do not tell the two apart afterwards. [`check_text`] refuses such
//! conversations before they are rendered; what is not checked there can forge turns, but not pictures: a placeholder
//! too many is always an error in [`PromptBuilder::build`].

use crate::tokenizer::{EncodeError, Tokenizer};
use forerun_engine::{
    config::{Config, TokenIds},
    positions::{self, PositionError, Positions, TokenType},
    slicing::CropPlan,
};
use forerun_format::{FormatError, keys};
use serde_json::Value;

/// Most tokens of a prompt: four times the longest context of this family of models.
const TOKENS_MAX: u64 = 1 << 20;

/// Tokens that end or structure a conversation besides those in [`TokenIds`].
const STRUCTURE: [&str; 5] = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<image_id>", "</image_id>"];

/// The crops of one picture: an image, or a frame (or composite of frames) of a video.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VisualGrid {
    /// Rows of slices; 0 if there are none.
    pub rows: u32,
    /// Columns of slices; 0 if there are none.
    pub cols: u32,
    /// Sides (rows, columns) of each crop in patches: the thumbnail, then the slices row by row.
    pub crops: Vec<(u32, u32)>,
}

impl From<&CropPlan> for VisualGrid {
    fn from(plan: &CropPlan) -> Self {
        let (rows, cols) = plan.grid.unwrap_or((0, 0));
        Self { rows, cols, crops: plan.crops().map(|c| (c.rows, c.cols)).collect() }
    }
}

/// What one placeholder of the chat template stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Visual {
    /// An image.
    Image(VisualGrid),
    /// A video: its frames in order. Frames without crops are skipped.
    Video(Vec<VisualGrid>),
}

/// Model input for a prompt of `n` tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// Token ids, `[n]`.
    pub ids: Vec<u32>,
    /// Token types, `[n]`.
    pub types: Vec<TokenType>,
    /// Sides of all crops in patches, in the order of their placeholders: the order the vision tower must deliver in.
    pub grids: Vec<(u32, u32)>,
    /// Positions, `[n]`.
    pub positions: Positions,
}

impl Prompt {
    /// Tokens at the beginning that are the same in `other`, positions included.
    pub fn common(&self, other: &Self) -> usize {
        let (p, q) = (&self.positions, &other.positions);
        let same =
            |i: &usize| self.ids[*i] == other.ids[*i] && (p.t[*i], p.h[*i], p.w[*i]) == (q.t[*i], q.h[*i], q.w[*i]);
        (0..self.ids.len().min(other.ids.len())).take_while(same).count()
    }
}

/// Why a prompt could not be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PromptError {
    /// Placeholders and pictures differ in number.
    #[error(
        "found {found} placeholders {token} in the prompt, expected {expected}, one for each {kind}: remove {token} from \
         the text of the messages"
    )]
    Placeholders {
        /// `image` or `video`.
        kind: &'static str,
        /// The placeholder's text.
        token: String,
        /// Placeholders in the prompt.
        found: usize,
        /// Pictures given.
        expected: usize,
    },
    /// A picture's crops do not fit its grid of slices.
    #[error("{kind} {index}: found {crops} crops, expected one and {rows}x{cols} slices")]
    Crops {
        /// `image` or `video frame`.
        kind: &'static str,
        /// Which one, from 0.
        index: usize,
        /// Crops given.
        crops: usize,
        /// Rows of slices.
        rows: u32,
        /// Columns of slices.
        cols: u32,
    },
    /// The prompt is absurdly long.
    #[error("found over {TOKENS_MAX} tokens in the prompt, expected fewer: use fewer or smaller pictures")]
    TooLong,
    /// Text of a message contains a token that structures the conversation.
    #[error("found the control token {token} in the text of {place}, expected plain text: remove it")]
    Forged {
        /// The token's text.
        token: String,
        /// Where, for example `message 2`.
        place: String,
    },
    /// Text could not be tokenized.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// Placeholders and grids do not fit.
    #[error(transparent)]
    Positions(#[from] PositionError),
}

/// Builds prompts for one model.
#[derive(Debug)]
pub struct PromptBuilder {
    tokens: TokenIds,
    canvas: bool,
    /// `<image_id>` and `</image_id>`, if images are numbered.
    image_id: Option<(u32, u32)>,
    /// Texts of the tokens that messages must not contain.
    structure: Vec<String>,
}

impl PromptBuilder {
    /// Takes what the model file says of prompts.
    ///
    /// # Errors
    /// If the vocabulary is not the engine's, or lacks a token that prompts of this model need.
    pub fn new(config: &Config, tokenizer: &Tokenizer) -> Result<Self, FormatError> {
        if tokenizer.vocab_len() != config.text.vocab {
            return Err(FormatError::invalid(
                "the vocabulary",
                format!("{} tokens", tokenizer.vocab_len()),
                format!("{}, the rows of token_embd.weight", config.text.vocab),
            ));
        }
        let tokens = config.tokens.clone();
        let image = config.vision.as_ref().map(|(_, image)| image);
        let image_id = match image {
            Some(image) if image.use_image_id => {
                let id = |text: &str| {
                    tokenizer.id_of(text).ok_or_else(|| {
                        let expected = format!("a token for it, since {} is true", keys::IMAGE_USE_ID);
                        FormatError::invalid(text, "no token", expected)
                    })
                };
                Some((id("<image_id>")?, id("</image_id>")?))
            }
            _ => None,
        };

        let mut ids = tokens.stop.clone();
        if image.is_some() {
            ids.extend([tokens.image, tokens.video, tokens.image_start, tokens.image_end]);
            ids.extend([tokens.slice_start, tokens.slice_end]);
        }
        let mut structure = Vec::new();
        for id in ids {
            let text = tokenizer.decode(&[id], false);
            if tokenizer.id_of(&text) != Some(id) {
                let expected = format!("an added token of the {} in the vocabulary", tokenizer.vocab_len());
                return Err(FormatError::invalid("keys forerun.token.*", format!("token {id}"), expected));
            }
            structure.push(text);
        }
        structure.extend(STRUCTURE.iter().filter(|t| tokenizer.id_of(t).is_some()).map(|&t| t.to_owned()));
        Ok(Self { tokens, canvas: image.is_some_and(|i| i.canvas), image_id, structure })
    }

    /// Refuses a conversation whose text contains tokens that structure conversations, such as `<|im_start|>` or an
    /// image placeholder. Call it on `messages` and `tools` from strangers, after pictures were taken out of them.
    ///
    /// Tokens that belong to answers (`<think>`, `<tool_call>`, `<box>`) are allowed.
    ///
    /// # Errors
    /// [`PromptError::Forged`] with the token and the message.
    pub fn check_text(&self, messages: &[Value], tools: &[Value]) -> Result<(), PromptError> {
        for (kind, values) in [("message", messages), ("tool", tools)] {
            for (i, value) in values.iter().enumerate() {
                if let Some(token) = self.forged_in(value) {
                    return Err(PromptError::Forged { token: token.to_owned(), place: format!("{kind} {i}") });
                }
            }
        }
        Ok(())
    }

    /// The first control token in any text or key of `value`.
    fn forged_in(&self, value: &Value) -> Option<&str> {
        match value {
            Value::String(text) => self.forged(text),
            Value::Array(items) => {
                // A template may join the texts of a list of parts, and a token may only come about by this.
                let joined: String = items.iter().filter_map(|part| part.get("text")?.as_str()).collect();
                items.iter().find_map(|item| self.forged_in(item)).or_else(|| self.forged(&joined))
            }
            Value::Object(fields) => fields.iter().find_map(|(k, v)| self.forged(k).or_else(|| self.forged_in(v))),
            Value::Null | Value::Bool(_) | Value::Number(_) => None,
        }
    }

    fn forged(&self, text: &str) -> Option<&str> {
        self.structure.iter().map(String::as_str).find(|&token| text.contains(token))
    }

    /// Expands the placeholders in `rendered`, the text that the chat template made, and computes positions.
    ///
    /// `visuals` are in the order of the conversation; `merge` is the number of patches along the side of a visual
    /// token: 4 in 16x mode, 2 in 4x mode.
    ///
    /// # Errors
    /// If placeholders and pictures do not fit each other.
    pub fn build(
        &self,
        tokenizer: &Tokenizer,
        rendered: &str,
        visuals: &[Visual],
        merge: u32,
    ) -> Result<Prompt, PromptError> {
        let text_ids = tokenizer.encode(rendered)?;
        self.check_count(tokenizer, &text_ids, visuals)?;

        // Each kind in its own order: the template decides how images and videos follow each other.
        let mut images =
            visuals.iter().filter_map(|v| if let Visual::Image(g) = v { Some(g) } else { None }).enumerate();
        let mut videos = visuals.iter().filter_map(|v| if let Visual::Video(f) = v { Some(f) } else { None });
        let mut out = Expansion { ids: Vec::with_capacity(text_ids.len()), grids: Vec::new(), merge };
        for id in text_ids {
            // What is inserted begins and ends with added tokens, so the text around it is tokenized as if the reference
            // had replaced the placeholder in the string.
            if id == self.tokens.image {
                let Some((index, grid)) = images.next() else { continue };
                if let Some((start, end)) = self.image_id {
                    out.ids.push(start);
                    out.ids.extend(tokenizer.encode(&index.to_string())?);
                    out.ids.push(end);
                }
                out.picture(&self.tokens, id, grid, "image", index)?;
            } else if id == self.tokens.video {
                let frames = videos.next().into_iter().flatten().enumerate();
                for (index, frame) in frames.filter(|(_, f)| !f.crops.is_empty()) {
                    out.picture(&self.tokens, id, frame, "video frame", index)?;
                }
            } else {
                out.ids.push(id);
            }
        }
        let Expansion { ids, grids, .. } = out;
        let types = positions::token_types(&ids, &self.tokens);
        let positions = positions::positions(&ids, &types, &grids, merge, &self.tokens, self.canvas)?;
        Ok(Prompt { ids, types, grids, positions })
    }

    fn check_count(&self, tokenizer: &Tokenizer, ids: &[u32], visuals: &[Visual]) -> Result<(), PromptError> {
        let images = visuals.iter().filter(|v| matches!(v, Visual::Image(_))).count();
        for (kind, id, expected) in
            [("image", self.tokens.image, images), ("video", self.tokens.video, visuals.len() - images)]
        {
            let found = ids.iter().filter(|&&i| i == id).count();
            if found != expected {
                let token = tokenizer.decode(&[id], false);
                return Err(PromptError::Placeholders { kind, token, found, expected });
            }
        }
        Ok(())
    }
}

/// A prompt in the making.
struct Expansion {
    ids: Vec<u32>,
    grids: Vec<(u32, u32)>,
    merge: u32,
}

impl Expansion {
    /// `<image>…</image>`, then the slices, rows joined by a newline.
    fn picture(
        &mut self,
        m: &TokenIds,
        placeholder: u32,
        grid: &VisualGrid,
        kind: &'static str,
        index: usize,
    ) -> Result<(), PromptError> {
        let VisualGrid { rows, cols, ref crops } = *grid;
        let wrong = || PromptError::Crops { kind, index, crops: crops.len(), rows, cols };
        let (&thumbnail, slices) = crops.split_first().ok_or_else(wrong)?;
        if slices.len() as u64 != u64::from(rows) * u64::from(cols) {
            return Err(wrong());
        }
        self.crop(m.image_start, placeholder, thumbnail, m.image_end)?;
        for (i, &slice) in slices.iter().enumerate() {
            if i > 0 && i % cols as usize == 0 {
                self.ids.push(m.newline);
            }
            self.crop(m.slice_start, placeholder, slice, m.slice_end)?;
        }
        Ok(())
    }

    fn crop(&mut self, start: u32, placeholder: u32, grid: (u32, u32), end: u32) -> Result<(), PromptError> {
        let side = |patches: u32| patches.checked_div(self.merge).map_or(0, u64::from);
        // Both sides are below 2^32, so the product fits.
        let tokens = side(grid.0) * side(grid.1);
        if tokens > TOKENS_MAX || self.ids.len() as u64 + tokens > TOKENS_MAX {
            return Err(PromptError::TooLong);
        }
        self.ids.push(start);
        self.ids.resize(self.ids.len() + tokens as usize, placeholder);
        self.ids.push(end);
        self.grids.push(grid);
        Ok(())
    }
}
