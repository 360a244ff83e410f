//! The thread that writes a recorder's files, and its queue.
//!
//! The thread starts with the first channel, not with the recorder. A process that enters a sandbox
//! does so before its first channel, and an older thread could keep the privileges that it drops.

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::{Direction, RECORDING_HEADER_BYTES, RecordingHeader, RecordingSide};

/// Maximum number of bytes that wait for the disk: as many as the engine keeps in flight. A writer
/// thread that is not scheduled for some milliseconds on a fast link must not end a recording.
const MAX_QUEUED: usize = 64 << 20;

/// Overhead of a job beyond its bytes, so that many small jobs are limited too.
const JOB_BYTES: usize = 64;

/// How long to wait for the disk at the end.
pub const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// Receives a line that says why the recording has ended.
type EndObserver = Box<dyn Fn(&str) + Send + Sync>;

/// Creates a new file with this name.
type CreateFile = Box<dyn Fn(&Path) -> io::Result<File> + Send + Sync>;

/// The recorders whose writers may still be working.
static WRITING: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Waits until everything recorded in this process is written, at most 2 s. Call it before the
/// process exits.
pub fn finish_recordings() {
    let deadline = Instant::now() + FLUSH_TIMEOUT;
    let writing = WRITING.lock().clone();
    writing.iter().filter_map(Weak::upgrade).for_each(|shared| shared.flush(deadline));
}

/// A task for the writer.
pub enum Job {
    /// Creates the files of a channel, for `track` and the next one.
    Open { track: u64, at: u64 },
    /// Writes to a track's file.
    Write { track: u64, bytes: Vec<u8> },
    /// Closes a track's file.
    Close { track: u64 },
}

impl Job {
    fn cost(&self) -> usize {
        match self {
            Self::Write { bytes, .. } => JOB_BYTES + bytes.len(),
            Self::Open { .. } | Self::Close { .. } => JOB_BYTES,
        }
    }
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// The cost of all unfinished jobs, including the current one.
    waiting: usize,
    started: bool,
    /// No more jobs will be queued.
    closed: bool,
    /// Nothing more is written.
    stopped: bool,
}

/// The state shared by channels and the writer.
pub struct Shared {
    pub directory: PathBuf,
    pub side: RecordingSide,
    limit: u64,
    max_queued: usize,
    create: CreateFile,
    /// Bytes that may still be recorded.
    left: AtomicU64,
    tracks: AtomicU64,
    ended: AtomicBool,
    observer: Mutex<Option<EndObserver>>,
    queue: Mutex<Queue>,
    /// Notified when the queue grows or shrinks.
    changed: Condvar,
}

impl Shared {
    pub fn new(directory: &Path, side: RecordingSide, limit: u64) -> Self {
        let create =
            |path: &Path| OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        Self::with_disk(directory, side, limit, MAX_QUEUED, Box::new(create))
    }

    /// With another queue limit and another disk.
    pub fn with_disk(
        directory: &Path,
        side: RecordingSide,
        limit: u64,
        max_queued: usize,
        create: CreateFile,
    ) -> Self {
        Self {
            directory: directory.to_owned(),
            side,
            limit,
            max_queued,
            create,
            left: AtomicU64::new(limit),
            tracks: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            observer: Mutex::default(),
            queue: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub fn on_end(&self, observer: EndObserver) {
        *self.observer.lock() = Some(observer);
    }

    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// Starts the files of a new channel. Returns the number of its first track, or `None` if the
    /// recording has ended.
    pub fn open(self: &Arc<Self>, at: u64) -> Option<u64> {
        if self.has_ended() || !self.reserve(2 * RECORDING_HEADER_BYTES) {
            return None;
        }
        if let Err(error) = self.start() {
            self.end(&format!("can't start a thread: {error}"));
            return None;
        }
        let track = self.tracks.fetch_add(2, Ordering::Relaxed);
        self.put(Job::Open { track, at });
        Some(track)
    }

    fn start(self: &Arc<Self>) -> io::Result<()> {
        let mut queue = self.queue.lock();
        if !queue.started {
            let shared = Arc::clone(self);
            let run = move || shared.run();
            thread::Builder::new().name("vmferry-record".into()).spawn(run)?;
            queue.started = true;
            let mut writing = WRITING.lock();
            writing.retain(|other| other.strong_count() > 0);
            writing.push(Arc::downgrade(self));
        }
        Ok(())
    }

    /// Takes bytes from the limit. Returns whether enough were left.
    pub fn reserve(&self, bytes: usize) -> bool {
        let reserve = |left: u64| left.checked_sub(bytes as u64);
        let reserved =
            self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserve).is_ok();
        if !reserved {
            let limit = self.limit;
            self.end(&format!("its limit of {limit} bytes is reached"));
        }
        reserved
    }

    /// Queues a job. If the queue is full, the recording ends, but queued data is still written.
    pub fn put(&self, job: Job) {
        let mut queue = self.queue.lock();
        if queue.stopped {
            return;
        }
        let full = queue.waiting.saturating_add(job.cost()) > self.max_queued;
        // A file that is no longer used is closed in any case.
        if full && !matches!(job, Job::Close { .. }) {
            drop(queue);
            let max = self.max_queued >> 20;
            self.end(&format!("the disk is too slow: more than {max} MiB wait to be written"));
            return;
        }
        queue.waiting += job.cost();
        queue.jobs.push_back(job);
        self.changed.notify_all();
    }

    /// No more jobs will be queued.
    pub fn close(&self) {
        self.queue.lock().closed = true;
        self.changed.notify_all();
    }

    /// Waits until the queue is empty. At the deadline, the rest is dropped and the recording ends.
    pub fn flush(&self, deadline: Instant) {
        let waits = |queue: &mut Queue| queue.waiting > 0 && !queue.stopped;
        let mut queue = self.queue.lock();
        self.changed.wait_while_until(&mut queue, waits, deadline);
        if waits(&mut queue) {
            queue.give_up();
            drop(queue);
            self.end(
                "the disk is too slow: it did not accept the remaining data in time at the end",
            );
        }
    }

    /// Ends the recording of all channels, and reports the reason once.
    fn end(&self, why: &str) {
        if self.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Some(observer) = &*self.observer.lock() {
            observer(&format!("recording to {} has ended: {why}", self.directory.display()));
        }
    }

    #[cfg(test)]
    pub fn is_idle(&self) -> bool {
        self.queue.lock().waiting == 0
    }

    /// The writer thread.
    fn run(&self) {
        let mut files = Files { open: HashMap::new(), next: 0 };
        while let Some(job) = self.next() {
            let cost = job.cost();
            if let Err(why) = files.execute(self, job) {
                self.end(&why);
                self.queue.lock().give_up();
            } else {
                let mut queue = self.queue.lock();
                queue.waiting = queue.waiting.saturating_sub(cost);
            }
            self.changed.notify_all();
        }
    }

    /// Waits for the next job; `None` if there will be none.
    fn next(&self) -> Option<Job> {
        let waits = |queue: &mut Queue| queue.jobs.is_empty() && !queue.closed && !queue.stopped;
        let mut queue = self.queue.lock();
        self.changed.wait_while(&mut queue, waits);
        queue.jobs.pop_front()
    }
}

impl Queue {
    fn give_up(&mut self) {
        self.stopped = true;
        self.jobs = VecDeque::new();
        self.waiting = 0;
    }
}

/// The writer's open files, by track.
struct Files {
    open: HashMap<u64, File>,
    /// The number of the next channel.
    next: u32,
}

impl Files {
    /// Executes a job.
    ///
    /// # Errors
    /// Why the recording ends.
    fn execute(&mut self, shared: &Shared, job: Job) -> Result<(), String> {
        match job {
            Job::Open { track, at } => {
                let files = self.create(shared, at);
                let files = files.map_err(|error| format!("can't create a file: {error}"))?;
                self.open.extend((track..).zip(files));
            }
            Job::Write { track, bytes } => {
                if let Some(file) = self.open.get_mut(&track) {
                    file.write_all(&bytes).map_err(|error| error.to_string())?;
                }
            }
            Job::Close { track } => drop(self.open.remove(&track)),
        }
        Ok(())
    }

    /// Creates the files of the next channel: to the destination, and to the source.
    fn create(&mut self, shared: &Shared, at: u64) -> io::Result<[File; 2]> {
        loop {
            let connection = self.next;
            self.next += 1;
            let create = |direction| -> io::Result<File> {
                let name = match direction {
                    Direction::ToDestination => "to-destination",
                    Direction::ToSource => "to-source",
                };
                let name = format!("{connection:04}-{name}.vmftrace");
                let mut file = (shared.create)(&shared.directory.join(name))?;
                let header = RecordingHeader { side: shared.side, direction, connection, at };
                file.write_all(&header.encode())?;
                Ok(file)
            };
            match create(Direction::ToDestination) {
                // Earlier recordings are never overwritten.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                first => return Ok([first?, create(Direction::ToSource)?]),
            }
        }
    }
}
