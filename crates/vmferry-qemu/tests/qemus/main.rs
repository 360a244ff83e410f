//! Real QEMUs whose guests are moved by the library: attached to, carried, and with streams that are recognised.

mod carried;
mod carried_guests;
mod carrying;
mod carrying_faults;
mod devices;
mod migration;
mod stream;
mod support;
