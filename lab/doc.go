// Package lab makes a virtual cluster on one Linux machine: nodes with a
// network, processes and a file system of their own, cables between them that
// can be cut, a LAN, and power that can fail. The tbcluster binary runs in the
// nodes as it would on hardware.
//
// Processes. `Up` starts a keeper, the only process that the lab has outside
// of its nodes. It is process 1 of a PID namespace that holds the whole lab, so
// that its death, however it comes, is the end of every process, mount,
// namespace and cable of the lab; what remains are a directory and, where the
// lab limits memory, cgroups, and Down removes those. Each node has an init,
// process 1 of the node's own PID namespace: it builds the file system, starts
// the boot command (the agent), reaps orphans, and runs what Exec asks for. It
// does not restart what ends.
//
// Files. A lab NAME lives in DIR/NAME, where DIR is /run/tbcluster-lab for
// root, $XDG_RUNTIME_DIR/tbcluster-lab or /tmp/tbcluster-lab-UID for others:
//
//	lab.json           what the lab is made of, and which process keeps it
//	keeper.sock        commands for the keeper (frames of JSON)
//	keeper.log         what the keeper had to say
//	NODE/run/          the node's /run: API sockets can be reached here
//	NODE/init.sock     Exec
//	NODE/console.log   output of the node's init and boot command; /lab/console.log inside
//
// The disks of the nodes are in memory; only the keeper and the nodes see them.
//
// A cable is a veth pair whose ends are named as the kernel names Thunderbolt
// interfaces, and an XDomain with its services in the sysfs-shaped tree of each
// end, /lab/sys. The agent finds that tree by its setting sysfs_root. Changes
// there are told as the kernel tells them, by its device events; as on real
// sysfs, inotify is not to be relied on.
//
// What a lab is not: a security boundary. Root in a node of a lab that root
// made is root of the machine.
package lab
