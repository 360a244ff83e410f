/* A virtio-net driver and its datagrams. See network.h. */
#include "network.h"

#include "kernel.h"
#include "virtqueue.h"
#include "work.h"

/* QEMU's machine `microvm` (hw/i386/microvm.h). A transport without a device has device ID 0. */
#define FIRST_TRANSPORT 0xfeb00000ull
#define TRANSPORT_BYTES 512
#define TRANSPORTS 24
#define VIRTIO_NET 1
#define RECEIVE_QUEUE 0
#define SEND_QUEUE 1

/* The device has half of the buffers. The others contain the last received data. */
#define BUFFERS 64
#define BUFFER_BYTES 2048
#define HELD (BUFFERS / 2)
#define SENT_AT_ONCE 8
#define PATIENCE_TICKS 100
#define PAYLOAD_WORDS 128

#define GUEST_IP 0x0a4d0709u /* 10.77.7.9 */
#define PEER_IP 0x0a4d0701u  /* 10.77.7.1 */
#define GUEST_PORT 7009
#define IPV4 0x0800
#define UDP 17

struct frame {
    uint8_t virtio[12]; /* struct virtio_net_hdr_v1 */
    uint8_t to[6], from[6];
    uint8_t type[2];
    uint8_t version, service, bytes[2], id[2], fragment[2], life, protocol, checksum[2], source[4],
        destination[4];
    uint8_t source_port[2], destination_port[2], udp_bytes[2], udp_checksum[2];
    uint8_t payload[8 * PAYLOAD_WORDS]; /* a number, and words computed from it */
} __attribute__((packed));
_Static_assert(sizeof(struct frame) <= BUFFER_BYTES, "a frame fits a buffer");
#define FRAME_BYTES ((uint32_t)sizeof(struct frame))
#define IP_BYTES (20 + 8 + 8 * PAYLOAD_WORDS)

static struct virtio_device device;
static struct virtqueue receive_queue, send_queue;
static uint8_t receive_memory[QUEUE_BYTES(BUFFERS)] __attribute__((aligned(16)));
static uint8_t send_memory[QUEUE_BYTES(BUFFERS)] __attribute__((aligned(16)));
static uint8_t received[BUFFERS][BUFFER_BYTES] __attribute__((aligned(4096)));
static uint8_t sent[SENT_AT_ONCE][BUFFER_BYTES] __attribute__((aligned(4096)));

static int works;
static uint16_t peer_port;
static uint8_t in_buffer[BUFFERS]; /* the buffer of each descriptor of the receive queue */
static struct held {
    uint32_t buffer;
    uint64_t number; /* 0: nothing received yet */
} held[HELD];
static uint32_t held_next; /* the oldest */
static uint64_t next_number = 1, sent_ticks, awaited;
static struct network_summary summary;

static void put16(uint8_t *at, uint32_t value)
{
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}

static uint32_t get16(const uint8_t *at)
{
    return (uint32_t)at[0] << 8 | at[1];
}

static void put32(uint8_t *at, uint32_t value)
{
    put16(at, value >> 16);
    put16(at + 2, value & 0xffff);
}

static uint64_t payload_word(uint64_t number, uint64_t index)
{
    return index ? mix(number * PAYLOAD_WORDS + index) : number;
}

/* ---- sending ---- */

static void make_frame(struct frame *frame, uint64_t number)
{
    static const uint8_t guest[6] = {0x52, 0x54, 0, 0x77, 7, 9};

    __builtin_memset(frame, 0, sizeof *frame);
    for (unsigned index = 0; index < 6; index++) {
        frame->to[index] = 0xff; /* broadcast */
        frame->from[index] = guest[index];
    }
    put16(frame->type, IPV4);
    frame->version = 0x45;
    put16(frame->bytes, IP_BYTES);
    frame->life = 64;
    frame->protocol = UDP;
    put32(frame->source, GUEST_IP);
    put32(frame->destination, PEER_IP);
    uint32_t sum = 0;
    for (unsigned index = 0; index < 20; index += 2)
        sum += get16(&frame->version + index);
    sum = (sum & 0xffff) + (sum >> 16);
    put16(frame->checksum, ~(sum + (sum >> 16)) & 0xffff);
    put16(frame->source_port, GUEST_PORT);
    put16(frame->destination_port, peer_port);
    put16(frame->udp_bytes, IP_BYTES - 20); /* without a checksum, which IPv4 allows */
    for (uint64_t index = 0; index < PAYLOAD_WORDS; index++) {
        uint64_t word = payload_word(number, index);
        __builtin_memcpy(frame->payload + 8 * index, &word, 8);
    }
}

/* Sends the next frames when all replies have arrived, or after a timeout. */
static void send_step(uint64_t ticks)
{
    while (virtqueue_take(&send_queue, &device) >= 0)
        ;
    if (!virtqueue_is_quiet(&send_queue) || (awaited && ticks < sent_ticks + PATIENCE_TICKS))
        return;
    summary.lost += awaited;
    awaited = SENT_AT_ONCE;
    sent_ticks = ticks;
    for (unsigned index = 0; index < SENT_AT_ONCE; index++) {
        make_frame((struct frame *)sent[index], next_number++);
        virtqueue_add(&send_queue, (uint64_t)sent[index], FRAME_BYTES, 0);
    }
    virtqueue_notify(&send_queue, &device);
}

/* ---- receiving ---- */

static int is_reply(const volatile struct frame *frame)
{
    return frame->type[0] == IPV4 >> 8 && frame->type[1] == 0 && frame->version == 0x45 &&
           frame->protocol == UDP && frame->destination_port[0] == GUEST_PORT >> 8 &&
           frame->destination_port[1] == (GUEST_PORT & 0xff);
}

static uint64_t read_word(const volatile struct frame *frame, uint64_t index)
{
    return *(const volatile uint64_t *)(frame->payload + 8 * index);
}

/* Checks a datagram in a buffer. Returns its number, or 0 if it is something else. */
static uint64_t check(volatile struct vcpu_report *report, uint32_t buffer, uint64_t expected)
{
    const volatile struct frame *frame = (const volatile struct frame *)received[buffer];
    uint64_t number = expected;

    if (!expected) {
        if (!is_reply(frame))
            return 0;
        number = read_word(frame, 0);
        if (number >= next_number)
            report_corruption(report, (uint64_t)frame, next_number, number);
    }
    for (uint64_t index = 0; index < PAYLOAD_WORDS; index++) {
        uint64_t found = read_word(frame, index), word = payload_word(number, index);
        if (found != word) {
            report_corruption(report, (uint64_t)frame, word, found);
            break;
        }
    }
    return number;
}

static void give(uint32_t buffer)
{
    int descriptor = virtqueue_add(&receive_queue, (uint64_t)received[buffer], BUFFER_BYTES, 1);
    if (descriptor >= 0)
        in_buffer[descriptor] = (uint8_t)buffer;
}

/* Keeps a received buffer in the place of the oldest one, which must be unchanged. */
static void receive_step(volatile struct vcpu_report *report)
{
    int descriptor;

    while ((descriptor = virtqueue_take(&receive_queue, &device)) >= 0) {
        uint32_t buffer = in_buffer[descriptor];
        uint64_t number = check(report, buffer, 0);
        if (!number) {
            give(buffer); /* other traffic */
            continue;
        }
        if (number + SENT_AT_ONCE >= next_number && awaited) {
            awaited--;
            summary.replies++;
        }
        struct held *oldest = &held[held_next];
        held_next = (held_next + 1) % HELD;
        if (oldest->number)
            check(report, oldest->buffer, oldest->number);
        give(oldest->buffer);
        *oldest = (struct held){buffer, number};
    }
    virtqueue_notify(&receive_queue, &device);
}

/* ---- */

void network_init(void)
{
    volatile const char *at =
        (volatile const char *)words_at(&(struct guest_view){0}, COMMAND_LINE_ADDRESS);
    const uint64_t wanted = VIRTIO_F_VERSION_1 | VIRTIO_F_EVENT_IDX;

    for (; *at && !(at[0] == 'n' && at[1] == 'e' && at[2] == 't' && at[3] == '='); at++)
        ;
    if (!*at)
        return;
    for (at += 4; *at >= '0' && *at <= '9'; at++)
        peer_port = (uint16_t)(peer_port * 10 + (*at - '0'));
    for (unsigned index = 0; index < TRANSPORTS && !works; index++)
        works =
            virtio_begin(&device, FIRST_TRANSPORT + index * TRANSPORT_BYTES, VIRTIO_NET, wanted);
    works = works &&
            virtqueue_make(&receive_queue, &device, RECEIVE_QUEUE, BUFFERS, receive_memory) &&
            virtqueue_make(&send_queue, &device, SEND_QUEUE, BUFFERS, send_memory);
    if (!works)
        return;
    virtio_ready(&device);
    for (uint32_t buffer = 0; buffer < BUFFERS; buffer++) {
        if (buffer < HELD)
            held[buffer].buffer = buffer;
        else
            give(buffer);
    }
    virtqueue_notify(&receive_queue, &device);
}

void network_step(const struct guest_view *view, uint64_t ticks)
{
    if (!works)
        return;
    receive_step(vcpu_report(view, 0));
    send_step(ticks);
}

struct network_summary network_summary(void)
{
    return summary;
}
