//! Tests of the whole engine: migrations of guests that write continuously, under all kinds of
//! failures.

mod carried_post_copy;
mod compression;
mod damage;
mod free_pages;
mod hostile;
mod migration;
mod post_copy;
mod reconnect;
mod streams;
mod support;
mod upgrade;
mod verify;
mod witness;
