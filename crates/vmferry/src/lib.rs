//! The live-migration engine: source and destination state machines, rounds, convergence and handover.
