/* The driver of a virtio balloon: the device, its configuration, statistics. See balloon.h. */
#include "balloon.h"

#include "balloon_parts.h"

/*
 * Interval at which the driver polls the configuration without an interrupt. A kernel worker
 * delivers an irqfd to a pin of the IOAPIC, and on a busy host it may be half a second late, often
 * several times in a row. Other VMMs than this project's may use an irqfd. A poll costs 0.1 ms.
 */
#define LOOK_TICKS 200
#define LOOK_TICKS_LATE 10

/* The configuration (section 5.5.4), in little-endian words of 32 bits. */
enum balloon_register {
    CONFIG_PAGES = VIRTIO_CONFIG, /* the size that the host asks for */
    CONFIG_ACTUAL = VIRTIO_CONFIG + 4,
    CONFIG_COMMAND = VIRTIO_CONFIG + 8,
    CONFIG_POISON = VIRTIO_CONFIG + 12,
};

/* Section 5.5.6.3. */
struct statistic {
    uint16_t tag;
    uint64_t value;
} __attribute__((packed));
enum statistic_tag {
    MAJOR_FAULTS = 2,
    MINOR_FAULTS = 3,
    MEMORY_FREE = 4,
    MEMORY_TOTAL = 5,
    AVAILABLE = 6,
    CACHES = 7
};

static struct virtio_device device;
static const volatile uint64_t *interrupt_count;
static uint64_t interrupts_seen;
static uint64_t looked_ticks;
static uint64_t look_interval = LOOK_TICKS;
static struct virtqueue statistics_queue;
static uint8_t statistics_memory[QUEUE_BYTES(2)] __attribute__((aligned(16)));
static struct statistic statistics[6];

static volatile struct balloon_report *report_of(const struct guest_view *view)
{
    return (volatile struct balloon_report *)words_at(view, BALLOON_REPORT_ADDRESS);
}

/* ---- statistics ---- */

static void give_statistics(struct balloon *balloon)
{
    const struct guest_view *view = balloon->view;
    uint64_t free = heap_free_blocks(&balloon->heap) * HEAP_BLOCK_BYTES;
    uint64_t held = heap_count(&balloon->heap, LIST_HELD) * HEAP_BLOCK_BYTES;

    /* Only whole blocks count as free. Free pages of a split block belong to its vCPU. */
    statistics[0] = (struct statistic){MAJOR_FAULTS, 0};
    statistics[1] = (struct statistic){MINOR_FAULTS, 0};
    statistics[2] = (struct statistic){MEMORY_FREE, free};
    statistics[3] = (struct statistic){MEMORY_TOTAL, view->low_bytes + view->high_bytes};
    statistics[4] = (struct statistic){AVAILABLE, free + held};
    statistics[5] = (struct statistic){CACHES, 0};
    if (virtqueue_add(&statistics_queue, (uint64_t)statistics, sizeof statistics, 0) >= 0)
        virtqueue_notify(&statistics_queue, balloon->device);
}

static void statistics_step(struct balloon *balloon)
{
    if (!(device.features & BALLOON_F_STATS_VQ) || virtqueue_take(&statistics_queue, &device) < 0)
        return;
    give_statistics(balloon);
    balloon->report->statistics++;
}

/* ---- the device ---- */

static uint64_t wanted_features(uint32_t flags)
{
    uint64_t wanted = VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX | BALLOON_F_MUST_TELL_HOST |
                      BALLOON_F_STATS_VQ | BALLOON_F_DEFLATE_ON_OOM | BALLOON_F_FREE_PAGE_HINT;
    if (flags & FLAG_POISON)
        wanted |= BALLOON_F_PAGE_POISON;
    if (flags & FLAG_REPORTING)
        wanted |= BALLOON_F_PAGE_REPORTING;
    return wanted;
}

static int make_queues(uint32_t flags)
{
    return pages_make(&device) && (LIE_OF(flags) ? lies_make : hints_make)(&device) &&
           (!(device.features & BALLOON_F_STATS_VQ) ||
            virtqueue_make(&statistics_queue, &device, QUEUE_STATISTICS, 2, statistics_memory));
}

static int begin(uint64_t address, uint32_t flags)
{
    uint64_t wanted = wanted_features(flags);

    if (!virtio_begin(&device, address, BALLOON_DEVICE, wanted))
        return 0;
    /* A driver that expects poison in reported pages needs PAGE_POISON (section 5.5.3.1). */
    if (flags & FLAG_POISON && device.features & BALLOON_F_PAGE_REPORTING &&
        !(device.features & BALLOON_F_PAGE_POISON) &&
        !virtio_begin(&device, address, BALLOON_DEVICE, wanted & ~BALLOON_F_PAGE_REPORTING))
        return 0;
    if (!make_queues(flags)) {
        virtio_give_up(&device);
        return 0;
    }
    if (device.features & BALLOON_F_PAGE_POISON)
        virtio_write(&device, CONFIG_POISON, (uint32_t)heap_poison(flags));
    virtio_ready(&device);
    return 1;
}

static int open(struct balloon *balloon, const struct guest_view *view)
{
    balloon->view = view;
    balloon->device = &device;
    balloon->report = report_of(view);
    balloon->flags = guest_report(view)->flags;
    balloon->interrupts = interrupt_count;
    balloon->interrupts_seen = interrupts_seen;
    balloon->must_restart = 0;
    return heap_open(&balloon->heap, view, 0);
}

static void read_config(struct balloon *balloon)
{
    pages_target(balloon, virtio_read(&device, CONFIG_PAGES) / HEAP_BLOCK_PAGES);
    if (device.features & BALLOON_F_FREE_PAGE_HINT) {
        uint32_t command = virtio_read(&device, CONFIG_COMMAND);
        (LIE_OF(balloon->flags) ? lies_command : hints_command)(balloon, command);
    }
}

/* Initializes the device again, whatever its state is. */
static void restart(struct balloon *balloon)
{
    if (!begin(device.address, balloon->flags)) {
        balloon->report->state = BALLOON_FAILED;
        return;
    }
    if (device.features & BALLOON_F_STATS_VQ)
        give_statistics(balloon);
    read_config(balloon);
}

void balloon_init(const struct guest_view *view, uint64_t address,
                  const volatile uint64_t *interrupts)
{
    volatile struct balloon_report *report = report_of(view);
    struct balloon balloon;

    if (!address || !open(&balloon, view))
        return;
    interrupt_count = interrupts;
    interrupts_seen = *interrupts;
    report->magic = BALLOON_REPORT_MAGIC;
    report->version = BALLOON_REPORT_VERSION;
    if (!begin(address, balloon.flags)) {
        report->state = BALLOON_FAILED;
        return;
    }
    report->features = device.features;
    if (device.features & BALLOON_F_STATS_VQ)
        give_statistics(&balloon);
    read_config(&balloon);
    report->state = BALLOON_IDLE;
}


static void look_for_news(struct balloon *balloon)
{
    int is_called = balloon_has_news(balloon);

    if (!is_called && balloon->ticks - looked_ticks < look_interval)
        return;
    looked_ticks = balloon->ticks;
    /* Counted before the registers are read: a later change raises another interrupt. */
    interrupts_seen = *interrupt_count;
    balloon->interrupts_seen = interrupts_seen;
    if (is_called)
        balloon->report->interrupts = interrupts_seen;
    uint32_t status = virtio_read(&device, VIRTIO_INTERRUPT_STATUS);
    if (!is_called)
        look_interval = look_interval * 2 < LOOK_TICKS ? look_interval * 2 : LOOK_TICKS;
    if (!status)
        return;
    if (!is_called) {
        balloon->report->unheard++;
        look_interval = LOOK_TICKS_LATE;
    }
    virtio_write(&device, VIRTIO_INTERRUPT_ACK, status);
    if (status & VIRTIO_INTERRUPT_CONFIG)
        read_config(balloon);
}

/* Writes only changed values, because each write makes the page dirty. */
static void update(volatile uint32_t *reported, uint32_t value)
{
    if (*reported != value)
        *reported = value;
}

int balloon_step(const struct guest_view *view, uint64_t ticks)
{
    struct balloon balloon;

    if (report_of(view)->state < BALLOON_IDLE || !open(&balloon, view))
        return 1;
    balloon.ticks = ticks;
    look_for_news(&balloon);
    int is_busy = (LIE_OF(balloon.flags) ? lies_step : hints_step)(&balloon);
    if (balloon.must_restart)
        restart(&balloon);
    is_busy |= pages_step(&balloon);
    statistics_step(&balloon);
    rewrites_check(&balloon);
    update(&balloon.report->held_blocks, heap_count(&balloon.heap, LIST_HELD));
    update(&balloon.report->inflated_blocks, heap_count(&balloon.heap, LIST_INFLATED));
    if (balloon.report->notifications != device.notifications)
        balloon.report->notifications = device.notifications;
    return !is_busy;
}
