use std::fs::File;
use std::io::{IoSlice, PipeReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, mpsc};

use super::*;
use crate::{ChannelWriter, Dialer, Listener};

/// Sends data in both directions of a channel with optional recorders, including a gathered write.
fn exchange(here: Option<Recorder>, there: Option<Recorder>) {
    let recorders = [here.clone(), there.clone()];
    let (near, far) = UnixStream::pair().unwrap();
    let mut dialer = Dialer::over([OwnedFd::from(near)]).unwrap();
    dialer.recorder = here;
    let mut listener = Listener::over([OwnedFd::from(far)]).unwrap();
    if let Some(recorder) = there {
        listener.record(recorder);
    }
    let (mut reader, mut writer) = dialer.connect().unwrap().split();
    let parts = [IoSlice::new(b"to "), IoSlice::new(b""), IoSlice::new(b"there")];
    assert_eq!(writer.write_vectored(&parts).unwrap(), 8);
    writer.finish().unwrap();
    // A caller's socket is accepted when data has arrived.
    let accepted = listener.accept().unwrap().unwrap().handshake(Duration::from_secs(5)).unwrap();
    let (mut their_reader, mut their_writer) = accepted.split();
    let mut found = String::new();
    their_reader.read_to_string(&mut found).unwrap();
    assert_eq!(found, "to there");
    their_writer.write_all(b"and back").unwrap();
    their_writer.finish().unwrap();
    found.clear();
    reader.read_to_string(&mut found).unwrap();
    assert_eq!(found, "and back");
    recorders.iter().flatten().for_each(Recorder::flush);
}

/// The names and contents of a directory's files. Also checks their mode.
fn files(directory: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| {
            let path = entry.unwrap().path();
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, std::fs::read(path).unwrap())
        })
        .collect();
    files.sort();
    files
}

#[test]
fn recorder_records_each_direction_at_both_sides() {
    let root = tempfile::tempdir().unwrap();
    let recorder =
        |name: &str, side| Recorder::new(&root.path().join(name), side, 1 << 20).unwrap();
    let here = recorder("here", RecordingSide::Source);
    exchange(Some(here.clone()), Some(recorder("there", RecordingSide::Destination)));
    exchange(Some(here), None);
    let mode = std::fs::metadata(root.path().join("here")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
    for (name, side, channels) in
        [("here", RecordingSide::Source, 2), ("there", RecordingSide::Destination, 1)]
    {
        let found = files(&root.path().join(name));
        assert_eq!(found.len(), 2 * channels, "{name}");
        for (at, (file, bytes)) in found.iter().enumerate() {
            let (head, content) = bytes.split_first_chunk().unwrap();
            let header = RecordingHeader::parse(head).unwrap();
            let to_destination = at % 2 == 0;
            assert_eq!((header.side, header.connection), (side, at as u32 / 2));
            assert_eq!(header.direction == Direction::ToDestination, to_destination);
            assert_eq!(content, if to_destination { &b"to there"[..] } else { b"and back" });
            assert_eq!(file.contains("to-destination"), to_destination);
        }
    }
}

#[test]
fn limit_ends_the_recording_and_not_the_channel() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("r");
    // Two headers and 8 bytes: the answer exceeds the limit.
    let limit = 2 * RECORDING_HEADER_BYTES as u64 + 8;
    let recorder = Recorder::new(&directory, RecordingSide::Source, limit).unwrap();
    let reports = reports_of(&recorder);
    exchange(Some(recorder.clone()), None);
    exchange(Some(recorder.clone()), None);
    exchange(Some(recorder), None);
    let found = files(&directory);
    let bytes: usize = found.iter().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(bytes as u64, limit, "both headers and the first data");
    assert_eq!(found.len(), 2, "the channels after the end have no files");
    let reports = reports.lock().unwrap();
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert!(reports[0].contains("its limit of 56 bytes"), "{reports:?}");
}

#[test]
fn limit_below_the_headers_creates_no_file() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("r");
    let limit = 2 * RECORDING_HEADER_BYTES as u64 - 1;
    let recorder = Recorder::new(&directory, RecordingSide::Source, limit).unwrap();
    let reports = reports_of(&recorder);
    exchange(Some(recorder), None);
    assert!(files(&directory).is_empty());
    assert_eq!(reports.lock().unwrap().len(), 1);
}

#[test]
fn disk_error_ends_the_recording_and_not_the_channel() {
    let full = |_: &Path| File::options().write(true).open("/dev/full");
    let recorder = on_disk(1 << 20, full);
    let reports = reports_of(&recorder);
    exchange(Some(recorder.clone()), None);
    exchange(Some(recorder), None);
    let reports = reports.lock().unwrap();
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert!(reports[0].contains("No space left"), "{reports:?}");
}

/// The disk accepts as much as fits into a pipe, and then blocks until the pipe is read.
#[test]
fn disk_that_hangs_delays_no_channel() {
    let (reader, disk) = hanging_disk();
    let recorder = on_disk(1 << 20, disk);
    let reports = reports_of(&recorder);
    let (mut writer, mut peer) = channel(&recorder);
    let sent = content(4 << 20);
    let (done, is_done) = mpsc::channel();
    let whole = sent.clone();
    // In separate threads, so that a channel that waits for the disk fails the test instead of
    // blocking it.
    let writing = std::thread::spawn(move || writer.write_all(&whole).map(|()| writer));
    let reading = std::thread::spawn(move || {
        let mut found = vec![0; 4 << 20];
        peer.read_exact(&mut found).unwrap();
        done.send(found).unwrap();
    });
    let found = is_done.recv_timeout(Duration::from_secs(60)).expect("the channel goes on");
    assert!(found == sent, "the data arrived");
    let writer = writing.join().unwrap().unwrap();
    reading.join().unwrap();
    {
        let reports = reports.lock().unwrap();
        assert_eq!(reports.len(), 1, "{reports:?}");
        assert!(reports[0].contains("too slow: more than 1 MiB"), "{reports:?}");
    }
    // The final wait for the disk is limited.
    recorder.0.0.flush(Instant::now() + Duration::from_millis(20));
    assert!(recorder.0.0.is_idle(), "the queue is dropped");
    assert_eq!(reports.lock().unwrap().len(), 1, "it is reported once");
    drop((writer, recorder, reader));
}

#[test]
fn flush_writes_the_queue() {
    let (mut reader, disk) = hanging_disk();
    let recorder = on_disk(1 << 20, disk);
    let reports = reports_of(&recorder);
    let (mut writer, mut peer) = channel(&recorder);
    let sent = content(300 << 10);
    let whole = sent.clone();
    let writing = std::thread::spawn(move || writer.write_all(&whole));
    peer.read_exact(&mut vec![0; 300 << 10]).unwrap();
    writing.join().unwrap().unwrap();
    // Both directions go to the same pipe: two headers, and the data.
    let whole = 2 * RECORDING_HEADER_BYTES + sent.len();
    let reading = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        let mut found = vec![0; whole];
        reader.read_exact(&mut found).map(|()| found)
    });
    recorder.0.0.flush(Instant::now() + Duration::from_secs(60));
    assert!(reports.lock().unwrap().is_empty());
    let found = reading.join().unwrap().unwrap();
    assert!(found[2 * RECORDING_HEADER_BYTES..] == sent, "in the order of sending");
}

/// Collects a recorder's reports.
fn reports_of(recorder: &Recorder) -> Arc<Mutex<Vec<String>>> {
    let reports = Arc::new(Mutex::new(Vec::new()));
    let collector = Arc::clone(&reports);
    recorder.on_end(move |text| collector.lock().unwrap().push(text.to_owned()));
    reports
}

/// A recorder that creates its files with `create`.
fn on_disk(
    max_queued: usize,
    create: impl Fn(&Path) -> io::Result<File> + Send + Sync + 'static,
) -> Recorder {
    let (path, side) = (Path::new("/nowhere"), RecordingSide::Source);
    let shared = Shared::with_disk(path, side, u64::MAX, max_queued, Box::new(create));
    Recorder(Arc::new(Handle(Arc::new(shared))))
}

/// A disk on which every file is the same pipe.
fn hanging_disk() -> (PipeReader, impl Fn(&Path) -> io::Result<File> + Send + Sync + 'static) {
    let (reader, writer) = io::pipe().unwrap();
    (reader, move |_: &Path| Ok(File::from(OwnedFd::from(writer.try_clone()?))))
}

/// The sending half of a recorded channel, and its peer.
fn channel(recorder: &Recorder) -> (ChannelWriter, UnixStream) {
    let (near, far) = UnixStream::pair().unwrap();
    let mut dialer = Dialer::over([OwnedFd::from(near)]).unwrap();
    dialer.recorder = Some(recorder.clone());
    let (_, writer) = dialer.connect().unwrap().split();
    (writer, far)
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at / 7) as u8).collect()
}

#[test]
fn directory_that_others_can_read_is_refused() {
    let root = tempfile::tempdir().unwrap();
    std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let error = Recorder::new(root.path(), RecordingSide::Source, 1).unwrap_err().to_string();
    assert!(error.contains("chmod 700"), "{error}");
}

#[test]
fn earlier_recording_is_not_overwritten() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("r");
    for _ in 0..2 {
        let recorder = Recorder::new(&directory, RecordingSide::Source, 1 << 20).unwrap();
        exchange(Some(recorder), None);
    }
    assert_eq!(files(&directory).len(), 4);
}

#[test]
fn header_round_trips() {
    let header = RecordingHeader {
        side: RecordingSide::Destination,
        direction: Direction::ToSource,
        connection: 3,
        at: 0x0102_0304,
    };
    let bytes = header.encode();
    assert_eq!(bytes, *b"VMFTRACE\x01\0\x02\x02\x03\0\0\0\x04\x03\x02\x01\0\0\0\0");
    assert_eq!(RecordingHeader::parse(&bytes), Ok(header));
    for at in 0..12 {
        let mut bad = bytes;
        bad[at] ^= 0x40;
        assert!(RecordingHeader::parse(&bad).is_err(), "byte {at}");
    }
}
