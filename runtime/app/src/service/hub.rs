//! What happens, for whoever listens: events in a bounded ring, the latest picture and the state of each camera.
//!
//! Relies on nobody reading: a listener that is slow loses the oldest events and is told how many. The engine's thread
//! never publishes; who takes words from an [`super::Inbox`] does.

use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Most events that are kept for slow listeners.
pub const EVENTS_MAX: usize = 256;
/// Most bytes of their data; one event may be as long.
pub const EVENT_BYTES_MAX: usize = 256 << 10;
/// Most listeners.
pub const LISTENERS_MAX: usize = 16;
/// Most cameras.
pub const CAMERAS_MAX: usize = 8;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Counted from 1 since the program started.
    pub seq: u64,
    /// What kind: `start`, `word`, `answer`, `failed`, `picture`, `status`.
    pub kind: &'static str,
    /// A JSON object.
    pub data: String,
}

/// The latest picture of a camera.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Latest {
    /// The whole JPEG file.
    pub jpeg: Vec<u8>,
    /// Pixels.
    pub width: u32,
    /// Pixels.
    pub height: u32,
    /// When it was taken.
    pub taken: SystemTime,
    /// The camera's count of frames.
    pub sequence: u64,
}

/// How a camera is.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct CameraStatus {
    /// Whether it delivers.
    pub ok: bool,
    /// What is wrong if it does not; else what it is.
    pub reason: String,
    /// Frames it delivered.
    pub frames: u64,
    /// Frames that were skipped or lost.
    pub dropped: u64,
    /// Times it was opened again.
    pub reopened: u64,
    /// When the last frame came, milliseconds since 1970.
    pub last_frame_unix_ms: Option<u64>,
    /// Frames by second, lately.
    pub fps: f64,
}

#[derive(Default)]
struct State {
    seq: u64,
    ring: VecDeque<Arc<Event>>,
    ring_bytes: usize,
    wakers: Vec<Waker>,
    listeners: usize,
    cameras: BTreeMap<String, (CameraStatus, Option<Arc<Latest>>)>,
    /// The camera whose picture came last.
    newest: Option<String>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The place where all of this is kept. Clones are the same hub.
#[derive(Clone)]
pub struct Hub(Arc<Shared>);

impl Default for Hub {
    fn default() -> Self {
        Self::new()
    }
}

/// Milliseconds from 1970 to `at`.
pub fn unix_ms(at: SystemTime) -> u64 {
    at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

impl Hub {
    /// A hub where nothing happened yet.
    pub fn new() -> Self {
        Self(Arc::new(Shared { state: Mutex::new(State::default()), changed: Condvar::new() }))
    }

    /// Tells all listeners. `data` is an object; one of over [`EVENT_BYTES_MAX`] bytes is replaced by a note.
    pub fn publish(&self, kind: &'static str, data: &Value) {
        let mut data = data.to_string();
        if data.len() > EVENT_BYTES_MAX {
            data = json!({"omitted_bytes": data.len()}).to_string();
        }
        let mut state = self.0.lock();
        state.seq += 1;
        state.ring_bytes += data.len();
        let event = Event { seq: state.seq, kind, data };
        state.ring.push_back(Arc::new(event));
        while state.ring.len() > EVENTS_MAX || state.ring_bytes > EVENT_BYTES_MAX {
            let Some(oldest) = state.ring.pop_front() else { break };
            state.ring_bytes -= oldest.data.len();
        }
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.0.changed.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Listens from now on, or from after event `last` as far as the ring goes back. `None` if [`LISTENERS_MAX`] do.
    pub fn subscribe(&self, last: Option<u64>) -> Option<Subscription> {
        let mut state = self.0.lock();
        if state.listeners >= LISTENERS_MAX {
            return None;
        }
        state.listeners += 1;
        // A number from before a restart is larger than any here.
        let next = last.map_or(state.seq, |l| l.min(state.seq)) + 1;
        Some(Subscription { hub: self.clone(), next })
    }

    /// Keeps `latest` as the picture of `camera`, and tells listeners that there is one. False if there are [`CAMERAS_MAX`]
    /// others.
    pub fn set_picture(&self, camera: &str, latest: Latest) -> bool {
        let data = json!({
            "camera": camera, "sequence": latest.sequence, "taken_unix_ms": unix_ms(latest.taken),
            "width": latest.width, "height": latest.height,
        });
        let mut state = self.0.lock();
        let Some((_, picture)) = state.camera(camera) else { return false };
        *picture = Some(Arc::new(latest));
        state.newest = Some(camera.to_owned());
        drop(state);
        self.publish("picture", &data);
        true
    }

    /// The latest picture of `camera`, or of any.
    pub fn picture(&self, camera: Option<&str>) -> Option<Arc<Latest>> {
        let state = self.0.lock();
        let name = camera.or(state.newest.as_deref())?;
        state.cameras.get(name)?.1.clone()
    }

    /// Keeps how `camera` is, and tells listeners if it began or ceased to deliver. False if there are [`CAMERAS_MAX`]
    /// others.
    pub fn set_camera(&self, camera: &str, status: CameraStatus) -> bool {
        let mut state = self.0.lock();
        let known = state.cameras.contains_key(camera);
        let Some((old, _)) = state.camera(camera) else { return false };
        let changed = !known || old.ok != status.ok || old.reason != status.reason;
        let data = changed.then(|| json!({"camera": camera, "status": status}));
        *old = status;
        drop(state);
        if let Some(data) = data {
            self.publish("status", &data);
        }
        true
    }

    /// Forgets `camera`.
    pub fn remove_camera(&self, camera: &str) {
        let mut state = self.0.lock();
        state.cameras.remove(camera);
        if state.newest.as_deref() == Some(camera) {
            state.newest = None;
        }
    }

    /// All cameras by name.
    pub fn cameras(&self) -> Vec<(String, CameraStatus)> {
        self.0.lock().cameras.iter().map(|(name, (status, _))| (name.clone(), status.clone())).collect()
    }

    /// How many listen.
    pub fn listeners(&self) -> usize {
        self.0.lock().listeners
    }
}

impl State {
    fn camera(&mut self, name: &str) -> Option<&mut (CameraStatus, Option<Arc<Latest>>)> {
        if !self.cameras.contains_key(name) && self.cameras.len() >= CAMERAS_MAX {
            return None;
        }
        Some(self.cameras.entry(name.to_owned()).or_default())
    }

    /// The event that `next` asks for, or the oldest that is left.
    fn event(&self, next: u64) -> Option<&Arc<Event>> {
        let first = self.ring.front()?.seq;
        self.ring.get(next.saturating_sub(first) as usize)
    }
}

/// A listener.
pub struct Subscription {
    hub: Hub,
    next: u64,
}

impl Subscription {
    fn take(&mut self, state: &State) -> Option<(Arc<Event>, u64)> {
        let event = Arc::clone(state.event(self.next)?);
        let missed = event.seq - self.next;
        self.next = event.seq + 1;
        Some((event, missed))
    }

    /// The next event and how many were lost before it; otherwise `cx` is woken when one comes.
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<(Arc<Event>, u64)> {
        let shared = Arc::clone(&self.hub.0);
        let mut state = shared.lock();
        if let Some(taken) = self.take(&state) {
            return Poll::Ready(taken);
        }
        // One for each listener that waits: a task that polls again replaces its own.
        if !state.wakers.iter().any(|w| w.will_wake(cx.waker())) {
            state.wakers.push(cx.waker().clone());
        }
        Poll::Pending
    }

    /// The next event, for a thread; `None` if none came within `patience`.
    pub fn wait(&mut self, patience: Duration) -> Option<(Arc<Event>, u64)> {
        let shared = Arc::clone(&self.hub.0);
        let end = Instant::now() + patience;
        let mut state = shared.lock();
        loop {
            if let Some(taken) = self.take(&state) {
                return Some(taken);
            }
            let left = end.checked_duration_since(Instant::now())?;
            state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.hub.0.lock().listeners -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_listener_is_told_what_it_lost() {
        let hub = Hub::new();
        hub.publish("word", &json!({"before": true}));
        let mut s = hub.subscribe(None).expect("room");
        assert!(s.wait(Duration::ZERO).is_none());
        for i in 0..EVENTS_MAX as u64 + 10 {
            hub.publish("word", &json!({ "i": i }));
        }
        let (event, missed) = s.wait(Duration::ZERO).expect("event");
        assert_eq!((missed, event.data.as_str()), (10, "{\"i\":10}"));
        assert_eq!(std::iter::from_fn(|| s.wait(Duration::ZERO)).count(), EVENTS_MAX - 1);
        // One that comes back hears what it missed; one from before a restart, nothing twice.
        let mut back = hub.subscribe(Some(EVENTS_MAX as u64 + 10)).expect("room");
        assert_eq!(back.wait(Duration::ZERO).map(|(e, missed)| (e.seq, missed)), Some((EVENTS_MAX as u64 + 11, 0)));
        assert!(hub.subscribe(Some(u64::MAX)).expect("room").wait(Duration::ZERO).is_none());
    }

    #[test]
    fn long_events_do_not_add_up() {
        let hub = Hub::new();
        let mut s = hub.subscribe(None).expect("room");
        for _ in 0..3 {
            hub.publish("answer", &json!({ "text": "x".repeat(EVENT_BYTES_MAX - 20) }));
        }
        let (event, missed) = s.wait(Duration::ZERO).expect("event");
        assert_eq!((event.seq, missed), (3, 2));
        hub.publish("answer", &json!({ "text": "x".repeat(EVENT_BYTES_MAX) }));
        assert_eq!(
            s.wait(Duration::ZERO).expect("event").0.data,
            format!("{{\"omitted_bytes\":{}}}", EVENT_BYTES_MAX + 11)
        );
    }

    #[test]
    fn listeners_and_cameras_are_bounded() {
        let hub = Hub::new();
        let all: Vec<_> = (0..LISTENERS_MAX).map_while(|_| hub.subscribe(None)).collect();
        assert_eq!(all.len(), LISTENERS_MAX);
        assert!(hub.subscribe(None).is_none());
        drop(all);
        assert!(hub.subscribe(None).is_some());
        for i in 0..CAMERAS_MAX {
            assert!(hub.set_camera(&format!("camera {i}"), CameraStatus::default()));
        }
        assert!(!hub.set_camera("one more", CameraStatus::default()));
        let latest = Latest { jpeg: vec![1], width: 1, height: 1, taken: UNIX_EPOCH, sequence: 1 };
        assert!(!hub.set_picture("one more", latest.clone()));
        hub.remove_camera("camera 0");
        assert!(hub.set_picture("one more", latest.clone()));
        assert_eq!(hub.picture(None).as_deref(), Some(&latest));
        assert_eq!(hub.picture(Some("camera 1")), None);
    }
}
