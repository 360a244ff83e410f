//! Runs the seeds of the fuzz targets, so that what fuzzing has covered stays covered without a
//! fuzzer; and checks the seeds themselves, which `write_the_seeds` generates.

/// The tests of a target whose module has `seeds()`, or of several with the seeds that each names.
/// `places` places of each seed are damaged. Seeds whose names `differs` selects have other content
/// each time.
macro_rules! seed_tests {
    ($target:ident, places: $places:literal, differs: $differs:expr) => {
        #[test]
        fn seeds_are_handled() {
            crate::replay::every_seed(stringify!($target), $target::run);
        }

        #[test]
        fn cut_and_damaged_seeds_are_handled() {
            crate::replay::every_seed_cut_and_damaged(stringify!($target), $target::run, $places);
        }

        #[test]
        fn seeds_are_in_the_tree() {
            crate::replay::are_in_the_tree(stringify!($target), seeds(), $differs);
        }

        /// Run `cargo test -p vmferry-fuzz-targets -- --ignored` after a change of the format.
        #[test]
        #[ignore = "writes the seeds"]
        fn write_the_seeds() {
            crate::replay::write(stringify!($target), seeds());
        }
    };
    (places: $places:literal, differs: $differs:expr, $($target:ident: $seeds:expr),+) => {$(
        mod $target {
            use super::*;
            use vmferry_fuzz_targets::$target;

            seed_tests!($target, places: $places, differs: $differs);

            fn seeds() -> Vec<(String, Vec<u8>)> {
                $seeds
            }
        }
    )+};
}

mod balloon;
mod certificate;
mod codec;
mod control;
mod definition;
mod engine;
mod inspect;
mod libvirt_rpc;
mod qemu_stream;
mod qmp;
mod replay;
mod state;
