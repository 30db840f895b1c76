package host

import (
	"fmt"
	"os"
)

// Asker is the person for whom something is done. UID and Name are for
// records and messages; the root half believes neither: it reads a local asker
// from Socket and maps a remote one by its own file.
type Asker struct {
	UID  uint32
	Name string
	// Node is the node ID on which a remote person asked; "" for a local one.
	Node string
	// Socket is the local person's client socket; nil for a remote one, and
	// for what the agent does again for somebody it did it for before.
	Socket *os.File
}

// String returns "name" or "name@node".
func (a Asker) String() string {
	name := a.Name
	if name == "" {
		name = fmt.Sprintf("uid %d", a.UID)
	}
	if a.Node != "" {
		return name + "@" + a.Node
	}
	return name
}
