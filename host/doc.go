// Package host is the seam between tbcluster and the machine it runs on.
//
// Facts are plain data: what the Thunderbolt layer sees, which interfaces and
// addresses exist, how much memory there is. Changes are plain data too: an
// address, a route, an MTU, a packet-filter table. An implementation (packages
// linux and darwin) reads facts and carries out changes; it is chosen at run
// time by package agent, so that darwin's parsers and commands are tested on
// Linux over recorded outputs.
//
// Package host decides nothing: which address a link gets is package mesh's
// matter, who may ask for it is the root half's.
package host
