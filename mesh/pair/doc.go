// Package pair lets two nodes that know nothing of each other trust each other
// by a code that one shows and a person types at the other.
//
// The code NNNN-XXXX-XXXX is a number that follows from the inviting node's key
// and forty random bits. Inside TLS, whose keys nobody vouches for yet, both
// run a PAKE over the code with the hashes of both keys as identities, and
// confirm it both ways with the TLS exporter: who sits in between has other
// keys, so a relayed exchange fails. One exchange is one guess; three wrong
// ones end the code. Nothing but the exchange happens before it is confirmed.
package pair
