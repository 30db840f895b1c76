package schema

import (
	"encoding/json"
	"fmt"

	"tbcluster/api/fault"
)

// Check returns a fault with reason StateTooNew if data, the content of the
// state file at path, has a greater schema number than this program knows. What
// has no number, or is no JSON, passes: whoever reads it goes on to say so.
func Check(data []byte, knows int, path string) error {
	var head struct {
		Schema json.Number `json:"schema"`
	}
	if json.Unmarshal(data, &head) != nil {
		return nil
	}
	var have int
	if n, err := head.Schema.Int64(); err != nil || n <= int64(knows) {
		if err == nil || head.Schema == "" {
			return nil
		}
		have = -1 // a number, and none that this program ever wrote
	} else {
		have = int(n)
	}
	f := fault.Newf(fault.StateTooNew, "install that version again, or a newer one; or move the file away, with what it remembers", "read the state of an earlier run").At(path)
	f.Why = fmt.Sprintf("it was written by a newer tbcluster (schema %s, this one knows %d)", head.Schema, knows)
	if have == -1 {
		f.Why = fmt.Sprintf("its schema %s is none of this tbcluster, which knows %d", head.Schema, knows)
	}
	return f
}
