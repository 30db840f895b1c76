// SPDX-License-Identifier: GPL-2.0-only
/*
 * tbring - raw traffic over the rings of a Thunderbolt/USB4 host interface
 *
 * Both hosts load it. It announces the service "tbring" and, for each host at
 * the other end of a cable that announces it too, sets up one ring in each
 * direction. Traffic is asked for, and looked at, in debugfs, one directory for
 * each such service (that of its device, as 0-1.1):
 *
 *   /sys/kernel/debug/tbring/0-1.1/send    write "FRAMES SIZE": sends as many
 *                                          frames of that many bytes (24..4096)
 *                                          and returns when all have left
 *   /sys/kernel/debug/tbring/0-1.1/stats   counters, "name value" a line
 *   /sys/kernel/debug/tbring/0-1.1/reset   write anything: counters to zero, and
 *                                          what was received so far forgotten
 *   /sys/kernel/debug/tbring/0-1.1/verify  0: check headers only, 1: every byte.
 *                                          To be the same at both ends.
 *
 * Each frame begins with a header that numbers it, so the receiver counts what
 * is missing (rx_lost), repeated or out of order (rx_stale), and not what was
 * sent (rx_bad). Frames that the hardware flags are counted as flagged (rx_crc,
 * rx_overrun) and not looked into.
 */

#include <linux/completion.h>
#include <linux/debugfs.h>
#include <linux/dma-mapping.h>
#include <linux/gfp.h>
#include <linux/kstrtox.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/random.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/thunderbolt.h>
#include <linux/uaccess.h>

#define TBRING_KEY		"tbring"
#define TBRING_FRAME_MAX	4096
#define TBRING_MAGIC		0x74627267
#define TBRING_STALL		(10 * HZ)

enum {
	TBRING_SOF = 1,
	TBRING_EOF = 2,
};

static unsigned int ring_size = 256;
module_param(ring_size, uint, 0444);
MODULE_PARM_DESC(ring_size, "descriptors of each ring (2..1024)");

static bool e2e = true;
module_param(e2e, bool, 0444);
MODULE_PARM_DESC(e2e, "end-to-end flow control: no frame is lost for want of a buffer");

static int hop = 12;
module_param(hop, int, 0444);
MODULE_PARM_DESC(hop, "HopID of the path in both directions, the same at both ends");

static unsigned int rx_buffers;
module_param(rx_buffers, uint, 0444);
MODULE_PARM_DESC(rx_buffers, "buffers to receive into; 0: as many as the ring takes");

/**
 * struct tbring_header - what each frame begins with, little-endian
 * @magic: TBRING_MAGIC
 * @run: random number of the send that it belongs to
 * @seq: number of the frame in that send, from 0
 * @len: length of the frame, header and all
 * @verify: whether the rest of the frame has the pattern
 */
struct tbring_header {
	__le32 magic;
	__le32 run;
	__le64 seq;
	__le32 len;
	__le32 verify;
};

/**
 * struct tbring_frame - a buffer and its place in a ring
 * @frame: what the ring knows of it
 * @ring: whose it is
 * @data: one page
 * @mapped: @frame.buffer_phy is valid
 */
struct tbring_frame {
	struct ring_frame frame;
	struct tbring *ring;
	void *data;
	bool mapped;
};

/**
 * struct tbring_stats - counters since the last reset
 * @tx_frames: frames that have left
 * @tx_bytes: their bytes
 * @tx_canceled: frames that were taken back because the ring was stopped
 * @tx_ns: how long the last send took
 * @tx_last: frames of the last send
 * @rx_frames: frames that came, flagged ones too
 * @rx_bytes: their bytes
 * @rx_crc: frames flagged with a CRC error
 * @rx_overrun: frames flagged with a buffer overrun
 * @rx_bad: frames whose content is not what was sent
 * @rx_lost: frames missing between others
 * @rx_stale: frames that came after a later one, or twice
 * @rx_next: number of the frame that is due next, of the send that was received
 *	last: what it lacks to @tx_last of the other end was lost at the end
 * @rx_first: time of the first frame, ns
 * @rx_last: time of the last frame, ns
 */
struct tbring_stats {
	u64 tx_frames, tx_bytes, tx_canceled, tx_ns, tx_last;
	u64 rx_frames, rx_bytes, rx_crc, rx_overrun, rx_bad, rx_lost, rx_stale;
	u64 rx_next;
	u64 rx_first, rx_last;
};

/**
 * struct tbring - a service of a host at the other end of a cable
 * @svc: the service
 * @xd: the host
 * @tx: ring towards it
 * @rx: ring from it
 * @in_hop: HopID of the path from it, negative without
 * @out_hop: HopID of the path to it, negative without
 * @paths: the paths are set up
 * @tx_frames: buffers of @tx
 * @rx_frames: buffers of @rx
 * @nr_rx: how many of @rx_frames there are
 * @dir: directory in debugfs
 * @send: one send at a time
 * @sent: all frames of a send have come back
 * @order: held from where a frame gets its number to where it is queued
 * @lock: protects all that follows
 * @gone: being removed
 * @stop: the send is to end early
 * @left: frames of the send that were not queued yet
 * @flying: frames that are queued
 * @size: bytes of a frame of the send
 * @run: number of the send
 * @seq: next frame of the send
 * @verify: fill and check every byte
 * @rx_run: send that is being received
 * @rx_seq: frame of it that is due
 * @rx_unknown: frames since the last good one that were flagged or bad
 * @stats: counters
 */
struct tbring {
	struct tb_service *svc;
	struct tb_xdomain *xd;
	struct tb_ring *tx;
	struct tb_ring *rx;
	int in_hop;
	int out_hop;
	bool paths;
	struct tbring_frame *tx_frames;
	struct tbring_frame *rx_frames;
	unsigned int nr_rx;
	struct dentry *dir;
	struct mutex send;
	struct completion sent;
	struct mutex order;

	spinlock_t lock;
	bool gone;
	bool stop;
	u64 left;
	unsigned int flying;
	u32 size;
	u32 run;
	u64 seq;
	bool verify;
	u32 rx_run;
	u64 rx_seq;
	u64 rx_unknown;
	struct tbring_stats stats;
};

/* 7f5c4a0e-36a1-4a6e-9d0b-8a4f6a6f5f11 */
static const uuid_t tbring_uuid =
	UUID_INIT(0x7f5c4a0e, 0x36a1, 0x4a6e,
		  0x9d, 0x0b, 0x8a, 0x4f, 0x6a, 0x6f, 0x5f, 0x11);

static struct tb_property_dir *tbring_properties;
static struct dentry *tbring_root;

/* Content */

static u64 tbring_word(u64 seq, u32 run, unsigned int i)
{
	return (seq + 1) * 0x9e3779b97f4a7c15ULL + (((u64)run << 32) | i);
}

static void tbring_fill(void *data, u32 size, u64 seq, u32 run, bool verify)
{
	struct tbring_header *h = data;
	unsigned int i, words = (size - sizeof(*h)) / sizeof(u64);
	u8 *rest = data + sizeof(*h) + words * sizeof(u64);
	__le64 *word = data + sizeof(*h);

	h->magic = cpu_to_le32(TBRING_MAGIC);
	h->run = cpu_to_le32(run);
	h->seq = cpu_to_le64(seq);
	h->len = cpu_to_le32(size);
	h->verify = cpu_to_le32(verify);
	if (!verify)
		return;
	for (i = 0; i < words; i++)
		word[i] = cpu_to_le64(tbring_word(seq, run, i));
	for (i = 0; i < (size - sizeof(*h)) % sizeof(u64); i++)
		rest[i] = (u8)(seq + i);
}

static bool tbring_check(const void *data, u32 size, bool verify)
{
	const struct tbring_header *h = data;
	unsigned int i, words;
	const __le64 *word;
	const u8 *rest;
	u64 seq;
	u32 run;

	if (size < sizeof(*h) || h->magic != cpu_to_le32(TBRING_MAGIC) ||
	    h->len != cpu_to_le32(size) || h->verify != cpu_to_le32(verify))
		return false;
	if (!verify)
		return true;

	seq = le64_to_cpu(h->seq);
	run = le32_to_cpu(h->run);
	words = (size - sizeof(*h)) / sizeof(u64);
	word = data + sizeof(*h);
	rest = data + sizeof(*h) + words * sizeof(u64);
	for (i = 0; i < words; i++)
		if (word[i] != cpu_to_le64(tbring_word(seq, run, i)))
			return false;
	for (i = 0; i < (size - sizeof(*h)) % sizeof(u64); i++)
		if (rest[i] != (u8)(seq + i))
			return false;
	return true;
}

/* Receiving */

static void tbring_received(struct tbring *r, const void *data, u32 size,
			    u32 flags)
{
	const struct tbring_header *h = data;
	struct tbring_stats *s = &r->stats;
	bool flagged = flags & (RING_DESC_CRC_ERROR | RING_DESC_BUFFER_OVERRUN);
	bool good = !flagged && tbring_check(data, size, READ_ONCE(r->verify));
	u64 seq, missing, now = ktime_get_ns();
	u32 run;

	spin_lock(&r->lock);
	if (!s->rx_frames)
		s->rx_first = now;
	s->rx_last = now;
	s->rx_frames++;
	s->rx_bytes += size;
	if (flags & RING_DESC_CRC_ERROR)
		s->rx_crc++;
	if (flags & RING_DESC_BUFFER_OVERRUN)
		s->rx_overrun++;
	if (!good) {
		s->rx_bad += !flagged;
		r->rx_unknown++;
		goto out;
	}
	seq = le64_to_cpu(h->seq);
	run = le32_to_cpu(h->run);
	if (run != r->rx_run) {
		r->rx_run = run;
		r->rx_seq = 0;
	}
	if (seq < r->rx_seq) {
		s->rx_stale++;
		goto out;
	}
	/* Frames that came, but whose numbers cannot be trusted, are not missing. */
	missing = seq - r->rx_seq;
	s->rx_lost += missing - min(missing, r->rx_unknown);
	r->rx_unknown = 0;
	r->rx_seq = seq + 1;
out:
	s->rx_next = r->rx_seq + r->rx_unknown;
	spin_unlock(&r->lock);
}

static void tbring_rx_done(struct tb_ring *ring, struct ring_frame *frame,
			   bool canceled)
{
	struct tbring_frame *f = container_of(frame, typeof(*f), frame);
	struct device *dev = tb_ring_dma_device(ring);

	if (canceled)
		return;
	dma_sync_single_for_cpu(dev, frame->buffer_phy, TBRING_FRAME_MAX,
				DMA_FROM_DEVICE);
	tbring_received(f->ring, f->data, frame->size ?: TBRING_FRAME_MAX,
			frame->flags);
	dma_sync_single_for_device(dev, frame->buffer_phy, TBRING_FRAME_MAX,
				   DMA_FROM_DEVICE);
	frame->size = 0;
	/* It refuses once the ring is stopped, which is as good as canceled. */
	tb_ring_rx(ring, frame);
}

/* Sending */

static bool tbring_queue(struct tbring *r, struct tbring_frame *f)
{
	struct device *dev = tb_ring_dma_device(r->tx);
	bool more, verify;
	u32 size, run;
	u64 seq;

	spin_lock(&r->lock);
	more = r->left && !r->stop && !r->gone;
	if (more) {
		r->left--;
		r->flying++;
	}
	seq = r->seq;
	r->seq += more;
	size = r->size;
	run = r->run;
	verify = r->verify;
	spin_unlock(&r->lock);
	if (!more)
		return false;

	dma_sync_single_for_cpu(dev, f->frame.buffer_phy, TBRING_FRAME_MAX,
				DMA_TO_DEVICE);
	tbring_fill(f->data, size, seq, run, verify);
	dma_sync_single_for_device(dev, f->frame.buffer_phy, TBRING_FRAME_MAX,
				   DMA_TO_DEVICE);
	f->frame.size = size == TBRING_FRAME_MAX ? 0 : size;
	if (!tb_ring_tx(r->tx, &f->frame))
		return true;

	/* The ring was stopped meanwhile. */
	spin_lock(&r->lock);
	r->flying--;
	r->stats.tx_canceled++;
	spin_unlock(&r->lock);
	return false;
}

/*
 * Queues the next frame of a send; false when there is none. The send itself
 * and the completions of its first frames do so at the same time.
 */
static bool tbring_next(struct tbring *r, struct tbring_frame *f)
{
	bool queued;

	mutex_lock(&r->order);
	queued = tbring_queue(r, f);
	mutex_unlock(&r->order);
	return queued;
}

static void tbring_tx_done(struct tb_ring *ring, struct ring_frame *frame,
			   bool canceled)
{
	struct tbring_frame *f = container_of(frame, typeof(*f), frame);
	struct tbring *r = f->ring;

	spin_lock(&r->lock);
	r->flying--;
	if (canceled) {
		r->stats.tx_canceled++;
	} else {
		r->stats.tx_frames++;
		r->stats.tx_bytes += frame->size ?: TBRING_FRAME_MAX;
	}
	spin_unlock(&r->lock);

	if (!canceled && tbring_next(r, f))
		return;
	spin_lock(&r->lock);
	if (!r->flying)
		complete(&r->sent);
	spin_unlock(&r->lock);
}

/* Waits for the end of a send, as long as it makes headway. */
static int tbring_wait(struct tbring *r)
{
	u64 before = U64_MAX, now;
	long ret;

	for (;;) {
		ret = wait_for_completion_interruptible_timeout(&r->sent,
								TBRING_STALL);
		spin_lock(&r->lock);
		now = r->stats.tx_frames;
		if (ret > 0)
			ret = r->gone ? -ENODEV : 0;
		else if (!ret && now == before)
			ret = -ETIMEDOUT;
		else if (!ret)
			ret = 1;	/* slow, but not stuck */
		if (ret < 0)
			r->stop = true;
		spin_unlock(&r->lock);
		if (ret <= 0)
			return ret;
		before = now;
	}
}

static int tbring_send(struct tbring *r, u64 frames, u32 size)
{
	unsigned int i;
	u64 begun;
	int ret;

	ret = mutex_lock_interruptible(&r->send);
	if (ret)
		return ret;

	spin_lock(&r->lock);
	if (r->gone) {
		ret = -ENODEV;
	} else if (r->flying) {
		ret = -EBUSY;	/* of a send that was given up */
	} else {
		reinit_completion(&r->sent);
		r->stop = false;
		r->left = frames;
		r->size = size;
		r->run = get_random_u32();
		r->seq = 0;
	}
	spin_unlock(&r->lock);
	if (ret)
		goto out;

	begun = ktime_get_ns();
	/* One descriptor of a ring stays free. */
	for (i = 0; i < ring_size - 1; i++)
		if (!tbring_next(r, &r->tx_frames[i]))
			break;
	/*
	 * Frames that have come back in between may have found nothing left;
	 * the last one completes. If not one was queued, nothing will.
	 */
	if (!i)
		ret = -ESHUTDOWN;
	else
		ret = tbring_wait(r);

	spin_lock(&r->lock);
	r->stats.tx_ns = ktime_get_ns() - begun;
	r->stats.tx_last = r->seq;
	spin_unlock(&r->lock);
out:
	mutex_unlock(&r->send);
	return ret;
}

/* Debugfs */

static ssize_t tbring_send_write(struct file *file, const char __user *from,
				 size_t count, loff_t *pos)
{
	struct tbring *r = file->private_data;
	unsigned long long frames;
	unsigned int size;
	char text[64];
	ssize_t n;
	int ret;

	n = simple_write_to_buffer(text, sizeof(text) - 1, pos, from, count);
	if (n < 0)
		return n;
	text[n] = '\0';
	if (n != count || sscanf(text, "%llu %u", &frames, &size) != 2)
		return -EINVAL;
	if (!frames || size < sizeof(struct tbring_header) ||
	    size > TBRING_FRAME_MAX)
		return -EINVAL;
	ret = tbring_send(r, frames, size);
	return ret ?: count;
}

static const struct file_operations tbring_send_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = tbring_send_write,
	.llseek = noop_llseek,
};

static ssize_t tbring_reset_write(struct file *file, const char __user *from,
				  size_t count, loff_t *pos)
{
	struct tbring *r = file->private_data;

	spin_lock(&r->lock);
	memset(&r->stats, 0, sizeof(r->stats));
	r->rx_run = 0;
	r->rx_seq = 0;
	r->rx_unknown = 0;
	spin_unlock(&r->lock);
	return count;
}

static const struct file_operations tbring_reset_fops = {
	.owner = THIS_MODULE,
	.open = simple_open,
	.write = tbring_reset_write,
	.llseek = noop_llseek,
};

static int tbring_stats_show(struct seq_file *m, void *unused)
{
	struct tbring *r = m->private;
	struct tbring_stats s;
	unsigned int flying;

	spin_lock(&r->lock);
	s = r->stats;
	flying = r->flying;
	spin_unlock(&r->lock);

#define TBRING_SHOW(name)	seq_printf(m, #name " %llu\n", s.name)
	TBRING_SHOW(tx_frames);
	TBRING_SHOW(tx_bytes);
	TBRING_SHOW(tx_canceled);
	seq_printf(m, "tx_flying %u\n", flying);
	TBRING_SHOW(tx_last);
	TBRING_SHOW(tx_ns);
	TBRING_SHOW(rx_frames);
	TBRING_SHOW(rx_bytes);
	TBRING_SHOW(rx_crc);
	TBRING_SHOW(rx_overrun);
	TBRING_SHOW(rx_bad);
	TBRING_SHOW(rx_lost);
	TBRING_SHOW(rx_stale);
	TBRING_SHOW(rx_next);
	seq_printf(m, "rx_ns %llu\n", s.rx_last - s.rx_first);
#undef TBRING_SHOW
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(tbring_stats);

/* Setting up and tearing down */

static void tbring_free_frames(struct tbring_frame *frames, unsigned int n,
			       struct tb_ring *ring,
			       enum dma_data_direction direction)
{
	unsigned int i;

	for (i = 0; frames && i < n; i++) {
		if (frames[i].mapped)
			dma_unmap_single(tb_ring_dma_device(ring),
					 frames[i].frame.buffer_phy,
					 TBRING_FRAME_MAX, direction);
		free_page((unsigned long)frames[i].data);
	}
	kfree(frames);
}

static struct tbring_frame *
tbring_alloc_frames(struct tbring *r, unsigned int n, struct tb_ring *ring,
		    ring_cb done, enum dma_data_direction direction)
{
	struct device *dev = tb_ring_dma_device(ring);
	struct tbring_frame *frames;
	unsigned int i;

	frames = kcalloc(n, sizeof(*frames), GFP_KERNEL);
	if (!frames)
		return NULL;
	for (i = 0; i < n; i++) {
		struct tbring_frame *f = &frames[i];

		f->ring = r;
		f->data = (void *)get_zeroed_page(GFP_KERNEL);
		if (!f->data)
			goto fail;
		f->frame.buffer_phy = dma_map_single(dev, f->data,
						     TBRING_FRAME_MAX,
						     direction);
		if (dma_mapping_error(dev, f->frame.buffer_phy))
			goto fail;
		f->mapped = true;
		f->frame.callback = done;
		f->frame.sof = TBRING_SOF;
		f->frame.eof = TBRING_EOF;
		INIT_LIST_HEAD(&f->frame.list);
	}
	return frames;
fail:
	tbring_free_frames(frames, n, ring, direction);
	return NULL;
}

/* Takes down whatever tbring_setup() has set up. */
static void tbring_teardown(struct tbring *r)
{
	int ret;

	if (r->paths) {
		tb_ring_stop(r->rx);
		tb_ring_stop(r->tx);
		ret = tb_xdomain_disable_paths(r->xd, r->out_hop, r->tx->hop,
					       r->in_hop, r->rx->hop);
		if (ret)
			dev_warn(&r->svc->dev, "paths not taken down: %d\n", ret);
	}
	if (r->rx) {
		tbring_free_frames(r->rx_frames, r->nr_rx, r->rx,
				   DMA_FROM_DEVICE);
		tb_ring_free(r->rx);
	}
	if (r->tx) {
		tbring_free_frames(r->tx_frames, ring_size - 1, r->tx,
				   DMA_TO_DEVICE);
		tb_ring_free(r->tx);
	}
	if (r->in_hop >= 0)
		tb_xdomain_release_in_hopid(r->xd, r->in_hop);
	if (r->out_hop >= 0)
		tb_xdomain_release_out_hopid(r->xd, r->out_hop);
}

static int tbring_setup(struct tbring *r)
{
	unsigned int flags = RING_FLAG_FRAME | (e2e ? RING_FLAG_E2E : 0);
	struct tb_nhi *nhi = r->xd->tb->nhi;
	unsigned int i;
	int ret;

	r->in_hop = tb_xdomain_alloc_in_hopid(r->xd, hop);
	if (r->in_hop != hop)
		return r->in_hop < 0 ? r->in_hop : -EBUSY;
	r->out_hop = tb_xdomain_alloc_out_hopid(r->xd, hop);
	if (r->out_hop != hop)
		return r->out_hop < 0 ? r->out_hop : -EBUSY;

	r->tx = tb_ring_alloc_tx(nhi, -1, ring_size, flags);
	if (!r->tx)
		return -ENOMEM;
	r->rx = tb_ring_alloc_rx(nhi, -1, ring_size, flags,
				 e2e ? r->tx->hop : 0, BIT(TBRING_SOF),
				 BIT(TBRING_EOF), NULL, NULL);
	if (!r->rx)
		return -ENOMEM;

	r->tx_frames = tbring_alloc_frames(r, ring_size - 1, r->tx,
					   tbring_tx_done, DMA_TO_DEVICE);
	r->rx_frames = tbring_alloc_frames(r, r->nr_rx, r->rx, tbring_rx_done,
					   DMA_FROM_DEVICE);
	if (!r->tx_frames || !r->rx_frames)
		return -ENOMEM;

	ret = tb_xdomain_enable_paths(r->xd, r->out_hop, r->tx->hop, r->in_hop,
				      r->rx->hop);
	if (ret)
		return ret;
	tb_ring_start(r->tx);
	tb_ring_start(r->rx);
	r->paths = true;
	for (i = 0; i < r->nr_rx; i++) {
		ret = tb_ring_rx(r->rx, &r->rx_frames[i].frame);
		if (ret)
			return ret;
	}
	return 0;
}

#ifdef TBRING_PROBE_HAS_ID
static int tbring_probe(struct tb_service *svc, const struct tb_service_id *id)
#else
static int tbring_probe(struct tb_service *svc)
#endif
{
	struct tbring *r;
	int ret;

	r = kzalloc(sizeof(*r), GFP_KERNEL);
	if (!r)
		return -ENOMEM;
	r->svc = svc;
	r->xd = tb_service_parent(svc);
	r->in_hop = -1;
	r->out_hop = -1;
	r->nr_rx = rx_buffers ? min(rx_buffers, ring_size - 1) : ring_size - 1;
	mutex_init(&r->send);
	mutex_init(&r->order);
	init_completion(&r->sent);
	spin_lock_init(&r->lock);

	ret = tbring_setup(r);
	if (ret) {
		tbring_teardown(r);
		kfree(r);
		return ret;
	}
	tb_service_set_drvdata(svc, r);

	r->dir = debugfs_create_dir(dev_name(&svc->dev), tbring_root);
	debugfs_create_file("send", 0200, r->dir, r, &tbring_send_fops);
	debugfs_create_file("reset", 0200, r->dir, r, &tbring_reset_fops);
	debugfs_create_file("stats", 0400, r->dir, r, &tbring_stats_fops);
	debugfs_create_bool("verify", 0600, r->dir, &r->verify);
	dev_info(&svc->dev, "tbring: hop %d, rings tx %d rx %d\n", hop,
		 r->tx->hop, r->rx->hop);
	return 0;
}

static void tbring_remove(struct tb_service *svc)
{
	struct tbring *r = tb_service_get_drvdata(svc);

	/* Whoever sends is let go before the files are taken away. */
	spin_lock(&r->lock);
	r->gone = true;
	complete_all(&r->sent);
	spin_unlock(&r->lock);
	debugfs_remove_recursive(r->dir);

	tbring_teardown(r);
	kfree(r);
}

static const struct tb_service_id tbring_ids[] = {
	{ TB_SERVICE(TBRING_KEY, 1) },
	{ },
};
MODULE_DEVICE_TABLE(tbsvc, tbring_ids);

static struct tb_service_driver tbring_driver = {
	.driver = {
		.owner = THIS_MODULE,
		.name = "tbring",
	},
	.probe = tbring_probe,
	.remove = tbring_remove,
	.id_table = tbring_ids,
};

static int __init tbring_init(void)
{
	int ret;

	if (ring_size < 2 || ring_size > 1024)
		return -EINVAL;

	tbring_properties = tb_property_create_dir(&tbring_uuid);
	if (!tbring_properties)
		return -ENOMEM;
	ret = tb_property_add_immediate(tbring_properties, "prtcid", 1) ?:
	      tb_property_add_immediate(tbring_properties, "prtcvers", 1) ?:
	      tb_property_add_immediate(tbring_properties, "prtcrevs", 1) ?:
	      tb_property_add_immediate(tbring_properties, "prtcstns", 0);
	if (ret)
		goto free;

	tbring_root = debugfs_create_dir("tbring", NULL);
	ret = tb_register_property_dir(TBRING_KEY, tbring_properties);
	if (ret)
		goto remove;
	ret = tb_register_service_driver(&tbring_driver);
	if (ret)
		goto unregister;
	return 0;

unregister:
	tb_unregister_property_dir(TBRING_KEY, tbring_properties);
remove:
	debugfs_remove_recursive(tbring_root);
free:
	tb_property_free_dir(tbring_properties);
	return ret;
}
module_init(tbring_init);

static void __exit tbring_exit(void)
{
	tb_unregister_service_driver(&tbring_driver);
	tb_unregister_property_dir(TBRING_KEY, tbring_properties);
	tb_property_free_dir(tbring_properties);
	debugfs_remove_recursive(tbring_root);
}
module_exit(tbring_exit);

MODULE_DESCRIPTION("Raw traffic over Thunderbolt/USB4 host interface rings");
MODULE_LICENSE("GPL");
