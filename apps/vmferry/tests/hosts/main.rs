//! The command between two hosts: migrations there and back, the related commands, and the
//! refusals. One program, so that shared code is compiled once and waiting tests wait side by side.

mod back_and_forth;
mod bad_input;
mod balloon;
mod compress;
mod daemon;
mod daemon_place;
mod demo;
mod directories;
mod doctor;
mod doctor_host;
mod inspect;
mod leftovers;
mod live;
mod peers;
mod post_copy;
mod report;
mod sandbox;
mod shapes;
#[path = "../support/mod.rs"]
mod support;
mod systemd;
mod throttle;
mod transports;
mod trust;
mod upgrade;
