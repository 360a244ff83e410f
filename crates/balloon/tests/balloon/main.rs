//! The device and its protocol, with a driver in the test.

mod device;
mod hints;
mod support;
