//! Initial inputs for a fuzzer: actions of valid and invalid drivers, in the target's input format.

/// All features offered, 16 entries, all accepted, usual rings, no poison.
const USUAL: [u8; 5] = [0, 4, 0, 0, 0];
const START: &[u8] = &[4];
const STOP: &[u8] = &[5];
const WITHDRAW: &[u8] = &[6];
const FINISH: &[u8] = &[7];
/// A buffer with the present command, with STOP, with an old command, and with the present one and
/// a range.
const BEGIN: &[u8] = &[8, 2, 1, 1];
const END: &[u8] = &[8, 0, 1, 1];
const OLD: &[u8] = &[8, 1, 1, 1];
const BEGIN_AT_ONCE: &[u8] = &[8, 2, 1, 0, 2, 9, 2];
/// Two pages from the tenth on, a range that is not page-aligned, and a range across the hole.
const HINT: &[u8] = &[10, 0, 2, 10, 2];
const ODD_HINT: &[u8] = &[10, 0, 1, 83, 20];
const WIDE_HINT: &[u8] = &[10, 0, 2, 14, 7];
const LOOK: &[u8] = &[0, 3];
const MOVE: &[u8] = &[18, 0];

pub fn seeds() -> Vec<(&'static str, Vec<u8>)> {
    let usual = |steps: &[&[u8]]| [&USUAL[..], &steps.concat()].concat();
    let with = |first: [u8; 5], steps: &[&[u8]]| [&first[..], &steps.concat()].concat();
    let numbers = |index: u8, numbers: [u32; 8]| {
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
        [&[12][..], &bytes, &[index], &[0, index]].concat()
    };
    let statistics: Vec<u8> = [&[12, 4][..], &[0; 9], &[5], &[1; 9], &[0; 12], &[2, 0, 2]].concat();
    let inflate = numbers(0, [9, 10, 11, 15, 16, 20, 27, u32::MAX]);
    let deflate = numbers(1, [9, 10, 11, 15, 16, 20, 27, u32::MAX]);
    let report: &[u8] = &[13, 4, 1, 2, 9, 1, 2, 20, 3, 0, 4];
    let lies: &[u8] =
        &[14, 1, 2, 0x14, 200, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    vec![
        ("a-round", usual(&[START, BEGIN, HINT, ODD_HINT, END, LOOK, FINISH])),
        (
            "rounds",
            usual(&[
                START, BEGIN, HINT, LOOK, STOP, START, OLD, HINT, BEGIN, WIDE_HINT, LOOK, FINISH,
            ]),
        ),
        ("at-once", usual(&[START, BEGIN_AT_ONCE, LOOK, END, BEGIN, HINT, LOOK])),
        (
            "stopped-late",
            usual(&[START, BEGIN, LOOK, HINT, HINT, HINT, STOP, HINT, LOOK, WITHDRAW, START]),
        ),
        (
            "moves",
            usual(&[START, BEGIN, HINT, LOOK, HINT, MOVE, LOOK, START, MOVE, &[18, 1], LOOK]),
        ),
        ("inflates", usual(&[&inflate, &deflate, &inflate, &[15, 4, 4, 0, 9, 0, 0, 0]])),
        ("statistics", usual(&[&statistics, &[16, 0], &statistics, &statistics, MOVE, &[16, 0]])),
        ("reports", usual(&[report, &[16, 1, 40, 0], report])),
        ("poison", with([0, 4, 0, 4, 0xaa], &[report, &inflate, START, BEGIN, HINT, LOOK])),
        ("no-gaps", with([2, 4, 2, 1, 0], &[START, BEGIN, HINT, &[0, 2], END, &[0, 2], &[0, 3]])),
        ("no-index", with([0, 3, 0x80, 0, 0], &[START, BEGIN, HINT, HINT, LOOK, END, LOOK])),
        (
            "wild-rings",
            with(
                [0, 6, 0, 2, 0],
                &[
                    &[0, 12, 0x90, 1, 4, 1, 1, 1, 7, 2, 2, 2, 9, 0, 13, 128],
                    START,
                    BEGIN,
                    HINT,
                    LOOK,
                ],
            ),
        ),
        (
            "resets",
            usual(&[START, BEGIN, HINT, LOOK, &[17, 1, 0, 0, 0], LOOK, START, BEGIN, HINT, LOOK]),
        ),
        ("taken-away", usual(&[START, BEGIN, &[17, 0, 3], LOOK, STOP, &[17, 0, 2], &statistics])),
        (
            "damaged",
            usual(&[
                START,
                &[19, 3, 140, 1, 0],
                &[19, 60, 1, 6, 6, 3],
                &[19, 5, 133, 7, 2, 3],
                LOOK,
            ]),
        ),
        ("lies", usual(&[START, BEGIN, HINT, lies, LOOK, LOOK])),
    ]
}
