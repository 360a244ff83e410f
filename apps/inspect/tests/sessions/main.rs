//! Sessions that were recorded, and what is told of them.

mod golden;
mod recordings;
mod streams;
mod support;
