/*
 * The report as a line of text on the serial port, for VMMs that do not read it from memory: after
 * a PVH boot. It uses the words of the Linux guest (linux/main.c) where they apply.
 */
#ifndef VMFERRY_SERIAL_REPORT_H
#define VMFERRY_SERIAL_REPORT_H

#include <stdint.h>

#include "workload.h"

/* In ring 3, on vCPU 0: writes a line if one is due. */
void serial_report_step(const struct guest_view *view, uint64_t ticks);

#endif
