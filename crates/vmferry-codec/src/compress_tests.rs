//! Tests of `compress`.
