//! The model in simulated worlds: a link, some processors, and pages.

use vmferry_wire::Algorithm;

use super::*;

const FRAME: u64 = 64;

/// A link in bytes per second, workers, and for each encoding a worker's microseconds and the bytes
/// per page.
#[derive(Clone, Copy)]
struct World {
    link: f64,
    workers: usize,
    costs: [(f64, f64); ENCODINGS.len()],
}

/// Program code on a core of 2023, as measured.
const PROGRAM: [(f64, f64); ENCODINGS.len()] =
    [(0.8, 4120.0), (7.0, 2170.0), (9.6, 1610.0), (14.0, 1520.0), (40.0, 1480.0)];
/// Random pages are recognized and not compressed.
const RANDOM: [(f64, f64); ENCODINGS.len()] =
    [(0.8, 4120.0), (1.1, 4120.0), (1.1, 4120.0), (1.1, 4120.0), (1.1, 4120.0)];

impl World {
    fn rate(&self, encoding: usize) -> f64 {
        let (us, bytes) = self.costs[encoding];
        (self.link / bytes).min(self.workers as f64 * 1e6 / us)
    }

    fn best(&self) -> f64 {
        (0..ENCODINGS.len()).map(|encoding| self.rate(encoding)).fold(0.0, f64::max)
    }

    /// Sends frames for this number of seconds. Returns pages per second, and how often each
    /// encoding was used.
    fn run(&self, model: &mut Model, begin: f64, seconds: f64) -> (f64, [u64; ENCODINGS.len()]) {
        let (mut now, mut frames, mut taken) = (begin, 0, [0; ENCODINGS.len()]);
        while now < begin + seconds {
            let (encoding, _) = model.choose(Duration::from_secs_f64(now), false);
            taken[encoding] += 1;
            frames += 1;
            let (us, bytes) = self.costs[encoding];
            let frame = FRAME as f64 / self.rate(encoding);
            let sending = FRAME as f64 * bytes / self.link;
            now += frame;
            let time = Duration::from_secs_f64;
            let sent = (FRAME as f64 * bytes) as u64;
            model.sent(0, sent, time((frame - sending).max(0.0)), time(sending));
            let packed = if ENCODINGS[encoding].is_some() { FRAME } else { 0 };
            let counts = FrameCounts {
                raw_pages: FRAME - packed,
                packed_pages: packed,
                packed_bytes: if packed > 0 { sent } else { 0 },
                ..FrameCounts::default()
            };
            model.encoded(time(now), encoding, &counts, time(us * FRAME as f64 / 1e6));
        }
        ((frames * FRAME) as f64 / (now - begin), taken)
    }
}

fn model(workers: usize) -> Model {
    Model::new(1, workers, None)
}

#[test]
fn fast_link_gets_raw_pages_without_trials() {
    let world = World { link: 5e9, workers: 2, costs: PROGRAM };
    let (_, taken) = world.run(&mut model(2), 0.0, 1.0);
    assert_eq!(&taken[1..], [0; ENCODINGS.len() - 1]);
}

#[test]
fn choice_is_close_to_the_best_on_every_link() {
    for link in [1e6, 10e6, 43.75e6, 117e6, 350e6, 700e6, 1.2e9, 2.5e9, 10e9] {
        for workers in [1, 2, 8] {
            for costs in [PROGRAM, RANDOM] {
                let world = World { link, workers, costs };
                let mut model = model(workers);
                // Excludes the first trials.
                world.run(&mut model, 0.0, 1.0);
                let (rate, taken) = world.run(&mut model, 2.0, 10.0);
                let part = rate / world.best();
                assert!(part > 0.93, "{link} B/s, {workers} workers: {part:.3}, {taken:?}");
            }
        }
    }
}

#[test]
fn choice_follows_a_changing_link() {
    let slow = World { link: 43.75e6, workers: 2, costs: PROGRAM };
    let fast = World { link: 5e9, ..slow };
    let mut model = model(2);
    for (begin, world) in [(0.0, slow), (10.0, fast), (20.0, slow), (30.0, fast)] {
        world.run(&mut model, begin, 4.0);
        let (rate, taken) = world.run(&mut model, begin + 4.0, 4.0);
        let part = rate / world.best();
        assert!(part > 0.9, "at {begin} s: {part:.3}, {taken:?}");
    }
}

#[test]
fn choice_follows_changing_pages() {
    let program = World { link: 100e6, workers: 2, costs: PROGRAM };
    let random = World { costs: RANDOM, ..program };
    let mut model = model(2);
    for (begin, world) in [(0.0, program), (10.0, random), (20.0, program)] {
        world.run(&mut model, begin, 3.0);
        let (rate, taken) = world.run(&mut model, begin + 3.0, 4.0);
        let part = rate / world.best();
        assert!(part > 0.93, "at {begin} s: {part:.3}, {taken:?}");
    }
}

#[test]
fn idle_channel_gets_the_encoding_that_arrives_first() {
    let known = |link: f64| {
        let world = World { link, workers: 2, costs: PROGRAM };
        let mut model = model(2);
        world.run(&mut model, 0.0, 3.0);
        // Between two trials.
        model.next_trial = Duration::MAX;
        model.choose(Duration::from_secs(3), true)
    };
    // At 350 Mbit/s, 256 KiB take 6 ms uncompressed and 3 ms compressed. At 5 GB/s the time on the
    // wire is negligible.
    assert_ne!(known(43.75e6).0, RAW);
    assert_eq!(known(5e9), (RAW, Why::Waiting));
}

#[test]
fn other_load_of_the_processors_limits_the_rate() {
    // Each frame takes twice as long as its link and its worker need, because the processors have
    // other work.
    let mut model = model(2);
    let lz4 = 1;
    model.current = lz4;
    let counts =
        FrameCounts { packed_pages: FRAME, packed_bytes: FRAME * 2170, ..FrameCounts::default() };
    let frame = Duration::from_micros(900);
    for number in 0..200 {
        model.sent(0, FRAME * 2170, Duration::from_micros(500), Duration::from_micros(400));
        model.encoded(frame * number, lz4, &counts, Duration::from_micros(450));
    }
    let link = model.link_bytes_per_s().unwrap();
    let real = FRAME as f64 / frame.as_secs_f64();
    assert!((model.rate(lz4, link) / real - 1.0).abs() < 0.02, "{}", model.rate(lz4, link));
}

#[test]
fn frames_have_more_pages_if_many_are_zero() {
    let mut model = model(2);
    assert_eq!(model.frame_pages(), 64);
    let mut frame = |zero_pages, raw_pages| {
        let counts = FrameCounts { zero_pages, raw_pages, ..FrameCounts::default() };
        (0..40).for_each(|_| model.encoded(Duration::ZERO, RAW, &counts, Duration::ZERO));
        model.frame_pages()
    };
    assert_eq!(frame(16, 48), 85);
    assert_eq!(frame(60, 4), 128);
    assert_eq!(frame(0, 64), 64);
}

#[test]
fn useless_deltas_are_mostly_skipped() {
    let tried = |model: &mut Model| (0..640).filter(|_| model.tries_deltas(2)).count();
    assert_eq!(tried(&mut Model::new(1, 2, Some(2_000_000_000))), 10, "not known yet");
    let mut model = Model::new(1, 2, Some(100_000_000));
    let frame = |model: &mut Model, made: u64| {
        let counts = FrameCounts {
            delta_pages: made,
            rewritten_pages: FRAME - made,
            ..FrameCounts::default()
        };
        model.encoded(Duration::ZERO, RAW, &counts, Duration::from_micros(50));
    };
    assert!(!model.tries_deltas(1), "nothing was sent before");
    assert!(model.tries_deltas(2));
    (0..30).for_each(|_| frame(&mut model, 0));
    assert_eq!(tried(&mut model), 10);
    (0..5).for_each(|_| frame(&mut model, FRAME));
    assert!((0..16).all(|_| model.tries_deltas(2)));
}

#[test]
fn cap_is_the_link_rate_until_it_is_measured() {
    let mut model = Model::new(2, 2, Some(1_000_000));
    assert_eq!(model.link_bytes_per_s(), Some(1e6));
    model.sent(0, 8 << 20, Duration::ZERO, Duration::from_secs(16));
    let measured = model.link_bytes_per_s().unwrap();
    assert!((measured - 1e6).abs() < 1e5, "both lanes together: {measured}");
    model.set_cap(Some(200_000));
    assert_eq!(model.link_bytes_per_s(), Some(2e5));
    model.set_cap(None);
    assert_eq!(model.link_bytes_per_s(), None, "to be measured again");
}

#[test]
fn algorithms_limit_what_can_be_decoded() {
    let mut model = model(2);
    assert!(model.can_be_decoded(Method::lz4()));
    model.set_algorithms(AlgorithmSet::ALL.only(&[Algorithm::Zstd]));
    assert!(!model.can_be_decoded(Method::lz4()));
}
