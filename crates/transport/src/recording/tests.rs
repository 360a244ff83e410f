use std::fs::File;
use std::io::{IoSlice, PipeReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, mpsc};

use super::*;
use crate::{ChannelWriter, Dialer, Listener};

/// A channel that is recorded at both sides: what each wrote, with gathered writes among it.
fn exchange(here: Option<Recorder>, there: Option<Recorder>) {
    let recorders = [here.clone(), there.clone()];
    let (one, other) = UnixStream::pair().unwrap();
    let mut dialer = Dialer::over([OwnedFd::from(one)]).unwrap();
    dialer.recorder = here;
    let mut listener = Listener::over([OwnedFd::from(other)]).unwrap();
    if let Some(recorder) = there {
        listener.record(recorder);
    }
    let (mut reader, mut writer) = dialer.connect().unwrap().split();
    let parts = [IoSlice::new(b"to "), IoSlice::new(b""), IoSlice::new(b"there")];
    assert_eq!(writer.write_vectored(&parts).unwrap(), 8);
    writer.finish().unwrap();
    // A socket of the caller's is accepted when something has come.
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

/// The files of a directory by name, and that nobody else can read them.
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
fn each_direction_is_recorded_at_both_sides() {
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
fn the_limit_ends_the_recording_and_not_the_channel() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("r");
    // Two headers and 8 bytes: the way back is over the limit.
    let limit = 2 * RECORDING_HEADER_BYTES as u64 + 8;
    let recorder = Recorder::new(&directory, RecordingSide::Source, limit).unwrap();
    let said = hear(&recorder);
    exchange(Some(recorder.clone()), None);
    exchange(Some(recorder.clone()), None);
    exchange(Some(recorder), None);
    let found = files(&directory);
    let bytes: usize = found.iter().map(|(_, bytes)| bytes.len()).sum();
    assert_eq!(bytes as u64, limit, "both headers, and what was sent first");
    assert_eq!(found.len(), 2, "the channels after the end have no files");
    let said = said.lock().unwrap();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("its limit of 56 bytes"), "{said:?}");
}

#[test]
fn a_limit_below_the_headers_makes_no_file() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("r");
    let limit = 2 * RECORDING_HEADER_BYTES as u64 - 1;
    let recorder = Recorder::new(&directory, RecordingSide::Source, limit).unwrap();
    let said = hear(&recorder);
    exchange(Some(recorder), None);
    assert!(files(&directory).is_empty());
    assert_eq!(said.lock().unwrap().len(), 1);
}

#[test]
fn a_disk_that_fails_ends_the_recording_and_not_the_channel() {
    let full = |_: &Path| File::options().write(true).open("/dev/full");
    let recorder = on_disk(1 << 20, full);
    let said = hear(&recorder);
    exchange(Some(recorder.clone()), None);
    exchange(Some(recorder), None);
    let said = said.lock().unwrap();
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("No space left"), "{said:?}");
}

/// A disk that takes what fits into a pipe, and then nothing until somebody reads.
#[test]
fn a_disk_that_hangs_holds_up_no_channel() {
    let (reader, disk) = hanging_disk();
    let recorder = on_disk(1 << 20, disk);
    let said = hear(&recorder);
    let (mut ours, mut theirs) = channel(&recorder);
    let sent = content(4 << 20);
    let (done, is_done) = mpsc::channel();
    let whole = sent.clone();
    // On threads of their own: one that waits for the disk fails the test instead of holding it up.
    let writing = std::thread::spawn(move || ours.write_all(&whole).map(|()| ours));
    let reading = std::thread::spawn(move || {
        let mut found = vec![0; 4 << 20];
        theirs.read_exact(&mut found).unwrap();
        done.send(found).unwrap();
    });
    let found = is_done.recv_timeout(Duration::from_secs(60)).expect("the channel goes on");
    assert!(found == sent, "what was sent has come");
    let ours = writing.join().unwrap().unwrap();
    reading.join().unwrap();
    {
        let said = said.lock().unwrap();
        assert_eq!(said.len(), 1, "{said:?}");
        assert!(said[0].contains("too slow: more than 1 MiB"), "{said:?}");
    }
    // The end waits for it no longer than is said.
    recorder.0.0.flush(Instant::now() + Duration::from_millis(20));
    assert!(recorder.0.0.waits_for_nothing(), "what was queued is dropped");
    assert_eq!(said.lock().unwrap().len(), 1, "it is told of once");
    drop((ours, recorder, reader));
}

#[test]
fn what_is_queued_is_written_at_the_end() {
    let (mut reader, disk) = hanging_disk();
    let recorder = on_disk(1 << 20, disk);
    let said = hear(&recorder);
    let (mut ours, mut theirs) = channel(&recorder);
    let sent = content(300 << 10);
    let whole = sent.clone();
    let writing = std::thread::spawn(move || ours.write_all(&whole));
    theirs.read_exact(&mut vec![0; 300 << 10]).unwrap();
    writing.join().unwrap().unwrap();
    // Both directions are in the one pipe: two headers, and what was sent.
    let whole = 2 * RECORDING_HEADER_BYTES + sent.len();
    let reading = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        let mut found = vec![0; whole];
        reader.read_exact(&mut found).map(|()| found)
    });
    recorder.0.0.flush(Instant::now() + Duration::from_secs(60));
    assert!(said.lock().unwrap().is_empty());
    let found = reading.join().unwrap().unwrap();
    assert!(found[2 * RECORDING_HEADER_BYTES..] == sent, "in the order that it was sent in");
}

/// What a recorder says.
fn hear(recorder: &Recorder) -> Arc<Mutex<Vec<String>>> {
    let said = Arc::new(Mutex::new(Vec::new()));
    let hearer = Arc::clone(&said);
    recorder.tell(move |text| hearer.lock().unwrap().push(text.to_owned()));
    said
}

/// A recorder whose files are what `make` makes.
fn on_disk(
    most_queued: usize,
    make: impl Fn(&Path) -> io::Result<File> + Send + Sync + 'static,
) -> Recorder {
    let (path, side) = (Path::new("/nowhere"), RecordingSide::Source);
    let shared = Shared::on(path, side, u64::MAX, most_queued, Box::new(make));
    Recorder(Arc::new(Handle(Arc::new(shared))))
}

/// All files are the one pipe.
fn hanging_disk() -> (PipeReader, impl Fn(&Path) -> io::Result<File> + Send + Sync + 'static) {
    let (reader, writer) = io::pipe().unwrap();
    (reader, move |_: &Path| Ok(File::from(OwnedFd::from(writer.try_clone()?))))
}

/// A recorded channel's sending half, and the peer.
fn channel(recorder: &Recorder) -> (ChannelWriter, UnixStream) {
    let (one, other) = UnixStream::pair().unwrap();
    let mut dialer = Dialer::over([OwnedFd::from(one)]).unwrap();
    dialer.recorder = Some(recorder.clone());
    let (_, writer) = dialer.connect().unwrap().split();
    (writer, other)
}

fn content(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at / 7) as u8).collect()
}

#[test]
fn a_directory_that_others_can_read_is_refused() {
    let root = tempfile::tempdir().unwrap();
    std::fs::set_permissions(root.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let error = Recorder::new(root.path(), RecordingSide::Source, 1).unwrap_err().to_string();
    assert!(error.contains("chmod 700"), "{error}");
}

#[test]
fn an_earlier_recording_is_not_written_over() {
    let root = tempfile::tempdir().unwrap();
    let directory = root.path().join("r");
    for _ in 0..2 {
        let recorder = Recorder::new(&directory, RecordingSide::Source, 1 << 20).unwrap();
        exchange(Some(recorder), None);
    }
    assert_eq!(files(&directory).len(), 4);
}

#[test]
fn a_header_is_read_as_it_was_written() {
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
