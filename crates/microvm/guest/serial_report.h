/*
 * The report as a line of text on the serial port, where a VMM does not read it from memory: PVH boot.
 * The words are those of the Linux guest (linux/main.c), as far as they have a meaning here.
 */
#ifndef VMFERRY_SERIAL_REPORT_H
#define VMFERRY_SERIAL_REPORT_H

#include <stdint.h>

#include "workload.h"

/* Ring 3, vCPU 0: a line, if it is time for one. */
void serial_report_step(const struct guest_view *view, uint64_t ticks);

#endif
