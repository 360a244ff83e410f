//! Compatibility of two releases: every protocol version on either side, and fields that a newer
//! version may add.

use std::io::{Read, Write};
use std::ops::RangeInclusive;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::hostile::by_hand::{begin, message};
use crate::support::cutter::{Channels, Cut, Cutter};
use crate::support::streamer::{Plan, Streamer};
use crate::support::taker::Taker;
use crate::support::{
    DestinationGuest, PAGES, Scenario, given, kept, nothing, owned, running_guest,
};
use vmferry::config::compression::CompressionWay;
use vmferry::config::{BandwidthCap, ProtocolVersions};
use vmferry::destination::{Received, receive};
use vmferry::source::migrate;
use vmferry::stats::SourceStats;
use vmferry::{ErrorClass, MigrateError};
use vmferry_codec::Method;
use vmferry_transport::{Dialer, Listener};
use vmferry_wire::{
    Algorithm, AlgorithmSet, CONTROL_HEADER_BYTES, ControlMessage, HELLO_REPLY_BYTES, Hello,
    HelloReply, HelloStatus, ReasonCode, Role, SessionId, Token,
};

/// The versions of source and destination, and the version that they negotiate.
const PAIRS: [(RangeInclusive<u16>, RangeInclusive<u16>, u16); 4] =
    [(1..=1, 1..=1, 1), (1..=1, 1..=2, 1), (1..=2, 1..=1, 1), (1..=2, 1..=2, 2)];

fn scenario(source: &RangeInclusive<u16>, destination: &RangeInclusive<u16>) -> Scenario {
    let mut scenario = Scenario::new();
    scenario.source.protocol = ProtocolVersions::new(source.clone()).unwrap();
    scenario.destination.protocol = ProtocolVersions::new(destination.clone()).unwrap();
    scenario
}

/// Checks that each side knows what the version lets the other announce.
fn assert_introduced(
    version: u16,
    stats: &SourceStats,
    received: &vmferry::stats::DestinationStats,
) {
    assert_eq!((stats.protocol, received.protocol), (version, version));
    let said = (version > 1).then_some(env!("CARGO_PKG_VERSION"));
    assert_eq!(stats.destination.as_ref().map(|release| release.vmferry.as_str()), said);
    assert_eq!(received.source.as_ref().map(|release| release.vmferry.as_str()), said);
    assert_eq!((stats.unknown_fields, received.unknown_fields), (0, 0));
}

#[test]
fn memory_moves_between_all_versions() {
    for (source, destination, version) in PAIRS {
        let scenario = scenario(&source, &destination);
        let (outcome, received) =
            scenario.run(running_guest(PAGES / 16), DestinationGuest::default(), |_| {});
        let (vm, stats) = given(outcome);
        let owned = owned(received);
        assert_eq!((stats.digest_match, stats.verify_match), (Some(true), Some(true)));
        assert_introduced(version, &stats, &owned.stats);
        let guest = owned.vm.guest.as_ref().unwrap();
        guest.wait_for_work();
        guest.pause();
        drop(vm);
    }
}

#[test]
fn streams_move_between_all_versions() {
    for (source, destination, version) in PAIRS {
        let mut scenario = scenario(&source, &destination);
        scenario.source.verify = false;
        let vm = Streamer::new(Plan { streams: 2, ..Plan::default() });
        let (outcome, received) = scenario.run_streamed(vm, Taker::default(), |_| {});
        let (vm, stats) = given(outcome);
        let owned = owned(received);
        assert!(*vm.written.lock().unwrap() == *owned.vm.taken.lock().unwrap());
        assert!(!vm.runs.load(Ordering::SeqCst) && owned.vm.runs.load(Ordering::SeqCst));
        assert_introduced(version, &stats, &owned.stats);
    }
}

/// The greetings of the reestablished control channel and of the lanes use the same versions.
#[test]
fn lost_link_is_reestablished_between_all_versions() {
    for (source, destination, version) in PAIRS {
        let mut scenario = scenario(&source, &destination);
        let path = scenario.directory.path().join("link.sock");
        let cut = Cut { channels: Channels::All, round: 1, lasts: Duration::from_millis(300) };
        let cutter = Cutter::start(path, &scenario.listen_at, vec![cut]);
        scenario.dial = Some(cutter.address());
        let (outcome, received) =
            scenario.run(running_guest(PAGES / 16), DestinationGuest::default(), |_| {});
        assert_eq!(cutter.left(), 0, "the link was cut");
        let (vm, stats) = given(outcome);
        let owned = owned(received);
        assert_eq!((stats.digest_match, stats.verify_match), (Some(true), Some(true)));
        assert!(stats.reconnections > 0);
        assert_introduced(version, &stats, &owned.stats);
        owned.vm.guest.as_ref().unwrap().pause();
        drop(vm);
    }
}

#[test]
fn missing_common_version_is_reported_with_advice_on_both_sides() {
    for (source, destination) in [(2..=2, 1..=1), (1..=1, 2..=2)] {
        let scenario = scenario(&source, &destination);
        let listener = Listener::bind(&scenario.listen_at, None).unwrap();
        let dialer = Dialer::new(scenario.listen_at.clone(), None);
        let mut turned_away = String::new();
        let (outcome, received) = std::thread::scope(|scope| {
            let (config, stop) = (&scenario.destination, &scenario.stop);
            // It continues to listen after such a greeting.
            let receiving = scope.spawn(|| {
                let vm = DestinationGuest::default();
                receive(listener, vm, config, stop, &mut |notice| {
                    turned_away += &format!("{notice:?}");
                    stop.stop();
                })
            });
            let (vm, config) = (running_guest(4), scenario.source.clone());
            let outcome = migrate(vm, &dialer, config, &scenario.orders, &mut |_| {});
            (outcome, receiving.join().unwrap())
        });
        let (vm, error) = kept(outcome);
        vm.guest.pause();
        assert_eq!(error.class(), ErrorClass::Protocol, "{error}");
        let (theirs, ours) = (destination.start(), source.start());
        let words = |who: &str, theirs: &u16, ours: &u16| {
            format!(
                "{who} speaks protocol version {theirs}, and this side version {ours}: let both \
                 sides choose the version"
            )
        };
        assert!(error.to_string().contains(&words("it", theirs, ours)), "{error}");
        assert!(turned_away.contains(&words("the source", ours, theirs)), "{turned_away}");
        nothing(received);
    }
}

#[test]
fn source_compresses_only_with_what_the_destination_decodes() {
    let fixed = CompressionWay::Fixed(Method::zstd(1));
    let run = |version: u16, way: CompressionWay| {
        let mut scenario = scenario(&(1..=version), &(1..=version));
        scenario.source.compression.way = way;
        scenario.source.verify = false;
        // Slow enough that every encoding of `auto` is worth a trial.
        scenario.source.max_bandwidth = Some(BandwidthCap::new(8 << 20).unwrap());
        scenario.destination.algorithms = AlgorithmSet::ALL.only(&[Algorithm::Lz4]);
        let vm = Streamer::new(Plan { pages: 6_000, ..Plan::default() });
        scenario.run_streamed(vm, Taker::default(), |_| {})
    };
    let (outcome, received) = run(2, fixed);
    let (_, error) = kept(outcome);
    assert!(
        matches!(error, MigrateError::Undecodable { algorithm: Algorithm::Zstd, .. }),
        "{error}"
    );
    assert!(error.to_string().contains("can't decode zstd, only: lz4"), "{error}");
    assert_eq!(error.class(), ErrorClass::Incompatible);
    nothing(received);

    let (_, stats) = given(run(2, CompressionWay::Auto).0);
    assert_eq!(stats.encoded.zstd, 0, "{:?}", stats.encoded);
    assert!(stats.encoded.lz4 > 0, "{:?}", stats.encoded);
    // The negative control: a destination of version 1 can't announce its algorithms, and must
    // accept all of version 1.
    let (_, stats) = given(run(1, fixed).0);
    assert!(stats.encoded.zstd > 0, "{:?}", stats.encoded);
}

#[test]
fn destination_vmm_without_streams_refuses_a_carried_guest() {
    let mut scenario = Scenario::new();
    scenario.source.verify = false;
    let vm = Streamer::new(Plan::default());
    // The VMM's name has no meaning for this destination.
    let (outcome, received) = scenario.run_streamed(vm, DestinationGuest::default(), |_| {});
    let (vm, error) = kept(outcome);
    assert!(vm.runs.load(Ordering::SeqCst));
    assert_eq!(error.class(), ErrorClass::Incompatible, "{error}");
    let words = "the source's VMM streams its guest, and the destination's VMM takes pages";
    assert!(error.to_string().contains(words), "{error}");
    assert!(
        error.to_string().contains(concat!("(it is vmferry ", env!("CARGO_PKG_VERSION"))),
        "{error}"
    );
    nothing(received);
}

/// A source of a future release.
struct Newer(UnixStream);

impl Newer {
    fn begin(at: &Path, fields: &[(u16, &[u8])]) -> Self {
        let mut channel = UnixStream::connect(at).unwrap();
        let token = Token([0; 16]);
        let hello = Hello {
            version_min: 2,
            version_max: 9,
            role: Role::Control,
            lane: 0,
            token,
            attempt: 0,
        };
        channel.write_all(&hello.encode()).unwrap();
        let mut reply = [0; HELLO_REPLY_BYTES];
        channel.read_exact(&mut reply).unwrap();
        let reply = HelloReply::parse(&reply).unwrap();
        assert_eq!((reply.status, reply.version), (HelloStatus::Ok, 2));
        let mut bytes = Vec::new();
        begin(SessionId([3; 16])).encode(2, &mut bytes);
        let mut body = bytes.split_off(CONTROL_HEADER_BYTES);
        for (number, content) in fields {
            body.extend_from_slice(&number.to_le_bytes());
            body.extend_from_slice(&(content.len() as u32).to_le_bytes());
            body.extend_from_slice(content);
        }
        bytes[0..4].copy_from_slice(&(body.len() as u32).to_le_bytes());
        let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, &body) as u32;
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        channel.write_all(&[bytes, body].concat()).unwrap();
        Self(channel)
    }

    fn answer(&mut self) -> ControlMessage {
        message(&mut self.0)
    }
}

/// A destination that receives one source, and its notices about it.
fn hear(fields: &[(u16, &[u8])]) -> (ControlMessage, MigrateError, String) {
    let scenario = Scenario::new();
    let path = scenario.directory.path().join("in.sock");
    let listener = Listener::bind(&scenario.listen_at, None).unwrap();
    let mut notices = String::new();
    std::thread::scope(|scope| {
        let source = scope.spawn(|| Newer::begin(&path, fields).answer());
        let vm = DestinationGuest::default();
        let received: Received<DestinationGuest> =
            receive(listener, vm, &scenario.destination, &scenario.stop, &mut |notice| {
                notices += &format!("{notice:?}\n");
            });
        (source.join().unwrap(), nothing(received), notices)
    })
}

#[test]
fn unknown_optional_fields_are_ignored_and_reported() {
    let (answer, _, notices) = hear(&[(40, b"what is not known yet"), (41, b"")]);
    let ControlMessage::Accept { release, algorithms, .. } = answer else { panic!("{answer:?}") };
    assert_eq!(release.unwrap().vmferry, env!("CARGO_PKG_VERSION"));
    assert_eq!(algorithms, Some(AlgorithmSet::ALL));
    assert!(
        notices.contains(r#"UnknownFields { message: "BEGIN", fields: [40, 41] }"#),
        "{notices}"
    );
}

#[test]
fn unknown_mandatory_fields_are_refused_by_name() {
    let (answer, error, notices) = hear(&[(40, b""), (41 | 1 << 15, b"")]);
    let ControlMessage::Refuse { reason, release } = answer else { panic!("{answer:?}") };
    assert_eq!(release.unwrap().vmferry, env!("CARGO_PKG_VERSION"));
    assert_eq!(reason.code, ReasonCode::Protocol);
    for text in [reason.text, error.to_string()] {
        assert!(text.contains("BEGIN has the mandatory field 41, which vmferry "), "{text}");
        assert!(text.contains("upgrade vmferry on the host that refuses it"), "{text}");
    }
    assert!(!notices.contains("Accepted"), "{notices}");
}
