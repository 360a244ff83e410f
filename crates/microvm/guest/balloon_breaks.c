/* Broken rings, disabled queues and queues outside memory, for balloon_lies.c. */
#include "balloon_lies.h"

void lies_break_ring(struct balloon *balloon, struct liar *liar)
{
    struct virtqueue *queue = &liar->queue;

    if (liar->stories % 3 == 1) {
        lies_offer(queue, LIE_BUFFERS);
    } else if (liar->stories % 3 == 2) {
        lies_offer(queue, 0xffff);
    } else {
        queue->added = (uint16_t)(queue->added + LIE_BUFFERS + 1);
        __atomic_store_n(&queue->available[1], queue->added, __ATOMIC_RELEASE);
    }
    virtqueue_notify(queue, balloon->device);
}

/* Offers live pages in a queue that the device must not use any more. */
static void offer_live(struct balloon *balloon, struct liar *liar)
{
    struct virtqueue *queue = &liar->queue;

    for (uint16_t head = 0; head < 4; head++) {
        volatile struct ring_descriptor *descriptor = &queue->descriptors[head];
        descriptor->address = FIRST_WORK_ADDRESS;
        descriptor->bytes = lies_live_bytes(balloon);
        descriptor->flags = DESCRIPTOR_WRITE;
        lies_offer(queue, head);
    }
    virtio_write(balloon->device, VIRTIO_QUEUE_NOTIFY, QUEUE_HINTS);
}

static void write_queue(const struct virtio_device *device, uint64_t descriptors, uint64_t driver,
                        uint64_t used)
{
    const uint64_t addresses[] = {descriptors, driver, used};
    const uint32_t registers[] = {VIRTIO_QUEUE_DESCRIPTORS, VIRTIO_QUEUE_DRIVER,
                                  VIRTIO_QUEUE_DEVICE};

    virtio_write(device, VIRTIO_QUEUE_SELECT, QUEUE_HINTS);
    virtio_write(device, VIRTIO_QUEUE_SIZE, LIE_BUFFERS);
    for (unsigned place = 0; place < 3; place++) {
        virtio_write(device, registers[place], (uint32_t)addresses[place]);
        virtio_write(device, registers[place] + 4, (uint32_t)(addresses[place] >> 32));
    }
    virtio_write(device, VIRTIO_QUEUE_READY, 1);
}

void lies_take_away(struct balloon *balloon, struct liar *liar)
{
    const struct virtio_device *device = balloon->device;
    const struct virtqueue *queue = &liar->queue;

    if (liar->stories % 2) {
        virtio_write(device, VIRTIO_QUEUE_SELECT, QUEUE_HINTS);
        virtio_write(device, VIRTIO_QUEUE_READY, 0);
    } else {
        virtio_write(device, VIRTIO_STATUS, 0);
    }
    offer_live(balloon, liar);
    balloon->report->lies++;
    if (!(liar->stories % 2)) {
        /* All stories have the same number of lies, so that the test can detect the end of one. */
        if (!virtio_read(device, VIRTIO_STATUS))
            balloon->report->lies++;
        return;
    }
    /* A queue cannot be enabled again while the device is in use. */
    write_queue(device, (uint64_t)queue->descriptors, (uint64_t)queue->available,
                (uint64_t)queue->used);
    if (!virtio_read(device, VIRTIO_QUEUE_READY))
        balloon->report->lies++;
    offer_live(balloon, liar);
}

int lies_begin_unmapped(struct balloon *balloon, struct liar *liar, uint32_t unmapping)
{
    struct virtqueue *queue = &liar->queue;
    struct virtio_device *device = balloon->device;
    uint64_t features = VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX | BALLOON_F_FREE_PAGE_HINT;
    uint64_t descriptors = (uint64_t)queue->descriptors, driver = (uint64_t)queue->available;
    uint64_t used = (uint64_t)queue->used;

    if (!virtio_begin(device, device->address, BALLOON_DEVICE, features))
        return 0;
    if (unmapping == 0) /* only the first descriptor is in memory */
        descriptors = balloon->view->low_bytes - sizeof(struct ring_descriptor);
    else if (unmapping == 1)
        driver = HOLE_ADDRESS;
    else if (unmapping == 2)
        used = device->address;
    else
        driver = 0; /* memory, but not valid for a ring */
    write_queue(device, descriptors, driver, used);
    virtio_ready(device);
    return 1;
}
