//! Dirty logs: which guest pages were written since the last look, by KVM, userfaultfd or software.
