package transfer

import (
	"strings"

	"tbcluster/api/fault"
)

// Endpoint is a path on a node.
type Endpoint struct {
	// Node is a node ID in a Job; as ParseEndpoint returns it, it is the name,
	// ID or address that the person wrote, "" for the node they are on.
	Node string
	// Path as it was written: absolute, relative, or from "~". Empty means the
	// home directory.
	Path string
	// Dir is the absolute directory that a relative Path starts from; empty
	// means the home directory of the user on that node.
	Dir string
}

// ParseEndpoint reads "path", "node:path" or "[address%zone]:path". A colon
// makes it remote when it comes before the first slash; "./a:b" is the file
// "a:b" here. It returns a Fault of reason Usage for what is none of these.
func ParseEndpoint(s string) (Endpoint, error) {
	const fix = "write PATH, NODE:PATH or [ADDRESS]:PATH; a local name with a colon is written ./NAME"
	if s == "" {
		return Endpoint{}, fault.Newf(fault.Usage, fix, "the path is empty")
	}
	if strings.ContainsRune(s, 0) {
		return Endpoint{}, fault.Newf(fault.Usage, fix, "the path has a NUL byte")
	}
	if s[0] == '[' {
		// Only "]:" makes it an address: a local file may be named "[x]".
		if node, path, ok := strings.Cut(s[1:], "]:"); ok && !strings.Contains(node, "/") {
			if node == "" {
				return Endpoint{}, fault.Newf(fault.Usage, fix, "no address is between the brackets of %q", s)
			}
			return Endpoint{Node: node, Path: path}, nil
		}
	}
	colon, slash := strings.IndexByte(s, ':'), strings.IndexByte(s, '/')
	if colon < 0 || slash >= 0 && slash < colon {
		return Endpoint{Path: s}, nil
	}
	if colon == 0 {
		return Endpoint{}, fault.Newf(fault.Usage, fix, "no node is before the colon of %q", s)
	}
	return Endpoint{Node: s[:colon], Path: s[colon+1:]}, nil
}

// String returns what ParseEndpoint reads.
func (e Endpoint) String() string {
	if e.Node == "" {
		p := e.Path
		if again, err := ParseEndpoint(p); err != nil || again.Node != "" {
			return "./" + p
		}
		return p
	}
	if strings.ContainsAny(e.Node, ":[]") {
		return "[" + e.Node + "]:" + e.Path
	}
	return e.Node + ":" + e.Path
}
