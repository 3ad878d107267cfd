//! Reads a routing trace: which experts each token chose in each layer. Text: `#` lines, of which one names `n_layer`,
//! `n_expert` and `n_expert_used`; a line of column names; then one line for each expert chosen. Needed columns: `turn`,
//! `phase` (0 prompt, 1 decode), `step` (number of the token in the turn), `layer`, `slot` (rank of the choice), `expert`.

use crate::error::{Error, Result};
use forerun_engine::cache::Shape;
use std::{
    collections::BTreeMap,
    fs::File,
    io::{BufRead, BufReader, Read},
    path::Path,
};

/// Longest line accepted, bytes.
const LINE_BYTES_MAX: u64 = 4096;
/// Largest trace accepted, choices: a hundred thousand tokens of a model of 40 layers that uses 8 experts.
const CHOICES_MAX: usize = 32 << 20;
/// Largest counts accepted of layers, experts and experts used.
const LAYERS_MAX: usize = 1024;
const EXPERTS_MAX: usize = 4096;
const TOP_K_MAX: usize = 32;

const COLUMNS: [&str; 6] = ["turn", "phase", "step", "layer", "slot", "expert"];
const NO_EXPERT: u16 = u16::MAX;

/// What went through all layers together: a whole prompt, or a token of an answer.
#[derive(Debug)]
pub struct Step {
    /// A token of an answer.
    pub decode: bool,
    /// Number of tokens.
    pub tokens: usize,
    /// For each layer `(tokens, top_k)`; tokens of a prompt whose choice in a layer is not known are missing there.
    pub chosen: Vec<Vec<u16>>,
}

/// A routing trace.
#[derive(Debug)]
pub struct Trace {
    /// Of the model.
    pub shape: Shape,
    /// In the order of time.
    pub steps: Vec<Step>,
}

/// One line's values.
struct Row {
    turn: u64,
    decode: bool,
    step: u64,
    layer: usize,
    rank: usize,
    expert: u16,
}

/// A token's choices, `(layers, top_k)`, and the first line that tells of it.
struct Token {
    chosen: Vec<u16>,
    line: usize,
}

/// Tokens by turn, then prompt before answer, then number.
type Tokens = BTreeMap<(u64, bool, u64), Token>;

impl Trace {
    /// Reads the trace in `path`.
    ///
    /// # Errors
    /// If it cannot be read, or a line is not as it must be; the error names the line.
    pub fn read(path: &Path) -> Result<Self> {
        let mut lines = Lines::open(path)?;
        let shape = lines.shape()?;
        let columns = lines.columns()?;
        let mut tokens = Tokens::new();
        while let Some(line) = lines.next()? {
            if !line.starts_with('#') {
                let row = lines.row(&line, &columns, shape)?;
                lines.enter(row, shape, &mut tokens)?;
            }
        }
        let steps = lines.steps(tokens, shape)?;
        if !steps.iter().any(|s| s.decode) {
            return Err(Error::input(path.display(), "no decoded token (phase 1)", "at least one"));
        }
        Ok(Self { shape, steps })
    }

    /// Takes prompts apart into their tokens, as if they had been decoded.
    pub fn split_prompts(&mut self) {
        let top_k = self.shape.top_k;
        let split = |s: Step| -> Vec<Step> {
            if s.tokens == 1 {
                return vec![s];
            }
            // What is known of the fewest tokens is known of the last ones.
            let of = |c: &Vec<u16>, t: usize| {
                let missing = s.tokens - c.len() / top_k;
                t.checked_sub(missing).map_or(Vec::new(), |t| c[t * top_k..][..top_k].to_vec())
            };
            let token = |t| Step { decode: s.decode, tokens: 1, chosen: s.chosen.iter().map(|c| of(c, t)).collect() };
            (0..s.tokens).map(token).collect()
        };
        self.steps = std::mem::take(&mut self.steps).into_iter().flat_map(split).collect();
    }

    /// Tokens of prompts, and tokens of answers.
    pub fn tokens(&self) -> [usize; 2] {
        [false, true].map(|decode| self.steps.iter().filter(|s| s.decode == decode).map(|s| s.tokens).sum())
    }
}

struct Lines<'a> {
    path: &'a Path,
    reader: BufReader<File>,
    /// Number of the line read last, from 1.
    line: usize,
}

impl<'a> Lines<'a> {
    fn open(path: &'a Path) -> Result<Self> {
        let file = File::open(path).map_err(|e| Error::io("open", path, &e))?;
        Ok(Self { path, reader: BufReader::new(file), line: 0 })
    }

    /// The next line without its end.
    fn next(&mut self) -> Result<Option<String>> {
        let mut bytes = Vec::new();
        let limit = &mut (&mut self.reader).take(LINE_BYTES_MAX);
        limit.read_until(b'\n', &mut bytes).map_err(|e| Error::io("read", self.path, &e))?;
        if bytes.is_empty() {
            return Ok(None);
        }
        self.line += 1;
        if bytes.len() as u64 == LINE_BYTES_MAX && bytes.last() != Some(&b'\n') {
            return Err(self.error("line", "a longer one", format!("at most {LINE_BYTES_MAX} bytes")));
        }
        let text = String::from_utf8(bytes).map_err(|_| self.error("line", "bytes that are no text", "UTF-8"))?;
        Ok(Some(text.trim_end_matches(['\n', '\r']).to_string()))
    }

    fn error(&self, what: &str, found: impl std::fmt::Display, expected: impl std::fmt::Display) -> Error {
        self.error_at(self.line.max(1), what, found, expected)
    }

    fn error_at(
        &self,
        line: usize,
        what: &str,
        found: impl std::fmt::Display,
        expected: impl std::fmt::Display,
    ) -> Error {
        Error::input(format!("{}:{line}: {what}", self.path.display()), found, expected)
    }

    /// The `#` line that tells the model's shape.
    fn shape(&mut self) -> Result<Shape> {
        let expected = "n_layer=N n_expert=N n_expert_used=N in a line that begins with #";
        loop {
            let line = self.next()?.ok_or_else(|| self.error("header", "the end of the file", expected))?;
            let Some(header) = line.strip_prefix('#') else { return Err(self.error("header", line, expected)) };
            let value = |key: &str| {
                header
                    .split_whitespace()
                    .find_map(|word| word.split_once('=').filter(|(k, _)| *k == key))
                    .map(|(_, v)| v)
            };
            let [Some(layers), Some(experts), Some(top_k)] = ["n_layer", "n_expert", "n_expert_used"].map(value) else {
                continue;
            };
            let count = |name, text: &str, max| match text.parse() {
                Ok(n) if (1..=max).contains(&n) => Ok(n),
                _ => Err(self.error(name, text, format!("a number from 1 to {max}"))),
            };
            let layers = count("n_layer", layers, LAYERS_MAX)?;
            let experts = count("n_expert", experts, EXPERTS_MAX)?;
            let top_k = count("n_expert_used", top_k, TOP_K_MAX.min(experts))?;
            return Ok(Shape { layers, experts, top_k });
        }
    }

    /// Where the needed columns are.
    fn columns(&mut self) -> Result<[usize; 6]> {
        let line = loop {
            let line = self.next()?.ok_or_else(|| self.error("columns", "the end of the file", COLUMNS.join(",")))?;
            if !line.starts_with('#') {
                break line;
            }
        };
        let mut at = [0; 6];
        for (at, name) in at.iter_mut().zip(COLUMNS) {
            *at = line
                .split(',')
                .position(|c| c.trim() == name)
                .ok_or_else(|| self.error("columns", &line, format!("one called {name}")))?;
        }
        Ok(at)
    }

    fn row(&self, line: &str, columns: &[usize; 6], shape: Shape) -> Result<Row> {
        let number = |i: usize, below: u64| -> Result<u64> {
            let text = line
                .split(',')
                .nth(columns[i])
                .ok_or_else(|| self.error(COLUMNS[i], line, format!("{} columns or more", columns[i] + 1)))?;
            text.trim()
                .parse()
                .ok()
                .filter(|&n| n < below)
                .ok_or_else(|| self.error(COLUMNS[i], text, format!("a number below {below}")))
        };
        Ok(Row {
            turn: number(0, 1 << 32)?,
            decode: number(1, 2)? == 1,
            step: number(2, 1 << 32)?,
            layer: number(3, shape.layers as u64)? as usize,
            rank: number(4, shape.top_k as u64)? as usize,
            expert: number(5, shape.experts as u64)? as u16,
        })
    }

    fn enter(&self, row: Row, shape: Shape, tokens: &mut Tokens) -> Result<()> {
        let key = (row.turn, row.decode, row.step);
        let tokens_max = CHOICES_MAX / (shape.layers * shape.top_k);
        if tokens.len() == tokens_max && !tokens.contains_key(&key) {
            return Err(self.error("tokens", "more", format!("at most {tokens_max}")));
        }
        let token = tokens
            .entry(key)
            .or_insert_with(|| Token { chosen: vec![NO_EXPERT; shape.layers * shape.top_k], line: self.line });
        let chosen = &mut token.chosen[row.layer * shape.top_k..][..shape.top_k];
        if chosen.contains(&row.expert) {
            return Err(self.error("expert", row.expert, "one that this token has not chosen in this layer yet"));
        }
        if chosen[row.rank] != NO_EXPERT {
            return Err(self.error("slot", row.rank, "one that this token has not filled in this layer yet"));
        }
        chosen[row.rank] = row.expert;
        Ok(())
    }

    /// Each turn's prompt as one step, then its decoded tokens.
    fn steps(&self, tokens: Tokens, shape: Shape) -> Result<Vec<Step>> {
        let mut steps: Vec<Step> = Vec::new();
        let mut prompt_of = None;
        for ((turn, decode, step), token) in tokens {
            if decode || prompt_of != Some(turn) {
                steps.push(Step { decode, tokens: 0, chosen: vec![Vec::new(); shape.layers] });
                prompt_of = Some(turn);
            }
            let at = steps.len() - 1;
            steps[at].tokens += 1;
            for (layer, chosen) in token.chosen.chunks_exact(shape.top_k).enumerate() {
                let known = chosen.iter().filter(|&&e| e != NO_EXPERT).count();
                // The last layer may have been computed for a prompt's last token only.
                if known == 0 && !decode {
                    continue;
                }
                if known < shape.top_k {
                    let what = format!("turn {turn} step {step} layer {layer}");
                    let expected = format!("{} (n_expert_used)", shape.top_k);
                    return Err(self.error_at(token.line, &what, format!("{known} experts"), expected));
                }
                steps[at].chosen[layer].extend_from_slice(chosen);
            }
        }
        Ok(steps)
    }
}
