//! A simulated VMM of a carried guest at the source. It writes records of pages into sockets in
//! several passes, stops "the guest", waits, and writes the rest.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::net::{RecvFlags, recv};
use vmferry::vmm::streamed::{
    LateStreams, Marks, OutgoingStream, PageMark, PostCopyStart, Recogniser, StreamEvent,
    StreamEvents, StreamedVm,
};
use vmferry::{GuestDescription, Resume, VmError};
use vmferry_handover::Reconnect;
use vmferry_memory::{PAGE_SIZE, SlotId, SlotLayout};
use vmferry_wire::GuestIdentity;

/// Headers of a page record and of a zero-page record, which has no content.
const PAGE: u64 = 0x28;
const ZERO: u64 = 0x22;

/// The contents of the streams.
#[derive(Clone, Debug)]
pub struct Plan {
    pub streams: u8,
    /// Starts with one stream fewer than announced.
    pub one_less: bool,
    /// Pages of each stream, of which every eighth is zero.
    pub pages: u64,
    /// Passes over the first `hot` pages of each stream after the first pass.
    pub passes: u32,
    pub hot: u64,
    /// Bytes before each pass that are not pages.
    pub noise: usize,
    /// Approximate number of bytes that the recognizer consumes of each stream. After these it
    /// consumes nothing.
    pub recognised: usize,
    /// After the last pass it continues with further passes until this is set.
    pub until: Arc<AtomicBool>,
    /// To end its migration it writes the rest, and reads what no other reader has read.
    pub drains: bool,
    /// It has post-copy: it answers requests until the other VMM needs nothing more. This is the
    /// number of pages that it says it has not sent.
    pub post_copy: Option<u64>,
    /// It stops the guest by itself before it is told to begin its post-copy.
    pub stops_first: bool,
}

impl Default for Plan {
    fn default() -> Self {
        let until = Arc::new(AtomicBool::new(true));
        let recognised = usize::MAX;
        Self {
            streams: 1,
            one_less: false,
            pages: 2000,
            passes: 3,
            hot: 300,
            noise: 5000,
            recognised,
            until,
            drains: false,
            post_copy: None,
            stops_first: false,
        }
    }
}

/// Synchronizes the test and the VMM's threads.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
}

/// The source's VMM.
pub struct Streamer {
    plan: Plan,
    gate: Arc<Gate>,
    cut: Vec<UnixStream>,
    /// The sockets that the engine reads from.
    read: Vec<UnixStream>,
    threads: Vec<JoinHandle<()>>,
    /// Where requests are written, and answers are read.
    late: Option<LateStreams>,
    /// Post-copy was begun.
    answers: Arc<AtomicBool>,
    /// The bytes written to each stream.
    pub written: Arc<Mutex<Vec<Vec<u8>>>>,
    /// Bytes written so far, over all streams.
    pub so_far: Arc<AtomicU64>,
    /// Whether "the guest" runs.
    pub runs: Arc<AtomicBool>,
    /// The last downtime limit that was set.
    pub downtime: Arc<Mutex<Duration>>,
}

impl Streamer {
    /// Whether nothing of its own migration is left.
    pub fn is_ended(&self) -> bool {
        self.threads.is_empty()
    }

    /// Ends the VMM, whose guest has moved.
    pub fn end(&mut self) {
        for socket in &self.cut {
            let _ = socket.shutdown(Shutdown::Both);
        }
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
    }

    fn open_gate(&self) {
        *self.gate.open.lock().unwrap() = true;
        self.gate.changed.notify_all();
    }

    pub fn new(plan: Plan) -> Self {
        let written = vec![Vec::new(); usize::from(plan.streams)];
        Self {
            plan,
            gate: Arc::default(),
            cut: Vec::new(),
            read: Vec::new(),
            threads: Vec::new(),
            late: None,
            answers: Arc::default(),
            written: Arc::new(Mutex::new(written)),
            so_far: Arc::default(),
            runs: Arc::new(AtomicBool::new(true)),
            downtime: Arc::default(),
        }
    }
}

pub fn description(plan: &Plan) -> GuestDescription {
    let identity = GuestIdentity { uuid: uuid::Uuid::from_u128(7), name: "streamed".into() };
    let layout = vec![SlotLayout { slot: SlotId(0), gpa: 0, pages: plan.pages * 16 }];
    GuestDescription { identity, vmm: "streamer".into(), config: vec![plan.streams], layout }
}

impl Resume for Streamer {
    fn resume(&mut self) -> Result<(), VmError> {
        while self.plan.drains && !self.threads.iter().all(JoinHandle::is_finished) {
            self.open_gate();
            for socket in &self.read {
                // The engine may have read everything.
                let _ = recv(socket, &mut [0; 5000], RecvFlags::DONTWAIT);
            }
        }
        for socket in &self.cut {
            let _ = socket.shutdown(Shutdown::Both);
        }
        self.open_gate();
        self.threads.drain(..).for_each(|thread| thread.join().unwrap());
        self.runs.store(true, Ordering::SeqCst);
        Ok(())
    }
}

impl Reconnect for Streamer {
    type Streams = LateStreams;

    fn reconnect(&mut self) -> Result<LateStreams, VmError> {
        Err("it has one set of streams".into())
    }
}

impl StreamedVm for Streamer {
    fn describe(&self) -> GuestDescription {
        description(&self.plan)
    }

    fn streams(&self) -> u8 {
        self.plan.streams
    }

    fn begin(
        &mut self,
        downtime: Duration,
        events: StreamEvents,
    ) -> Result<Vec<OutgoingStream>, VmError> {
        *self.downtime.lock().unwrap() = downtime;
        let events: Arc<StreamEvents> = Arc::new(events);
        let mut streams = Vec::new();
        let arrived = Arc::new(AtomicU64::new(0));
        let done = Arc::new(AtomicU64::new(0));
        for number in 0..self.plan.streams {
            let (theirs, ours) = UnixStream::pair()?;
            let mut urgent = None;
            if self.plan.post_copy.is_some() {
                let (answered, answers) = UnixStream::pair()?;
                self.late = Some(LateStreams::new(theirs.try_clone()?, Some(answers)));
                urgent = Some(answered);
            }
            self.cut.push(ours.try_clone()?);
            self.read.push(theirs.try_clone()?);
            let (stream, left) = (number.into(), self.plan.recognised);
            let recogniser: Box<dyn Recogniser> = Box::new(Records { stream, left });
            streams.push(OutgoingStream { socket: theirs, recogniser });
            let stream = Stream {
                number,
                plan: self.plan.clone(),
                socket: ours,
                urgent,
                answers: Arc::clone(&self.answers),
                written: Arc::clone(&self.written),
                so_far: Arc::clone(&self.so_far),
                contents: Vec::new(),
                noise: fastrand::Rng::with_seed(u64::from(number)),
            };
            let (events, gate, runs) =
                (Arc::clone(&events), Arc::clone(&self.gate), Arc::clone(&self.runs));
            let (arrived, done) = (Arc::clone(&arrived), Arc::clone(&done));
            self.threads.push(std::thread::spawn(move || {
                stream.run(&events, &gate, &runs, &arrived, &done);
            }));
        }
        if self.plan.one_less {
            streams.pop();
        }
        Ok(streams)
    }

    fn set_downtime(&mut self, downtime: Duration) -> Result<(), VmError> {
        *self.downtime.lock().unwrap() = downtime;
        self.plan.until.store(true, Ordering::SeqCst);
        Ok(())
    }

    fn finish(&mut self) -> Result<(), VmError> {
        self.open_gate();
        Ok(())
    }

    fn allow_post_copy(&mut self) -> Result<(), VmError> {
        match self.plan.post_copy {
            Some(_) => Ok(()),
            None => Err("it has no post-copy".into()),
        }
    }

    fn begin_post_copy(&mut self) -> Result<PostCopyStart, VmError> {
        self.answers.store(!self.plan.stops_first, Ordering::SeqCst);
        self.plan.until.store(true, Ordering::SeqCst);
        if self.plan.stops_first { Ok(PostCopyStart::TooLate) } else { Ok(PostCopyStart::Begun) }
    }

    fn forbid_post_copy(&mut self) {
        self.plan.post_copy = None;
    }

    fn late_streams(&mut self) -> Result<LateStreams, VmError> {
        self.late.take().ok_or_else(|| "they were taken".into())
    }

    fn allow_throttling(&mut self, _percent: u8) -> Result<(), VmError> {
        Err("it has no vCPUs".into())
    }
}

impl Drop for Streamer {
    fn drop(&mut self) {
        let _ = self.resume();
    }
}

/// The page that a request with this number asks for.
pub fn answer_to(number: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE_SIZE];
    fastrand::Rng::with_seed(number).fill(&mut page);
    page
}

struct Stream {
    number: u8,
    plan: Plan,
    socket: UnixStream,
    urgent: Option<UnixStream>,
    answers: Arc<AtomicBool>,
    written: Arc<Mutex<Vec<Vec<u8>>>>,
    so_far: Arc<AtomicU64>,
    contents: Vec<Vec<u8>>,
    noise: fastrand::Rng,
}

impl Stream {
    fn run(
        mut self,
        events: &StreamEvents,
        gate: &Gate,
        runs: &AtomicBool,
        arrived: &AtomicU64,
        done: &AtomicU64,
    ) {
        let first = self.number == 0;
        let mut pass = 1;
        loop {
            if first {
                let (pages, dirty_pages_per_s) = (self.plan.hot, 1000.0);
                events(StreamEvent::Pass { number: pass, pages, dirty_pages_per_s });
            }
            let pages = if pass == 1 { self.plan.pages } else { self.plan.hot };
            if self.pass(pages).is_err() {
                return;
            }
            if pass > self.plan.passes && self.plan.until.load(Ordering::SeqCst) {
                break;
            }
            pass += 1;
        }
        let all = u64::from(self.plan.streams);
        if arrived.fetch_add(1, Ordering::SeqCst) + 1 == all {
            runs.store(false, Ordering::SeqCst);
            let (stood_still, expected_downtime) = (Duration::ZERO, Duration::from_millis(7));
            let pages = self.plan.post_copy.unwrap_or(0);
            events(StreamEvent::Stopped { stood_still, expected_downtime, pages });
        }
        let mut open = gate.open.lock().unwrap();
        while !*open {
            open = gate.changed.wait(open).unwrap();
        }
        drop(open);
        if self.pass(self.plan.hot / 2).is_err() || self.answer().is_err() {
            return;
        }
        let _ = self.socket.shutdown(Shutdown::Both);
        if done.fetch_add(1, Ordering::SeqCst) + 1 == all {
            events(StreamEvent::Completed);
        }
    }

    /// Answers each request with a page, and sends one in the background, until the other VMM needs
    /// nothing more.
    fn answer(&mut self) -> std::io::Result<()> {
        let mut request = [0; 8];
        while self.answers.load(Ordering::SeqCst) {
            self.socket.read_exact(&mut request)?;
            let number = u64::from_be_bytes(request);
            if number == u64::MAX {
                return Ok(());
            }
            if let Some(urgent) = &mut self.urgent {
                urgent.write_all(&answer_to(number))?;
            }
            self.pass(1)?;
        }
        Ok(())
    }

    fn pass(&mut self, pages: u64) -> std::io::Result<()> {
        let mut bytes = vec![0; self.plan.noise];
        self.noise.fill(&mut bytes);
        // Must not look like the beginning of a record.
        bytes.iter_mut().for_each(|byte| *byte |= 0x80);
        for page in 0..pages {
            let header = |kind: u64| (page << 12 | kind).to_be_bytes();
            if page % 8 == 7 {
                bytes.extend_from_slice(&header(ZERO));
                continue;
            }
            bytes.extend_from_slice(&header(PAGE));
            bytes.extend_from_slice(self.next_version(page));
            if bytes.len() > 100_000 {
                self.write(&bytes)?;
                bytes.clear();
            }
        }
        self.write(&bytes)
    }

    /// A third is random, a third is text that changes little, and a third changes completely.
    fn next_version(&mut self, page: u64) -> &[u8] {
        let index = page as usize;
        if self.contents.len() <= index {
            self.contents.resize(index + 1, Vec::new());
        }
        let content = &mut self.contents[index];
        if content.is_empty() || page % 3 == 2 {
            content.resize(PAGE_SIZE, 0);
            match page % 3 {
                0 => self.noise.fill(content),
                _ => content.fill(self.noise.u8(..)),
            }
        }
        content[self.noise.usize(..PAGE_SIZE)] ^= 1;
        content
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.written.lock().unwrap()[usize::from(self.number)].extend_from_slice(bytes);
        self.socket.write_all(bytes)?;
        self.so_far.fetch_add(bytes.len() as u64, Ordering::SeqCst);
        Ok(())
    }
}

/// Finds the records.
struct Records {
    stream: u64,
    /// Bytes until it stops consuming.
    left: usize,
}

impl Recogniser for Records {
    fn look(&mut self, bytes: &[u8], marks: &mut Marks) -> usize {
        if self.left == 0 {
            return 0;
        }
        let taken = self.records(bytes, marks);
        self.left = self.left.saturating_sub(taken);
        taken
    }
}

impl Records {
    fn records(&self, bytes: &[u8], marks: &mut Marks) -> usize {
        let mut at = 0;
        while let Some(word) = bytes.get(at..at + 8) {
            let word = u64::from_be_bytes(word.try_into().unwrap());
            match word & 0xfff {
                _ if word >> 63 == 1 => at += 1,
                PAGE if bytes.len() < at + 8 + PAGE_SIZE => return at,
                PAGE => {
                    let page = (word >> 12) + (self.stream << 40);
                    marks.pages.push(PageMark { at: at + 8, slot: SlotId(0), page });
                    at += 8 + PAGE_SIZE;
                }
                ZERO => {
                    marks.zero_pages += 1;
                    at += 8;
                }
                _ => at += 1,
            }
        }
        at
    }
}
