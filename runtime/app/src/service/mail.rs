//! How the words of one answer come to who asked: one side adds, the other takes what has gathered.
//!
//! Relies on thoughts coming before text. Bounded by the longest answer; adding within what was reserved allocates nothing
//! and never waits for the reader. Works from a thread (`wait`) and from a future (`poll`).

use super::Failure;
use crate::session::{Answer, Piece};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

/// What there is to take.
#[derive(Debug)]
pub enum Mail {
    /// The engine began with the job.
    Started,
    /// Part of the thoughts.
    Thought(String),
    /// Part of the answer.
    Text(String),
    /// The end, with the whole answer. Nothing follows.
    End(Result<Box<Answer>, Failure>),
}

#[derive(Default)]
struct State {
    started: bool,
    thought: String,
    text: String,
    end: Option<Result<Box<Answer>, Failure>>,
    /// Nobody reads any more.
    cancelled: bool,
    waker: Option<Waker>,
}

impl State {
    fn take(&mut self) -> Option<Mail> {
        if std::mem::take(&mut self.started) {
            Some(Mail::Started)
        } else if !self.thought.is_empty() {
            // Cloned, so that the room stays reserved.
            let taken = Mail::Thought(self.thought.clone());
            self.thought.clear();
            Some(taken)
        } else if !self.text.is_empty() {
            let taken = Mail::Text(self.text.clone());
            self.text.clear();
            Some(taken)
        } else {
            self.end.take().map(Mail::End)
        }
    }
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes the reader.
    fn change<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        let mut state = self.lock();
        let result = f(&mut state);
        let waker = state.waker.take();
        drop(state);
        self.changed.notify_all();
        if let Some(waker) = waker {
            waker.wake();
        }
        result
    }
}

/// The engine's side.
pub(super) struct Outbox(Arc<Shared>);

/// The side of who asked. Dropping it cancels the job.
pub struct Inbox(Arc<Shared>);

/// Both sides, with room for `bytes` of text that nobody took yet.
pub(super) fn mailbox(bytes: usize) -> (Outbox, Inbox) {
    let state = State { text: String::with_capacity(bytes), ..State::default() };
    let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
    (Outbox(Arc::clone(&shared)), Inbox(shared))
}

impl Outbox {
    /// Whether nobody reads any more.
    pub fn cancelled(&self) -> bool {
        self.0.lock().cancelled
    }

    /// Says that the job runs.
    pub fn start(&self) {
        self.0.change(|s| s.started = true);
    }

    /// Adds a piece. False if nobody reads any more.
    pub fn push(&self, piece: Piece<'_>) -> bool {
        self.0.change(|s| {
            match piece {
                Piece::Thought(t) => s.thought.push_str(t),
                Piece::Text(t) => s.text.push_str(t),
                Piece::Call(_) => {}
            }
            !s.cancelled
        })
    }

    /// The end.
    pub fn end(&self, result: Result<Answer, Failure>) {
        self.0.change(|s| s.end = Some(result.map(Box::new)));
    }
}

impl Inbox {
    /// What has gathered; otherwise `cx` is woken when something comes.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Mail> {
        let mut state = self.0.lock();
        match state.take() {
            Some(mail) => Poll::Ready(mail),
            None => {
                state.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// The next mail, for a future.
    pub async fn next(&mut self) -> Mail {
        std::future::poll_fn(|cx| self.poll(cx)).await
    }

    /// The next mail, for a thread; `None` if none came within `patience`.
    pub fn wait(&mut self, patience: Duration) -> Option<Mail> {
        let end = Instant::now() + patience;
        let mut state = self.0.lock();
        loop {
            if let Some(mail) = state.take() {
                return Some(mail);
            }
            let left = end.checked_duration_since(Instant::now())?;
            state = self.0.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The whole answer, for a thread.
    ///
    /// # Errors
    /// If there is none, or it did not come within `patience`: the job is cancelled then.
    pub fn answer(mut self, patience: Duration) -> Result<Answer, Failure> {
        let end = Instant::now() + patience;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.wait(left) {
                Some(Mail::End(result)) => return result.map(|a| *a),
                Some(_) => {}
                None => return Err(Failure::late(patience)),
            }
        }
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.0.lock().cancelled = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_gather_until_they_are_taken() {
        let (out, mut inbox) = mailbox(16);
        assert!(inbox.wait(Duration::ZERO).is_none());
        out.start();
        for t in ["a", "b"] {
            assert!(out.push(Piece::Thought(t)));
        }
        for t in ["c", "d"] {
            assert!(out.push(Piece::Text(t)));
        }
        out.end(Err(Failure::loading()));
        assert!(matches!(inbox.wait(Duration::ZERO), Some(Mail::Started)));
        assert!(matches!(inbox.wait(Duration::ZERO), Some(Mail::Thought(t)) if t == "ab"));
        assert!(matches!(inbox.wait(Duration::ZERO), Some(Mail::Text(t)) if t == "cd"));
        assert!(matches!(inbox.wait(Duration::ZERO), Some(Mail::End(Err(_)))));
        assert!(inbox.wait(Duration::ZERO).is_none());
    }

    #[test]
    fn who_leaves_cancels() {
        let (out, inbox) = mailbox(16);
        assert!(out.push(Piece::Text("a")) && !out.cancelled());
        drop(inbox);
        assert!(!out.push(Piece::Text("b")) && out.cancelled());
    }

    #[test]
    fn a_thread_that_waits_is_woken() {
        let (out, inbox) = mailbox(16);
        std::thread::scope(|s| {
            let waits = s.spawn(|| inbox.answer(Duration::from_secs(60)).map_err(|f| f.message));
            out.end(Err(Failure::loading()));
            assert_eq!(waits.join().expect("thread").expect_err("failure"), Failure::loading().message);
        });
    }
}
