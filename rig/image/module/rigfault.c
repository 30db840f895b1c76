// SPDX-License-Identifier: GPL-2.0-only
/*
 * rigfault - commits one fault on purpose, to see that it is noticed
 *
 *   insmod rigfault.ko kind=warn
 *
 * The module never stays loaded: its init fails with -ECANCELED when it comes
 * that far.
 */

#include <linux/bug.h>
#include <linux/delay.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/spinlock.h>
#include <linux/string.h>

static char *kind = "";
module_param(kind, charp, 0444);
MODULE_PARM_DESC(kind, "warn, bug, oops, kasan, lockdep, sleep, leak, panic");

static DEFINE_MUTEX(rigfault_a);
static DEFINE_MUTEX(rigfault_b);
static DEFINE_SPINLOCK(rigfault_spin);

static void rigfault_warn(void)
{
	WARN(1, "rigfault: as asked\n");
}

static void rigfault_bug(void)
{
	BUG();
}

static void rigfault_oops(void)
{
	int *volatile nowhere = NULL;

	WRITE_ONCE(*nowhere, 1);
}

static void rigfault_kasan(void)
{
	char *volatile freed = kmalloc(64, GFP_KERNEL);

	if (!freed)
		return;
	kfree(freed);
	WRITE_ONCE(freed[8], 1);
}

static void rigfault_lockdep(void)
{
	mutex_lock(&rigfault_a);
	mutex_lock(&rigfault_b);
	mutex_unlock(&rigfault_b);
	mutex_unlock(&rigfault_a);

	mutex_lock(&rigfault_b);
	mutex_lock(&rigfault_a);
	mutex_unlock(&rigfault_a);
	mutex_unlock(&rigfault_b);
}

static void rigfault_sleep(void)
{
	spin_lock(&rigfault_spin);
	might_sleep();
	spin_unlock(&rigfault_spin);
}

static void rigfault_leak(void)
{
	unsigned int i;

	for (i = 0; i < 16; i++)
		memset(kmalloc(128, GFP_KERNEL | __GFP_NOFAIL), 0x5a, 128);
}

static void rigfault_panic(void)
{
	panic("rigfault: as asked");
}

static const struct {
	const char *kind;
	void (*commit)(void);
} rigfaults[] = {
	{ "warn", rigfault_warn },
	{ "bug", rigfault_bug },
	{ "oops", rigfault_oops },
	{ "kasan", rigfault_kasan },
	{ "lockdep", rigfault_lockdep },
	{ "sleep", rigfault_sleep },
	{ "leak", rigfault_leak },
	{ "panic", rigfault_panic },
};

static int __init rigfault_init(void)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(rigfaults); i++) {
		if (strcmp(kind, rigfaults[i].kind))
			continue;
		rigfaults[i].commit();
		return -ECANCELED;
	}
	return -EINVAL;
}
module_init(rigfault_init);

MODULE_DESCRIPTION("Commits a fault on purpose");
MODULE_LICENSE("GPL");
