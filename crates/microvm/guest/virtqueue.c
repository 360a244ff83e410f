/* Memory-mapped virtio. See virtqueue.h. */
#include "virtqueue.h"

#define MMIO_MAGIC 0x74726976u /* "virt" */
#define MMIO_VERSION 2u

/* Section 2.1. */
enum virtio_status {
    STATUS_ACKNOWLEDGE = 1,
    STATUS_DRIVER = 2,
    STATUS_DRIVER_OK = 4,
    STATUS_FEATURES_OK = 8,
    STATUS_FAILED = 128,
};

#define DESCRIPTOR_WRITE 2       /* the device writes the buffer */
#define AVAILABLE_NO_INTERRUPT 1 /* no interrupts for used buffers */
#define USED_NO_NOTIFY 1
#define RESET_TRIES 1000

uint32_t virtio_read(const struct virtio_device *device, uint32_t offset)
{
    return *(volatile uint32_t *)(device->address + offset);
}

void virtio_write(const struct virtio_device *device, uint32_t offset, uint32_t value)
{
    *(volatile uint32_t *)(device->address + offset) = value;
}

static void write_address(const struct virtio_device *device, uint32_t offset,
                          volatile void *memory)
{
    virtio_write(device, offset, (uint32_t)(uint64_t)memory);
    virtio_write(device, offset + 4, (uint32_t)((uint64_t)memory >> 32));
}

/* ---- the device ---- */

static uint64_t read_features(const struct virtio_device *device)
{
    virtio_write(device, VIRTIO_DEVICE_FEATURES_SELECT, 1);
    uint64_t high = virtio_read(device, VIRTIO_DEVICE_FEATURES);
    virtio_write(device, VIRTIO_DEVICE_FEATURES_SELECT, 0);
    return high << 32 | virtio_read(device, VIRTIO_DEVICE_FEATURES);
}

static int reset(const struct virtio_device *device)
{
    virtio_write(device, VIRTIO_STATUS, 0);
    for (unsigned tries = 0; tries < RESET_TRIES; tries++) {
        if (virtio_read(device, VIRTIO_STATUS) == 0)
            return 1;
    }
    return 0;
}

int virtio_begin(struct virtio_device *device, uint64_t address, uint32_t kind, uint64_t wanted)
{
    device->address = address;
    if (virtio_read(device, VIRTIO_MAGIC) != MMIO_MAGIC ||
        virtio_read(device, VIRTIO_VERSION) != MMIO_VERSION ||
        virtio_read(device, VIRTIO_DEVICE_ID) != kind || !reset(device))
        return 0;
    virtio_write(device, VIRTIO_STATUS, STATUS_ACKNOWLEDGE);
    virtio_write(device, VIRTIO_STATUS, STATUS_ACKNOWLEDGE | STATUS_DRIVER);
    device->features = read_features(device) & wanted;
    virtio_write(device, VIRTIO_DRIVER_FEATURES_SELECT, 1);
    virtio_write(device, VIRTIO_DRIVER_FEATURES, (uint32_t)(device->features >> 32));
    virtio_write(device, VIRTIO_DRIVER_FEATURES_SELECT, 0);
    virtio_write(device, VIRTIO_DRIVER_FEATURES, (uint32_t)device->features);
    virtio_write(device, VIRTIO_STATUS, STATUS_ACKNOWLEDGE | STATUS_DRIVER | STATUS_FEATURES_OK);
    if (device->features & VIRTIO_F_VERSION_1 &&
        virtio_read(device, VIRTIO_STATUS) & STATUS_FEATURES_OK)
        return 1;
    virtio_give_up(device);
    return 0;
}

void virtio_ready(const struct virtio_device *device)
{
    virtio_write(device, VIRTIO_STATUS,
                 STATUS_ACKNOWLEDGE | STATUS_DRIVER | STATUS_FEATURES_OK | STATUS_DRIVER_OK);
}

void virtio_give_up(const struct virtio_device *device)
{
    virtio_write(device, VIRTIO_STATUS, STATUS_FAILED);
}

/* ---- a queue ---- */

int virtqueue_make(struct virtqueue *queue, const struct virtio_device *device, uint16_t number,
                   uint16_t limit, void *memory)
{
    virtio_write(device, VIRTIO_QUEUE_SELECT, number);
    uint32_t most = virtio_read(device, VIRTIO_QUEUE_SIZE_MAX);
    uint32_t size = 1;
    while (size * 2 <= most && size * 2 <= limit)
        size *= 2;
    if (!most || virtio_read(device, VIRTIO_QUEUE_READY))
        return 0;
    uint8_t *at = memory;
    queue->number = number;
    queue->size = (uint16_t)size;
    queue->descriptors = (volatile struct ring_descriptor *)at;
    at += size * sizeof(struct ring_descriptor);
    queue->available = (volatile uint16_t *)at;
    at += (3 + size) * 2 + 2; /* to a multiple of 4 */
    queue->used = (volatile uint16_t *)at;
    at += 6 + 8 * size + 2;
    queue->unused = (uint16_t *)at;
    for (uint32_t index = 0; index < size; index++)
        queue->unused[index] = (uint16_t)(size - 1 - index);
    queue->room = (uint16_t)size;
    queue->added = queue->notified = queue->seen = 0;
    /* Indices of an earlier use would be taken for buffers. */
    queue->available[0] = queue->available[1] = 0;
    queue->used[0] = queue->used[1] = 0;
    queue->used[2 + size * 4] = 0; /* avail_event */
    if (device->features & VIRTIO_F_EVENT_IDX)
        queue->available[2 + size] = 0xffff; /* one before the used index: see virtqueue_take */
    else
        queue->available[0] = AVAILABLE_NO_INTERRUPT;
    virtio_write(device, VIRTIO_QUEUE_SIZE, size);
    write_address(device, VIRTIO_QUEUE_DESCRIPTORS, queue->descriptors);
    write_address(device, VIRTIO_QUEUE_DRIVER, queue->available);
    write_address(device, VIRTIO_QUEUE_DEVICE, queue->used);
    virtio_write(device, VIRTIO_QUEUE_READY, 1);
    return 1;
}

int virtqueue_add(struct virtqueue *queue, uint64_t gpa, uint32_t bytes, int device_writes)
{
    if (!queue->room)
        return -1;
    uint16_t id = queue->unused[--queue->room];
    volatile struct ring_descriptor *descriptor = &queue->descriptors[id];
    descriptor->address = gpa;
    descriptor->bytes = bytes;
    descriptor->flags = device_writes ? DESCRIPTOR_WRITE : 0;
    descriptor->next = 0;
    queue->available[2 + queue->added % queue->size] = id;
    queue->added++;
    /* The device may look at any time, so the buffer and the entry are written before the index. */
    __atomic_store_n(&queue->available[1], queue->added, __ATOMIC_RELEASE);
    return id;
}

int virtqueue_take(struct virtqueue *queue, const struct virtio_device *device)
{
    if (__atomic_load_n(&queue->used[1], __ATOMIC_ACQUIRE) == queue->seen)
        return -1;
    volatile uint32_t *entry =
        (volatile uint32_t *)(queue->used + 2) + queue->seen % queue->size * 2;
    uint32_t id = *entry;
    queue->seen++;
    /* One before the used index: the device interrupts only after 65,536 more used buffers. */
    if (device->features & VIRTIO_F_EVENT_IDX)
        queue->available[2 + queue->size] = (uint16_t)(queue->seen - 1);
    if (id >= queue->size || queue->room >= queue->size)
        return -1; /* not a descriptor of this driver */
    queue->unused[queue->room++] = (uint16_t)id;
    return (int)id;
}

void virtqueue_notify(struct virtqueue *queue, struct virtio_device *device)
{
    uint16_t added = queue->added, notified = queue->notified;

    if (added == notified)
        return;
    queue->notified = added;
    /* Either the device sees the new index, or this driver sees that it must be notified. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    int wanted;
    if (device->features & VIRTIO_F_EVENT_IDX) {
        uint16_t event = queue->used[2 + queue->size * 4];
        wanted = (uint16_t)(added - event - 1) < (uint16_t)(added - notified);
    } else {
        wanted = !(queue->used[0] & USED_NO_NOTIFY);
    }
    if (wanted) {
        virtio_write(device, VIRTIO_QUEUE_NOTIFY, queue->number);
        device->notifications++;
    }
}

int virtqueue_is_quiet(const struct virtqueue *queue)
{
    return queue->room == queue->size;
}
