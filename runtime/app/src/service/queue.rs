//! A queue between threads that refuses what is over its bound.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Why something was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// As many wait as may.
    Full,
    /// The queue was closed.
    Closed,
}

struct State<T> {
    items: VecDeque<T>,
    closed: bool,
}

/// First in, first out; at most `max` wait.
pub struct Queue<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    max: usize,
}

impl<T> Queue<T> {
    /// An empty queue.
    pub fn new(max: usize) -> Self {
        let state = State { items: VecDeque::with_capacity(max), closed: false };
        Self { state: Mutex::new(state), changed: Condvar::new(), max }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds `item`. If the queue is full, those that are `dead` leave it first.
    ///
    /// # Errors
    /// If it is full of living ones, or closed.
    pub fn push(&self, item: T, dead: impl Fn(&T) -> bool) -> Result<(), Refused> {
        let mut state = self.lock();
        if state.closed {
            return Err(Refused::Closed);
        }
        if state.items.len() >= self.max {
            state.items.retain(|i| !dead(i));
        }
        if state.items.len() >= self.max {
            return Err(Refused::Full);
        }
        state.items.push_back(item);
        self.changed.notify_one();
        Ok(())
    }

    /// The next item, waiting up to `patience` for one. `Ok(None)` if none came.
    ///
    /// # Errors
    /// If the queue was closed.
    pub fn pop(&self, patience: Duration) -> Result<Option<T>, Refused> {
        let idle = |s: &mut State<T>| s.items.is_empty() && !s.closed;
        let waited = self.changed.wait_timeout_while(self.lock(), patience, idle);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state.closed { Err(Refused::Closed) } else { Ok(state.items.pop_front()) }
    }

    /// Takes nothing any more, and gives back what waited.
    pub fn close(&self) -> VecDeque<T> {
        let mut state = self.lock();
        state.closed = true;
        self.changed.notify_all();
        std::mem::take(&mut state.items)
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.lock().items.len()
    }

    /// Most that may wait.
    pub fn max(&self) -> usize {
        self.max
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_refuses_and_lets_the_dead_go() {
        let q = Queue::new(3);
        for i in 0..3 {
            assert_eq!(q.push(i, |_| false), Ok(()));
        }
        assert_eq!(q.push(3, |_| false), Err(Refused::Full));
        assert_eq!(q.len(), q.max());
        assert_eq!(q.push(3, |i| i % 2 == 0), Ok(()), "two were dead");
        assert_eq!([q.pop(Duration::ZERO), q.pop(Duration::ZERO)], [Ok(Some(1)), Ok(Some(3))]);
        assert_eq!(q.pop(Duration::ZERO), Ok(None));
    }

    #[test]
    fn a_closed_queue_gives_back_what_waited_and_wakes_who_waits() {
        let q = Queue::new(2);
        assert_eq!(q.push(7, |_| false), Ok(()));
        assert_eq!(q.close(), [7]);
        assert_eq!(q.push(8, |_| false), Err(Refused::Closed));
        assert_eq!(q.pop(Duration::from_secs(60)), Err(Refused::Closed));
        let q = Queue::<u8>::new(1);
        std::thread::scope(|s| {
            let waits = s.spawn(|| q.pop(Duration::from_secs(60)));
            q.close();
            assert_eq!(waits.join().ok(), Some(Err(Refused::Closed)));
        });
    }
}
