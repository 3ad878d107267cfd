//! Reads prompts into an engine and computes only what its state does not hold already.
//!
//! Relies on nobody else using the engine, which it borrows. Tokens and positions are compared one by one and pictures by
//! their bytes; an answer is the same as from an empty state, to the bit.

use crate::prompt::{Prompt, VisualGrid};
use forerun_camera::picture::Rgb;
use forerun_engine::ports::Storage;
use forerun_engine::slicing::{CropPlan, Detail};
use forerun_engine::{CropPixels, Engine, EngineError, Input, NoObserver, Observer};
use sha2::{Digest, Sha256};

/// All that the visual tokens of a picture depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PictureId {
    sha256: [u8; 32],
    detail: Detail,
    max_slices: u32,
}

impl PictureId {
    /// The picture in a file's `bytes`, seen in mode `detail` with at most `max_slices` slices.
    pub fn new(bytes: &[u8], detail: Detail, max_slices: u32) -> Self {
        Self { sha256: Sha256::digest(bytes).into(), detail, max_slices }
    }
}

/// A picture whose visual features the engine holds.
struct Seen {
    id: PictureId,
    grid: VisualGrid,
    /// Visual features of it and of those before it.
    features: usize,
}

/// A token in the state.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Token {
    id: u32,
    /// T, H and W.
    at: [u32; 3],
}

/// An engine, and what its state stands for.
pub struct Reader<'e, 'a, S: Storage> {
    engine: &'e mut Engine<'a, S>,
    /// As many as are in the state.
    tokens: Vec<Token>,
    /// In the order of their features.
    pictures: Vec<Seen>,
}

impl<'e, 'a, S: Storage> Reader<'e, 'a, S> {
    /// Takes `engine` over and resets it.
    pub fn new(engine: &'e mut Engine<'a, S>) -> Self {
        engine.reset();
        let tokens = Vec::with_capacity(engine.context());
        Self { engine, tokens, pictures: Vec::new() }
    }

    /// The engine, to look at.
    pub fn engine(&self) -> &Engine<'a, S> {
        self.engine
    }

    /// The grid of picture `i` if it is `id` and the engine has its visual features.
    pub fn knows(&self, i: usize, id: &PictureId) -> Option<&VisualGrid> {
        self.pictures.get(i).filter(|p| p.id == *id).map(|p| &p.grid)
    }

    /// Visual features of the first `n` pictures.
    pub fn features(&self, n: usize) -> usize {
        self.pictures.get(..n).and_then(<[_]>::last).map_or(0, |p| p.features)
    }

    /// Forgets all pictures but the first `n`, and the tokens that depend on them.
    pub fn keep_pictures(&mut self, n: usize) {
        self.pictures.truncate(n);
        self.engine.keep_features(self.pictures.last().map_or(0, |p| p.features));
        self.tokens.truncate(self.engine.len());
    }

    /// Shows one more picture, cut into `crops` as `plan` says, to the vision tower.
    ///
    /// # Errors
    /// If its features do not fit.
    pub fn see(&mut self, id: PictureId, plan: &CropPlan, crops: &[Rgb]) -> Result<VisualGrid, EngineError> {
        let mut features = self.features(self.pictures.len());
        for (crop, rgb) in plan.crops().zip(crops) {
            let crop = CropPixels { rows: crop.rows as usize, cols: crop.cols as usize, rgb: &rgb.pixels };
            features += self.engine.see(crop, id.detail, &mut NoObserver)?;
        }
        let grid = VisualGrid::from(plan);
        self.pictures.push(Seen { id, grid: grid.clone(), features });
        Ok(grid)
    }

    /// Computes what of `prompt` the state does not hold, and leaves the logits of its last token; the visual features of
    /// its pictures are there. The state after its first `fixed` tokens, where the next prompt may differ, is saved if the
    /// plan has room. `observer` hears of computed tokens alone. Returns how many tokens were there.
    ///
    /// # Errors
    /// Those of [`Engine::run`].
    pub fn read(&mut self, prompt: &Prompt, fixed: usize, observer: &mut dyn Observer) -> Result<usize, EngineError> {
        let (n, context) = (prompt.ids.len(), self.engine.context());
        if n > context {
            return Err(EngineError::ContextFull { need: n, context });
        }
        let p = &prompt.positions;
        let token = |i: usize| Token { id: prompt.ids[i], at: [p.t[i], p.h[i], p.w[i]] };
        // A token is left to compute, for its logits.
        let begins = |k: usize| k < n && self.tokens.iter().take(k).enumerate().all(|(i, t)| *t == token(i));
        if !begins(self.engine.len()) {
            match self.engine.saved() {
                Some(k) if begins(k) => self.engine.rewind(),
                _ => self.engine.forget(),
            }
        }
        let known = self.engine.len();
        self.tokens.truncate(known);
        self.tokens.extend((known..n).map(token));
        let fixed = fixed.min(n.saturating_sub(1));
        let save = fixed > 0 && fixed >= known && self.engine.saved() != Some(fixed);
        let input = Input { ids: &prompt.ids[known..], positions: [&p.t[known..], &p.h[known..], &p.w[known..]] };
        let result = self.engine.run_saving(input, save.then(|| fixed - known), observer);
        self.tokens.truncate(self.engine.len());
        result.map(|()| known)
    }

    /// Computes one more token at position `at`, and leaves its logits.
    ///
    /// # Errors
    /// Those of [`Engine::run`].
    pub fn step(&mut self, id: u32, at: u32, observer: &mut dyn Observer) -> Result<(), EngineError> {
        self.tokens.push(Token { id, at: [at; 3] });
        let result = self.engine.run(Input { ids: &[id], positions: [&[at]; 3] }, observer);
        self.tokens.truncate(self.engine.len());
        result
    }
}
