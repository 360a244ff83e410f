//! The thread that writes a recorder's files, and the queue before it.
//!
//! It starts with the first channel and not with the recorder: a process that restricts itself does so before it takes
//! any, and a thread that was there before could keep what is given up.

use std::collections::{HashMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::{Direction, RECORDING_HEADER_BYTES, RecordingHeader, RecordingSide};

/// Most bytes that wait for the disk. As much as the engine keeps in flight: a writer that gets no processor for some
/// milliseconds, while the link is fast, must not end a recording.
const MOST_QUEUED: usize = 64 << 20;

/// What a job takes beside its bytes, so that many small ones are bounded too.
const JOB_BYTES: usize = 64;

/// For how long the disk is waited for at the end.
pub const FLUSH_PATIENCE: Duration = Duration::from_secs(2);

/// Whoever is told, in a line, that the recording has ended and why.
type Teller = Box<dyn Fn(&str) + Send + Sync>;

/// Makes a new file of this name.
type Make = Box<dyn Fn(&Path) -> io::Result<File> + Send + Sync>;

/// The recorders whose writers may still have something to do.
static WRITING: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Waits until what was recorded in this process has been written, but no longer than 2 s: for the end of the process.
pub fn finish_recordings() {
    let deadline = Instant::now() + FLUSH_PATIENCE;
    let writing = lock(&WRITING).clone();
    writing.iter().filter_map(Weak::upgrade).for_each(|shared| shared.flush(deadline));
}

/// What the writer does next.
pub enum Job {
    /// Makes the files of a channel, `track` and the next one.
    Open { track: u64, at: u64 },
    /// Writes to the file of a track.
    Write { track: u64, bytes: Vec<u8> },
    /// Closes it.
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
    /// The cost of all jobs that are not done, of the one that the writer has too.
    waiting: usize,
    started: bool,
    /// No more jobs will come.
    closed: bool,
    /// Nothing more is written.
    over: bool,
}

/// What channels and writer share.
pub struct Shared {
    pub directory: PathBuf,
    pub side: RecordingSide,
    limit: u64,
    most_queued: usize,
    make: Make,
    /// Bytes that may still be recorded.
    left: AtomicU64,
    tracks: AtomicU64,
    ended: AtomicBool,
    teller: Mutex<Option<Teller>>,
    queue: Mutex<Queue>,
    /// The queue was filled or emptied.
    changed: Condvar,
}

impl Shared {
    pub fn new(directory: &Path, side: RecordingSide, limit: u64) -> Self {
        let make =
            |path: &Path| OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
        Self::on(directory, side, limit, MOST_QUEUED, Box::new(make))
    }

    /// With another bound and another disk.
    pub fn on(
        directory: &Path,
        side: RecordingSide,
        limit: u64,
        most_queued: usize,
        make: Make,
    ) -> Self {
        Self {
            directory: directory.to_owned(),
            side,
            limit,
            most_queued,
            make,
            left: AtomicU64::new(limit),
            tracks: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            teller: Mutex::default(),
            queue: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    pub fn tell(&self, teller: Teller) {
        *lock(&self.teller) = Some(teller);
    }

    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Relaxed)
    }

    /// The files of a new channel: the number of the first track; none if nothing is recorded any more.
    pub fn open(self: &Arc<Self>, at: u64) -> Option<u64> {
        if self.has_ended() || !self.take(2 * RECORDING_HEADER_BYTES) {
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
        let mut queue = self.queue();
        if !queue.started {
            let shared = Arc::clone(self);
            let run = move || shared.run();
            thread::Builder::new().name("vmferry-record".into()).spawn(run)?;
            queue.started = true;
            let mut writing = lock(&WRITING);
            writing.retain(|other| other.strong_count() > 0);
            writing.push(Arc::downgrade(self));
        }
        Ok(())
    }

    /// Takes bytes from the limit; whether there were as many.
    pub fn take(&self, bytes: usize) -> bool {
        let take = |left: u64| left.checked_sub(bytes as u64);
        let taken = self.left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
        if !taken {
            let limit = self.limit;
            self.end(&format!("its limit of {limit} bytes is reached"));
        }
        taken
    }

    /// Queues a job. Where the queue is full the recording ends: what is queued is still written.
    pub fn put(&self, job: Job) {
        let mut queue = self.queue();
        if queue.over {
            return;
        }
        let full = queue.waiting.saturating_add(job.cost()) > self.most_queued;
        // A file that is no longer written to is closed in any case.
        if full && !matches!(job, Job::Close { .. }) {
            drop(queue);
            let most = self.most_queued >> 20;
            self.end(&format!("the disk is too slow: more than {most} MiB wait to be written"));
            return;
        }
        queue.waiting += job.cost();
        queue.jobs.push_back(job);
        self.changed.notify_all();
    }

    /// No more jobs will come.
    pub fn close(&self) {
        self.queue().closed = true;
        self.changed.notify_all();
    }

    /// Waits until the queue is empty; at the deadline what is left is dropped, and the recording has ended.
    pub fn flush(&self, deadline: Instant) {
        let left = deadline.saturating_duration_since(Instant::now());
        let waits = |queue: &mut Queue| queue.waiting > 0 && !queue.over;
        let waited = self.changed.wait_timeout_while(self.queue(), left, waits);
        let (mut queue, late) = waited.unwrap_or_else(PoisonError::into_inner);
        if late.timed_out() {
            queue.give_up();
            drop(queue);
            self.end("the disk is too slow: it has not taken in time what was left at the end");
        }
    }

    /// Ends the recording of all channels, and says why, once.
    fn end(&self, why: &str) {
        if self.ended.swap(true, Ordering::Relaxed) {
            return;
        }
        if let Some(teller) = &*lock(&self.teller) {
            teller(&format!("recording to {} has ended: {why}", self.directory.display()));
        }
    }

    #[cfg(test)]
    pub fn waits_for_nothing(&self) -> bool {
        self.queue().waiting == 0
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        lock(&self.queue)
    }

    /// The writer.
    fn run(&self) {
        let mut files = Files { open: HashMap::new(), next: 0 };
        while let Some(job) = self.next() {
            let cost = job.cost();
            if let Err(why) = files.execute(self, job) {
                self.end(&why);
                self.queue().give_up();
            } else {
                let mut queue = self.queue();
                queue.waiting = queue.waiting.saturating_sub(cost);
            }
            self.changed.notify_all();
        }
    }

    /// Waits for the next job; none if there will be none.
    fn next(&self) -> Option<Job> {
        let waits = |queue: &mut Queue| queue.jobs.is_empty() && !queue.closed && !queue.over;
        let waited = self.changed.wait_while(self.queue(), waits);
        waited.unwrap_or_else(PoisonError::into_inner).jobs.pop_front()
    }
}

impl Queue {
    fn give_up(&mut self) {
        self.over = true;
        self.jobs = VecDeque::new();
        self.waiting = 0;
    }
}

/// The files that the writer has open, by track.
struct Files {
    open: HashMap<u64, File>,
    /// The number of the next channel.
    next: u32,
}

impl Files {
    /// # Errors
    /// Why the recording ends.
    fn execute(&mut self, shared: &Shared, job: Job) -> Result<(), String> {
        match job {
            Job::Open { track, at } => {
                let files = self.make(shared, at);
                let files = files.map_err(|error| format!("can't make a file: {error}"))?;
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

    /// The files of the next channel: to the destination, and to the source.
    fn make(&mut self, shared: &Shared, at: u64) -> io::Result<[File; 2]> {
        loop {
            let connection = self.next;
            self.next += 1;
            let make = |direction| -> io::Result<File> {
                let name = match direction {
                    Direction::ToDestination => "to-destination",
                    Direction::ToSource => "to-source",
                };
                let name = format!("{connection:04}-{name}.vmftrace");
                let mut file = (shared.make)(&shared.directory.join(name))?;
                let header = RecordingHeader { side: shared.side, direction, connection, at };
                file.write_all(&header.encode())?;
                Ok(file)
            };
            match make(Direction::ToDestination) {
                // An earlier recording is never written over.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                first => return Ok([first?, make(Direction::ToSource)?]),
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
