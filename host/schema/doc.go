// Package schema keeps an older program from state that a newer one wrote.
//
// Every state file of ours is JSON with a number "schema", which grows when its
// meaning changes. The number is read before anything else: what a newer
// version wrote need not be readable otherwise, and must neither be taken for
// broken nor be overwritten.
package schema
