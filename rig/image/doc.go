// Package image builds what the rig's guests boot from, and keeps it: a Debian
// chroot with QEMU and compilers, the kernels of Debian, a debug kernel, the
// initramfs with its tools, our test modules, and a disk with systemd.
//
// All of it lies outside the clone, in ${XDG_CACHE_HOME:-~/.cache}/tbcluster/rig,
// each part in a directory that is named by a hash of its recipe. A part is
// built aside and renamed, under a lock: builders may run side by side and may
// be killed, and a part that is there is whole. Parts of recipes that nobody
// uses any more are removed.
//
// Building needs root (chroot, device nodes, ownership of files) and the Debian
// mirror that the machine itself uses; nothing is mounted, no loop device is
// used. Using what is built needs neither. Programs of the chroot are run in
// place by its own dynamic loader (Tools.Command), so that they see the paths of
// the machine; only compilers are run inside (Tools.Chroot).
//
// Linux on amd64 only: everything else gets a Fault.
package image
