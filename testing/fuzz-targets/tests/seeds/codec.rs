//! Runs the seeds of the codec's fuzz targets.

mod seeds;

seed_tests!(
    // A small neighborhood of each seed: frames are long.
    places: 24,
    // zlib's output for the same bytes depends on the processor.
    differs: |name| name.starts_with("zlib-"),
    delta: seeds::deltas(),
    frame: seeds::frames(),
    frame_sealed: seeds::choices(),
    piece: seeds::choices(),
    round_trip: seeds::choices()
);

#[test]
fn seeds_of_frames_are_placed() {
    for (name, seed) in seeds::frames() {
        assert!(seeds::are_placed(&seed), "{name}");
    }
}
