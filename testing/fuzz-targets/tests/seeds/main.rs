//! The seeds of the fuzz targets through the same functions, so that what fuzzing has covered stays
//! covered where there is no fuzzer; and the seeds themselves, which `write_the_seeds` makes.

mod balloon;
mod certificate;
mod codec;
mod control;
mod engine;
mod inspect;
mod qemu_stream;
mod qmp;
mod replay;
mod state;
