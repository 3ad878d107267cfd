//! Conversations on one engine, whose state is reused, answer as on an engine of their own: words, and logits to the bit. What
//! is computed again is counted.

use forerun::{
    cli::SampleArgs,
    model::{Model, Setup},
    reader::Reader,
    session::{Answer, Fixed, Look, Session, user_message},
};
use forerun_engine::ports::{Completion, Read, ReadError, Storage};
use forerun_engine::{
    Observer, Tuning,
    plan::{KvType, Options, Residency, VisionOptions},
    slicing::Detail,
};
use forerun_linux::{FileStorage, IoChoice};
use forerun_tests::path;
use serde_json::json;
use std::cell::Cell;

/// The end of an answer, and what comes before and after it in the next prompt.
const ASK: &str = "<|im_start|>assistant\n<think>\n\n</think>\n\n";
const SAID: &str = "<|im_start|>assistant\n";

fn model(name: &str) -> Model {
    Model::open(&path(format!("models/{name}.gguf"))).unwrap()
}

fn setup(chunk: usize, kv: KvType) -> Setup {
    let options = Options {
        context: 512,
        chunk,
        kv,
        // The mode with the larger crops has room for the other one.
        vision: Some(VisionOptions { detail: Detail::X4, picture_bytes: 0, residency: Residency::Resident }),
        prefix: true,
        cap_bytes: None,
        slots_max: Some(40),
        tokenizer_bytes: 0,
    };
    Setup { options, threads: 1, io: IoChoice::Auto, tuning: Tuning::default() }
}

fn look(detail: Detail) -> Look {
    Look { detail, max_slices: None, pixels_max: 1 << 20, file_bytes_max: 1 << 20 }
}

fn sample(think: bool) -> SampleArgs {
    SampleArgs { max_tokens: 40, temperature: Some(0.0), top_p: None, top_k: None, seed: 0, think }
}

/// Logits by which the tokens of the answer were chosen, as bits.
#[derive(Default)]
struct Logits(Vec<Vec<u32>>);

impl Observer for Logits {
    fn logits(&mut self, _token: usize, logits: &[f32]) {
        self.0.push(logits.iter().map(|x| x.to_bits()).collect());
    }
}

/// What was said and computed.
struct Said {
    answer: Answer,
    logits: Vec<Vec<u32>>,
    tokens: usize,
    crops: u64,
}

impl Said {
    /// Tokens of the prompt that were computed.
    fn read(&self) -> usize {
        assert_eq!(self.tokens, self.answer.prompt_tokens - self.answer.cached_tokens + self.answer.tokens.len() - 1);
        self.answer.prompt_tokens - self.answer.cached_tokens
    }
}

fn try_ask<S: Storage>(reader: &mut Reader<'_, '_, S>, s: &Session<'_>, think: bool) -> Result<Said, String> {
    let before = reader.engine().counters();
    let mut logits = Logits::default();
    let answer = s.answer(reader, &sample(think), &mut logits, &mut |_| Ok(())).map_err(|e| e.to_string())?;
    let after = reader.engine().counters();
    let (tokens, crops) = ((after.tokens - before.tokens) as usize, after.crops - before.crops);
    Ok(Said { answer, logits: logits.0, tokens, crops })
}

/// The answer, after comparing it with that of an engine of its own.
fn ask<S: Storage>(model: &Model, reader: &mut Reader<'_, '_, S>, s: &Session<'_>, think: bool) -> Said {
    let said = try_ask(reader, s, think).unwrap();
    same(model, s, think, &said);
    said
}

fn same(model: &Model, s: &Session<'_>, think: bool, said: &Said) {
    let mut plain = setup(64, KvType::F16);
    plain.options.prefix = false;
    let fresh = model.with_engine(&plain, |s| s, |e, _| Ok(try_ask(&mut Reader::new(e), s, think).unwrap())).unwrap();
    assert_eq!((&said.answer.text, &said.answer.tokens), (&fresh.answer.text, &fresh.answer.tokens));
    assert_eq!((said.answer.prompt_tokens, fresh.answer.cached_tokens), (fresh.answer.prompt_tokens, 0));
    assert!(said.logits == fresh.logits, "logits of {:?}", said.answer.text);
}

fn with<R>(model: &Model, chunk: usize, f: impl FnOnce(&mut Reader<'_, '_, FileStorage>) -> R) -> R {
    model.with_engine(&setup(chunk, KvType::F16), |s| s, |e, _| Ok(f(&mut Reader::new(e)))).unwrap()
}

fn picture(name: &str) -> std::path::PathBuf {
    path("demo").join(name)
}

#[test]
fn a_chat_of_three_turns_reads_what_is_new() {
    for name in ["tiny-moe", "tiny-dense"] {
        let model = model(name);
        let count = |text: &str| model.tokenizer.encode(text).unwrap().len();
        for (system, chunk) in [(None, 512), (Some("You are a helpful assistant."), 3), (None, 16)] {
            with(&model, chunk, |reader| {
                let mut s = Session::new(&model, look(Detail::X16), system);
                s.fixed = Fixed::Messages;
                let mut said: Option<Said> = None;
                for message in ["Hello!", "Which day comes after Monday?", "What is 3 plus 5?"] {
                    s.messages.push(user_message(0, message));
                    let now = ask(&model, reader, &s, false);
                    let asked = format!("<|im_start|>user\n{message}<|im_end|>\n{ASK}");
                    match &said {
                        None => assert_eq!(now.answer.cached_tokens, 0),
                        // The template leaves the empty thought out of what was said, so the answer is read again.
                        Some(before) => {
                            let answered = format!("{SAID}{}<|im_end|>\n{asked}", before.answer.text);
                            assert_eq!(now.read(), count(&answered), "{name} {message}");
                            assert_eq!(now.answer.cached_tokens, before.answer.prompt_tokens - count(ASK));
                        }
                    }
                    s.messages.push(json!({"role": "assistant", "content": now.answer.text}));
                    said = Some(now);
                }
                // The conversation is forgotten, and so is what was saved of it.
                s.messages.truncate(usize::from(system.is_some()));
                s.messages.push(user_message(0, "Hello!"));
                assert_eq!(ask(&model, reader, &s, false).answer.cached_tokens, 0);
            });
        }
    }
}

#[test]
fn thoughts_are_dropped_and_the_rest_goes_on() {
    let model = model("tiny-moe");
    with(&model, 64, |reader| {
        let mut s = Session::new(&model, look(Detail::X16), None);
        s.fixed = Fixed::Messages;
        s.messages.push(user_message(0, "What is 2 + 3 + 4?"));
        let first = ask(&model, reader, &s, true);
        assert_eq!(first.answer.thinking.as_deref(), Some("2 + 3 = 5. 5 + 4 = 9."));
        s.messages.push(json!({"role": "assistant", "content": first.answer.text}));
        s.messages.push(user_message(0, "Hello!"));
        let second = ask(&model, reader, &s, true);
        let opening = model.tokenizer.encode("<|im_start|>assistant\n<think>\n").unwrap().len();
        assert_eq!(second.answer.cached_tokens, first.answer.prompt_tokens - opening);
    });
}

#[test]
fn a_picture_in_a_chat_is_seen_once() {
    let model = model("tiny-moe");
    with(&model, 16, |reader| {
        let mut s = Session::new(&model, look(Detail::X16), None);
        s.fixed = Fixed::Messages;
        s.messages.push(user_message(1, "Is the door open?"));
        s.pictures.push(picture("scene_083.png").into());
        let first = ask(&model, reader, &s, false);
        assert_eq!((first.answer.text.as_str(), first.crops), ("The door is open.", 1));
        let mut said = first.answer;
        for message in ["Hello!", "What is 3 plus 5?"] {
            s.messages.push(json!({"role": "assistant", "content": said.text}));
            s.messages.push(user_message(0, message));
            let now = ask(&model, reader, &s, false);
            let ask_tokens = model.tokenizer.encode(ASK).unwrap().len();
            assert_eq!((now.crops, now.answer.cached_tokens), (0, said.prompt_tokens - ask_tokens));
            said = now.answer;
        }
        // Another picture after it.
        s.messages.push(json!({"role": "assistant", "content": said.text}));
        s.messages.push(user_message(1, "Where is the star?"));
        s.pictures.push(picture("place_027.png").into());
        let now = ask(&model, reader, &s, false);
        assert_eq!(now.crops, 1);
        assert!(now.answer.cached_tokens > 0);
        // Another one in place of the first: same tokens, other features.
        s.pictures[0] = picture("place_027.png").into();
        let other = ask(&model, reader, &s, false);
        assert_eq!((other.crops, other.answer.cached_tokens), (2, 0));
        // The same pictures under another question.
        s.messages.truncate(0);
        s.messages.push(user_message(2, "What is in the first picture?"));
        assert_eq!(ask(&model, reader, &s, false).crops, 0);
        // The same picture, seen otherwise.
        let mut closer = Session::new(&model, look(Detail::X4), None);
        closer.messages.push(user_message(1, "Is the door open?"));
        closer.pictures.push(picture("place_027.png").into());
        assert_eq!(ask(&model, reader, &closer, false).crops, 1);
    });
}

/// What a camera does: the same instruction, then one frame after another.
#[test]
fn a_frame_pays_for_its_own_tokens() {
    for name in ["tiny-moe", "tiny-dense"] {
        let model = model(name);
        for (chunk, detail) in [(512, Detail::X16), (5, Detail::X4)] {
            with(&model, chunk, |reader| {
                let mut s = Session::new(&model, look(detail), Some("You are a helpful assistant."));
                s.fixed = Fixed::BeforePicture(0);
                let content = json!([{"type": "text", "text": "Is the door open?"}, {"type": "image"}]);
                s.messages.push(json!({"role": "user", "content": content}));
                let before = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nIs the door open?\n\
                              <image_id>0</image_id><image>";
                let before = model.tokenizer.encode(before).unwrap().len();
                let frames = ["demo/scene_083.png", "demo/place_027.png", "goldens/pictures/wide_16x_0.png"];
                for (i, frame) in frames.iter().cycle().take(5).enumerate() {
                    s.pictures = vec![path(frame).into()];
                    let now = ask(&model, reader, &s, false);
                    assert!(now.crops > 0);
                    assert_eq!(now.answer.cached_tokens, if i == 0 { 0 } else { before }, "{name} {frame}");
                    now.read();
                }
                // The same frame again is not even seen.
                assert_eq!(ask(&model, reader, &s, false).crops, 0);
            });
        }
    }
}

/// A disk whose reads fail while `bad` says so.
struct Switched<'c, S> {
    inner: S,
    bad: &'c Cell<bool>,
    /// Reads until `bad` is set; off at 0.
    left: &'c Cell<u32>,
}

impl<S: Storage> Storage for Switched<'_, S> {
    fn slots(&self) -> usize {
        self.inner.slots()
    }

    fn slot_bytes(&self) -> usize {
        self.inner.slot_bytes()
    }

    fn depth_max(&self) -> usize {
        self.inner.depth_max()
    }

    fn submit(&mut self, reads: &[Read]) -> usize {
        self.inner.submit(reads)
    }

    fn complete(&mut self, wait: bool) -> Option<Completion> {
        let mut c = self.inner.complete(wait)?;
        if self.left.get() > 0 {
            self.left.set(self.left.get() - 1);
            self.bad.set(self.left.get() == 0);
        }
        if self.bad.get() {
            c.result = Err(ReadError::Os(5));
        }
        Some(c)
    }

    fn slot(&self, slot: u32) -> &[u8] {
        self.inner.slot(slot)
    }

    fn slot_mut(&mut self, slot: u32) -> &mut [u8] {
        self.inner.slot_mut(slot)
    }

    fn read_at(&mut self, offset: u64, out: &mut [u8]) -> Result<(), ReadError> {
        self.inner.read_at(offset, out)
    }
}

/// Wherever in a turn the disk fails, the turn can be asked again and the conversation goes on as if nothing had been.
#[test]
fn a_failing_disk_does_not_spoil_the_conversation() {
    let model = model("tiny-moe");
    let (bad, left) = (Cell::new(false), Cell::new(0));
    let (mut failed, mut kept) = (0, 0);
    for (round, reads) in [1, 20, 60, 120, 200, 300, 450, 600].into_iter().enumerate() {
        let mut setup = setup([4, 64][round % 2], KvType::F16);
        setup.options.slots_max = Some(12);
        let wrap = |inner| Switched { inner, bad: &bad, left: &left };
        model
            .with_engine(&setup, wrap, |engine, _| {
                let mut reader = Reader::new(engine);
                let mut s = Session::new(&model, look(Detail::X16), None);
                s.fixed = Fixed::Messages;
                s.messages.push(user_message(1, "Is the door open?"));
                s.pictures.push(picture("scene_083.png").into());
                let first = ask(&model, &mut reader, &s, false);
                s.messages.push(json!({"role": "assistant", "content": first.answer.text}));
                s.messages.push(user_message(0, "What is 3 plus 5?"));
                left.set(reads);
                if let Err(e) = try_ask(&mut reader, &s, false) {
                    assert!(e.contains("I/O error 5"), "{e}");
                    failed += 1;
                }
                left.set(0);
                bad.set(false);
                let second = ask(&model, &mut reader, &s, false);
                kept += usize::from(second.answer.cached_tokens > 0);
                assert_eq!(second.crops, 0);
                s.messages.push(json!({"role": "assistant", "content": second.answer.text}));
                s.messages.push(user_message(0, "Hello!"));
                assert!(ask(&model, &mut reader, &s, false).answer.cached_tokens > 0);
                Ok(())
            })
            .unwrap();
    }
    println!("{failed} turns failed; {kept} were asked again from a saved state");
    assert!(failed > 4 && kept > 0 && kept < 8, "{failed} failed, {kept} kept");
}

/// A template that repeats what was said as it was: the state goes on without being gone back to. And one token is always
/// computed, for its logits.
#[test]
fn a_prompt_that_continues_the_state_goes_on_from_it() {
    let model = model("tiny-moe");
    let prompt = |text: &str| model.prompts.build(&model.tokenizer, text, &[], 4).unwrap();
    with(&model, 64, |reader| {
        let mut none = Logits::default();
        let short = prompt("<|im_start|>user\nHello!");
        let n = short.ids.len();
        assert_eq!(reader.read(&short, n, &mut none), Ok(0));
        assert_eq!(reader.engine().saved(), Some(n - 1));
        let long = prompt("<|im_start|>user\nHello!<|im_end|>\n");
        assert_eq!(reader.read(&long, 0, &mut none), Ok(n));
        assert_eq!(reader.read(&long, 0, &mut none), Ok(n - 1), "one token is left");
        // Equal tokens at other positions are other tokens.
        let mut moved = long.clone();
        moved.positions.h[1] += 1;
        assert_eq!(reader.read(&moved, 0, &mut none), Ok(0));
        // One that does not fit leaves everything there.
        let mut huge = long.clone();
        huge.ids.resize(600, 1);
        huge.positions =
            forerun_engine::positions::Positions { t: vec![0; 600], h: vec![0; 600], w: vec![0; 600], delta: 0 };
        assert!(reader.read(&huge, 0, &mut none).is_err());
        assert_eq!(reader.engine().len(), long.ids.len());
    });
}
