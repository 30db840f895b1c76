// Package link knows which cable goes where and whether it carries.
//
// A Tracker turns facts of the machine into this node's own link ends, keyed
// by port and far UUID (interface names and MACs change with every replug), and
// drives a probe over each end that has an interface and an address. An end is
// cabled (the Thunderbolt layer sees a peer), addressed (it has a link
// address), proven (a ping that left on that very interface came back from the
// right node) or down. Assemble joins the ends that all nodes report into the
// cluster's links; it is pure, so every node computes the same.
//
// A ping goes out every second. 2.5 seconds without an answer end proven (a
// silent cable); a vanished interface or peer ends it at once.
//
// Package link chooses no addresses (package mesh/address does), opens no
// sockets (it is given a Dialer and a Listener) and trusts nobody: whom it
// talks to was authenticated by the connection it is handed.
package link
