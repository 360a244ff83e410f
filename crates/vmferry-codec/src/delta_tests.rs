//! Tests of `delta`.
