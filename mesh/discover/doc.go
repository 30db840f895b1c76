// Package discover finds nodes nearby: by mDNS (_tbcluster._tcp), by addresses
// written in the configuration, and by the addresses at which a node was last
// met. What it finds are candidates. Nothing of it is trusted: everything on
// the network can claim to be any node, so everything is bounded and cleaned,
// and a candidate becomes a way only after a bound and authenticated dial.
package discover
