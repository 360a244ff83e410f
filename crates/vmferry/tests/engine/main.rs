//! The engine whole: migrations of guests that write all the time, and everything that can happen to them on their way.

mod compression;
mod damage;
mod free_pages;
mod hostile;
mod migration;
mod reconnect;
mod streams;
mod support;
mod upgrade;
mod verify;
