//! CPU features as QEMU reports them in CPUID words: all in one command, where each property by
//! itself is a command, and QEMU reads its commands byte by byte.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::qmp::{Qmp, QmpError};

/// The input (EAX and ECX) and the output register of CPUID.
type Word = (u64, u64, &'static str);

/// The words with names for their bits, as `BIT:NAME`. A name with several bits needs all of them.
///
/// Source: QEMU 7.2 and 10.0, whose vCPUs were started with each feature. A name and its bits are
/// part of QEMU's interface and do not change. Names that are missing here are properties, too, and
/// read one by one.
const WORDS: &[(Word, &str)] = &[
    (
        (1, 0, "ECX"),
        "0:pni 1:pclmulqdq 2:dtes64 3:monitor 4:ds-cpl 5:vmx 6:smx 7:est 8:tm2 9:ssse3 10:cid \
         12:fma 13:cx16 14:xtpr 15:pdcm 17:pcid 18:dca 19:sse4.1 20:sse4.2 21:x2apic 22:movbe \
         23:popcnt 24:tsc-deadline 25:aes 26:xsave 28:avx 29:f16c 30:rdrand 31:hypervisor",
    ),
    (
        (1, 0, "EDX"),
        "0:fpu 1:vme 2:de 3:pse 4:tsc 5:msr 6:pae 7:mce 8:cx8 9:apic 11:sep 12:mtrr 13:pge 14:mca \
         15:cmov 16:pat 17:pse36 18:pn 19:clflush 21:ds 22:acpi 23:mmx 24:fxsr 25:sse 26:sse2 \
         27:ss 28:ht 29:tm 30:ia64 31:pbe",
    ),
    ((6, 0, "EAX"), "2:arat"),
    (
        (7, 0, "EBX"),
        "0:fsgsbase 1:tsc-adjust 2:sgx 3:bmi1 4:hle 5:avx2 6:fdp-excptn-only 7:smep 8:bmi2 9:erms \
         10:invpcid 11:rtm 13:zero-fcs-fds 14:mpx 16:avx512f 17:avx512dq 18:rdseed 19:adx 20:smap \
         21:avx512ifma 22:pcommit 23:clflushopt 24:clwb 25:intel-pt 26:avx512pf 27:avx512er \
         28:avx512cd 29:sha-ni 30:avx512bw 31:avx512vl",
    ),
    (
        (7, 0, "ECX"),
        "1:avx512vbmi 2:umip 3:pku 5:waitpkg 6:avx512vbmi2 8:gfni 9:vaes 10:vpclmulqdq \
         11:avx512vnni 12:avx512bitalg 14:avx512-vpopcntdq 16:la57 22:rdpid 24:bus-lock-detect \
         25:cldemote 27:movdiri 28:movdir64b 30:sgxlc 31:pks",
    ),
    (
        (7, 0, "EDX"),
        "2:avx512-4vnniw 3:avx512-4fmaps 4:fsrm 8:avx512-vp2intersect 10:md-clear 14:serialize \
         16:tsx-ldtrk 19:arch-lbr 22:amx-bf16 23:avx512-fp16 24:amx-tile 25:amx-int8 26:spec-ctrl \
         27:stibp 28:flush-l1d 29:arch-capabilities 30:core-capability 31:ssbd",
    ),
    (
        (7, 1, "EAX"),
        "0:sha512 1:sm3 2:sm4 4:avx-vnni 5:avx512-bf16 7:cmpccxadd 10:fzrm 11:fsrs 12:fsrc \
         17:fred 18:lkgs 19:wrmsrns 21:amx-fp16 23:avx-ifma 26:lam",
    ),
    (
        (7, 1, "EDX"),
        "4:avx-vnni-int8 5:avx-ne-convert 8:amx-complex 10:avx-vnni-int16 14:prefetchiti 19:avx10",
    ),
    ((7, 2, "EDX"), "0:intel-psfd 1:ipred-ctrl 2:rrsba-ctrl 3:ddpd-u 4:bhi-ctrl 5:mcdt-no"),
    ((13, 1, "EAX"), "0:xsaveopt 1:xsavec 2:xgetbv1 3:xsaves 4:xfd"),
    ((18, 0, "EAX"), "0:sgx1 1:sgx2 11:sgx-edeccssa"),
    ((18, 0, "EBX"), "0:sgx-exinfo"),
    (
        (18, 1, "EAX"),
        "1:sgx-debug 2:sgx-mode64 4:sgx-provisionkey 5:sgx-tokenkey 7:sgx-kss 10:sgx-aex-notify",
    ),
    ((20, 0, "ECX"), "31:intel-pt-lip"),
    ((36, 0, "EBX"), "16:avx10-128 17:avx10-256 18:avx10-512"),
    (
        (0x4000_0001, 0, "EAX"),
        "0:kvmclock 1:kvm-nopiodelay 2:kvm-mmu 3:kvmclock 4:kvm-asyncpf 5:kvm-steal-time \
         6:kvm-pv-eoi 7:kvm-pv-unhalt 9:kvm-pv-tlb-flush 10:kvm-asyncpf-vmexit 11:kvm-pv-ipi \
         12:kvm-poll-control 13:kvm-pv-sched-yield 14:kvm-asyncpf-int 15:kvm-msi-ext-dest-id \
         24:kvmclock-stable-bit",
    ),
    ((0x4000_0001, 0, "EDX"), "0:kvm-hint-dedicated"),
    (
        (0x8000_0001, 0, "ECX"),
        "0:lahf-lm 1:cmp-legacy 2:svm 3:extapic 4:cr8legacy 5:abm 6:sse4a 7:misalignsse \
         8:3dnowprefetch 9:osvw 10:ibs 11:xop 12:skinit 13:wdt 15:lwp 16:fma4 17:tce \
         19:nodeid-msr 21:tbm 22:topoext 23:perfctr-core 24:perfctr-nb",
    ),
    (
        (0x8000_0001, 0, "EDX"),
        "11:syscall 20:nx 22:mmxext 25:fxsr-opt 26:pdpe1gb 27:rdtscp 29:lm 30:3dnowext 31:3dnow",
    ),
    ((0x8000_0007, 0, "EBX"), "0:overflow-recov 1:succor"),
    ((0x8000_0007, 0, "EDX"), "8:invtsc"),
    (
        (0x8000_0008, 0, "EBX"),
        "0:clzero 2:xsaveerptr 9:wbnoinvd 12:ibpb 14:ibrs 15:amd-stibp 17:stibp-always-on \
         24:amd-ssbd 25:virt-ssbd 26:amd-no-ssb 28:amd-psfd",
    ),
    (
        (0x8000_000a, 0, "EDX"),
        "0:npt 1:lbrv 2:svm-lock 3:nrip-save 4:tsc-scale 5:vmcb-clean 6:flushbyasid \
         7:decodeassists 10:pause-filter 12:pfthreshold 13:avic 15:v-vmsave-vmload 16:vgif \
         25:vnmi 28:svme-addr-chk",
    ),
    (
        (0x8000_0021, 0, "EAX"),
        "0:no-nested-data-bp 2:lfence-always-serializing 6:null-sel-clr-base 8:auto-ibrs 24:eraps \
         27:sbpb 28:ibpb-brtype 29:srso-no 30:srso-user-kernel-no",
    ),
    ((0x8000_0022, 0, "EAX"), "0:perfmon-v2"),
    (
        (0xc000_0001, 0, "EDX"),
        "2:xstore 3:xstore-en 6:xcrypt 7:xcrypt-en 8:ace2 9:ace2-en 10:phe 11:phe-en 12:pmm \
         13:pmm-en",
    ),
];

/// The features of the vCPU at `path` that its words tell, by name: whether the vCPU has them.
///
/// # Errors
/// QMP errors.
pub(super) fn read(qmp: &mut Qmp, path: &str) -> Result<BTreeMap<&'static str, bool>, QmpError> {
    let property = json!({ "path": path, "property": "feature-words" });
    match qmp.execute("qom-get", property) {
        Ok(reported) => Ok(named(&reported)),
        Err(QmpError::Refused { .. }) => Ok(BTreeMap::new()),
        Err(error) => Err(error),
    }
}

fn named(reported: &Value) -> BTreeMap<&'static str, bool> {
    let mut features = BTreeMap::new();
    for word in reported.as_array().into_iter().flatten() {
        let Some(bits) = word["features"].as_u64() else { continue };
        for (name, bit) in names(word) {
            *features.entry(name).or_insert(true) &= bits >> bit & 1 == 1;
        }
    }
    features
}

/// The named bits of a word that QEMU reports.
fn names(word: &Value) -> impl Iterator<Item = (&'static str, u32)> {
    let is_it = |&&((eax, ecx, register), _): &&(Word, &str)| {
        word["cpuid-input-eax"] == eax
            && word["cpuid-input-ecx"].as_u64().unwrap_or(0) == ecx
            && word["cpuid-register"] == register
    };
    let names = WORDS.iter().find(is_it).map_or("", |&(_, names)| names);
    names.split_whitespace().filter_map(|name| {
        let (bit, name) = name.split_once(':')?;
        Some((name, bit.parse().ok()?))
    })
}
