/*
 * A virtio device with memory-mapped registers of version 2 (VIRTIO 1.2, section 4.2), and its
 * split virtqueues (section 2.7), for a driver that polls: each buffer has one descriptor, and the
 * driver disables interrupts for used buffers.
 *
 * A register access leaves the guest and costs as much as writing 30 pages. The rings are memory.
 * All memory is identity-mapped, so an address is a guest-physical address.
 */
#ifndef VMFERRY_VIRTQUEUE_H
#define VMFERRY_VIRTQUEUE_H

#include <stdint.h>

/* Section 4.2.2. */
enum virtio_register {
    VIRTIO_MAGIC = 0x000,
    VIRTIO_VERSION = 0x004,
    VIRTIO_DEVICE_ID = 0x008,
    VIRTIO_DEVICE_FEATURES = 0x010,
    VIRTIO_DEVICE_FEATURES_SELECT = 0x014,
    VIRTIO_DRIVER_FEATURES = 0x020,
    VIRTIO_DRIVER_FEATURES_SELECT = 0x024,
    VIRTIO_QUEUE_SELECT = 0x030,
    VIRTIO_QUEUE_SIZE_MAX = 0x034,
    VIRTIO_QUEUE_SIZE = 0x038,
    VIRTIO_QUEUE_READY = 0x044,
    VIRTIO_QUEUE_NOTIFY = 0x050,
    VIRTIO_INTERRUPT_STATUS = 0x060,
    VIRTIO_INTERRUPT_ACK = 0x064,
    VIRTIO_STATUS = 0x070,
    VIRTIO_QUEUE_DESCRIPTORS = 0x080, /* low half; the high half follows */
    VIRTIO_QUEUE_DRIVER = 0x090,
    VIRTIO_QUEUE_DEVICE = 0x0a0,
    VIRTIO_CONFIG = 0x100,
};

#define VIRTIO_INTERRUPT_CONFIG 2u /* interrupt status: the configuration has changed */

/* Section 6. */
#define VIRTIO_F_EVENT_IDX (1ull << 29)
#define VIRTIO_F_VERSION_1 (1ull << 32)

struct virtio_device {
    uint64_t address;
    uint64_t features; /* negotiated */
    uint64_t notifications;
};

/* Size of a queue of `size` descriptors. */
#define QUEUE_BYTES(size) (28 * (size) + 32)

struct ring_descriptor {
    uint64_t address;
    uint32_t bytes;
    uint16_t flags, next;
};

struct virtqueue {
    volatile struct ring_descriptor *descriptors;
    volatile uint16_t *available; /* flags, index, ring, used_event */
    volatile uint16_t *used; /* flags, index, ring of {id, bytes} of 32 bits each, avail_event */
    uint16_t *unused;             /* a stack of free descriptors */
    uint16_t number, size;
    uint16_t room;     /* number of free descriptors */
    uint16_t added;    /* index of the available ring */
    uint16_t notified; /* `added` at the last call of virtqueue_notify */
    uint16_t seen;     /* index of the used ring */
};

uint32_t virtio_read(const struct virtio_device *device, uint32_t offset);
void virtio_write(const struct virtio_device *device, uint32_t offset, uint32_t value);

/*
 * Resets the device and negotiates the `wanted` features that it offers. Returns 0 if the device
 * cannot be driven. A device of another kind is not changed.
 */
int virtio_begin(struct virtio_device *device, uint64_t address, uint32_t kind, uint64_t wanted);
/* Sets DRIVER_OK, after all queues are ready. */
void virtio_ready(const struct virtio_device *device);
/* Sets FAILED. */
void virtio_give_up(const struct virtio_device *device);

/*
 * Creates a queue of at most `limit` descriptors, in QUEUE_BYTES(limit) of memory aligned to 16
 * bytes. Returns 0 if the device has no such queue.
 */
int virtqueue_make(struct virtqueue *queue, const struct virtio_device *device, uint16_t number,
                   uint16_t limit, void *memory);
/* Makes a buffer available. Returns its descriptor, or -1 if there is no room. */
int virtqueue_add(struct virtqueue *queue, uint64_t gpa, uint32_t bytes, int device_writes);
/* Frees a descriptor whose buffer the device has used. Returns the descriptor, or -1. */
int virtqueue_take(struct virtqueue *queue, const struct virtio_device *device);
/* Notifies the device of new buffers, unless it has disabled notifications. */
void virtqueue_notify(struct virtqueue *queue, struct virtio_device *device);
/* Whether the device has used all buffers, and all of them were taken. */
int virtqueue_is_quiet(const struct virtqueue *queue);

#endif
